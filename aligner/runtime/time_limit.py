"""run.max_time: how long a job may run from its process's first moment, so that it saves before a scheduler kills it."""

import logging
import os
import re
import time
from pathlib import Path
from typing import Callable, Optional

from aligner.runtime.signals import StopSignals

log = logging.getLogger(__name__)

_FORM = re.compile(r"(?:(?:(\d+)-)?(\d+):([0-5]?\d):([0-5]?\d)|(\d+(?:\.\d+)?))")


def seconds_of(text: str) -> float:
    """ "1-02:03:04" (days-hours:minutes:seconds, as Slurm writes it), "26:03:04" or "93784" (seconds). Raises ValueError for anything else.

    A bare number is seconds, as in every other setting, not Slurm's minutes: YAML itself reads an unquoted 26:03:04 as that many
    seconds (base 60)."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is neither D-HH:MM:SS, HH:MM:SS nor a number of seconds")
    days, hours, minutes, seconds, alone = match.groups()
    if alone is not None:
        return float(alone)
    return ((int(days or 0) * 24 + int(hours)) * 60 + int(minutes)) * 60.0 + int(seconds)


def process_age() -> float:
    """Seconds since this process was started, imports included; Linux."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class TimeLimit:
    """Whether the time that is left is less than what a job still needs."""

    def __init__(self, max_time: Optional[str], *, margin: float, age: Callable[[], float] = process_age) -> None:
        """margin: seconds that are kept at the least. age: seconds that the job has run."""
        self._text, self.margin, self._age = max_time, margin, age
        self.seconds = None if max_time is None else seconds_of(max_time)

    def leaves_less_than(self, needed: float) -> bool:
        """needed: seconds. False without a limit."""
        return self.seconds is not None and self.seconds - self._age() < max(self.margin, needed)

    def __str__(self) -> str:
        return f"run.max_time={self._text} is over in {(self.seconds or 0.0) - self._age():.0f} s"


def asked_to_stop(limit: TimeLimit, stop: StopSignals, needed: Callable[[], float]) -> Callable[[], bool]:
    """To be asked again and again: whether a signal came, or less is left of run.max_time than `needed()` seconds."""

    def asked() -> bool:
        if not stop.stopping and limit.leaves_less_than(seconds := needed()):
            log.info("%s, and %.0f s may be needed to end in order: ending now", limit, max(seconds, limit.margin))
            stop.ask()
        return stop.stopping

    return asked
