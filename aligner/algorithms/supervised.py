"""The loop of supervised jobs: rows of a file, mini-batch by mini-batch, with validation, checkpoints and records as the PPO job has them.

What is trained stands behind `Learner`, four methods and two for its state; the loop knows neither models nor losses:

    collate(rows) -> a dataclass of tensors, one mini-batch, the same on every rank
    train(batch)  -> metrics of one optimizer step; `skipped` and `empty` (0.0 or 1.0) are among them, as in Policy.train
    evaluate(rows) -> Evaluation: metrics of the held-out rows, how good they are, and rows for validation/step_N.jsonl
    save, load    -> the weights and optimizer (TrainableModel has both)

A step is one optimizer step. Step N takes the rows that follow the first `rows_consumed` ones in the order of (run.seed, epoch), so a run
that continues from a checkpoint needs one number to see the same. Metrics of `train` are recorded as train/NAME, those of `evaluate` as
val/NAME; metrics row 0 is the validation before training."""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Generic, Iterable, Mapping, Optional, Protocol, Sequence, TypeVar

from aligner.algorithms.agreement import on_all
from aligner.algorithms.pairs import Half, PairedCheckpoints
from aligner.algorithms.updates import train_in_turn
from aligner.config.supervised import SupervisedRunConfig, TrainConfig
from aligner.data.sampler import PromptSampler
from aligner.parallel.collectives import broadcast_object, gather_objects
from aligner.parallel.device import peak_memory_bytes
from aligner.parallel.topology import Topology
from aligner.runtime import faults
from aligner.runtime.errors import ConfigError
from aligner.runtime.recorder import Recorder

log = logging.getLogger(__name__)
Row = TypeVar("Row")

PHASES = ("data", "train", "validate", "checkpoint")


@dataclass
class Evaluation:
    """What held-out rows say of the present weights.

    quality: larger is better; checkpoint.keep_best keeps the checkpoint where it is largest. rows: JSON objects for
    validation/step_N.jsonl, made as they are asked for (on rank 0), and none where there is nothing to show. tokens: how many were read."""

    metrics: dict[str, float]
    quality: float
    tokens: int
    rows: Iterable[dict[str, Any]] = ()


class Learner(Protocol[Row]):
    """A model with its loss. Every method is collective over the job, with the same arguments and results on every rank."""

    def collate(self, rows: Sequence[Row]) -> Any: ...

    def train(self, batch: Any) -> dict[str, float]: ...

    def evaluate(self, rows: Sequence[Row]) -> Evaluation: ...

    def tokens(self, rows: Sequence[Row]) -> int:
        """How many tokens the rows have: for tokens_per_second. Not collective."""

    def save(self, folder: Path, *, extra: Mapping[str, Any], beside: bool) -> Half: ...

    def load(self, folder: Path) -> dict[str, Any]: ...


@dataclass
class SupervisedState:
    """What the loop carries from step to step, and a checkpoint beside weights and optimizer. The last two are what the order of rows
    hangs on: a run keeps them."""

    step: int = 0
    rows_consumed: int = 0
    tokens_consumed: int = 0
    train_rows: int = 0
    mini_batch_size: int = 0


@dataclass(frozen=True)
class Course:
    """How many rows a run takes, and in how many steps."""

    rows: int
    steps: int

    @classmethod
    def of(cls, train: TrainConfig, run: SupervisedRunConfig, n: int) -> "Course":
        """n: training rows. Every step has train.mini_batch_size of them but the last, which has what is left of train.epochs."""
        size = train.mini_batch_size
        if train.epochs is None:
            assert run.max_steps is not None, "config/validate_supervised.py refuses a run without an end"
            return cls(run.max_steps * size, run.max_steps)
        rows = train.epochs * n
        steps = -(-rows // size)
        if run.max_steps is not None and run.max_steps < steps:
            return cls(run.max_steps * size, run.max_steps)
        return cls(rows, steps)


@dataclass
class SupervisedTrainer(Generic[Row]):
    """Owns the loop; the learner owns the model. All methods are collective over the job."""

    config: Any  # SFTConfig, or another with run, train, data.shuffle, validation.every and checkpoint
    topology: Topology
    learner: Learner[Row]
    checkpoints: PairedCheckpoints
    recorder: Recorder
    train_rows: Sequence[Row]
    held_out: Sequence[Row]
    course: Course
    quality: Optional[float] = None  # of the present weights, where this step had a validation

    def __post_init__(self) -> None:
        seed, shuffle = self.config.run.seed, self.config.data.shuffle
        self.sampler = PromptSampler(len(self.train_rows), seed=seed, shuffle=shuffle)
        self.state = SupervisedState(train_rows=len(self.train_rows), mini_batch_size=self.config.train.mini_batch_size)

    @property
    def total_steps(self) -> int:
        return self.course.steps

    def fit(self, *, resume_from: Optional[int], should_stop: Callable[[], bool] = lambda: False) -> SupervisedState:
        """Run to the last step, or until `should_stop` (asked on rank 0, between steps) says that the job has to end; save, and return."""
        saved = self.checkpoints.restore(resume_from)
        self.recorder.start()
        if saved is not None:
            self.state = self.continued(SupervisedState(**saved))
        elif self.config.validation.every and self.held_out:
            self.validate_before_training()
        stopping = False
        while self.state.step < self.total_steps and not stopping:
            self.run_step()
            stopping = broadcast_object(should_stop(), 0, self.topology.cpu_group)
            if self.checkpoint_is_due() or stopping:
                self.save()
            self.checkpoints.settle(wait=stopping)
        self.checkpoints.settle(wait=True)
        return self.state

    def continued(self, saved: SupervisedState) -> SupervisedState:
        """Raises ConfigError where the rows that follow are not those of the run that was saved."""
        for name, key in (("train_rows", "the rows to train on"), ("mini_batch_size", "train.mini_batch_size")):
            was, now = getattr(saved, name), getattr(self.state, name)
            if was != now:
                raise ConfigError(
                    f"the run was begun with {key} = {was}, now it is {now}: restore it, or choose another run.name"
                )
        return saved

    def run_step(self) -> None:
        step, phase = self.state.step + 1, self.recorder.phase
        with phase("data"):
            rows = self.next_rows()
            batch = self.learner.collate(rows)
        with phase("train"):
            keep = self.recorder.keep_batch
            trained = train_in_turn([batch], self.learner.train, step=step, keep_batch=keep)
        faults.reach("trained", step)
        self.advance(step, rows)
        with phase("validate"):
            validation = self.validate_when_due(step)
        metrics = {**_prefixed("train", trained), **validation, **self.counters()}
        self.end_step(step, metrics, tokens=self.learner.tokens(rows))

    def next_rows(self) -> list[Row]:
        """This step's mini-batch; it may span two epochs."""
        first = self.state.rows_consumed
        size = min(self.config.train.mini_batch_size, self.course.rows - first)
        return [self.train_rows[i] for i in self.sampler.take(first, size)]

    def advance(self, step: int, rows: Sequence[Row]) -> None:
        self.state.step = step
        self.state.rows_consumed += len(rows)
        self.state.tokens_consumed += self.learner.tokens(rows)

    def counters(self) -> dict[str, float]:
        peaks = gather_objects(peak_memory_bytes(), self.topology.cpu_group)
        return {
            "epoch": self.state.rows_consumed / len(self.train_rows),
            "rows_consumed": self.state.rows_consumed,
            "tokens_consumed": self.state.tokens_consumed,
            "memory/peak_bytes": max(peaks),
        }

    def end_step(self, step: int, metrics: dict[str, float], *, tokens: int) -> None:
        on_all(lambda: self.recorder.end_step(step, metrics, tokens=tokens), self.topology)

    # Between steps

    def validate_before_training(self) -> None:
        """Metrics row 0."""
        with self.recorder.phase("validate"):
            evaluation = self.validate(0)
        metrics = {**_prefixed("val", evaluation.metrics), **self.counters()}
        self.end_step(0, metrics, tokens=evaluation.tokens)

    def validate_when_due(self, step: int) -> dict[str, float]:
        self.quality = None
        return _prefixed("val", self.validate(step).metrics) if self.validation_is_due(step) else {}

    def validation_is_due(self, step: int) -> bool:
        every = self.config.validation.every
        return bool(every and self.held_out) and (step % every == 0 or step == self.total_steps)

    def validate(self, step: int) -> Evaluation:
        evaluation = self.learner.evaluate(self.held_out)
        self.quality = evaluation.quality
        if evaluation.rows != ():
            on_all(lambda: self.recorder.validation_samples(step, evaluation.rows), self.topology)
        return evaluation

    def checkpoint_is_due(self) -> bool:
        settings, step = self.config.checkpoint, self.state.step
        last = step == self.total_steps
        return (settings.every > 0 and step % settings.every == 0) or (last and settings.at_end)

    def save(self) -> None:
        with self.recorder.phase("checkpoint"):
            self.checkpoints.save(self.state.step, asdict(self.state), validation=self.quality)


def _prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
