"""Phases of a step that sum to the step."""

import contextlib
import time
from typing import Callable, Iterator, Optional


class Timers:
    """Wall-clock seconds of each phase of a step; what no phase covers is `other`, so time/* without time/step sums to time/step.

    phases: always reported, 0 where unused. on_phase: told the name of a phase that begins (progress). synchronise: called
    at both ends of a phase, so that work queued on a GPU is charged to the phase that queued it."""

    def __init__(
        self,
        *phases: str,
        on_phase: Optional[Callable[[str], None]] = None,
        synchronise: Optional[Callable[[], None]] = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._phases = phases
        self._on_phase = on_phase or (lambda name: None)
        self._synchronise = synchronise or (lambda: None)
        self._clock = clock
        self._running: Optional[str] = None
        self.start_step()

    def start_step(self) -> None:
        """Forget what was measured; the step begins now."""
        assert self._running is None, f"a step cannot begin inside phase {self._running}"
        self._seconds = dict.fromkeys(self._phases, 0.0)
        self._began = self._clock()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase. Phases do not nest (their sum would exceed the step) but may come again."""
        assert self._running is None, f"phase {name} inside phase {self._running}: phases do not nest"
        assert name not in ("step", "other"), f"{name} is not a phase"
        self._running = name
        self._on_phase(name)
        self._synchronise()
        start = self._clock()
        try:
            yield
        finally:
            self._synchronise()
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start
            self._running = None

    def finish_step(self) -> dict[str, float]:
        """time/PHASE, time/other and time/step in seconds; the next step begins now."""
        assert self._running is None, f"a step cannot end inside phase {self._running}"
        step = self._clock() - self._began
        seconds = {**self._seconds, "other": max(0.0, step - sum(self._seconds.values())), "step": step}
        self.start_step()
        return {f"time/{name}": value for name, value in seconds.items()}
