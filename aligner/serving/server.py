"""The served critic: rank 0 answers requests through PyTriton, every other rank follows its calls."""

import logging
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Mapping, Optional

import torch.distributed as dist

from aligner.config.groups import RunConfig, ServingConfig
from aligner.runtime.signals import StopSignals
from aligner.runtime.stacks import Stacks
from aligner.runtime.time_limit import TimeLimit, asked_to_stop
from aligner.serving import access
from aligner.serving.backend import CriticBackend
from aligner.serving.control import Control
from aligner.serving.ending import Ending
from aligner.serving.endpoint import EndpointInfo, remove_endpoint, write_endpoint
from aligner.serving.hello import Contract
from aligner.serving.inference import Inference
from aligner.serving.loop import STUCK_GRACE, Loop, LostRank
from aligner.serving.metrics import MetricsServer
from aligner.serving.observed import Handler, Latency
from aligner.serving.reception import Reception
from aligner.serving.triton_server import TritonServer, check_port_free, check_python

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where a served job keeps its files, by its name: endpoint and token under endpoints/, Triton's log under logs/."""

    run_folder: Path
    name: str = "critic"

    @property
    def endpoint_file(self) -> Path:
        return self.run_folder / "endpoints" / f"{self.name}.json"

    @property
    def token_file(self) -> Path:
        return self.run_folder / "endpoints" / f"{self.name}.token"

    @property
    def log_file(self) -> Path:
        return self.run_folder / "logs" / f"{self.name}_triton.log"


def check_place(config: ServingConfig) -> None:
    """Raise ValueError where the server could not start as set: before models are built, which takes minutes."""
    check_python()
    address = access.resolve_bind(config.bind, os.environ)
    for key, port in (("serving.port", config.port), ("serving.metrics_port", config.metrics_port)):
        if port:
            check_port_free(address, port, key=key)


def stop_asked(run: RunConfig, config: ServingConfig, stop: StopSignals) -> Callable[[], bool]:
    """serve()'s should_stop of a job with run.max_time: it ends serving.drain_timeout earlier than it has to."""
    limit = TimeLimit(run.max_time, margin=run.max_time_margin)
    return asked_to_stop(limit, stop, lambda: run.max_time_margin + config.drain_timeout)


def serve(
    backend: CriticBackend,
    config: ServingConfig,
    *,
    place: Place,
    group: Optional[dist.ProcessGroup],
    should_stop: Callable[[], bool] = lambda: False,
    grid: str = "",
    on_ready: Callable[[EndpointInfo], None] = lambda info: None,
    stuck_grace: float = STUCK_GRACE,
    timeout: float = 1800.0,
    stacks: Optional[Stacks] = None,
    drains: bool = True,
) -> str:
    """Serve until told to stop (should_stop, polled; the actor's stop; idle_timeout); returns the reason. Called on every rank.

    group: all ranks of the job (None: one rank); rank 0 of it serves. timeout: of the loop's own collectives (parallel.timeout).
    should_stop is asked on rank 0 alone: the others leave when it does, so SIGTERM and SIGINT must not end them. stuck_grace:
    seconds that the other ranks have to end a call in which one raised; after that the process ends, for they wait inside a
    collective that the failed rank left.

    drains: whether a job that is told to stop has something that the actor should save first.

    Raises ValueError for settings that cannot be served; JobFailed (on every rank) where the ranks cannot be kept in step or
    Triton died: exit at once then, without collectives."""
    loop = Loop(
        backend,
        group=group,
        heartbeat=config.heartbeat,
        deterministic=config.deterministic,
        stuck_grace=stuck_grace,
        timeout=timeout,
        stacks=stacks,
    )
    try:
        if group is not None and dist.get_rank(group) != 0:
            loop.follow()
            return "rank 0 ended"
        if not drains:
            config = replace(config, drain_timeout=0.0)
        return _lead(backend, loop, config, place=place, should_stop=should_stop, grid=grid, on_ready=on_ready)
    finally:
        loop.leave_group()


def _lead(backend: CriticBackend, loop: Loop, config: ServingConfig, **how: Any) -> str:
    """Serve as rank 0, and let the others go at the end."""
    try:
        reason = _serve_rank0(backend, loop, config, **how)
    except LostRank:
        raise  # the others cannot be told
    except BaseException:
        loop.release()
        raise
    loop.release()
    return reason


def _serve_rank0(
    backend: CriticBackend,
    loop: Loop,
    config: ServingConfig,
    *,
    place: Place,
    should_stop: Callable[[], bool],
    grid: str,
    on_ready: Callable[[EndpointInfo], None],
) -> str:
    address, token_file = _address_and_token_file(config, place)
    token = None if token_file is None else access.make_token(token_file)
    contract = Contract.of(backend.status())
    assert contract.step is not None, "a backend's status has its step"
    reception = Reception(token)
    control = Control(
        backend, loop, reception, contract=contract, run_folder=place.run_folder, max_rows=config.max_rows
    )
    inference = Inference(
        backend,
        loop,
        reception,
        contract=contract,
        max_rows=config.max_rows,
        deterministic=config.deterministic,
    )
    handlers = {"infer": inference.infer, "train": control.train, "control": control.control}
    latencies = {name: Latency() for name in handlers}
    metrics = None
    if config.metrics_port is not None:
        how = {"numbers": _numbers(backend, loop, reception, inference), "latencies": latencies}
        metrics = MetricsServer(address, config.metrics_port, job=place.name, run=contract.run_id, **how)
    measured = {name: latencies[name].around(handler) for name, handler in handlers.items()}
    triton = _start_triton(config, place, measured, address=address, token=token)
    info = _endpoint(
        config,
        address=address,
        port=triton.port,
        run_id=contract.run_id,
        grid=grid,
        token_file=None if token_file is None else str(token_file.resolve()),
        metrics_port=metrics and metrics.port,
    )

    def leave() -> None:
        if metrics is not None:
            metrics.stop()
        remove_endpoint(place.endpoint_file, info)
        triton.stop()

    loop.before_exit = leave
    try:
        write_endpoint(place.endpoint_file, info)
        log.info("serving run %s at %s", info.run_id, info.address)
        on_ready(info)
        reception.spoken()
        return loop.run(Ending(reception, control, loop, triton, should_stop, config))
    finally:
        loop.close("it has ended")
        leave()


def _start_triton(
    config: ServingConfig, place: Place, handlers: Mapping[str, Handler], *, address: str, token: Optional[str]
) -> TritonServer:
    return TritonServer(
        handlers,
        address=address,
        port=config.port,
        token=token,
        max_rows=config.max_rows,
        queue_delay_us=0 if config.deterministic else config.queue_delay_us,
        log_file=place.log_file,
        run=str(place.run_folder.resolve() / place.name),
    )


def _endpoint(config: ServingConfig, *, address: str, **known: Any) -> EndpointInfo:
    """What the endpoint file says of this process."""
    return EndpointInfo(
        host=config.advertise_host or (access.node_address() if address == "0.0.0.0" else address),
        pid=os.getpid(),
        started=time.time(),
        job_id=os.environ.get("SLURM_JOB_ID"),
        **known,
    )


def _numbers(
    backend: CriticBackend, loop: Loop, reception: Reception, inference: Inference
) -> Callable[[], dict[str, float]]:
    """A function that gives the present numbers of serving/metrics.py."""

    def numbers() -> dict[str, float]:
        now = {"queue": loop.queued, "step": backend.status()["step"], "draining": float(reception.draining)}
        return {**reception.counts, **now, **inference.served.summary()}

    return numbers


def _address_and_token_file(config: ServingConfig, place: Place) -> tuple[str, Optional[Path]]:
    """Where to bind, and the file of the token: always one where others could reach the address."""
    address = access.resolve_bind(config.bind, os.environ)
    if config.token_file is not None:
        return address, Path(config.token_file)
    return address, None if access.is_loopback(address) else place.token_file
