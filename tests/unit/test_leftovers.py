"""What a killed server leaves behind is removed: by its guardian at once, by the next start of the run at the latest."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from aligner.serving import leftovers

ROOT = Path(__file__).resolve().parents[2]


def test_leftovers_of_the_dead_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, parent = 2**22 + 1, os.getppid()  # above the largest pid, and one that lives
    start = leftovers.process_start(parent)
    owners = {
        f"aligner-triton-{dead}-a": {"pid": dead, "process_start": "1", "run": "other"},
        f"aligner-triton-{parent}-b": {"pid": parent, "process_start": start, "run": "other"},
        f"aligner-triton-{parent}-c": {"pid": parent, "process_start": "1", "run": "other"},  # its pid was given anew
        f"aligner-triton-{parent}-d": {"pid": parent, "process_start": start, "run": "mine"},
        f"other-{dead}-e": {},
    }
    for name, owner in owners.items():
        (tmp_path / name / "workspace").mkdir(parents=True)
        (tmp_path / name / leftovers.OWNER).write_text(json.dumps(owner))
    mine = leftovers.make_workspace("mine")
    environ = {leftovers.MARK: str(tmp_path / f"aligner-triton-{dead}-a"), "PATH": os.environ["PATH"]}
    marked = subprocess.Popen(["cat"], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    marked.stdin.write(b"\n")
    marked.stdout.readline()  # /proc tells its environment once it runs, which is a little after Popen is done
    leftovers.remove_abandoned("mine")
    assert marked.wait(30) == -signal.SIGKILL
    kept = [mine.name, f"aligner-triton-{parent}-b", f"other-{dead}-e"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(kept)


def test_the_guardian_removes_what_a_killed_server_leaves(tmp_path):
    """A process that guards a workspace and starts a marked child is killed: child and workspace go."""
    code = (
        "import os, subprocess, sys, time\n"
        "from aligner.serving import leftovers\n"
        "home = leftovers.make_workspace('r')\n"
        "guardian = leftovers.guard(home)\n"
        "child = subprocess.Popen(['sleep', '60'], env={**os.environ, leftovers.MARK: str(home)}, start_new_session=True)\n"
        "print(guardian.pid, child.pid, home, flush=True)\n"
        "time.sleep(60)\n"
    )
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    server = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)
    *pids, home = server.stdout.readline().split()
    guardian, child = map(int, pids)
    assert Path(home).is_relative_to(tmp_path) and None not in map(leftovers.process_start, (guardian, child))
    server.kill()
    server.wait()
    until = time.monotonic() + 30
    while time.monotonic() < until and {leftovers.process_start(pid) for pid in (guardian, child)} != {None}:
        time.sleep(0.1)
    assert [leftovers.process_start(pid) for pid in (guardian, child)] == [None, None]
    assert not Path(home).exists()


HOLDER = """
import multiprocessing.resource_tracker, multiprocessing.shared_memory, sys, time
multiprocessing.resource_tracker.register = lambda *args: None  # nobody cleans up after it
held = multiprocessing.shared_memory.SharedMemory(create=True, size=64)
print("/dev/shm/" + held.name.lstrip("/"), flush=True)
time.sleep(60)
"""


def start_holder(folder: Path, mark: str) -> tuple[subprocess.Popen, Path]:
    """A process as Triton's Python backend runs one: it has a segment, and a script in a folder of Triton's."""
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(HOLDER)
    environ = {**os.environ, leftovers.MARK: mark}
    process = subprocess.Popen(
        [sys.executable, str(folder / "1" / "model.py")], env=environ, stdout=subprocess.PIPE, text=True
    )
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_tree_held_is_removed_and_nobody_elses(tmp_path, monkeypatch):
    """Noted while it lived: once a whole tree was killed at once, nothing tells whose a segment was."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    home = tmp_path / f"aligner-triton-{2**22 + 1}-a"
    home.mkdir()
    ours, other = tmp_path / "folderAb12Cd", tmp_path / "folderXy98Zw"
    mine, my_segment = start_holder(ours, str(home))
    stranger, their_segment = start_holder(other, "/tmp/another")
    try:
        noted = leftovers.note_holdings(home)
        assert set(noted) == {str(my_segment), str(ours)} and my_segment.exists()
        mine.kill()
        mine.wait()
        leftovers.remove_abandoned("any")
        assert not my_segment.exists() and not ours.exists() and not home.exists()
        assert their_segment.exists() and other.exists() and stranger.poll() is None
    finally:
        for process in (mine, stranger):
            process.kill()
            process.wait()
        their_segment.unlink(missing_ok=True)


def test_a_name_that_was_given_anew_is_left(tmp_path):
    file = tmp_path / "folderAb12Cd"
    file.mkdir()
    leftovers._remove_holdings({str(file): file.stat().st_ino + 1})
    assert file.exists()
    leftovers._remove_holdings({str(file): file.stat().st_ino})
    assert not file.exists()


def test_an_environment_goes_where_no_living_server_may_have_made_it(tmp_path, monkeypatch):
    folder = tmp_path / "python_env_Ab12Cd"
    folder.mkdir()
    holdings = {str(folder): folder.stat().st_ino}
    monkeypatch.setattr(leftovers, "_servers", lambda: [os.getppid()])
    monkeypatch.setattr(leftovers, "_is_of", lambda environment, server: server == os.getppid())
    leftovers._remove_holdings(holdings)
    assert folder.exists()
    monkeypatch.setattr(leftovers, "_servers", list)
    leftovers._remove_holdings(holdings)
    assert not folder.exists()
    started = subprocess.Popen(["sleep", "60"])
    folder.mkdir()
    try:
        monkeypatch.undo()
        installed = Path(os.__file__).parent  # made long before
        assert leftovers._is_of(folder, started.pid) and not leftovers._is_of(installed, started.pid)
    finally:
        started.kill()
        started.wait()
