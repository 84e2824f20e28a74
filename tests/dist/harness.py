"""Spawned gloo ranks for tests: one launch may run many grids, since starting a process costs seconds and a grid milliseconds.

    def body(rank, arg):
        for topology in topologies((2, 1, None, False), (1, 2, None, False)):
            ...
        return result

    first, second = run_ranks(body, 2, arg)

`body` must be importable (a top-level function of the test file): it is pickled by name."""

import contextlib
import multiprocessing
import os
import queue
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
    """body(rank, *args) on `world_size` spawned processes -> their picklable results in order of rank.

    Raises AssertionError with the traceback of every rank that failed, or naming those that were not done after `deadline` seconds;
    processes started here are ended in any case, and no others."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    port = _free_port()
    ranks = [
        context.Process(target=_rank_main, args=(body, rank, world_size, port, answers, args))
        for rank in range(world_size)
    ]
    with _environment():
        for process in ranks:
            process.start()
    try:
        results = _collect(ranks, answers, deadline)
        for process in ranks:  # each ends by itself, and ends the helper that saving a checkpoint started
            process.join(30)
        return results
    finally:
        for process in ranks:
            _end(process)


def _end(process) -> None:
    """Kill a rank that still runs, and first what it started: megatron-core's checkpoint helper would outlive it."""
    if process.is_alive():
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
    process.join()


def _collect(ranks: list, answers, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    end = time.monotonic() + deadline
    while len(results) < len(ranks) and not failures and time.monotonic() < end:
        try:
            rank, ok, value = answers.get(timeout=0.2)
        except queue.Empty:
            failures = {
                r: f"ended with code {p.exitcode}"
                for r, p in enumerate(ranks)
                if p.exitcode not in (None, 0) and r not in results
            }
            continue
        (results if ok else failures)[rank] = value
    while failures and not answers.empty():  # the others' errors are often the consequence of the first
        rank, ok, value = answers.get()
        (results if ok else failures)[rank] = value
    assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
    missing = [rank for rank in range(len(ranks)) if rank not in results]
    assert not missing, f"ranks {missing} of {len(ranks)} were not done after {deadline:g} s"
    return [results[rank] for rank in range(len(ranks))]


def _rank_main(body: Callable, rank: int, world_size: int, port: int, answers, args: tuple) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        answers.put((rank, True, body(rank, *args)))
    except BaseException:
        answers.put((rank, False, traceback.format_exc()))
    finally:
        answers.close()
        answers.join_thread()
        _leave()


def _leave() -> None:
    if "torch" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


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


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
