"""What rank 0 observes of its own service: how long answers take, and how the values that it serves move. Plain numbers, any thread."""

import bisect
import math
import threading
import time
from typing import Any, Callable

from torch import Tensor

Handler = Callable[[Any], Any]
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds


class Latency:
    """A histogram. `counts[i]`: answers within BUCKETS[i] that took longer than the bucket before; the last one: beyond all."""

    def __init__(self) -> None:
        self.counts, self.total = [0] * (len(BUCKETS) + 1), 0.0

    def around(self, handler: Handler) -> Handler:
        """The handler, measured. It is called in one thread, as an endpoint's is."""

        def measured(requests: Any) -> Any:
            began = time.monotonic()
            try:
                return handler(requests)
            finally:
                took = time.monotonic() - began
                self.counts[bisect.bisect_left(BUCKETS, took)] += 1
                self.total += took

        return measured

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, answers within it), as Prometheus has it."""
        bounds, so_far, found = [*map(str, BUCKETS), "+Inf"], 0, []
        for bound, count in zip(bounds, self.counts, strict=True):
            so_far += count
            found.append((bound, float(so_far)))
        return found


class ServedValues:
    """Mean and deviation of the values served since the critic's last step, and how far the mean is from that of the step before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step, self._before = -1, math.nan
        self._clear()

    def _clear(self) -> None:
        self._count, self._sum, self._squares = 0, 0.0, 0.0

    def add(self, step: int, values: Tensor) -> None:
        """values: any shape, those of response tokens, by the critic after `step` train steps."""
        with self._lock:
            if step != self._step:
                if self._count:
                    self._before = self._sum / self._count
                self._step = step
                self._clear()
            wide = values.double()
            self._count += wide.numel()
            self._sum += float(wide.sum())
            self._squares += float(wide.square().sum())

    def summary(self) -> dict[str, float]:
        """values_mean, values_std and values_drift; what is not known yet is left out."""
        with self._lock:
            if not self._count:
                return {}
            mean = self._sum / self._count
            found = {"values_mean": mean, "values_std": math.sqrt(max(self._squares / self._count - mean**2, 0.0))}
            return found if math.isnan(self._before) else {**found, "values_drift": mean - self._before}
