"""Spawned gloo ranks for tests: they stay for all tests, since starting a process costs seconds and a grid milliseconds.

    def body(rank, arg):
        for topology in topologies((2, 1, None, False), (1, 2, None, False)):
            ...
        return result

    first, second = run_ranks(body, 2, arg)

`body` must be importable (a top-level function of the test file): it is pickled by name."""

import atexit
import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

import psutil

ROOT = Path(__file__).resolve().parents[2]

Grid = tuple[int, int, Optional[int], bool]  # tensor, pipeline, virtual_pipeline, sequence


def run_ranks(body: Callable, world_size: int, *args, deadline: float = 300) -> list[Any]:
    """body(rank, *args) on `world_size` processes -> their picklable results in order of rank.

    The processes are started when they are first needed, and wait for the next call then: importing torch and megatron costs more
    than most bodies. They join a new process group each time. Raises AssertionError with the traceback of every rank that failed,
    or naming those that were not done after `deadline` seconds; all are ended then, and the next call starts others."""
    while len(_workers) < world_size:
        _workers.append(_Worker())
    ranks = _workers[:world_size]
    try:
        with _free_port() as port:
            for rank, worker in enumerate(ranks):
                worker.tell((body, rank, world_size, port, args))
            return _collect(ranks, deadline)
    except BaseException:
        end_workers()
        raise


class _Worker:
    """A spawned process that runs bodies, one after another, until this one ends: the pipe between them closes then."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, far_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(far_end,))
        with _environment():
            self.process.start()
        far_end.close()

    def tell(self, task: tuple) -> None:
        self.pipe.send(task)

    def end(self) -> None:
        """Kill what it started, and it: megatron-core's writers of a checkpoint would outlive it."""
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.kill()
        self.process.join()
        self.pipe.close()


_workers: list[_Worker] = []


@atexit.register  # before multiprocessing's own, which waits for children
def end_workers() -> None:
    """End all processes that wait for a body; memory that a large one has left is free then."""
    while _workers:
        _workers.pop().end()


def _collect(ranks: list[_Worker], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    end = time.monotonic() + deadline
    while len(results) + len(failures) < len(ranks) and time.monotonic() < end:
        waiting = {ranks[r].pipe: r for r in range(len(ranks)) if r not in results and r not in failures}
        for pipe in multiprocessing.connection.wait(waiting, timeout=max(0.0, end - time.monotonic())):
            try:
                done, value = pipe.recv()
            except EOFError:
                ranks[waiting[pipe]].process.join(10)
                done, value = False, f"ended with code {ranks[waiting[pipe]].process.exitcode}"
            (results if done else failures)[waiting[pipe]] = value
        if failures:  # the others' errors are often the consequence of the first, and may never come
            end = min(end, time.monotonic() + 2)
    assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
    missing = [rank for rank in range(len(ranks)) if rank not in results]
    assert not missing, f"ranks {missing} of {len(ranks)} were not done after {deadline:g} s"
    return [results[rank] for rank in range(len(ranks))]


def _serve(pipe) -> None:
    """In a spawned process: run bodies until the other end of the pipe is closed."""
    while True:
        try:
            body, rank, world_size, port, args = pipe.recv()
        except EOFError:
            return
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        try:
            answer = (True, body(rank, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
        _leave()


def _leave() -> None:
    """Out of the process group, and what the body made is freed."""
    if "torch" in sys.modules:
        from aligner.parallel.startup import shutdown

        shutdown()
    gc.collect()


def topologies(*grids: Grid, seed: int = 1, timeout: float = 200) -> Iterator[Any]:
    """Inside a rank: start each grid in turn on the same process group, and yield its Topology."""
    from aligner.config.groups import ParallelConfig
    from aligner.parallel.startup import start

    for tensor, pipeline, virtual_pipeline, sequence in grids:
        yield start(
            ParallelConfig(
                tensor=tensor,
                pipeline=pipeline,
                virtual_pipeline=virtual_pipeline,
                sequence=sequence,
                threads=1,
                timeout=timeout,
            ),
            seed,
        )


class _environment:
    """The spawned interpreters' environment: one OpenMP thread (two a rank on a busy machine collapse) and the repository's packages."""

    def __enter__(self):
        self.saved = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "PYTHONPATH")}
        paths = [str(ROOT), *filter(None, [self.saved["PYTHONPATH"]])]
        os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}

    def __exit__(self, *exc):
        for name, value in self.saved.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _free_port() -> Iterator[int]:
    """For rank 0's store, which needs seconds to get there. Bound here, the kernel gives it to no other process meanwhile; with
    SO_REUSEADDR on both, the store may listen on it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
