"""A call of the critic job, from rank 0 to every rank: a header of fixed size, then the payload, by broadcast over a gloo group."""

import json
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.data.batch import CriticBatch, CriticRows

MAX_TENSORS = 8
HEADER = 2 + 4 * MAX_TENSORS  # op, number of tensors, then dtype, rank and two sizes of each
DTYPES = (torch.int64, torch.float32, torch.bool, torch.uint8)
ROW_TENSORS = ("tokens", "lengths", "prompt_lengths", "sample_ids", "truncated")
BATCH_TENSORS = ("tokens", "lengths", "mask", "values", "returns", "sample_ids")


class Op(IntEnum):
    NOOP = 0
    STOP = 1
    INFER = 2
    TRAIN = 3
    PREPARE_SAVE = 4
    COMMIT = 5
    RESTORE = 6
    SAVED = 7


@dataclass
class Call:
    """One call of a backend method, with its arguments; those that an op does not take stay at their defaults."""

    op: Op
    rows: Optional[CriticRows] = None
    batch: Optional[CriticBatch] = None
    step: int = 0
    folder: Optional[Path] = None
    beside: bool = False


def broadcast_call(call: Optional[Call], *, group: Optional[dist.ProcessGroup]) -> Call:
    """Rank 0 gives a call, the others None; every rank returns an equal one. Group None: one rank, nothing is sent.

    Raises RuntimeError where a peer is gone: the ranks can not be brought back in step after that."""
    if group is None:
        assert call is not None
        return call
    tensors = _flatten(call) if call is not None else []
    header = torch.zeros(HEADER, dtype=torch.int64)
    if call is not None:
        header[:2] = torch.tensor([int(call.op), len(tensors)])
        for i, t in enumerate(tensors):
            header[2 + 4 * i : 6 + 4 * i] = torch.tensor([DTYPES.index(t.dtype), t.dim(), *(*t.shape, 0, 0)[:2]])
    dist.broadcast(header, group_src=0, group=group)
    received = []
    for i in range(int(header[1])):
        dtype, rank, *sizes = header[2 + 4 * i : 6 + 4 * i].tolist()
        received.append(tensors[i] if call is not None else torch.empty(sizes[:rank], dtype=DTYPES[dtype]))
        dist.broadcast(_bytes(received[i]), group_src=0, group=group)
    return call if call is not None else _unflatten(Op(int(header[0])), received)


def _bytes(t: Tensor) -> Tensor:
    return t.view(torch.uint8) if t.dtype == torch.bool else t  # gloo moves no bool


def _flatten(call: Call) -> list[Tensor]:
    """The JSON of what is no tensor first, then the tensors."""
    folder = None if call.folder is None else str(call.folder)
    meta: dict[str, Any] = {"step": call.step, "folder": folder, "beside": call.beside}
    tensors = []
    if call.rows is not None:
        meta |= {"fields": call.rows.fields, "values": call.rows.values}
        tensors = [getattr(call.rows, n).contiguous() for n in ROW_TENSORS]
    if call.batch is not None:
        tensors = [getattr(call.batch, n).contiguous() for n in BATCH_TENSORS]
    return [torch.frombuffer(bytearray(json.dumps(meta).encode()), dtype=torch.uint8), *tensors]


def _unflatten(op: Op, tensors: list[Tensor]) -> Call:
    meta = json.loads(bytes(tensors[0].tolist()))
    folder = None if meta["folder"] is None else Path(meta["folder"])
    call = Call(op, step=meta["step"], folder=folder, beside=meta["beside"])
    if op is Op.INFER:
        call.rows = CriticRows(**dict(zip(ROW_TENSORS, tensors[1:])), fields=meta["fields"], values=meta["values"])
    if op is Op.TRAIN:
        call.batch = CriticBatch(**dict(zip(BATCH_TENSORS, tensors[1:])))
    return call
