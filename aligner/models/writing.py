"""Sharded state dicts to torch_dist files: begun by all ranks, written at once or beside the training, finished by all ranks."""

import contextlib
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

from torch.distributed.checkpoint.api import CheckpointException

from aligner.models.digests import sha256_of
from aligner.parallel.collectives import agree
from aligner.parallel.device import ON_GPU
from aligner.parallel.topology import Topology

from megatron.core import dist_checkpointing  # isort: skip  (after aligner.parallel, which adapts it to a CPU)
from megatron.core.dist_checkpointing import serialization  # isort: skip
from megatron.core.dist_checkpointing.strategies import filesystem_async  # isort: skip
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy  # isort: skip
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy  # isort: skip


class Writing:
    """One sharded state dict on its way into an existing folder. Making one and `finish` are collective; both raise AgreedUserError
    or AgreedError, on every rank, where a rank cannot write.

    beside: the tensors are copied, and a thread writes the copies while training goes on; otherwise they are written on return.

    Megatron forks its writers, and hands their results over through a process that imports torch anew on every rank. A forked copy of a
    process with threads (Triton's, gloo's) may hang for ever, and one whose parent is killed keeps open what the parent's helpers wait
    for to be closed. Here threads write, and a plain queue does."""

    def __init__(self, state: dict[str, Any], folder: Path, topology: Topology, *, beside: bool = False) -> None:
        self.folder, self._topology = folder, topology
        self.digests: dict[str, str] = {}
        """sha256 of what this rank has written, by name in the folder; once it is `ready`."""
        filesystem_async._results_queue = queue.Queue()  # of this save's writers alone: they keep it
        if not filesystem_async.HAVE_PSUTIL:
            filesystem_async._process_memory = lambda: 0
        self._request = None

        def begin() -> None:
            strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
            self._request = dist_checkpointing.save(state, str(folder), strategy, async_sharded_save=True)

        self._failed: list[BaseException] = []
        self._keeping_failures(begin)
        if self._request is None:  # on every rank: what was to be saved is wrong
            self._agree()
        self._arguments = self._staged(beside)
        self._thread: Optional[threading.Thread] = None
        if beside:
            self._thread = threading.Thread(target=self._write, name=f"writing {folder}", daemon=True)
            self._thread.start()
        else:
            self._write()

    @property
    def ready(self) -> bool:
        """Whether this rank's part is written, or has failed. Not collective."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """For this rank's part. Not collective."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Wait for all ranks' parts, and write what makes the files a checkpoint."""
        self.wait()

        def finalize() -> None:
            for act in self._request.finalize_fns:
                act()

        self._keeping_failures(finalize)
        self._agree()

    def _staged(self, beside: bool) -> list[Any]:
        """The writers' arguments, with tensors that nobody else changes where they are written beside."""
        arguments = list(self._request.async_fn_args)
        if self._request.async_fn is None:  # nothing to write on this rank
            return arguments
        buckets = self._request.preload_fn()
        if beside and not ON_GPU:  # on a GPU they are copies already
            buckets = [(p, k, (b, [(i, t.clone()) for i, t in tensors])) for p, k, (b, tensors) in buckets]
        arguments[1] = buckets
        return arguments

    def _write(self) -> None:
        """What write_preloaded_data_multiproc does, without processes. Errors are results, which `finish` finds."""
        if self._request.async_fn is None:
            return
        transforms = self._request.async_fn.args[0]
        _, buckets, results = self._arguments
        try:
            with ThreadPoolExecutor(len(buckets)) as pool:
                written = list(pool.map(partial(_write_bucket, transforms), range(len(buckets)), buckets))
            self.digests = {name: sha256_of(Path(path)) for path, name, _ in buckets}
            results.put(dict(enumerate(written)))
        except Exception as error:
            results.put(error)
        self._arguments = []

    def _keeping_failures(self, act: Callable[[], None]) -> None:
        with _failures_of_rank_0_kept(self._failed):
            try:
                act()
            # Of writers: raised on every rank, but rank 0 alone knows what failed.
            except CheckpointException as failed:
                self._failed += [error for error, _ in failed.failures.values()]

    def _agree(self) -> None:
        said = "; ".join(sorted({str(error) for error in self._failed}))
        agree(RuntimeError(f"{self.folder} could not be written: {said}") if self._failed else None, self._topology)


def _write_bucket(transforms: list[Any], number: int, bucket: Any) -> list[Any]:
    """One file of this rank; its write results. Raises what went wrong."""
    answers: queue.Queue[Any] = queue.Queue()
    under_way: queue.Queue[int] = queue.Queue()
    under_way.put(number)
    filesystem_async.FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, answers, under_way, True)
    result = answers.get_nowait()[1]
    if isinstance(result, Exception):
        raise result
    return result


def write_sharded(state: dict[str, Any], folder: Path, topology: Topology) -> Writing:
    """Written on return. Collective; raises as Writing does."""
    writing = Writing(state, folder, topology)
    writing.finish()
    return writing


# What rank 0 alone writes: common.pt, .metadata and metadata.json.
_WRITES_OF_RANK_0 = (
    (TorchCommonSaveStrategy, "save_common"),
    (filesystem_async.FileSystemWriterAsync, "finish"),
    (serialization, "save_config"),
)


@contextlib.contextmanager
def _failures_of_rank_0_kept(kept: list[BaseException]) -> Iterator[None]:
    """Megatron lets an error of these writes out of rank 0 while the others wait for it in a collective, where only parallel.timeout
    would end them. Here rank 0 keeps the error, leaves out the writes that would make the files look complete, and goes on."""

    def keeping(write: Callable[..., None]) -> Callable[..., None]:
        def try_to(*args, **how) -> None:
            try:
                if not kept:
                    write(*args, **how)
            except Exception as error:
                kept.append(error)

        return try_to

    with contextlib.ExitStack() as restoring:
        for owner, name in _WRITES_OF_RANK_0:
            original = getattr(owner, name)
            restoring.callback(setattr, owner, name, original)
            setattr(owner, name, keeping(original))
        yield
