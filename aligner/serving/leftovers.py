"""What a killed critic job would leave behind: Triton's processes, its workspace, its shared memory.

Run as a script it is the guardian of one job: it waits for its parent to end, however that ends, and removes what is left. Imports the
standard library only, so that it starts in milliseconds and with `python -I -S`."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Iterator, Optional

MARK = "ALIGNER_TRITON"  # in the environment of Triton's processes: the workspace of the server that they belong to
OWNER = "owner.json"
WORKSPACE = re.compile(r"aligner-triton-(\d+)-")
SHARED_MEMORY = re.compile(r"pytrtion(\d+)-")  # the library's own spelling
HOLDINGS = "holdings.json"
SEGMENT = re.compile(r"/dev/shm/psm_[0-9a-f]+")  # Python's name for any shared memory: it does not tell whose it is
FOLDER = re.compile(r".*/folder\w{6}(?=/)")  # Triton's copy of a model's script, in the command line of what runs it
ENVIRONMENT = re.compile(r"python_env_\w{6}")  # an empty folder that Triton's Python backend makes as it starts
LOADED = 60.0  # seconds after its start in which a Triton server has loaded that backend
CLOCKS = 1.0  # seconds by which a folder's time may lie before the start of the process that made it: file times are coarse, clocks are set
POLL = 0.5
WATCHED = 5.0
SETTLED = 3.0  # seconds in which no further process may appear: one that was being started when its parent was killed


def process_start(pid: int) -> Optional[str]:
    """Start time in clock ticks, which tells a reused pid from the old one; None where no such process runs (or it is a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return None


def make_workspace(run: str) -> Path:
    """A folder for the server of this process. `run`: what it serves, for whoever finds the folder."""
    home = Path(tempfile.mkdtemp(prefix=f"aligner-triton-{os.getpid()}-"))
    owner = {"pid": os.getpid(), "process_start": process_start(os.getpid()), "run": run}
    (home / OWNER).write_text(json.dumps(owner))
    return home


def guard(home: Path) -> subprocess.Popen:
    """Start the guardian of this process. Kill it once everything was removed in order."""
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(home)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def remove_abandoned(run: str) -> None:
    """What servers of dead processes, or of earlier jobs of this run (which is held by this process's lock), have left. Call it
    before this process starts its own."""
    for home in _own_entries(Path(tempfile.gettempdir()), WORKSPACE):
        pid, alive, of_run = _owner(home)
        if pid != os.getpid() and (not alive or of_run == run):
            remove(home, pid)
    for file in _own_entries(Path("/dev/shm"), SHARED_MEMORY):
        if process_start(int(SHARED_MEMORY.match(file.name)[1])) is None:
            _unlink(file)


def remove(home: Path, pid: int) -> None:
    """End Triton's processes of a server that is gone, then remove its files."""
    holdings = note_holdings(home)
    for process in _marked(home):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    for file in _own_entries(Path("/dev/shm"), SHARED_MEMORY):
        if int(SHARED_MEMORY.match(file.name)[1]) == pid:
            _unlink(file)
    _remove_holdings(holdings)
    shutil.rmtree(home, ignore_errors=True)


def note_holdings(home: Path) -> dict[str, int]:
    """Path -> inode of what the processes of a workspace use under names that do not tell whose it is; with what was noted before, in the
    workspace: when they are killed with their server, nothing else knows."""
    noted = {}
    with contextlib.suppress(OSError, ValueError):
        noted = json.loads((home / HOLDINGS).read_text())
    found = {str(path): inode for process in _marked(home) for path in _held_by(process) if (inode := _inode(path))}
    if found.keys() - noted.keys():
        noted = {**found, **noted}
        with contextlib.suppress(OSError):
            beside = home / f"{HOLDINGS}.new"
            beside.write_text(json.dumps(noted))
            beside.replace(home / HOLDINGS)
    return noted


def _held_by(process: int) -> Iterator[Path]:
    """Segments that it has open, its model's folder, and, of a Triton server, the backend's folder that was made as it started."""
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                if match := SEGMENT.fullmatch(os.readlink(link)):
                    yield Path(match[0])
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{process}/cmdline").read_text(errors="replace").split("\0")
        yield from (Path(match[0]) for word in words if (match := FOLDER.match(word)))
        if Path(words[0]).name == "tritonserver":
            yield from (path for path in _own_entries(Path("/tmp"), ENVIRONMENT) if _is_of(path, process))


def _is_of(environment: Path, server: int) -> bool:
    """Whether a server may have made the folder: it was started at most LOADED seconds before."""
    start = process_start(server)
    if start is None:
        return False
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return -CLOCKS <= environment.stat().st_ctime - booted - int(start) / os.sysconf("SC_CLK_TCK") <= LOADED


def _remove_holdings(holdings: dict[str, int]) -> None:
    """What still is what was noted. An environment goes only where no server that lives could have made it."""
    for path in map(Path, holdings):
        if _inode(path) != holdings[str(path)]:
            continue
        with contextlib.suppress(OSError):
            if not path.is_dir():
                path.unlink()
            elif not ENVIRONMENT.fullmatch(path.name):
                shutil.rmtree(path)
            elif not any(_is_of(path, server) for server in _servers()):
                path.rmdir()  # it is empty


def _servers() -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "comm").read_text().strip() == "tritonserver":
                yield int(folder.name)


def _inode(path: Path) -> int:
    """0 where there is nothing of this user's."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        return status.st_ino if status.st_uid == os.getuid() else 0
    return 0


def _owner(home: Path) -> tuple[int, bool, Optional[str]]:
    """pid of the server's process, whether it lives, and its run."""
    pid = int(WORKSPACE.match(home.name)[1])
    try:
        owner = json.loads((home / OWNER).read_text())
        return owner["pid"], process_start(owner["pid"]) == owner["process_start"], owner["run"]
    except (OSError, ValueError, KeyError):
        return pid, process_start(pid) is not None, None


def _own_entries(folder: Path, pattern: re.Pattern) -> Iterator[Path]:
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            if pattern.match(path.name) and path.stat().st_uid == os.getuid():
                yield path


def _marked(home: Path) -> Iterator[int]:
    """Processes with the workspace's mark in their environment."""
    wanted = f"{MARK}={home}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def _unlink(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()


def main(parent: int, home: Path) -> None:
    looked = time.monotonic()
    while os.getppid() == parent:
        time.sleep(POLL)
        if time.monotonic() - looked > WATCHED:
            note_holdings(home)
            looked = time.monotonic()
    until = time.monotonic() + SETTLED
    while time.monotonic() < until:
        remove(home, parent)
        time.sleep(POLL)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
