"""What the loop tells the outside: phases, metrics, samples. Every rank has one, so that the loop reads the same; rank 0's alone writes."""

from pathlib import Path
from typing import Any, Callable, ContextManager, Iterable, Mapping, Optional, Sequence

from aligner.runtime.errors import disk_full_is_named
from aligner.runtime.metrics import MetricsWriter, plain_row
from aligner.runtime.progress import Progress
from aligner.runtime.run_folder import RunFolder
from aligner.runtime.timers import Timers

PHASES = ("refit", "generate", "logprobs", "critic_wait", "advantages", "train", "validate", "checkpoint")


class Recorder:
    """config: of a job, with `logging`. folder: None on the ranks that write nothing. resumed: step of the checkpoint that the run
    continues from, None for a new run. total: steps of the run. on_phase: told the name of a phase that begins, on every rank."""

    def __init__(
        self,
        config: Any,
        folder: Optional[RunFolder],
        *,
        resumed: Optional[int],
        total: int = 0,
        job: str = "actor",
        phases: Sequence[str] = PHASES,
        synchronise: Optional[Callable[[], None]] = None,
        on_phase: Optional[Callable[[str], None]] = None,
        settings: Optional[Mapping[str, Any]] = None,
    ) -> None:
        self.folder, self.job = folder, job
        self._log_samples = config.logging.rollouts
        self._metrics = self._progress = None
        if folder is not None:
            self._metrics = MetricsWriter(folder.path, config.logging, keep_through=resumed, config=settings)
            self._progress = Progress(total, done=resumed or 0)
        self._on_phase = on_phase
        self.longest_step = 0.0  # seconds so far, without saving
        self.timers = Timers(*phases, on_phase=self._enter, synchronise=synchronise)

    def _enter(self, phase: str) -> None:
        if self._progress is not None:
            self._progress.phase(phase)
        if self._on_phase is not None:
            self._on_phase(phase)

    def phase(self, name: str) -> ContextManager[None]:
        return self.timers.phase(name)

    def detail(self, text: str) -> None:
        """How far the running phase is."""
        if self._progress is not None:
            self._progress.detail(text)

    def start(self) -> None:
        """The first step begins now. Later ones begin where the one before ended, so a checkpoint counts in the step that follows it."""
        self.timers.start_step()

    def end_step(self, step: int, metrics: Mapping[str, Any], *, tokens: int) -> None:
        """Write the row of a step. tokens: prompt and response tokens of the step; tokens_per_second leaves validation and saving out.

        Raises FloatingPointError, on every rank alike, where a metric is not finite."""
        times = self.timers.finish_step()
        self.longest_step = max(self.longest_step, times["time/step"] - times["time/checkpoint"])
        aside = times["time/validate"] + times["time/checkpoint"]
        working = times["time/step"] - (aside if step else 0.0)
        row = plain_row({**metrics, **times, "tokens_per_second": tokens / max(working, 1e-9)})
        if self._metrics is not None:
            with disk_full_is_named(self.folder.path, f"the metrics of step {step}"):
                self._metrics.write(step, row)
            self._progress.step(step, row)

    def training_samples(self, step: int, rows: Iterable[dict[str, Any]]) -> None:
        if self.folder is not None:
            self._write_samples(self.folder.rollouts(step), rows)

    def validation_samples(self, step: int, rows: Iterable[dict[str, Any]]) -> None:
        if self.folder is not None:
            self._write_samples(self.folder.validation(step), rows)

    def _write_samples(self, path: Path, rows: Iterable[dict[str, Any]]) -> None:
        if self._log_samples:
            with disk_full_is_named(self.folder.path, f"the samples {path.name}"):
                self.folder.write_samples(path, rows)

    def keep_batch(self, name: str, tensors: Mapping[str, Any]) -> str:
        """Save a batch that could not be trained on. Returns where, for a message; "" on a rank that writes nothing."""
        return "" if self.folder is None else self.folder.keep_batch(f"{self.job}_{name}", tensors)

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._progress.close()
