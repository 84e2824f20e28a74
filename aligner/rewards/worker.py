"""A verifier process: `python -m aligner.rewards.worker SPEC`, started and killed by pool.py. One JSON object a line on both pipes.

It says {"ready"} or {"error"} once; then, for each request, {"started"} when the slow preparation is over (the deadline of one score
runs from there) and {"parts"} or {"error"}. Each carries the "number" of its request; that of the start is 0."""

import ctypes
import json
import math
import os
import resource
import signal
import sys
import time
import traceback
from typing import Any, BinaryIO, Optional

from aligner.rewards.build import build_verifier
from aligner.runtime.signals import ignore_in_child

PR_SET_PDEATHSIG = 1
OPEN_FILES = 256
FILE_BYTES = 64 << 20


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that ends; the pipe's end does it where it is idle."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def limit_resources(memory_mb: int) -> None:
    """Hard limits on address space, open files, the size of written files, and core dumps (none)."""
    wanted = {
        resource.RLIMIT_AS: memory_mb << 20,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for which, value in wanted.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def limit_cpu(seconds: float) -> None:
    """Let this process use `seconds` more of CPU time before the kernel ends it: a belt beside the parent's deadline."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = math.ceil(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The two pipes to the parent, moved away from 0 and 1: what a user's function prints goes to the log, not into the protocol."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def describe(error: BaseException) -> str:
    """Type, message and the innermost line, for a reader who has no traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:1000] + at


def exit_code(raised: Optional[BaseException]) -> int:
    """What Python would exit with after this exception, or after none."""
    if not isinstance(raised, SystemExit):
        return int(raised is not None)
    if raised.code is None or isinstance(raised.code, int):
        return int(raised.code or 0) & 0xFF
    return 1


def serve(spec: dict[str, Any], requests: BinaryIO, replies: BinaryIO) -> None:
    pid = os.getpid()

    def reply(number: int, *, raised: Optional[BaseException] = None, **message: Any) -> None:
        # The user's code forked and came back in the child too: the child must not answer for the worker.
        if os.getpid() != pid:
            os._exit(exit_code(raised))
        replies.write(json.dumps({"number": number, **message}).encode() + b"\n")
        replies.flush()

    try:
        verifier = build_verifier(spec)
    except BaseException as error:  # the user's file may raise anything, SystemExit too
        reply(0, raised=error, error=str(error) if isinstance(error, ValueError) else describe(error))
        return
    reply(0, ready=True)
    if hasattr(verifier, "preload"):
        verifier.preload()
    for line in requests:
        request = json.loads(line)
        number = request["number"]
        try:
            limit_cpu(spec["start_timeout"])
            prepared = verifier.prepare(request["sample"])
            limit_cpu(spec["timeout"])
            reply(number, started=True)
            reply(number, parts=verifier.score(prepared, request["response"], request["sample"]))
        except BaseException as error:
            reply(number, raised=error, error=describe(error))


def main() -> None:
    spec = json.loads(sys.argv[1])
    die_with_parent(spec["parent"])
    ignore_in_child()
    requests, replies = take_pipes()
    limit_resources(spec["memory_mb"])
    limit_cpu(spec["start_timeout"])
    serve(spec, requests, replies)


if __name__ == "__main__":
    main()
