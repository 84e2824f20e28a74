"""The prepared script, where there is a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECK = Path(__file__).with_name("check.py")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch sees none here")
def test_on_a_gpu(tmp_path):
    done = subprocess.run(
        [sys.executable, str(CHECK), "--out", str(tmp_path / "out")], capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_without_a_gpu_it_says_so(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = subprocess.run([sys.executable, str(CHECK)], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("SKIP (77): no CUDA device"), done.stderr
    assert not list(tmp_path.iterdir())
