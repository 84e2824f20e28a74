"""launch/local/ppo.py starts a job again that died, and only then. The jobs are scripts that count their starts in a file."""

import importlib.util
import signal
import sys
import time
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "launch" / "local" / "ppo.py"


@pytest.fixture
def launcher():
    spec = importlib.util.spec_from_file_location("local_launcher", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["local_launcher"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["local_launcher"]


def scripted(launcher, folder: Path, name: str, *ends: str, restarts: int = 2):
    """A job whose nth start ends as ends[n] says: an expression for sys.exit, or `serve` (until terminated)."""
    file = folder / name
    file.write_text("")
    code = (
        f"import os, sys, time\nfile = {str(file)!r}\nstarts = len(open(file).read())\nopen(file, 'a').write('x')\n"
        f"end = {ends!r}[starts]\ntime.sleep(60) if end == 'serve' else None\n"
        "os.kill(os.getpid(), 9) if end == 'killed' else sys.exit(int(end))\n"
    )
    job = launcher.Job(name, [sys.executable, "-S", "-c", code], restarts)
    job.start()
    return job, lambda: len(file.read_text())


def watched(launcher, actor, critic) -> int:
    try:
        return launcher.watch(actor=actor, critic=critic)
    finally:
        for job in (actor, critic):
            job.process.kill()
            job.process.wait()


def test_an_actor_that_died_is_started_again(launcher, tmp_path, capfd):
    critic, _ = scripted(launcher, tmp_path, "critic", "serve")
    actor, starts = scripted(launcher, tmp_path, "actor", "killed", "85", "0")
    launcher.GRACE = 0.1
    assert watched(launcher, actor, critic) == 0 and starts() == 3
    said = capfd.readouterr().err
    assert "the actor job ended with exit code -9: starting it again (1 more times at most)" in said
    assert "exit code 85" in said


@pytest.mark.parametrize("end, count", [("0", 1), ("130", 1), ("2", 1), ("3", 1), ("4", 1), ("1", 3)])
def test_what_would_end_the_same_again_is_not(launcher, tmp_path, end, count):
    critic, _ = scripted(launcher, tmp_path, "critic", "serve")
    actor, starts = scripted(launcher, tmp_path, "actor", *[end] * 5)
    launcher.GRACE = 0.1
    assert watched(launcher, actor, critic) == int(end) and starts() == count


def test_a_critic_that_dies_too_often_ends_the_actor(launcher, tmp_path, capfd):
    critic, starts = scripted(launcher, tmp_path, "critic", "killed", "1", "killed", "serve")
    actor, _ = scripted(launcher, tmp_path, "actor", "serve")
    launcher.GRACE = 0.5
    began = time.monotonic()
    assert watched(launcher, actor, critic) == -9 and starts() == 3
    assert "the actor job ends too" in capfd.readouterr().err and time.monotonic() - began < 50


def test_a_critic_that_is_refused_ends_the_actor_at_once(launcher, tmp_path):
    critic, starts = scripted(launcher, tmp_path, "critic", "3")
    actor, _ = scripted(launcher, tmp_path, "actor", "serve")
    assert watched(launcher, actor, critic) == 3 and starts() == 1


GIVEN = ["model.checkpoint=there", "data.task=chain_sum"]


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ([], True),
        (["ppo.advantage=rloo", "ppo.samples_per_prompt=4"], False),
        (["critic.place=local"], False),
        (["ppo.advantage=reinforce_baseline", "critic.place=remote"], True),
    ],
)
def test_a_critic_job_is_started_where_the_actors_settings_ask_for_one(launcher, monkeypatch, overrides, wanted):
    started = []
    monkeypatch.setattr(launcher.Job, "start", lambda self: started.append(self.name))
    monkeypatch.setattr(launcher, "watch", lambda *, actor, critic, others: 0 if (critic is not None) == wanted else 1)
    monkeypatch.setattr(launcher, "stop", lambda process: None)
    monkeypatch.setattr(launcher.Job, "code", 0)
    monkeypatch.setattr(launcher.Job, "process", None, raising=False)
    monkeypatch.setattr(sys, "argv", ["ppo.py", "--reward-ranks", "1", "--both", *GIVEN, "--actor", *overrides])
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        assert launcher.main() == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert started == [*(["critic"] if wanted else []), "reward", "actor"]


def test_settings_that_the_actor_job_would_refuse_start_nothing(launcher, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ppo.py", "--both", *GIVEN, "--actor", "ppo.advantage=rloo"])
    assert launcher.main() == 2
    assert "compares the responses to one prompt, and ppo.samples_per_prompt is 1" in capsys.readouterr().err
