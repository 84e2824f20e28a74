"""What hangs is found in the run folder: in a process of its own, whose threads stand at known functions."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import os, sys, threading, time
from pathlib import Path
from aligner.runtime.stacks import Stacks

waits = threading.Event()

def helper_that_waits():
    waits.set()
    time.sleep(60)

threading.Thread(target=helper_that_waits, daemon=True).start()
waits.wait()
stacks = Stacks(Path(sys.argv[1]))

def main_that_hangs():
    {act}
    print("there", flush=True)
    time.sleep({seconds})

main_that_hangs()
"""


def start(file: Path, act: str, seconds: float) -> subprocess.Popen:
    code = CODE.format(act=act, seconds=seconds)
    process = subprocess.Popen([sys.executable, "-c", code, str(file)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "there\n"
    return process


@pytest.mark.parametrize("act", ["stacks.dump('no answer for 5 s')", "stacks.expect(0.2)", "stacks.expect(60)"])
def test_all_threads_are_named(tmp_path, act):
    """By hand, by the watchdog, and by SIGUSR2 in a process that goes on."""
    file = tmp_path / "logs" / "actor_rank3.stacks"
    process = start(file, act, 60)
    if "60" in act:
        os.kill(process.pid, signal.SIGUSR2)
    until = time.monotonic() + 20
    while "main_that_hangs" not in file.read_text() and time.monotonic() < until:
        time.sleep(0.05)
    found = file.read_text()
    assert process.poll() is None
    process.kill()
    process.wait()
    assert "helper_that_waits" in found and "main_that_hangs" in found
    assert ("no answer for 5 s" in found) == ("dump" in act)


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV])
def test_a_crash_says_where(tmp_path, number):
    file = tmp_path / "actor_rank0.stacks"
    process = start(file, "pass", 60)
    process.send_signal(number)
    assert process.wait(20) == -number
    assert "Fatal Python error" in file.read_text() and "main_that_hangs" in file.read_text()


def test_a_process_in_which_all_went_well_leaves_no_file(tmp_path):
    file = tmp_path / "actor_rank0.stacks"
    process = start(file, "stacks.expect(60); stacks.rest()", 0)
    assert process.wait(20) == 0 and not file.exists()
