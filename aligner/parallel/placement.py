"""Which host every rank is on, and whether that fits the grid: a tensor-parallel group stays inside a node, a pipeline may cross."""

import os
from dataclasses import dataclass
from itertools import groupby
from typing import Mapping, Sequence

LINES = 64  # rows of the table; a larger job's has its first and last ones


def host_name(environ: Mapping[str, str], nodename: str) -> str:
    """This rank's host: Slurm's name of the node where Slurm started the process (it alone tells several slurmd of one machine apart),
    and the machine's own where that is another."""
    node = environ.get("SLURMD_NODENAME")
    if not node or node == nodename or node == nodename.split(".")[0]:
        return node or nodename
    return f"{node}@{nodename}"


def own_host() -> str:
    return host_name(os.environ, os.uname().nodename)


@dataclass(frozen=True)
class Grid:
    """Ranks are laid out tensor first, then data, then pipeline (parallel/topology.py)."""

    tensor: int
    pipeline: int
    world: int

    @property
    def data(self) -> int:
        return self.world // (self.tensor * self.pipeline)

    def place(self, rank: int) -> tuple[int, int, int]:
        """(tensor, pipeline, data) rank of a rank."""
        return rank % self.tensor, rank // (self.tensor * self.data), rank // self.tensor % self.data


def tensor_problems(hosts: Sequence[str], tensor: int) -> list[str]:
    """A sentence with the ranks, their hosts and what to change, where a tensor-parallel group is on several hosts. hosts: one a rank."""
    return _problems(hosts, tensor, "parallel.tensor", "form a tensor-parallel group")


def engine_problems(hosts: Sequence[str], size: int) -> list[str]:
    """The same for `size` consecutive ranks that share a rollout engine."""
    return _problems(hosts, size, "engine.tensor", "share an engine")


def _problems(hosts: Sequence[str], size: int, key: str, what: str) -> list[str]:
    """One sentence, about the first group of `size` consecutive ranks on several hosts; the others have the same cause."""
    return [
        f"{key}={size}: ranks {first} to {first + size - 1} {what} and must be on one node, they are on {_spread(members)}; "
        f"{_advice(hosts, key, size)}"
        for first, members in _split_groups(hosts, size)[:1]
    ]


def _split_groups(hosts: Sequence[str], size: int) -> list[tuple[int, Sequence[str]]]:
    """(first rank, hosts) of the groups of `size` consecutive ranks that are on several hosts."""
    groups = [(first, hosts[first : first + size]) for first in range(0, len(hosts), size)]
    return [(first, members) for first, members in groups if len(set(members)) > 1]


def _spread(members: Sequence[str]) -> str:
    return ", ".join(f"{host} ({members.count(host)})" for host in dict.fromkeys(members))


def _advice(hosts: Sequence[str], key: str, size: int) -> str:
    counts = {host: list(hosts).count(host) for host in dict.fromkeys(hosts)}
    if len([host for host, _ in groupby(hosts)]) > len(counts):
        return "ranks are dealt to the nodes in turn: start them block by block (srun --distribution=block)"
    per_node = len(hosts) / len(counts)
    even = int(per_node) if per_node == int(per_node) else 0
    if size > max(counts.values()) and (not even or size > even):
        return f"no node has that many ranks: lower {key} to {max(even or min(counts.values()), 1)} or less, or put more ranks on a node"
    if even and even % size == 0:
        return f"the nodes hold {', '.join(map(str, counts.values()))} ranks: start them with --ntasks-per-node={even}"
    return f"the nodes hold {', '.join(map(str, counts.values()))} ranks: make it a multiple of {key} on every node, with --ntasks-per-node"


def table(hosts: Sequence[str], grid: Grid) -> list[str]:
    """The mapping for a reader: a heading, and one line for consecutive ranks of one tensor-parallel group on one host."""
    rows = [("ranks", "host", "tp", "pp", "dp")]
    for (host, pp, dp), found in groupby(range(grid.world), key=lambda r: (hosts[r], *grid.place(r)[1:])):
        ranks = list(found)
        tp = _span([grid.place(rank)[0] for rank in ranks])
        rows.append((_span(ranks), host, tp, str(pp), str(dp)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(lines) > LINES:
        lines[LINES - 2 : -1] = [f"... {len(lines) - LINES + 1} more lines ..."]
    return lines


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
