"""The file by which a served job says where it is: written atomically once it serves, re-read at every attempt to connect."""

import json
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Callable, Optional

POLL, LONGEST_POLL = 0.25, 5.0  # seconds between attempts, doubled from one to the next
REMIND = 30.0


@dataclass(frozen=True)
class EndpointInfo:
    """Where a job serves. `started`: seconds since the epoch. `token_file`: where its token lies; None where it asks for none.
    metrics_port: of Prometheus metrics; None where there are none."""

    host: str
    port: int
    pid: int
    run_id: str
    grid: str
    started: float
    job_id: Optional[str] = None
    token_file: Optional[str] = None
    metrics_port: Optional[int] = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


def write_endpoint(file: Path, info: EndpointInfo) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(json.dumps(asdict(info), indent=1) + "\n")
    os.replace(partial, file)


def remove_endpoint(file: Path, info: EndpointInfo) -> None:
    """Remove the file where it is still ours: a successor may have written its own."""
    if read_endpoint(file) == info:
        file.unlink(missing_ok=True)


def read_endpoint(file: Path) -> Optional[EndpointInfo]:
    """What the file says; None where there is none. Raises ValueError where it is no endpoint file."""
    try:
        text = file.read_text()
    except FileNotFoundError:
        return None
    try:
        values = json.loads(text)
        known = {f.name for f in fields(EndpointInfo)}
        return EndpointInfo(**{k: v for k, v in values.items() if k in known})
    except (json.JSONDecodeError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is not an endpoint file ({error}); remove it, and start the job that writes it"
        ) from None


def parse_address(text: str, *, key: str) -> tuple[str, int]:
    """host:port. Raises ValueError naming the setting `key`."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{key}={text} is not host:port")
    return host, int(port)


def wait_for(
    find: Callable[[], Optional[EndpointInfo]],
    attempt: Callable[[EndpointInfo], None],
    *,
    timeout: float,
    say: Callable[[str], None],
    what: str,
    advice: str,
    leave: Callable[[], None] = lambda: None,
) -> EndpointInfo:
    """Try find() and attempt() until an attempt passes; attempt raises OSError while the job is not there yet.

    Says at once that it waits, and for what; raises TimeoutError with the same after `timeout` seconds.
    leave: called several times a second; what it raises ends the wait."""
    deadline = time.monotonic() + timeout
    reminder, pause = 0.0, POLL
    while True:
        info = find()
        state = f"{what} is not there"
        if info is not None:
            try:
                attempt(info)
                return info
            except OSError as error:
                state = f"{what} at {info.address} does not answer ({str(error) or type(error).__name__})"
        now = time.monotonic()
        if now >= deadline:
            raise TimeoutError(f"{state} after {timeout:.0f} s; {advice}")
        if now >= reminder:
            say(f"waiting for it: {state}; giving up in {deadline - now:.0f} s")
            reminder = now + REMIND
        until = min(now + pause, deadline)
        while (left := until - time.monotonic()) > 0:
            leave()
            time.sleep(min(POLL, left))
        pause = min(2 * pause, LONGEST_POLL)
