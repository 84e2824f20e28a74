"""Memory that was freed goes back to the system, also where the C library would keep it: between blocks that live on."""

import ctypes

import psutil
import pytest
import torch

from aligner.parallel.device import trim_heap


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc, whose malloc_trim gives it back"
)
def test_freed_blocks_between_living_ones_are_given_back():
    size, count = 100_000, 2000  # bytes: too small for blocks of their own in the kernel's eyes
    blocks = [torch.ones(size, dtype=torch.uint8) for _ in range(count)]
    kept = blocks[::2]
    del blocks
    before = psutil.Process().memory_info().rss
    trim_heap()
    assert before - psutil.Process().memory_info().rss > 0.8 * size * (count - len(kept))
