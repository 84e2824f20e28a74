"""Signals become flags that the loop looks at between steps. Imports nothing heavy: entry scripts install it before torch."""

import contextlib
import signal
from types import FrameType
from typing import Iterator, Optional

from aligner.runtime.errors import Stopped
from aligner.runtime.exit_codes import ExitCode


class StopSignals:
    """Which stop was asked for. SIGTERM and SIGUSR1 (Slurm's warning before the limit) ask to save and requeue, as the end of
    run.max_time does; SIGINT asks to end.

    A handler only sets an attribute: an Event's lock may be held by the very thread that the handler interrupts."""

    def __init__(self) -> None:
        self.received: Optional[signal.Signals] = None
        self._asked = False

    @classmethod
    def install(cls) -> "StopSignals":
        """Handle SIGTERM, SIGINT and SIGUSR1 in this process from now on. Main thread only."""
        flags = cls()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, flags._note)
        return flags

    def _note(self, number: int, _: Optional[FrameType]) -> None:
        again = self.received is not None and number == signal.SIGINT
        self.received = self.received or signal.Signals(number)
        if again:  # a second Ctrl-C does not wait for the step to end
            raise KeyboardInterrupt

    def ask(self) -> None:
        """Stop as SIGTERM asks to: run.max_time is nearly over."""
        self._asked = True

    @property
    def stopping(self) -> bool:
        return self.received is not None or self._asked

    def end_wait(self, doing: str) -> None:
        """Raise Stopped where a stop was asked for. doing: what for is waited, for the message."""
        if self.stopping:
            by = self.received.name if self.received else "run.max_time"
            raise Stopped(f"told to stop by {by} while {doing}; the same command continues the run", self.exit_code)

    @property
    def exit_code(self) -> ExitCode:
        """How a job that was asked to stop and has saved ends."""
        if not self.stopping:
            return ExitCode.DONE
        return ExitCode.INTERRUPTED if self.received == signal.SIGINT else ExitCode.REQUEUE


TO_SAVE = {signal.SIGTERM, signal.SIGUSR1}


@contextlib.contextmanager
def kept_from_children() -> Iterator[None]:
    """Processes that this thread starts inside never get SIGTERM and SIGUSR1: Slurm sends them to every process of a step, and ranks that
    are asked to save still need their server and their verifiers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TO_SAVE)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_in_child() -> None:
    """The same from inside such a process, which may start others that get them as usual (unlike a signal that is blocked or ignored)."""
    for number in TO_SAVE:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TO_SAVE)
