"""Start and end of a job's process groups, under torchrun, in a Slurm step, or as plain python."""

import os
import random
import re
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Callable, Mapping

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from aligner.config.groups import ParallelConfig
from aligner.parallel.device import BACKEND, DEVICE, ON_GPU, set_threads
from aligner.parallel.environment import gloo_problem
from aligner.parallel.topology import Topology, grid_problems
from aligner.runtime.errors import ConfigError

# Below the range that Linux hands out for outgoing connections (32768 and up), so that a port is seldom taken.
_FIRST_PORT, _PORTS = 20000, 12000


@dataclass(frozen=True)
class Launch:
    """How this process was started. kind: torchrun, slurm or plain (one process)."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int  # 0 for plain: no socket is opened
    kind: str


def resolves(host: str) -> bool:
    """Whether this node can look the name up."""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def detect_launch(environ: Mapping[str, str], *, can_resolve: Callable[[str], bool] = resolves) -> Launch:
    """Read a launch from the environment. torchrun's variables come first (torchrun may itself run under srun).

    Slurm only where SLURM_STEP_ID is set: a script without srun sees SLURM_NTASKS of its allocation and would wait for ranks that
    never come. Raises ValueError naming what is missing."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _torchrun(environ)
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        return _slurm(environ, can_resolve)
    return Launch(
        rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="127.0.0.1", master_port=0, kind="plain"
    )


def _torchrun(environ: Mapping[str, str]) -> Launch:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in environ]:
        raise ValueError(
            f"RANK and WORLD_SIZE are set but {', '.join(missing)} are not; start with torchrun, or unset both"
        )
    return Launch(
        rank=int(environ["RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        local_rank=int(environ["LOCAL_RANK"]),
        local_world_size=int(environ.get("LOCAL_WORLD_SIZE", environ["WORLD_SIZE"])),
        master_addr=environ["MASTER_ADDR"],
        master_port=int(environ["MASTER_PORT"]),
        kind="torchrun",
    )


def _slurm(environ: Mapping[str, str], can_resolve: Callable[[str], bool]) -> Launch:
    world_size = int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"])
    job, step = int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"])
    per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or str(world_size))
    return Launch(
        rank=int(environ["SLURM_PROCID"]),
        world_size=world_size,
        local_rank=int(environ["SLURM_LOCALID"]),
        local_world_size=per_node[int(environ.get("SLURM_NODEID", "0"))],
        master_addr=environ.get("MASTER_ADDR") or _slurm_master(environ, len(per_node), can_resolve),
        master_port=int(environ.get("MASTER_PORT") or _FIRST_PORT + (job * 31 + step) % _PORTS),
        kind="slurm",
    )


def _slurm_master(environ: Mapping[str, str], nodes: int, can_resolve: Callable[[str], bool]) -> str:
    """The host of rank 0: the first of the step's nodes; where its name resolves nowhere, the address that srun ran at."""
    if nodes == 1:
        return "127.0.0.1"
    first = first_host(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_NODELIST"])
    if can_resolve(first):
        return first
    if address := environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        return address
    raise ValueError(
        f"the step's first node {first!r} does not resolve on {socket.gethostname()}; set MASTER_ADDR to its address"
    )


def tasks_per_node(text: str) -> list[int]:
    """Slurm's "4(x2),3" -> [4, 4, 3]."""
    counts = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * (int(times.rstrip(")")) if times else 1)
    return counts


def first_host(nodelist: str) -> str:
    """The first name of Slurm's "gpu[003-005,9],login1" -> "gpu003"."""
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\]([^,\[]*))?", nodelist)
    if match is None:
        raise ValueError(f"cannot read the first host of SLURM_STEP_NODELIST={nodelist!r}; set MASTER_ADDR")
    return "".join(part or "" for part in match.groups())


def default_threads(environ: Mapping[str, str], launch: Launch, *, cores: int) -> int:
    """Compute threads where parallel.threads is 0: OMP_NUM_THREADS, else this rank's share of the host's cores.

    torchrun sets the variable to 1 for several ranks on a host where nobody has set it: a 1 under it is no wish of the user's."""
    wished = environ.get("OMP_NUM_THREADS", "").split(",")[0]  # a list has one number for each nesting level
    by_torchrun = launch.kind == "torchrun" and launch.local_world_size > 1 and wished == "1"
    if wished.isdecimal() and int(wished) > 0 and not by_torchrun:
        return int(wished)
    return max(1, cores // launch.local_world_size)


def start(parallel: ParallelConfig, seed: int) -> Topology:
    """Join the job and build the grid's groups, each with the deadline parallel.timeout; seed every generator; set the threads.

    In a process that has started already, the groups of the old grid are replaced. Raises ValueError for a grid that does not
    fit the number of ranks or an interface that is not there, RuntimeError where the other ranks cannot be reached."""
    launch = detect_launch(os.environ)
    world_size = dist.get_world_size() if dist.is_initialized() else launch.world_size
    if problems := grid_problems(parallel, world_size):
        raise ValueError("; ".join(problems))
    if problem := gloo_problem(os.environ, [name for _, name in socket.if_nameindex()]):
        raise ConfigError(f"{problem}: correct or unset it")
    set_threads(parallel.threads or default_threads(os.environ, launch, cores=len(os.sched_getaffinity(0))))
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    if not dist.is_initialized():
        _join(launch, timedelta(seconds=parallel.timeout))
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        distributed_timeout_minutes=parallel.timeout / 60,
    )
    seed_everything(seed)
    return _topology(parallel, launch)


def _join(launch: Launch, timeout: timedelta) -> None:
    where = f"{launch.master_addr}:{launch.master_port}"
    if launch.kind == "plain":
        place = {"store": dist.HashStore()}
    else:
        place = {"init_method": "env://" if launch.kind == "torchrun" else f"tcp://{where}"}
    try:
        dist.init_process_group(BACKEND, rank=launch.rank, world_size=launch.world_size, timeout=timeout, **place)
    except (dist.DistError, RuntimeError) as error:
        raise RuntimeError(
            f"rank {launch.rank} of {launch.world_size} ({launch.kind}) did not meet the others at {where} within "
            f"{timeout.total_seconds():g} s (parallel.timeout): {error}"
        ) from error


def seed_everything(seed: int) -> None:
    """Python's, numpy's and torch's generators, and megatron's tensor-parallel ones."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _topology(parallel: ParallelConfig, launch: Launch) -> Topology:
    timeout = timedelta(seconds=parallel.timeout)
    return Topology(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        data=parallel_state.get_data_parallel_world_size(),
        virtual_pipeline=parallel.virtual_pipeline,
        sequence=parallel.sequence,
        world_size=dist.get_world_size(),
        rank=dist.get_rank(),
        local_rank=launch.local_rank,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
        last_stage_rank=parallel_state.get_pipeline_model_parallel_last_rank(),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
        data_group=parallel_state.get_data_parallel_group(),
        model_group=parallel_state.get_model_parallel_group(),
        cpu_group=dist.new_group(backend="gloo", timeout=timeout) if ON_GPU else dist.group.WORLD,
    )


def shutdown() -> None:
    """Leave the job: destroys megatron's groups and torch's. Nothing where none was started."""
    parallel_state.destroy_model_parallel()
    _forget_groups()
    if dist.is_initialized():
        dist.destroy_process_group()


def _forget_groups() -> None:
    """What megatron 0.16.1 keeps for ever: two globals that its own destroy passes over, and models, in the cache of a method. Whatever
    refers to a group keeps its threads running (errors.end_threads_of_groups)."""
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
    getattr(RotaryEmbedding.forward, "cache_clear", lambda: None)()
