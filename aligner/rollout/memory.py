"""What a build of the torch engine takes, checked before it is taken."""

from pathlib import Path

import torch

from aligner.models.model_config import ModelShape
from aligner.rollout.cache import KVCache
from aligner.rollout.engine import BuildLimits
from aligner.rollout.linear import Kernel
from aligner.rollout.native_transformer import work_space
from aligner.rollout.weights import Weights


def make_cache(shape: ModelShape, *, rows: int, length: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    return KVCache(
        layers=shape.num_layers,
        rows=rows,
        kv_heads=shape.num_query_groups,
        length=length,
        head_dim=shape.kv_channels,
        dtype=dtype,
        device=device,
    )


def check_memory(
    shape: ModelShape, *, limits: BuildLimits, length: int, dtype: torch.dtype, device: torch.device, kernel: Kernel
) -> None:
    """ValueError with the figures where weights, cache and work space would not fit into the free memory of `device`."""
    meta = torch.device("meta")
    weights = Weights(shape, dtype=dtype, device=meta).nbytes
    cache = make_cache(shape, rows=limits.max_batch_size, length=length, dtype=dtype, device=meta).nbytes
    native = kernel is Kernel.native
    work = 4 * sum(work_space(shape, rows=limits.max_batch_size, length=length).values()) if native else 0
    free = free_memory(device)
    if weights + cache + work > free:
        raise ValueError(
            f"the torch engine needs {weights / 1e9:.2f} GB of weights, {cache / 1e9:.2f} GB of KV cache "
            f"(engine.max_batch_size={limits.max_batch_size} rows of {length} tokens) and {work / 1e9:.2f} GB of work space, "
            f"{free / 1e9:.2f} GB are free on {device}; "
            "lower engine.max_batch_size, engine.max_input_len or engine.max_output_len, or take a smaller dtype"
        )


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
