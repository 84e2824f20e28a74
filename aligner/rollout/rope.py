"""Rotary position embedding tables (Su et al. 2021), with Llama 3's frequency scaling."""

from typing import Any, Optional

import torch
from torch import Tensor

from aligner.models.rope import llama3_frequencies


def inverse_frequencies(head_dim: int, base: float, scaling: Optional[dict[str, Any]]) -> Tensor:
    """[head_dim / 2] float32. `scaling`: None, or the fields of llama3 (ModelShape has refused everything else)."""
    frequencies = 1.0 / (base ** (torch.arange(0, head_dim, 2).float() / head_dim))
    return frequencies if scaling is None else llama3_frequencies(frequencies, scaling)


def rope_tables(
    length: int,
    head_dim: int,
    *,
    base: float,
    scaling: Optional[dict[str, Any]],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """cos and sin, [length, head_dim] each. The first half of sin is negated, so that x * cos + roll(x, D/2) * sin rotates x."""
    angles = torch.arange(length).float()[:, None] * inverse_frequencies(head_dim, base, scaling)
    angles = torch.cat([angles, angles], -1)
    sin = angles.sin()
    sin[:, : head_dim // 2].neg_()
    return angles.cos().to(device, dtype), sin.to(device, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, D] at positions whose table rows are cos, sin [n, 1, D]."""
    return torch.addcmul(x * cos, torch.roll(x, x.size(-1) // 2, -1), sin)
