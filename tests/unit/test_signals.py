"""How a process ends: signals become flags, errors become one sentence and a documented code, tests can kill it at a named point."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from aligner.runtime import faults
from aligner.runtime.errors import ConfigError, ContractError, StorageError, UserError
from aligner.runtime.exit_codes import ExitCode
from aligner.runtime.signals import StopSignals, kept_from_children

DOCUMENTED = Path(__file__).resolve().parents[2] / "docs"


def run(code: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


# Signals


@pytest.fixture
def stop():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield StopSignals.install()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, ExitCode.REQUEUE), (signal.SIGUSR1, ExitCode.REQUEUE), (signal.SIGINT, ExitCode.INTERRUPTED)],
)
def test_a_signal_sets_a_flag_and_an_exit_code(stop, number, code):
    assert not stop.stopping
    assert stop.exit_code is ExitCode.DONE
    signal.raise_signal(number)
    assert stop.stopping
    assert stop.received == number
    assert stop.exit_code is code


def test_the_first_signal_decides_and_a_second_ctrl_c_does_not_wait(stop):
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGUSR1)
    assert stop.received == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


CHILD = """
import subprocess, sys
from aligner.runtime.signals import ignore_in_child
ignore_in_child()
own = subprocess.Popen(["sleep", "60"])
print(own.pid, flush=True)
sys.stdin.read()
"""


def test_children_live_through_the_signals_of_a_step():
    """Slurm signals every process of a step. What a child starts itself has the signals as usual."""
    with kept_from_children():
        server = subprocess.Popen(["sleep", "60"])
        worker = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGUSR1}
    try:
        for process in (server, worker):  # from their first moment on
            for number in (signal.SIGTERM, signal.SIGUSR1):
                process.send_signal(number)
        of_the_worker = int(worker.stdout.readline())
        worker.send_signal(signal.SIGTERM)
        os.kill(of_the_worker, signal.SIGTERM)
        worker.stdin.close()
        assert worker.wait(30) == 0 and server.poll() is None
        assert gone([of_the_worker])
    finally:
        server.kill()
        server.wait()


def gone(pids: list[int]) -> bool:
    """Whether they ended, or do so soon: the kernel ends processes in its own time. A zombie has ended."""
    until = time.monotonic() + 20
    while any(state(pid) not in ("", "Z", "X") for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    return all(state(pid) in ("", "Z", "X") for pid in pids)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_installing_imports_nothing_heavy(tmp_path):
    """An entry script installs the handlers before it imports torch."""
    code = """
    import sys
    from aligner.runtime.errors import run_main
    from aligner.runtime.signals import StopSignals, kept_from_children
    StopSignals.install()
    assert not {"torch", "numpy", "megatron", "hydra", "rich"} & set(sys.modules)
    """
    environment = {key: value for key, value in os.environ.items() if key != "ALIGNER_CONFIG_READS"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, env=environment, check=True)


# Errors

MAIN = """
import os, sys
from pathlib import Path
from aligner.runtime.errors import *
from aligner.runtime.log import setup_logging
def main():
    if os.environ.get("LOGS"):
        setup_logging(Path(os.environ["LOGS"]), job="actor", rank=0)
    {body}
run_main(main)
"""


def ended(tmp_path: Path, body: str, **environment: str) -> subprocess.CompletedProcess:
    return run(MAIN.format(body=body), tmp_path, **environment)


SPOILT = """
    try:
        raise KeyboardInterrupt
    finally:
        unbound  # what a library's clean-up may come to"""


@pytest.mark.parametrize(
    ("body", "code"), [("return None", 0), ("return 85", 85), ("raise KeyboardInterrupt", 130), (SPOILT, 130)]
)
def test_what_main_returns_is_the_exit_code(tmp_path, body, code):
    done = ended(tmp_path, body)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("body", "code"), [("return 0", 0), ("return 85", 85), ("raise ContractError('x')", 3), ("{}['absent']", 1)]
)
def test_rank_0_tells_a_launcher_how_the_job_ended(tmp_path, body, code):
    """In a file: of several ranks, srun tells the highest exit code. The others say nothing, and stop without ending rank 0 with them."""
    file = tmp_path / "code"
    assert ended(tmp_path, body, ALIGNER_EXIT_FILE=str(file), SLURM_PROCID="1").returncode == code % 85
    assert not file.exists()
    assert ended(tmp_path, body, ALIGNER_EXIT_FILE=str(file), SLURM_PROCID="0").returncode == code
    assert file.read_text() == f"{code}\n"


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        ("ConfigError('a.b must be positive')", 2),
        ("UserError('no such file')", 2),
        ("ContractError('the tokenizers differ')", 3),
        ("StorageError('no space')", 4),
        ("OSError(28, 'No space left on device')", 4),
    ],
)
def test_an_error_of_the_user_is_one_sentence(tmp_path, raised, code):
    done = ended(tmp_path, f"raise {raised}")
    assert done.returncode == code
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_the_traceback_of_a_users_error_is_in_the_log(tmp_path):
    done = ended(tmp_path, "raise UserError('no such file')", LOGS=str(tmp_path / "logs"))
    assert done.stderr == "error: no such file\n"
    assert "Traceback" in (tmp_path / "logs" / "actor_rank0.log").read_text()


def test_a_value_error_of_this_package_is_the_users_and_one_of_a_library_is_not(tmp_path):
    (tmp_path / "bad.jsonl").write_text("{}\nx\n{}")
    ours = ended(tmp_path, "from aligner.runtime.metrics import read_jsonl; read_jsonl(Path('bad.jsonl'))")
    assert ours.returncode == 2
    assert ours.stderr == "error: bad.jsonl:2 is not JSON: 'x'\n"
    foreign = ended(tmp_path, "int('x')")
    assert foreign.returncode == 1
    assert "Traceback" in foreign.stderr


def test_a_fault_keeps_its_traceback(tmp_path):
    done = ended(tmp_path, "{}['absent']")
    assert done.returncode == 1
    assert "KeyError: 'absent'" in done.stderr


def test_every_rank_names_itself_but_a_config_error_is_said_once(tmp_path):
    assert ended(tmp_path, "raise UserError('x')", RANK="3").stderr == "[rank 3] error: x\n"
    silent = ended(tmp_path, "raise ConfigError('x')", RANK="3")
    assert (silent.returncode, silent.stderr) == (2, "")


def under_torchrun(tmp_path: Path, script: str, ranks: int = 2) -> subprocess.CompletedProcess:
    (tmp_path / "job.py").write_text(script)
    words = ["-m", "aligner.runtime.torchrun", "--standalone", "--nproc-per-node", str(ranks), "job.py"]
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    return subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)


def test_under_torchrun_the_sentence_and_the_code_survive(tmp_path):
    """Both ranks meet the same ConfigError; torchrun's own traceback and exit code 1 do not cover it, nor does its banner about
    OMP_NUM_THREADS."""
    # On a busy machine rank 0 may start seconds later than rank 1, which lets it speak first
    body = "import aligner.runtime.errors as own; own.PATIENCE = 30.0; raise ConfigError('a.b must be positive')"
    done = under_torchrun(tmp_path, MAIN.format(body=body))
    assert done.returncode == 2
    assert done.stderr == "error: the configuration has a problem: a.b must be positive\n"


KILLED = """
import os, signal, sys
from pathlib import Path
from aligner.runtime.errors import run_main
from aligner.runtime.log import setup_logging
from aligner.runtime.signals import StopSignals
StopSignals.install()
def main():
    import torch, torch.distributed as dist
    setup_logging(Path("logs"), job="actor", rank=int(os.environ["RANK"]))
    dist.init_process_group("gloo")
    for step in range(100):
        dist.all_reduce(torch.zeros(1))
        if step == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
run_main(main)
"""


def test_a_killed_rank_is_told_in_sentences_and_the_traceback_is_in_the_log(tmp_path):
    done = under_torchrun(tmp_path, KILLED)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert lines[0].startswith("error: another rank of this job is gone (")
    assert lines[-1] == "error: rank 1 was killed by SIGKILL: by hand, or for memory (dmesg)"
    assert len(lines) == 3
    assert "Traceback" in (tmp_path / "logs" / "actor_rank0.log").read_text()


ORPHAN = """
import os, sys, time
from aligner.runtime.errors import run_main
def main():
    print(os.getpid(), flush=True)
    time.sleep(60)
run_main(main)
"""


def test_ranks_end_with_a_torchrun_that_was_killed(tmp_path):
    (tmp_path / "job.py").write_text(ORPHAN)
    words = ["-m", "aligner.runtime.torchrun", "--standalone", "--nproc-per-node", "2", "job.py"]
    launcher = subprocess.Popen([sys.executable, *words], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    ranks = [int(launcher.stdout.readline()) for _ in range(2)]
    launcher.kill()
    launcher.wait()
    assert gone(ranks)


def test_classes_of_errors():
    for cls in (ConfigError, ContractError, StorageError):
        assert issubclass(cls, UserError)
    assert issubclass(UserError, ValueError)
    assert str(ConfigError("a", "b")) == "the configuration has 2 problems:\n  a\n  b"


def test_exit_codes_are_documented():
    pages = "\n".join(page.read_text(encoding="utf-8") for page in DOCUMENTED.glob("*.md"))
    for code in ExitCode:
        assert f"| {code.value} | {code.name.lower()} |" in pages, f"exit code {code.value} is in no table of docs/"


# Faults


def test_a_process_dies_at_the_named_point_and_step_only(tmp_path):
    code = """
    from aligner.runtime import faults
    for step in (1, 2, 3):
        faults.reach("generated", step)
        print(step, flush=True)
    """
    done = run(code, tmp_path, ALIGNER_FAULT="generated:3")
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "1\n2\n"
    assert run(code, tmp_path, ALIGNER_FAULT="trained:2").returncode == 0


def test_without_the_variable_nothing_happens(monkeypatch):
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    faults.reach("generated", 1)
