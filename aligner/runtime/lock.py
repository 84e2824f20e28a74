"""One live job of a name: a lock file that says who holds it."""

import atexit
import contextlib
import errno
import fcntl
import getpass
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, Optional

from aligner.runtime.errors import UserError


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


def _is_alive_elsewhere(holder: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Whether a holder whose kernel lock we could take may still run: on another host, and not as this requeued Slurm job."""
    if holder["host"] == mine["host"]:
        return False
    return holder["job_id"] is None or holder["job_id"] != mine["job_id"]


def _is_alive_here(holder: dict[str, Any]) -> bool:
    """Whether a holder on this host still runs; for file systems without kernel locks."""
    return _process_start(holder["pid"]) is not None and _process_start(holder["pid"]) == holder["process_start"]


class RunLock:
    """Held from construction to release, or to the end of this process, which releases it unless it is killed.

    The kernel's lock on the file decides on one host; what the file says decides between hosts, where kernel locks may not reach."""

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
        if holder and _is_alive_elsewhere(holder, mine):
            raise UserError(self._refusal(what, holder))
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps(mine))
        self._file.flush()

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
            f"choose another run.name, or stop that job; if it is dead on another host, delete {self.path}"
        )

    def release(self) -> None:
        """Give the lock back. The file stays, empty: deleting it would let two later processes lock two different files."""
        if not self._file.closed:
            self._file.seek(0)
            self._file.truncate()
            self._file.close()
