"""launch/local/ppo.py with two scripted jobs: how it ends them."""

import importlib.util
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Notes the signal and whether the other job lives then; ends after `patience` seconds.
JOB = """
import os, signal, sys, time
from pathlib import Path
name, other, patience = sys.argv[1], sys.argv[2], float(sys.argv[3])
def note(number, _):
    alive = Path(other).exists() and not Path(other + ".ended").exists()
    Path(name).write_text(f"{signal.Signals(number).name}, the other {'lives' if alive else 'is gone'}")
    time.sleep(patience)
    Path(name + ".ended").touch()
    os._exit(0)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
Path(name).touch()
time.sleep(60)
"""


@pytest.mark.parametrize(("cores", "ranks", "share"), [(2, 2, 1), (2, 4, 1), (16, 2, 8), (16, 3, 5)])
def test_jobs_that_train_at_the_same_time_share_the_cores(monkeypatch, cores, ranks, share):
    launcher = loaded()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launcher.training_share(cores, ranks) == [f"parallel.training_threads={share}"]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert launcher.training_share(cores, ranks) == []


def loaded():
    spec = importlib.util.spec_from_file_location("launch_local_ppo", ROOT / "launch/local/ppo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LAUNCHER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("ppo", {path!r})
ppo = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ppo)
def command(script, *_):
    me, other = ("actor", "critic") if "actor" in script else ("critic", "actor")
    return [sys.executable, "job.py", me, other, str({patience} if me == "actor" else 0)]
ppo.command = command
sys.exit(ppo.main())
"""


def launched(folder: Path, patience: float) -> subprocess.Popen:
    (folder / "job.py").write_text(JOB)
    code = LAUNCHER.format(path=str(ROOT / "launch/local/ppo.py"), patience=patience)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=folder, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 30
    while not ((folder / "actor").exists() and (folder / "critic").exists()):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_actor_ends_while_the_critic_still_serves(tmp_path, number, code):
    process = launched(tmp_path, 0.2)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == code
    assert (tmp_path / "actor").read_text() == f"{number.name}, the other lives"
    assert (tmp_path / "critic").read_text() == "SIGTERM, the other is gone"
    assert ("saved first" in said) == (number == signal.SIGINT) and "Traceback" not in said


def test_another_ctrl_c_does_not_wait(tmp_path):
    process = launched(tmp_path, 60)
    process.send_signal(signal.SIGINT)
    until = time.monotonic() + 30
    while not (tmp_path / "actor").read_text() and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert not (tmp_path / "actor.ended").exists() and (tmp_path / "critic.ended").exists()
