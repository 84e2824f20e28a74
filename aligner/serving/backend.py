"""What the critic job serves: the contract between this folder and whoever implements a critic."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any, Optional, Protocol

from torch import Tensor

from aligner.data.batch import CriticBatch, CriticRows, Score
from aligner.serving.frames import Call, Op


class Refused(ValueError):
    """Raised by a backend that turns a call down before it has changed anything; the job goes on as it was.

    Any other exception out of `train`, `restore` or a collective of theirs leaves the weights undefined until a restore."""


class CriticBackend(Protocol):
    """All methods but start_scoring and status run on every rank of the job, in the same order, with equal arguments.

    Rank 0's return value is the answer. An exception on any rank fails the call with one sentence, and the next call is served."""

    def infer(self, rows: CriticRows) -> tuple[Tensor, Tensor, Optional[list[Score]]]:
        """values [b, S] float32, bootstrap [b] float32 (0 where the response terminated), the reward model's scores or None."""

    def train(self, step: int, batch: CriticBatch) -> dict[str, float]: ...

    def prepare_save(self, step: int, folder: Path, *, beside: bool) -> None:
        """beside: return once what changes is copied; `saved` tells when all is written."""

    def saved(self) -> bool:
        """Whether the save that was begun last is whole, which this call makes it where every rank has written its part."""

    def commit(self, step: int) -> None: ...

    def restore(self, step: int, folder: Optional[Path]) -> None: ...

    def start_scoring(self, rows: CriticRows) -> Optional["Future[list[Score]]"]:
        """Rank 0 only, from a request's thread: begin what a verifier does beside the ranks. None where none scores. Where infer gives
        scores too, the two are added."""

    def status(self) -> dict[str, Any]:
        """Rank 0 only, from any thread, no collectives. Holds at least the keys of hello.Contract."""


def run_call(backend: CriticBackend, call: Call) -> Any:
    """The backend's method of a call."""
    if call.op is Op.INFER:
        return backend.infer(call.rows)
    if call.op is Op.TRAIN:
        return backend.train(call.step, call.batch)
    if call.op is Op.PREPARE_SAVE:
        return backend.prepare_save(call.step, call.folder, beside=call.beside)
    if call.op is Op.SAVED:
        return backend.saved()
    if call.op is Op.COMMIT:
        return backend.commit(call.step)
    assert call.op is Op.RESTORE, call.op
    return backend.restore(call.step, call.folder)
