"""One live job of a name: a lock file that says who holds it."""

import atexit
import contextlib
import errno
import fcntl
import getpass
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, Optional

from aligner.runtime.errors import UserError

BEAT = 10.0  # seconds between a holder's signs of life
PATIENCE = 3.5 * BEAT  # without one, after which a holder on another host counts as dead


def _process_start(pid: int) -> Optional[str]:
    """Start time of a process in clock ticks, which tells a reused pid from the old one; None where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _own_record() -> dict[str, Any]:
    try:
        owner = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        owner = str(os.getuid())
    return {
        "owner": owner,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_start": _process_start(os.getpid()),
        "job_id": os.environ.get("SLURM_JOB_ID"),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _touched(file: Path) -> int:
    """When the file was touched last, in nanoseconds. Opened for it: a network file system then asks its server."""
    with file.open("rb") as opened:
        return os.fstat(opened.fileno()).st_mtime_ns


def _may_live_elsewhere(holder: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Whether a holder whose kernel lock we could take may still run: on another host, and not as this requeued Slurm job."""
    if holder["host"] == mine["host"]:
        return False
    return holder["job_id"] is None or holder["job_id"] != mine["job_id"]


def _is_alive_here(holder: dict[str, Any]) -> bool:
    """Whether a holder on this host still runs; for file systems without kernel locks."""
    return _process_start(holder["pid"]) is not None and _process_start(holder["pid"]) == holder["process_start"]


class RunLock:
    """Held from construction to release, or to the end of this process, which releases it unless it is killed.

    The kernel's lock on the file decides on one host. Between hosts, where kernel locks may not reach, the file decides: its holder
    touches it every few seconds, and one that does not has died."""

    def __init__(self, path: Path, *, what: str):
        """Raises UserError, naming the holder, where another process holds the lock. `what`: what is locked, for the message."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a+")
        try:
            self._take(what)
        except BaseException:
            self._file.close()
            raise
        self._released = threading.Event()
        threading.Thread(target=self._show_life, name="run lock", daemon=True).start()
        # Without it the record of a job that ended well would refuse the next one on another host.
        atexit.register(self.release)

    def _take(self, what: str) -> None:
        mine = _own_record()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = self._holder()
            held = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
            if held or (holder and (holder["host"] != mine["host"] or _is_alive_here(holder))):
                raise UserError(self._refusal(what, holder)) from None
        holder = self._holder()
        if holder and _may_live_elsewhere(holder, mine) and self._is_touched(what, holder):
            raise UserError(self._refusal(what, holder))
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps(mine))
        self._file.flush()

    def _show_life(self) -> None:
        while not self._released.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def _is_touched(self, what: str, holder: dict[str, Any]) -> bool:
        """Watch for the holder's sign of life. Times of one file are compared with one another: hosts' clocks may differ."""
        print(
            f"{what} was held on {holder['host']}: looking {PATIENCE:.0f} s for a sign of life",
            file=sys.stderr,
            flush=True,
        )
        first, until = _touched(self.path), time.monotonic() + PATIENCE
        while time.monotonic() < until:
            time.sleep(min(1.0, PATIENCE / 10))
            if _touched(self.path) != first:
                return True
        return False

    def _holder(self) -> Optional[dict[str, Any]]:
        self._file.seek(0)
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(self._file.read())
        return None

    def _refusal(self, what: str, holder: Optional[dict[str, Any]]) -> str:
        if holder is None:
            return f"{what} is held by a process that has just started: choose another run.name, or wait"
        job = f", Slurm job {holder['job_id']}" if holder["job_id"] else ""
        return (
            f"{what} is held by {holder['owner']} on {holder['host']} (pid {holder['pid']}{job}, since {holder['since']}): "
            "choose another run.name, or stop that job"
        )

    def release(self) -> None:
        """Give the lock back. The file stays, empty: deleting it would let two later processes lock two different files."""
        self._released.set()
        if not self._file.closed:
            self._file.seek(0)
            self._file.truncate()
            self._file.close()
