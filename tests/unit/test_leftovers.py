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
    marked = subprocess.Popen(
        ["sleep", "60"], env={leftovers.MARK: str(tmp_path / f"aligner-triton-{dead}-a"), "PATH": os.environ["PATH"]}
    )
    leftovers.remove_abandoned("mine")
    assert marked.wait(10) == -signal.SIGKILL
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
