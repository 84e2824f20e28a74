"""Errors that a user can act on end a job with one sentence and a documented exit code; everything else keeps its traceback."""

import contextlib
import errno
import gc
import logging
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Callable, Iterator, NoReturn, Optional

from aligner.runtime.exit_codes import ExitCode

PACKAGE = Path(__file__).resolve().parents[1]
PATIENCE = 5.0  # seconds
EXIT_FILE = "ALIGNER_EXIT_FILE"  # an environment variable
PR_SET_PDEATHSIG = 1  # linux/prctl.h
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# torch's zip writer reports a full disk as a RuntimeError without an errno: "pytorchstreamwriter failed", "unexpected pos 704 vs 598"
DISK_TEXTS = (
    "no space left on device",
    "disk quota exceeded",
    "file too large",
    "pytorchstreamwriter failed",
    "unexpected pos",
)


# How gloo and NCCL say that a collective's peer is gone
PEER_TEXTS = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")


class UserError(ValueError):
    """Something that the user can put right. The message is one sentence: the rule, the values, what to change."""

    exit_code = ExitCode.CONFIGURATION
    on_every_rank = False
    """Whether every rank raises the same, so that rank 0 alone tells it."""


class ConfigError(UserError):
    """Every problem of a configuration. `problems`: one line each."""

    on_every_rank = True

    def __init__(self, *problems: str):
        self.problems = list(problems)
        head = (
            "the configuration has a problem:"
            if len(problems) == 1
            else f"the configuration has {len(problems)} problems:"
        )
        super().__init__(f"{head} {problems[0]}" if len(problems) == 1 else "\n  ".join([head, *problems]))


class ContractError(UserError):
    """The two jobs do not fit together, or the other one cannot be reached."""

    exit_code = ExitCode.CONTRACT


class Stopped(UserError):
    """A stop was asked for while nothing could be saved: the newest checkpoint is what the run continues from."""

    on_every_rank = True

    def __init__(self, message: str, exit_code: ExitCode):
        super().__init__(message)
        self.exit_code = exit_code

    def __reduce__(self):  # it is broadcast to the other ranks
        return Stopped, (str(self), self.exit_code)


class StorageError(UserError):
    """The run folder cannot take what has to be written."""

    exit_code = ExitCode.STORAGE


class AgreedError(RuntimeError):
    """What one rank or several ended with, raised on all (parallel/collectives.py: agree)."""

    on_every_rank = True


class AgreedUserError(UserError):
    """The same for what the user can put right, with the exit code of the first."""

    on_every_rank = True

    def __init__(self, message: str, exit_code: ExitCode):
        super().__init__(message)
        self.exit_code = exit_code


def chain(error: Optional[BaseException]) -> Iterator[BaseException]:
    """The error, and what caused it, outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def is_disk_full(error: BaseException) -> bool:
    """Whether a full disk, a quota or a file size limit is behind the error."""
    return any(
        getattr(e, "errno", None) in DISK_ERRORS or any(text in str(e).lower() for text in DISK_TEXTS)
        for e in chain(error)
    )


def lost_peer(error: BaseException) -> Optional[str]:
    """What gloo or NCCL said where a collective failed because another rank is gone, in one short line; None for other errors."""
    for e in chain(error):
        text = " ".join(str(e).split())
        if isinstance(e, RuntimeError) and any(known in text.lower() for known in PEER_TEXTS):
            return re.sub(r"^\[\S+\] ", "", text).split(". ")[0]  # without the source line and the advice
    return None


@contextlib.contextmanager
def disk_full_is_named(folder: Path, what: str) -> Iterator[None]:
    """Turn a full disk while writing `what` under `folder` into a StorageError that says so."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise StorageError(
            f"{what} could not be written under {folder}: no space left (disk, quota or file size limit). "
            "Free space there, or point run.dir at a larger file system, and start the same command again."
        ) from error


def raised_by_us(error: BaseException) -> bool:
    """Whether a line of this package (not of a library that it called) raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and PACKAGE in Path(frames[-1].filename).resolve().parents


def exit_code_of(error: BaseException) -> ExitCode:
    if isinstance(error, UserError):
        return error.exit_code
    if is_disk_full(error):
        return ExitCode.STORAGE
    if isinstance(error, ValueError) and raised_by_us(
        error
    ):  # the convention of this package: a ValueError is the user's
        return ExitCode.CONFIGURATION
    return ExitCode.FAULT


def is_one_sentence(error: BaseException) -> bool:
    """Whether the message alone tells the user what happened; a TypeError never does."""
    ours = isinstance(error, (ValueError, RuntimeError, OSError, FloatingPointError)) and raised_by_us(error)
    return isinstance(error, UserError) or ours or is_disk_full(error)


def log_files() -> list[str]:
    """Files that this process logs to."""
    return [h.baseFilename for h in logging.getLogger().handlers if isinstance(h, logging.FileHandler)]


def report_error(error: BaseException, *, rank: int) -> ExitCode:
    """Print the error for its reader, and its traceback to the log file. Returns the exit code.

    What is the same on every rank is printed by rank 0 alone."""
    code = exit_code_of(error)
    if log_files():
        logging.getLogger("aligner").error("ended by an error", exc_info=error, extra={"file_only": True})
    if log_files() and not is_one_sentence(error) and (said := lost_peer(error)):
        _report_lost_peer(said, rank)
    elif not is_one_sentence(error) or (code is ExitCode.FAULT and not log_files()):
        traceback.print_exception(error)
    elif rank == 0 or not getattr(error, "on_every_rank", False):
        where = f"[rank {rank}] " if rank else ""
        hint = f"\n(traceback: {log_files()[0]})" if code is ExitCode.FAULT else ""
        print(f"{where}error: {error}{hint}", file=sys.stderr, flush=True)
    else:
        time.sleep(PATIENCE)  # a launcher ends the job with the first rank that does: let rank 0 speak
    return code


def _report_lost_peer(said: str, rank: int) -> None:
    """The rank that ended first is the one to be heard: its own error, or the launcher's word about the signal that killed it."""
    time.sleep(PATIENCE)
    if rank == 0:
        print(
            f"error: another rank of this job is gone ({said})\n(traceback: {log_files()[0]})",
            file=sys.stderr,
            flush=True,
        )


def end_with_launcher() -> None:
    """Under torchrun: let the kernel kill this rank where torchrun itself is killed. Orphans would hold the GPUs, the ports and the run's
    lock, and nobody would start them again."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_main(main: Callable[[], Optional[int]]) -> NoReturn:
    """Run an entry script's main and exit: with what it returns (None is 0), or as the error that ended it demands."""
    end_with_launcher()
    rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
    try:
        code = int(main() or 0)
        end_threads_of_groups()
    except (Exception, KeyboardInterrupt) as error:
        if was_interrupted(error):
            print("interrupted", file=sys.stderr)
            code = ExitCode.INTERRUPTED
        else:
            code = report_error(error, rank=rank)
    sys.exit(_told(code, rank))


def end_threads_of_groups() -> None:
    """Gloo's threads run on while anything refers to their group, destroyed or not, be it in a cycle (a model's, a traceback's). One that
    lets go of a tensor while Python is being torn down aborts the process."""
    gc.collect()


def _told(code: int, rank: int) -> int:
    """Rank 0 tells how the job ended, in the file that a launcher has named (EXIT_FILE): srun's own exit code is the highest of all ranks.

    Ranks that stopped with it end with 0: srun --kill-on-bad-exit would kill rank 0, which still closes what the job has open."""
    if rank:
        return ExitCode.DONE if code in (ExitCode.REQUEUE, ExitCode.INTERRUPTED) else code
    if file := os.environ.get(EXIT_FILE):
        with contextlib.suppress(OSError):
            Path(file).write_text(f"{int(code)}\n")
    return code


def was_interrupted(error: Optional[BaseException]) -> bool:
    """Whether Ctrl-C led to this error: libraries' clean-up may raise another in its place."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
