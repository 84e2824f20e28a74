"""Starts ranks of real entry scripts by fork from a process that has imported everything: 5 s of processor time less a rank.

A started rank runs the script's file as __main__ in a session of its own, with the arguments, environment and output files that it is
given, and ends as any Python process does. Requests and replies are JSON lines on stdin and stdout; when stdin closes, every rank that
still runs is killed."""

import contextlib
import json
import os
import resource
import runpy
import select
import signal
import sys

from tests.jobs.threads import thread_names

PRELOADED = (
    "aligner.algorithms.assemble",
    "aligner.algorithms.critic_job",
    "aligner.algorithms.sft",
    "aligner.algorithms.supervised_job",
    "aligner.config.load",
    "aligner.rewards.source",
    "aligner.rollout.offline",
    "aligner.runtime.report",
    "aligner.serving.client",
    "aligner.serving.local",
    "aligner.serving.server",
    "torch._dynamo",  # the first optimizer imports it
    "torch.utils.tensorboard",
    "transformers.tokenization_utils_tokenizers",
)


def serve() -> dict:
    """Answer until stdin closes. Returns in a started rank alone, with its request."""
    running: set[int] = set()
    buffered = b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.05)
        if readable:
            data = os.read(0, 1 << 16)
            if not data:
                end(running)
                os._exit(0)
            *lines, buffered = (buffered + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    return request
                running.add(pid)
                say({"started": pid})
        reap(running)


def reap(running: set[int]) -> None:
    for pid in list(running):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            running.discard(pid)
            say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def end(running: set[int]) -> None:
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def say(message: dict) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def become(request: dict) -> None:
    """Turn this forked process into the rank that was asked for."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests with Ctrl-C ignored
    os.dup2(os.open(request["stdin"], os.O_RDONLY), 0)
    for number, path in ((1, request["stdout"]), (2, request["stderr"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["largest_file"] is not None:
        signal.signal(
            signal.SIGXFSZ, signal.SIG_IGN
        )  # as Python itself does: a write beyond the limit fails with EFBIG
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["largest_file"], request["largest_file"]))
    os.chdir(request["folder"])
    sys.argv = request["argv"]
    sys.path[0] = os.path.dirname(request["argv"][0])
    if request["packages"] is not None:
        sys.path.insert(1, request["packages"])


def refuse_threads_of_groups() -> None:
    """A rank that ends well has none: see aligner/runtime/errors.py."""
    if left := [name for name in thread_names() if "gloo" in name]:
        sys.exit(f"threads of process groups are left: {', '.join(left)}")


if __name__ == "__main__":
    for module in PRELOADED:
        __import__(module)
    say({"ready": os.getpid()})
    mine = serve()
    become(mine)
    try:
        runpy.run_path(mine["argv"][0], run_name="__main__")
    except SystemExit as ended:
        if not ended.code:
            refuse_threads_of_groups()
        raise
