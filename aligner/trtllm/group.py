"""Generation groups: consecutive ranks of one node that share an engine. The first of them, the leader, alone talks to it."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Callable, Optional, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from aligner.parallel.collectives import gather_objects
from aligner.parallel.device import DEVICE, ON_GPU
from aligner.parallel.topology import Topology
from aligner.runtime.errors import AgreedUserError, exit_code_of
from aligner.runtime.exit_codes import ExitCode

T = TypeVar("T")


@dataclass(frozen=True)
class GenerationGroup:
    """`size` consecutive ranks from `first` on. `group`: them over gloo, None for one alone."""

    size: int
    first: int
    rank: int
    local_rank: int
    group: Optional[ProcessGroup]

    @property
    def is_leader(self) -> bool:
        return self.rank == self.first

    def gather(self, obj: T) -> list[T]:
        """Every rank's object, in order, on every rank of the group."""
        return [obj] if self.group is None else gather_objects(obj, self.group)

    def all_do(self, act: Callable[[], T]) -> list[T]:
        """Do it on every rank, and gather the results. Where one fails all raise; nobody waits for one that left."""
        result, error = _attempt(act)
        outcomes = self.gather((result, error and _said(error)))  # as text: not every exception can be pickled
        if error is not None:
            raise error
        for rank, (_, said) in enumerate(outcomes, self.first):
            if said is not None:
                code, text = said
                raise (
                    AgreedUserError(text, code) if code is not ExitCode.FAULT else RuntimeError(f"rank {rank}: {text}")
                )
        return [result for result, _ in outcomes]

    def lead(self, act: Callable[[], Any]) -> None:
        """Do it on the leader; the others wait for it, and raise what it raised."""

        def alone() -> None:
            if self.is_leader:
                act()

        self.all_do(alone)

    def devices(self) -> list[str]:
        """The group's GPUs as CUDA_VISIBLE_DEVICES names them (on a CPU: the numbers of the local ranks)."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if not ON_GPU:
            mine = str(self.local_rank)
        else:
            mine = visible.split(",")[DEVICE.index] if visible else str(DEVICE.index)
        found = self.gather(mine)
        if len(set(found)) < len(found):
            raise ValueError(
                f"engine.tensor={self.size}: each rank of a node must see all of its GPUs, and these see {', '.join(found)} as their "
                "own; launch without binding GPUs to tasks (no --gpus-per-task, no --gpu-bind)"
            )
        return found


def _attempt(act: Callable[[], T]) -> tuple[Optional[T], Optional[Exception]]:
    try:
        return act(), None
    except Exception as error:
        return None, error


def _said(error: Exception) -> tuple[ExitCode, str]:
    code = exit_code_of(error)
    return code, str(error) if code is not ExitCode.FAULT else f"{type(error).__name__}: {error}"


def generation_group(topology: Topology, size: int, *, timeout: float) -> GenerationGroup:
    """This rank's group of `size` ranks; timeout: of its collectives, in seconds. Collective over the job.

    Raises ValueError where the ranks cannot be grouped so. That each group is on one node was checked at the start of the job."""
    world = topology.world_size
    if world % size:
        raise ValueError(
            f"engine.tensor={size} ranks share an engine, and the number of ranks must be a multiple of it: {world} is not one; "
            "change engine.tensor or the number of ranks"
        )
    first = topology.rank // size * size
    wait = timedelta(seconds=timeout)
    group = None
    for start in range(0, world if size > 1 else 0, size):  # every rank makes every group, in the same order
        made = dist.new_group(list(range(start, start + size)), timeout=wait, backend="gloo")
        group = made if start == first else group
    return GenerationGroup(size, first, topology.rank, topology.local_rank, group)


def device_uuid(local_rank: int) -> str:
    """The name by which TensorRT-LLM's workers look for the weights of their GPU."""
    if not ON_GPU:
        return f"CPU-{local_rank}"
    return f"GPU-{torch.cuda.get_device_properties(DEVICE).uuid}"
