"""What a person sees while a run trains: a live line on a terminal, one plain line a step elsewhere."""

import logging
import sys
import time
from typing import Mapping, Optional

log = logging.getLogger("aligner")

SHOWN = (  # key in the metrics, label, format
    ("reward/mean", "reward", ".3f"),
    ("val/accuracy", "val accuracy", ".3f"),
    ("train/loss", "loss", ".4f"),
    ("val/loss", "val loss", ".4f"),
    ("kl/mean", "KL", ".4f"),
    ("response/length", "length", ".1f"),
    ("tokens_per_second", "tokens/s", ".0f"),
    ("time/step", "s/step", ".1f"),
)
DETAIL_EVERY = 30.0  # seconds


def step_line(step: int, total: int, metrics: Mapping[str, float], eta: Optional[float] = None) -> str:
    """One line about a step. eta: seconds left."""
    parts = [f"step {step}/{total}"]
    parts += [f"{label} {metrics[key]:{form}}" for key, label, form in SHOWN if key in metrics]
    if eta is not None:
        parts.append(f"{duration(eta)} left")
    return "  ".join(parts)


def phase_line(metrics: Mapping[str, float]) -> str:
    """Seconds of the phases that took any, longest first."""
    phases = {key.removeprefix("time/"): value for key, value in metrics.items() if key.startswith("time/")}
    phases.pop("step", None)
    ordered = sorted(phases.items(), key=lambda item: -item[1])
    return "  ".join(f"{name} {seconds:.1f} s" for name, seconds in ordered if seconds >= 0.05)


def duration(seconds: float) -> str:
    """h:mm:ss, or m:ss."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Shows steps done of `total`, the last metrics, the running phase and the time left. Rank 0 alone has one.

    done: steps done before this process (a resumed run). live: None asks whether stderr is a terminal."""

    def __init__(self, total: int, *, done: int = 0, live: Optional[bool] = None):
        self._total, self._done, self._first = total, done, done
        self._began = time.monotonic()
        self._metrics: dict[str, float] = {}
        self.phase("starting")
        self._live = _live_display(self) if (sys.stderr.isatty() if live is None else live) else None

    def phase(self, name: str) -> None:
        """A phase of the step begins (Timers' on_phase)."""
        self._phase, self._detail, self._told = name, "", time.monotonic()

    def detail(self, text: str) -> None:
        """How far the running phase is: at once on a terminal, elsewhere a line each DETAIL_EVERY seconds of a long phase."""
        self._detail = text
        now = time.monotonic()
        if self._live is None and now - self._told >= DETAIL_EVERY:
            self._told = now
            log.info("%s: %s", self._phase, text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done. Values of earlier steps (val/accuracy) stay on display until replaced."""
        self._done = step
        self._metrics = {**self._metrics, **metrics}
        if self._live is None:
            log.info(step_line(step, self._total, metrics, self.seconds_left()))

    def seconds_left(self) -> Optional[float]:
        """From the mean step of this process; None before its first step."""
        here = self._done - self._first
        if here <= 0:
            return None
        return (time.monotonic() - self._began) / here * max(0, self._total - self._done)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def __rich__(self):
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        line = step_line(self._done, self._total, self._metrics, self.seconds_left())
        bar = ProgressBar(total=max(1, self._total), completed=self._done, width=60)
        return Group(
            Text(f"{line}  now: {self._phase} {self._detail}"), Text(phase_line(self._metrics), style="dim"), bar
        )


def _live_display(progress: Progress):
    from rich.console import Console
    from rich.live import Live

    live = Live(progress, console=Console(stderr=True), refresh_per_second=2, transient=False)
    live.start()
    return live
