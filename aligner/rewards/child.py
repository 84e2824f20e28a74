"""Work that may never end or may need any amount of memory, in a forked child of a verifier process. Standard library only."""

import contextlib
import os
import resource
import select
import signal
import time
from typing import Callable, Optional


def in_child(work: Callable[[], bool], seconds: float) -> Optional[bool]:
    """What work() returns; None where it raised, died, or took longer than `seconds`, after which it is killed.

    Call it from a process of one thread: a fork copies no other. The limits of this process (memory, files) hold in the child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _work(work, reading, writing, seconds)
    os.close(writing)
    try:
        answer = _read(reading, time.monotonic() + seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
    return {b"1": True, b"0": False}.get(answer)


def _work(work: Callable[[], bool], reading: int, writing: int, seconds: float) -> None:
    """In the child, which never comes back from here."""
    code = 1
    try:
        os.close(reading)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        soft = int(seconds) + 2  # if the parent is killed, this ends it
        resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
        os.write(writing, b"1" if work() else b"0")
        code = 0
    finally:
        os._exit(code)


def _read(pipe: int, until: float) -> bytes:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while (left := until - time.monotonic()) > 0:
        if poll.poll(left * 1000):
            return os.read(pipe, 1)  # empty where the child ended without an answer
    return b""
