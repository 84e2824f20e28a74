"""How fast the groups are at the start of a job: latency and bandwidth of an all-reduce in each, and which group is far behind."""

import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import Callable, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.parallel.collectives import gather_objects
from aligner.parallel.device import DEVICE, ON_GPU, synchronise
from aligner.parallel.topology import Topology

LATENCY_BYTES = 8
LATENCY_ROUNDS, BANDWIDTH_ROUNDS = 10, 3
SLOW = 3.0  # times the median of the other groups; less is noise on a machine that others use
DEFAULT_MB = 16.0 if ON_GPU else 1.0

Reduce = Callable[[Tensor, Optional[ProcessGroup]], object]


@dataclass(frozen=True)
class Figure:
    """One group's. seconds: of the large all-reduce, the slowest rank's best."""

    kind: str
    ranks: tuple[int, ...]
    latency_us: float
    seconds: float

    def bandwidth_gb_s(self, size: int) -> float:
        """Algorithm bandwidth (as nccl-tests call it): bytes of the tensor over the time, whatever an algorithm sends for it."""
        return size / self.seconds / 1e9


def _all_reduce(tensor: Tensor, group: Optional[ProcessGroup]) -> None:
    dist.all_reduce(tensor, group=group)


def probe(topology: Topology, mb: Optional[float] = None, *, reduce: Reduce = _all_reduce) -> tuple[list[Figure], int]:
    """Measure every group of more than one rank: figures of all of them, and the bytes of the large all-reduce. Collective; the same on
    every rank. Times are the best of a few rounds, so that what else the machine does counts little.

    On a GPU the first all-reduce of a group makes its communicator, which the job needs anyway; that is not counted."""
    large = torch.zeros(max(1, int((mb or DEFAULT_MB) * 1e6) // 4), device=DEVICE)
    small = torch.zeros(LATENCY_BYTES // 4, device=DEVICE)
    mine = []
    for kind, group in (
        ("tensor", topology.tensor_group),
        ("pipeline", topology.pipeline_group),
        ("data", topology.data_group),
        ("world", topology.world_group),
    ):
        if dist.get_world_size(group) == 1:
            continue
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        latency = _best(small, group, LATENCY_ROUNDS, reduce)
        mine.append(Figure(kind, ranks, latency * 1e6, _best(large, group, BANDWIDTH_ROUNDS, reduce)))
    return _merged(gather_objects(mine, topology.cpu_group)), large.numel() * 4


def _best(tensor: Tensor, group: Optional[ProcessGroup], rounds: int, reduce: Reduce) -> float:
    """Seconds of the fastest of `rounds` all-reduces, after one that is not counted."""
    best = float("inf")
    for counted in range(rounds + 1):
        synchronise()
        start = time.perf_counter()
        reduce(tensor, group)
        synchronise()
        if counted:
            best = min(best, time.perf_counter() - start)
    return best


def _merged(every: Sequence[Sequence[Figure]]) -> list[Figure]:
    """One figure a group, from those of its ranks: the slowest counts."""
    found: dict[tuple, Figure] = {}
    for figure in (f for rank in every for f in rank):
        known = found.get((figure.kind, figure.ranks), figure)
        worst = max(known.latency_us, figure.latency_us), max(known.seconds, figure.seconds)
        found[figure.kind, figure.ranks] = Figure(figure.kind, figure.ranks, *worst)
    return list(found.values())


def lines(figures: Sequence[Figure], size: int) -> list[str]:
    """One line a kind of group: the median of its groups, and the slowest where there are several."""
    said = []
    for kind in dict.fromkeys(f.kind for f in figures):
        groups = [f for f in figures if f.kind == kind]
        latency = statistics.median(f.latency_us for f in groups)
        speed = statistics.median(f.bandwidth_gb_s(size) for f in groups)
        many = "" if len(groups) == 1 else f", the slowest {min(f.bandwidth_gb_s(size) for f in groups):.3g} GB/s"
        shape = f"{len(groups)} x {len(groups[0].ranks)} ranks"
        said.append(f"{kind}: {shape}, {latency:.0f} us for 8 B, {speed:.3g} GB/s for {size / 1e6:g} MB{many}")
    return said


def slow_groups(figures: Sequence[Figure]) -> list[Figure]:
    """Those that take SLOW times as long as the median of the other groups of their kind."""
    found = []
    for figure in figures:
        others = [f.seconds for f in figures if f.kind == figure.kind and f is not figure]
        if others and figure.seconds > SLOW * statistics.median(others):
            found.append(figure)
    return found


def slow_warning(figures: Sequence[Figure], size: int, hosts: Sequence[str]) -> Optional[str]:
    """A sentence that names the slow groups, and the rank that all of them share where there is one; None where no group is slow."""
    slow = slow_groups(figures)
    if not slow:
        return None
    told = "; ".join(
        f"{f.kind} group of ranks {', '.join(map(str, f.ranks))}: {f.bandwidth_gb_s(size):.3g} GB/s, the others' median is "
        f"{_median_of_others(figures, f, size):.3g}"
        for f in slow[:3]
    )
    counts = Counter(rank for f in slow for rank in f.ranks)
    common = [rank for rank, count in counts.items() if count == len(slow)]
    if len(slow) > 1 and len(common) == 1:
        return f"rank {common[0]} on {hosts[common[0]]} is slow: it is in every group that is far behind ({told})"
    where = ", ".join(dict.fromkeys(hosts[rank] for f in slow for rank in f.ranks))
    return f"a group is far behind the others of its kind: look at {where} ({told})"


def _median_of_others(figures: Sequence[Figure], figure: Figure, size: int) -> float:
    return statistics.median(f.bandwidth_gb_s(size) for f in figures if f.kind == figure.kind and f is not figure)
