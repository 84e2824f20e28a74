"""What a step trains on and in which order: pure functions of (seed, step), so that any grid and any resume sees the same."""

import hashlib

import torch
from torch import Tensor


def mini_batches(rows: int, size: int, *, seed: int, step: int, epoch: int) -> list[Tensor]:
    """Shuffled row indices (int64) of one epoch's mini-batches. `rows` is a multiple of `size`."""
    digest = hashlib.sha256(f"{seed}/{step}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return list(torch.randperm(rows, generator=generator).split(size))
