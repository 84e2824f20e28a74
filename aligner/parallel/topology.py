"""The process grid as values: degrees, this rank's place in it, and the groups."""

from dataclasses import dataclass
from typing import Optional

from torch.distributed import ProcessGroup

from aligner.config.groups import ParallelConfig
from aligner.config.validate import degree_problems


@dataclass(frozen=True)
class Topology:
    """Where this rank is. Ranks are laid out tensor first, then data, then pipeline (megatron's order tp-cp-ep-dp-pp)."""

    tensor: int
    pipeline: int
    data: int
    virtual_pipeline: Optional[int]
    sequence: bool
    world_size: int
    rank: int
    local_rank: int
    tensor_rank: int
    pipeline_rank: int
    data_rank: int
    last_stage_rank: int  # global rank of the last stage in this rank's pipeline
    tensor_group: ProcessGroup
    pipeline_group: ProcessGroup
    data_group: ProcessGroup
    model_group: ProcessGroup  # all ranks of one model replica: tensor x pipeline
    cpu_group: ProcessGroup  # the world over gloo: for objects, on a GPU too
    world_group: Optional[ProcessGroup] = None  # None is torch's default group

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline - 1

    @property
    def is_reporter(self) -> bool:
        """The one rank that writes files and talks to the terminal."""
        return self.rank == 0


def grid_problems(parallel: ParallelConfig, world_size: int, shape=None) -> list[str]:
    """What is wrong with a grid, each as a sentence with the rule, the numbers and the keys to change; empty where nothing is.

    shape: a ModelShape (or anything with its fields), or None to check the grid alone."""
    problems = degree_problems(parallel)
    if min(parallel.tensor, parallel.pipeline, parallel.virtual_pipeline or 1) < 1:
        return problems
    problems += _world_problems(parallel, world_size)
    return problems + (_shape_problems(parallel, shape) if shape is not None else [])


def _world_problems(p: ParallelConfig, world_size: int) -> list[str]:
    problems = []
    if world_size % (p.tensor * p.pipeline):
        problems.append(
            f"the number of ranks must be a multiple of parallel.tensor * parallel.pipeline: {world_size} ranks, "
            f"{p.tensor} * {p.pipeline} = {p.tensor * p.pipeline}; change one of the two or the number of ranks"
        )
    return problems


def _shape_problems(p: ParallelConfig, shape) -> list[str]:
    chunks = p.pipeline * (p.virtual_pipeline or 1)
    chunks_key = "parallel.pipeline" + (" * parallel.virtual_pipeline" if p.virtual_pipeline else "")
    rules = (
        ("num_attention_heads", shape.num_attention_heads, p.tensor, "parallel.tensor"),
        ("num_query_groups", shape.num_query_groups, p.tensor, "parallel.tensor"),
        ("ffn_hidden_size", shape.ffn_hidden_size, p.tensor, "parallel.tensor"),
        ("padded_vocab_size", shape.padded_vocab_size, p.tensor, "parallel.tensor"),
        ("num_layers", shape.num_layers, chunks, chunks_key),
    )
    return [
        f"the model's {name} must be a multiple of {key}: {value} is not one of {divisor}; change {key.replace(' * ', ' or ')}"
        for name, value, divisor, key in rules
        if value % divisor
    ]
