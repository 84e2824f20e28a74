"""The two conversion scripts, as a user runs them: there and back is bit-exact, and what cannot be converted is refused by name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.dist.tiny import tiny_hf, weights_of

ROOT = Path(__file__).resolve().parents[2]


def run(script, **options):
    command = [sys.executable, str(ROOT / f"{script}.py")]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def hf(tmp_path):
    """A tiny bfloat16 Llama with a chat template and an end token of its generation_config."""
    folder = tmp_path / "hf"
    model, _ = tiny_hf("llama", tied=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    save_file({n: t.contiguous() for n, t in weights_of(model).items()}, folder / "model.safetensors", {"format": "pt"})
    tokens = [{"id": i, "content": text} for i, text in enumerate(("<s>", "</s>"))]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    return folder


def test_there_and_back_is_bit_exact(hf, tmp_path):
    done = run("convert_hf_to_nemo", hf_checkpoint=hf, output_dir=tmp_path / "nemo")
    assert done.returncode == 0, done.stderr
    assert "10/38 tensors" not in done.stderr and "38/38 tensors" in done.stdout
    names = {path.name for path in (tmp_path / "nemo").iterdir()}
    assert names == {"model_config.yaml", "model_weights", "tokenizer"}
    assert (tmp_path / "nemo" / "tokenizer" / "chat_template.jinja").read_text() == "{{ messages }}"
    done = run("convert_nemo_to_hf", nemo_checkpoint=tmp_path / "nemo", output_dir=tmp_path / "back")
    assert done.returncode == 0, done.stderr
    before, after = load_file(hf / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) and after[n].dtype == torch.bfloat16 for n in before)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["eos_token_id"] == [1, 7] and config["bos_token_id"] == 0
    again = run("convert_hf_to_nemo", hf_checkpoint=hf, output_dir=tmp_path / "nemo")
    assert again.returncode != 0 and "exists and is not an empty folder" in again.stderr
    assert "Traceback" not in again.stderr


def test_refusals(hf, tmp_path):
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))
    done = run("convert_hf_to_nemo", hf_checkpoint=hf, output_dir=tmp_path / "nemo")
    assert done.returncode != 0 and "model family 'mistral' is not supported" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "nemo").exists()
    done = run("convert_hf_to_nemo", hf_checkpoint=tmp_path / "nowhere", output_dir=tmp_path / "nemo")
    assert done.returncode != 0 and "nowhere is not a folder" in done.stderr
    done = run("convert_nemo_to_hf", nemo_checkpoint=hf, output_dir=tmp_path / "back")
    assert done.returncode != 0 and "it has no model_config.yaml" in done.stderr
