"""Where every thread of a rank stands, written into the run folder: before a wait is given up, when nothing moves, on SIGUSR2, and where
the process crashes (SIGSEGV, SIGABRT)."""

import atexit
import contextlib
import faulthandler
import signal
import time
from pathlib import Path


class Stacks:
    """logs/JOB_rankN.stacks. Written by Python's faulthandler, whose own thread needs nothing that could be held by a hung one."""

    def __init__(self, file: Path) -> None:
        self.path = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file.open("a")
        faulthandler.register(signal.SIGUSR2, file=self._file, all_threads=True)
        faulthandler.enable(self._file)
        atexit.register(self._close)

    def dump(self, reason: str) -> None:
        """Now, because of `reason`."""
        self._file.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} {reason}\n")
        self._file.flush()
        faulthandler.dump_traceback(file=self._file, all_threads=True)

    def expect(self, within: float) -> None:
        """Dump where neither `expect` nor `rest` is called within so many seconds; what was expected before counts no longer."""
        faulthandler.dump_traceback_later(within, file=self._file)

    def rest(self) -> None:
        """Nothing is expected."""
        faulthandler.cancel_dump_traceback_later()

    def _close(self) -> None:
        """A file without a dump goes."""
        self.rest()
        faulthandler.unregister(signal.SIGUSR2)
        faulthandler.disable()
        self._file.close()
        with contextlib.suppress(OSError):
            if not self.path.stat().st_size:
                self.path.unlink()
