"""The one place that knows whether this process computes on a GPU or on the CPU."""

import contextlib
import ctypes
import functools
import os
import resource
import time
from pathlib import Path
from typing import Iterator, Mapping

import torch
import torch.distributed as dist

from aligner.config.groups import Dtype
from aligner.parallel import cpu_megatron

ON_GPU: bool = torch.cuda.is_available()


def gpu_index(environ: Mapping[str, str], visible: int) -> int:
    """This rank's GPU among those that it sees: one alone where Slurm binds one to each task, whatever its place on the node."""
    return int(environ.get("LOCAL_RANK", environ.get("SLURM_LOCALID", "0"))) % visible


DEVICE: torch.device = (
    torch.device("cuda", gpu_index(os.environ, torch.cuda.device_count())) if ON_GPU else torch.device("cpu")
)
BACKEND: str = "nccl" if ON_GPU else "gloo"

# bfloat16 must win by this factor to be chosen on a CPU: it costs precision.
_BF16_GAIN = 1.2

if ON_GPU:
    cpu_megatron.repair_loading_of_torch_adam()
else:
    cpu_megatron.install()


def set_threads(n: int) -> None:
    """CPU threads that the operations of this thread are computed with from now on; changing them costs microseconds."""
    torch.set_num_threads(n)


def thread_count() -> int:
    """What set_threads has set."""
    return torch.get_num_threads()


@contextlib.contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Set the CPU threads inside, and set them back; 0 leaves them as they are."""
    before = thread_count()
    set_threads(threads or before)
    try:
        yield
    finally:
        set_threads(before)


def peak_memory_bytes() -> int:
    """Peak memory so far: of the GPU's allocator, or the resident set of this process on a CPU."""
    if ON_GPU:
        return torch.cuda.max_memory_allocated(DEVICE)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def synchronise() -> None:
    """Wait for the work queued on the GPU, so that a timer charges it to the phase that queued it; nothing on a CPU."""
    if ON_GPU:
        torch.cuda.synchronize(DEVICE)


def empty_cache() -> None:
    """Give unused blocks of the GPU's allocator back; nothing on a CPU."""
    if ON_GPU:
        torch.cuda.empty_cache()


def trim_heap() -> None:
    """Give the pages back that glibc keeps of what was freed: before 2.38 it does not use a hole between aligned blocks again for a block
    of the same size, so that a process grows. Nothing on a GPU, whose own allocator uses it."""
    if not ON_GPU and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def _has_bfloat16_units() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; elsewhere it is emulated, ten times slower than float32 and more."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(flags & {"avx512_bf16", "amx_bf16"})


@functools.cache
def _cpu_bfloat16_gain() -> float:
    """Seconds of a small float32 product over those of the same product in bfloat16, on this CPU; taken in turns, best of each."""
    products = [(torch.ones(64, 512, dtype=d), torch.ones(512, 512, dtype=d)) for d in (torch.float32, torch.bfloat16)]
    best = [float("inf"), float("inf")]
    for _ in range(20):
        for i, (x, w) in enumerate(products):
            start = time.perf_counter()
            torch.nn.functional.linear(x, w)
            best[i] = min(best[i], time.perf_counter() - start)
    return best[0] / best[1]


def fastest_dtype() -> torch.dtype:
    """bfloat16 on a GPU; on a CPU what a micro-timing of this process finds faster (its ranks may differ: see resolve_dtype)."""
    if ON_GPU:
        return torch.bfloat16
    faster = _has_bfloat16_units() and _cpu_bfloat16_gain() > _BF16_GAIN
    return torch.bfloat16 if faster else torch.float32


def resolve_dtype(dtype: Dtype) -> torch.dtype:
    """The torch dtype of a setting. For `auto`, once a job has started, a collective: rank 0's choice holds on every rank."""
    if dtype is not Dtype.auto:
        return {Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16}[dtype]
    if ON_GPU or not dist.is_initialized() or dist.get_world_size() == 1:
        return fastest_dtype()
    choice = [fastest_dtype() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(choice, src=0)
    return choice[0]
