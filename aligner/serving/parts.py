"""A train request in parts: split by rows on the client, put together by the ledger, which applies each step exactly once."""

import hashlib
from dataclasses import dataclass
from typing import Any, Optional, Union

import numpy as np
import torch

from aligner.data.batch import CriticBatch
from aligner.serving import protocol
from aligner.serving.protocol import Arrays, NotInStep, ProtocolError

BATCH_FIELDS = ("tokens", "lengths", "mask", "values", "returns", "sample_ids")


def encode_batch(batch: CriticBatch) -> dict[str, np.ndarray]:
    """CriticBatch [B, S] -> the batch arrays of TRAIN, not yet split."""
    return {
        "tokens": protocol.int32_array(batch.tokens, "tokens"),
        "lengths": protocol.int32_array(batch.lengths, "lengths"),
        "mask": np.ascontiguousarray(batch.mask.numpy(), np.bool_),
        "values": np.ascontiguousarray(batch.values.numpy(), np.float32),
        "returns": np.ascontiguousarray(batch.returns.numpy(), np.float32),
        "sample_ids": batch.sample_ids.numpy().astype(np.int64),
    }


def decode_batch(arrays: Arrays) -> CriticBatch:
    """Batch arrays of TRAIN -> CriticBatch [B, S], int64 ids."""
    return CriticBatch(
        tokens=torch.from_numpy(arrays["tokens"].astype(np.int64)),
        lengths=torch.from_numpy(arrays["lengths"].astype(np.int64)),
        mask=torch.from_numpy(arrays["mask"].astype(np.bool_)),
        values=torch.from_numpy(arrays["values"].astype(np.float32)),
        returns=torch.from_numpy(arrays["returns"].astype(np.float32)),
        sample_ids=torch.from_numpy(arrays["sample_ids"].astype(np.int64)),
    )


def digest_of(batch: Arrays) -> str:
    """sha256 over names, shapes and bytes of the batch arrays."""
    h = hashlib.sha256()
    for name in BATCH_FIELDS:
        array = np.ascontiguousarray(batch[name])
        h.update(f"{name}{array.shape}{array.dtype}".encode())
        h.update(array.tobytes())
    return h.hexdigest()


def check_batch(batch: Arrays, *, vocab_size: Optional[int] = None, max_length: Optional[int] = None) -> None:
    """Shapes and values of the batch arrays against each other. Raises ProtocolError.

    What lies under a False mask may be anything; NaN or infinity under a True mask is refused."""
    b, s = batch["tokens"].shape
    shapes = {name: batch[name].shape for name in BATCH_FIELDS}
    wanted = {name: (b, s) if len(shape) == 2 else (b,) for name, shape in shapes.items()}
    if shapes != wanted:
        raise ProtocolError(f"train: arrays disagree on [B, S]: {shapes}")
    mask, lengths = batch["mask"], batch["lengths"]
    if lengths.min() < 1 or lengths.max() > s:
        raise ProtocolError(f"train: lengths must be in [1, {s}], but span {lengths.min()} to {lengths.max()}")
    if (mask & (np.arange(s) >= lengths[:, None])).any():
        raise ProtocolError("train: the mask is True beyond the length of a row")
    if max_length is not None and lengths.max() > max_length:
        raise ProtocolError(f"train: a row of {lengths.max()} tokens exceeds the critic's maximum of {max_length}")
    if vocab_size is not None:
        protocol.check_tokens(batch["tokens"], vocab_size)
    for name in ("values", "returns"):
        bad = mask & ~np.isfinite(batch[name])
        if bad.any():
            row, at = np.argwhere(bad)[0]
            sample = batch["sample_ids"][row]
            raise ProtocolError(
                f"train: {name} is {batch[name][row, at]} at token {at} of sample {sample}, under a True mask"
            )


def split(
    arrays: Arrays, *, step: int, run_id: str, max_bytes: int = protocol.MAX_PART_BYTES
) -> list[dict[str, np.ndarray]]:
    """The requests, each of at most max_bytes, that carry one step's batch (encode_batch). Raises ProtocolError."""
    check_batch(arrays)
    rows = len(arrays["lengths"])
    per_row = sum(a.nbytes for a in arrays.values()) / rows
    rows_per_part = int(max_bytes // per_row)
    if rows_per_part < 1:
        raise ProtocolError(f"train: one row of {per_row:.0f} bytes does not fit in a part of {max_bytes} bytes")
    starts = range(0, rows, rows_per_part)
    if len(starts) > protocol.MAX_PARTS:
        raise ProtocolError(
            f"train: {len(starts)} parts of {max_bytes} bytes exceed the limit of {protocol.MAX_PARTS} parts"
        )
    digest = digest_of(arrays)
    requests = [
        {
            "step": np.array([step], np.int64),
            "part": np.array([i], np.int32),
            "parts": np.array([len(starts)], np.int32),
            "run_id": protocol.text_array(run_id),
            "digest": protocol.text_array(digest),
            **{name: a[start : start + rows_per_part] for name, a in arrays.items()},
        }
        for i, start in enumerate(starts)
    ]
    for request in requests:
        protocol.check_arrays(protocol.TRAIN, request)
    return requests


@dataclass(frozen=True)
class Incomplete:
    """Parts are still missing."""

    received: int
    parts: int


@dataclass(frozen=True)
class Whole:
    """All parts are there: the batch is to be applied now."""

    step: int
    digest: str
    batch: CriticBatch


@dataclass(frozen=True)
class Stored:
    """This step was applied before: its answer, again."""

    answer: dict[str, Any]


class StepRefused(ProtocolError):
    """A train request for another step than the next one."""

    kind = NotInStep.kind


class TrainLedger:
    """Which step may be trained next, what was answered to the last one, and the parts of the one that is arriving.

    Not thread-safe: the server has one thread for train requests. `step` is the last step applied."""

    def __init__(
        self, *, step: int, run_id: str, vocab_size: Optional[int] = None, max_length: Optional[int] = None
    ) -> None:
        self.step, self.run_id = step, run_id
        self.vocab_size, self.max_length = vocab_size, max_length
        self.undefined: Optional[str] = None  # why the weights are no longer those of a step
        self._digest: Optional[str] = None  # of the batch that made `step`
        self._answer: Optional[dict[str, Any]] = None
        self._arriving: tuple[str, int] = ("", 0)  # digest and part count
        self._parts: dict[int, dict[str, np.ndarray]] = {}

    def check(self, step: int, digest: str) -> Optional[Stored]:
        """Whether `step` is the next one (None) or the last one again (its stored answer). Raises ProtocolError otherwise."""
        if self.undefined is not None:
            raise ProtocolError(
                f"step {step} is refused: {self.undefined}, so the critic's weights are undefined; "
                "restore a committed pair (restarting the actor job does)"
            )
        if step == self.step + 1:
            return None
        if step == self.step and self._answer is not None:
            if digest != self._digest:
                raise ProtocolError(
                    f"step {step} was already trained with another batch; a step id names one batch only"
                )
            return Stored(self._answer)
        rule = "is from the past" if step <= self.step else "leaves a gap"
        raise StepRefused(
            f"train step {step} {rule}: the critic has applied step {self.step}, so the next is {self.step + 1}; "
            "restore the pair of checkpoints that the actor is at"
        )

    def receive(self, request: Arrays) -> Union[Incomplete, Whole, Stored]:
        """Take one part, in any order, repeated or not. Raises ProtocolError where it is refused."""
        protocol.check_arrays(protocol.TRAIN, request)
        step, part, parts = (int(request[k][0]) for k in ("step", "part", "parts"))
        run_id, digest = protocol.text_of(request["run_id"][0]), protocol.text_of(request["digest"][0])
        if run_id != self.run_id:
            raise ProtocolError(
                f"train request of run '{run_id}', but this critic job serves run '{self.run_id}' (run.name)"
            )
        if not 0 <= part < parts <= protocol.MAX_PARTS:
            raise ProtocolError(f"step {step}: part {part} of {parts} is not within [0, {protocol.MAX_PARTS}]")
        stored = self.check(step, digest)
        if stored is not None:
            return stored
        if self._arriving != (digest, parts):  # another batch: an actor that came back sends its step anew
            self._arriving, self._parts = (digest, parts), {}
        # copied: the server's arrays lie in shared memory that the next request overwrites
        self._parts[part] = {name: np.array(request[name]) for name in BATCH_FIELDS}
        if len(self._parts) < parts:
            return Incomplete(len(self._parts), parts)
        return self._whole(step, digest)

    def _whole(self, step: int, digest: str) -> Whole:
        ordered = [self._parts[i] for i in range(len(self._parts))]
        self._arriving, self._parts = ("", 0), {}
        if len({p["tokens"].shape[1:] for p in ordered}) != 1:
            raise ProtocolError(f"step {step}: parts disagree on the number of columns")
        batch = {name: np.concatenate([p[name] for p in ordered]) for name in BATCH_FIELDS}
        if digest_of(batch) != digest:
            raise ProtocolError(
                f"step {step}: the parts do not add up to the batch that was announced (sha256 differs); send it again"
            )
        check_batch(batch, vocab_size=self.vocab_size, max_length=self.max_length)
        return Whole(step, digest, decode_batch(batch))

    def applied(self, step: int, answer: dict[str, Any], *, digest: str) -> None:
        """The batch with this digest was applied as `step`, and answered so."""
        self.step, self._answer, self._digest = step, answer, digest

    def failed(self, step: int, text: str) -> None:
        """Applying failed with the weights possibly half-way."""
        self.undefined = f"training step {step} failed half-way ({text})"

    def reset(self, step: int) -> None:
        """A committed pair was restored."""
        self.step, self.undefined, self._answer, self._digest = step, None, None, None
        self._arriving, self._parts = ("", 0), {}
