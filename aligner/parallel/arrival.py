"""What a job looks at once its ranks have met: where they are, what their environment does to the network, how fast their groups are."""

import logging
import os
import socket
from typing import Any

import torch

from aligner.config.groups import ParallelConfig, Placement
from aligner.parallel.collectives import gather_objects
from aligner.parallel.device import DEVICE, ON_GPU
from aligner.parallel.environment import nccl_findings
from aligner.parallel.placement import Grid, engine_problems, own_host, table, tensor_problems
from aligner.parallel.probe import lines, probe, slow_warning
from aligner.parallel.topology import Topology
from aligner.runtime.errors import ConfigError

log = logging.getLogger(__name__)


def look_around(parallel: ParallelConfig, topology: Topology, *, engine_ranks: int = 1) -> dict[str, Any]:
    """Check the placement, tell what the environment slows down, and probe the groups. Returns facts for the run's record. Collective.

    engine_ranks: consecutive ranks that share a rollout engine. Raises ConfigError, on every rank, where a group that must be on one
    node is not (with parallel.placement=warn a tensor-parallel one may)."""
    hosts = gather_objects(own_host(), topology.cpu_group)
    _check_placement(parallel, topology, hosts, engine_ranks)
    _tell_findings(topology, hosts)
    facts: dict[str, Any] = {"hosts": hosts}
    if parallel.probe and topology.world_size > 1:
        log.info("probing the groups of %d ranks: where this hangs, the network between them does", topology.world_size)
        figures, size = probe(topology, parallel.probe_mb)
        facts["probe"] = [
            {"group": f.kind, "ranks": list(f.ranks), "latency_us": f.latency_us, "gb_s": f.bandwidth_gb_s(size)}
            for f in figures
        ]
        for line in lines(figures, size):
            log.info("probe of %s", line)
        if warning := slow_warning(figures, size, hosts):
            log.warning("%s", warning)
    return facts


def _check_placement(parallel: ParallelConfig, topology: Topology, hosts: list[str], engine_ranks: int) -> None:
    grid = Grid(topology.tensor, topology.pipeline, topology.world_size)
    mapping = table(hosts, grid)
    shared, split = engine_problems(hosts, engine_ranks), tensor_problems(hosts, grid.tensor)
    if shared or (split and parallel.placement is Placement.refuse):
        hint = "" if shared else " (parallel.placement=warn starts all the same)"
        raise ConfigError("\n  ".join([*(shared + split)[:-1], (shared + split)[-1] + hint, *mapping]))
    for problem in split:
        log.warning("%s", problem)
    if len(set(hosts)) > 1:
        for line in mapping:
            log.info("placement: %s", line)


def _tell_findings(topology: Topology, hosts: list[str]) -> None:
    """Each finding once, with the hosts that have it."""
    mine = []
    if ON_GPU:
        many_queues = torch.cuda.get_device_capability(DEVICE)[0] >= 10
        names = [name for _, name in socket.if_nameindex()]
        known = {"nodes": len(set(hosts)), "tensor": topology.tensor, "many_queues": many_queues}
        mine = nccl_findings(os.environ, names, **known)
    found: dict[str, list[str]] = {}
    for host, findings in zip(hosts, gather_objects(mine, topology.cpu_group), strict=True):
        for finding in findings:
            found.setdefault(finding, []).append(host)
    for finding, where in found.items():
        log.warning("environment of %s: %s", ", ".join(dict.fromkeys(where)), finding)
