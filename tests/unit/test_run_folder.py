"""What a run leaves: lock, checkpoints, resume, samples."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from aligner.config.groups import Resume, RunConfig
from aligner.runtime import lock
from aligner.runtime.errors import ConfigError, StorageError, UserError, disk_full_is_named
from aligner.runtime.run_folder import RunFolder

HOLD = "import sys, time; from pathlib import Path; from aligner.runtime.run_folder import RunFolder\n"
HOLD += "lock = RunFolder(Path(sys.argv[1])).lock('actor'); print('held', flush=True); time.sleep(60)"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.of(RunConfig(name="trial", dir=str(tmp_path)))


@pytest.fixture
def holder(run: RunFolder):
    """Another process that holds the actor's lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


# The lock


def test_a_second_run_of_the_name_is_refused_by_one_sentence_that_names_the_holder(run, holder):
    with pytest.raises(UserError) as caught:
        run.lock("actor")
    text = str(caught.value)
    assert str(holder.pid) in text
    assert socket.gethostname() in text
    assert "choose another run.name" in text
    assert "\n" not in text
    run.lock("critic").release()  # the other job of the run has a lock of its own


def test_a_dead_holder_loses_the_lock(run, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    taken = run.lock("actor")
    assert json.loads(taken.path.read_text())["pid"] == os.getpid()
    taken.release()


def test_a_holder_that_ended_by_itself_leaves_no_record(run):
    """Which a job on another host would have to believe."""
    script = HOLD.partition("print")[0] + "raise SystemExit(3)\n"
    ended = subprocess.run([sys.executable, "-c", script, str(run.path)])
    assert ended.returncode == 3
    assert (run.path / "locks" / "actor.json").read_text() == ""


def test_a_released_lock_can_be_taken_again(run):
    run.lock("actor").release()
    run.lock("actor").release()


def held_elsewhere(run) -> Path:
    """The lock's file as a job 77 on another host would leave it."""
    held = run.lock("actor")
    record = {**json.loads(held.path.read_text()), "host": "elsewhere", "job_id": "77"}
    held.release()
    held.path.write_text(json.dumps(record))
    return held.path


@pytest.mark.parametrize("job_id", ["77", "78", None])
def test_a_holder_on_another_host_is_believed_while_it_shows_life(run, monkeypatch, job_id):
    """Unless it was this Slurm job, which was requeued. No kernel lock tells: the file's time does."""
    monkeypatch.setattr(lock, "PATIENCE", 10.0)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job_id:
        monkeypatch.setenv("SLURM_JOB_ID", job_id)
    file = held_elsewhere(run)
    ended = threading.Event()
    toucher = threading.Thread(target=lambda: [os.utime(file) for _ in iter(lambda: ended.wait(0.05), True)])
    toucher.start()
    try:
        if job_id == "77":
            run.lock("actor").release()
        else:
            with pytest.raises(UserError, match=r"elsewhere .*Slurm job 77"):
                run.lock("actor")
    finally:
        ended.set()
        toucher.join()
    monkeypatch.setattr(lock, "PATIENCE", 0.5)
    held_elsewhere(run)
    run.lock("actor").release()  # it died: nothing touches the file


def test_a_holder_shows_life(run, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.05)
    held = run.lock("actor")
    os.utime(held.path, (1, 1))
    until = time.monotonic() + 30
    while held.path.stat().st_mtime == 1 and time.monotonic() < until:
        time.sleep(0.02)
    assert held.path.stat().st_mtime > 1
    held.release()


# Checkpoints


def save(run: RunFolder, step: int, *, committed: bool = True, validation: float | None = None) -> None:
    (run.checkpoints.step(step) / "actor").mkdir(parents=True)
    (run.checkpoints.step(step) / "actor" / "weights").write_text("x" * 10)
    if committed:
        run.checkpoints.commit(step, validation=validation)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_marker_that_no_save_wrote_is_named_at_the_start(run, content):
    save(run, 5, validation=0.5)
    (run.checkpoints.step(5) / "COMMITTED").write_text(content)
    with pytest.raises(UserError, match="step_000005/COMMITTED is no record of a save"):
        run.checkpoints.resume_step(Resume.auto)


def test_only_committed_pairs_count(run):
    for step in (5, 10, 100):
        save(run, step)
    save(run, 200, committed=False)
    assert run.checkpoints.committed() == [5, 10, 100]
    assert run.checkpoints.newest() == 100
    assert run.checkpoints.step(10).name == "step_000010"
    assert [folder.name for folder in run.checkpoints.discard_uncommitted()] == ["step_000200"]
    assert not run.checkpoints.step(200).exists()
    assert (run.checkpoints.step(100) / "actor" / "weights").exists()


def test_an_empty_run_has_none(run):
    assert run.checkpoints.committed() == []
    assert run.checkpoints.newest() is None
    assert run.checkpoints.best() is None
    assert run.checkpoints.prune(keep_last=1, keep_best=True) == []


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "left"),
    [(2, False, [3, 4]), (1, True, [2, 4]), (10, True, [1, 2, 3, 4]), (0, False, [4])],
)
def test_pruning_keeps_the_newest_and_the_best(run, keep_last, keep_best, left):
    for step, validation in ((1, 0.1), (2, 0.9), (3, None), (4, 0.5)):
        save(run, step, validation=validation)
    gone = run.checkpoints.prune(keep_last=keep_last, keep_best=keep_best)
    assert run.checkpoints.committed() == left
    assert sorted(gone + left) == [1, 2, 3, 4]
    assert sorted(path.name for path in run.checkpoints.path.iterdir()) == [f"step_{step:06d}" for step in left]


def test_the_newest_of_equally_good_ones_is_best(run):
    save(run, 1, validation=0.5)
    save(run, 2, validation=0.5)
    assert run.checkpoints.best() == 2


def test_resume_policy(run):
    assert run.checkpoints.resume_step(Resume.auto) is None
    assert run.checkpoints.resume_step(Resume.never) is None
    with pytest.raises(ConfigError, match="run.resume=must.*holds no committed checkpoint"):
        run.checkpoints.resume_step(Resume.must)
    save(run, 3)
    assert run.checkpoints.resume_step(Resume.auto) == run.checkpoints.resume_step(Resume.must) == 3
    with pytest.raises(ConfigError, match="run.resume=never.*checkpoint of step 3"):
        run.checkpoints.resume_step(Resume.never)


# Disk


def test_space_is_checked_before_a_save(run):
    run.checkpoints.check_space(1)
    with pytest.raises(StorageError, match="needs about 1152921504606846976 MiB"):
        run.checkpoints.check_space(2**80)


def test_a_file_that_really_does_not_fit_is_named(run):
    """The kernel's limit on a file's size stands in for a full disk: the write itself fails."""
    code = (
        "import resource, signal, sys; from pathlib import Path; from aligner.runtime.errors import *\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "def main():\n"
        "    with disk_full_is_named(Path('.'), 'the checkpoint'):\n"
        "        Path('big').write_text('x' * 5000)\n"
        "run_main(main)"
    )
    run.path.mkdir()
    done = subprocess.run([sys.executable, "-c", code], cwd=run.path, capture_output=True, text=True)
    assert done.returncode == 4
    assert done.stderr.startswith("error: the checkpoint could not be written under .: no space left")
    assert "Traceback" not in done.stderr


def test_other_errors_pass_through(run):
    with pytest.raises(KeyError), disk_full_is_named(run.path, "x"):
        raise KeyError("no disk in this")


# Samples and records


def test_rewind_drops_what_comes_after_the_checkpoint(run):
    save(run, 2)
    save(run, 3, committed=False)
    for step in (1, 2, 3, 10):
        run.write_samples(run.rollouts(step), [{"prompt": "ä", "score": 1.0}])
    run.write_samples(run.validation(3), [{}])
    (run.path / "tensorboard").mkdir()
    run.rewind(2)
    assert sorted(path.name for path in (run.path / "rollouts").iterdir()) == ["step_1.jsonl", "step_2.jsonl"]
    assert json.loads(run.rollouts(1).read_text()) == {"prompt": "ä", "score": 1.0}
    assert list((run.path / "validation").iterdir()) == []
    assert run.checkpoints.step(2).exists()
    assert not run.checkpoints.step(3).exists()
    assert (run.path / "tensorboard").exists()
    run.rewind(None)
    assert list((run.path / "rollouts").iterdir()) == []
    assert not (run.path / "tensorboard").exists()


def test_a_sample_is_one_line_for_every_reader(run):
    """JSON leaves U+2028 and the like as they are, where str.splitlines and some editors break lines."""
    marks = "".join(map(chr, range(0x20))) + "\x7f\x85\u2028\u2029"
    samples = [{"response": f"a{mark}b{mark}"} for mark in marks] + [{"response": "ä 中 \ud800"}]
    run.write_samples(run.rollouts(1), samples)
    text = run.rollouts(1).read_text(encoding="utf-8")
    assert [json.loads(line) for line in text.splitlines()] == samples
    assert "ä 中" in text


def test_paths_and_records(run, tmp_path):
    assert run.path == tmp_path / "trial"
    assert not run.path.exists()  # a path alone touches nothing
    run.path.mkdir()
    run.write_record("actor", pid=7, grid={"tensor": 2})
    record = json.loads(run.record("actor").read_text())
    assert (record["job"], record["pid"], record["grid"]) == ("actor", 7, {"tensor": 2})
    run.write_config("critic", "a: 1\n")
    assert run.config("critic").read_text() == "a: 1\n"
    assert run.config("actor").name == "config.yaml"
