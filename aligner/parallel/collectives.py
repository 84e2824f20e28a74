"""Collectives with an explicit group on every call. All ranks of the group call each one, in the same order."""

from typing import Any, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.parallel.device import DEVICE
from aligner.parallel.topology import Topology
from aligner.runtime.errors import AgreedError, AgreedUserError, exit_code_of
from aligner.runtime.exit_codes import ExitCode


def gather_objects(obj: Any, group: ProcessGroup) -> list:
    """Every rank's picklable object, in order of the group's ranks, on every rank."""
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, obj, group=group)
    return found


def broadcast_object(obj: Any, src: int, group: ProcessGroup) -> Any:
    """The object of global rank `src`; the others' argument is not looked at."""
    box = [obj if dist.get_rank() == src else None]
    dist.broadcast_object_list(box, src=src, group=group)
    return box[0]


def from_last_stage(tensor: Optional[Tensor], shape: Sequence[int], dtype: torch.dtype, topology: Topology) -> Tensor:
    """The last stage's tensor on every stage of its pipeline. `tensor` is None on the other stages; shape and dtype are known to all."""
    if topology.is_last_stage:
        assert tensor is not None and tuple(tensor.shape) == tuple(shape) and tensor.dtype == dtype, (
            "the last stage's tensor differs from what was said"
        )
    if topology.pipeline == 1:
        return tensor
    sent = tensor.contiguous() if topology.is_last_stage else torch.empty(*shape, dtype=dtype, device=DEVICE)
    dist.broadcast(sent, src=topology.last_stage_rank, group=topology.pipeline_group)
    return sent


def agree(error: Optional[Exception], topology: Topology) -> None:
    """Make one rank's error everybody's, so that no rank waits in the next collective for one that left.

    Where an error of some rank is one that the user can put right, every rank raises its message with its exit code (AgreedUserError);
    otherwise every rank raises AgreedError, a RuntimeError "rank 3: ...", with all of them."""
    said = None
    if error is not None:
        code = exit_code_of(error)
        said = (code, str(error) if code is not ExitCode.FAULT else f"{type(error).__name__}: {error}")
    found = [(rank, *told) for rank, told in enumerate(gather_objects(said, topology.cpu_group)) if told is not None]
    for _, code, text in found:
        if code is not ExitCode.FAULT:
            raise AgreedUserError(text, code) from error
    if found:
        raise AgreedError("; ".join(f"rank {rank}: {text}" for rank, _, text in found)) from error
