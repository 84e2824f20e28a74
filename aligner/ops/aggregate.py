"""What share each token has in the loss of its mini-batch: denominators are those of the whole mini-batch, over all ranks."""

from typing import Optional

import torch
from torch import Tensor

from aligner.config.ppo import Aggregate


def token_shares(mask: Tensor, aggregate: Aggregate, *, constant_length: Optional[int] = None) -> Tensor:
    """[B, S] float32, 0 outside mask; the loss is the sum of share * term over all tokens of the mini-batch.

    mask [B, S] bool: of the whole mini-batch. token: 1 / T, T the tokens under mask (DAPO, Yu et al. 2025, equation 12). sequence:
    1 / (n T_b), T_b the tokens of the row and n the rows that have any (GRPO, Shao et al. 2024, equation 3). constant: 1 / (B L) with
    L = constant_length, whatever the rows' lengths and how many are masked (Dr. GRPO, Liu et al. 2025, where L is the longest length)."""
    assert mask.dtype == torch.bool and mask.dim() == 2, (
        f"mask must be [B, S] bool, is {mask.dtype} {tuple(mask.shape)}"
    )
    shares = mask.float()
    if aggregate is Aggregate.token:
        return shares / max(int(mask.sum()), 1)
    if aggregate is Aggregate.sequence:
        tokens = mask.sum(1, keepdim=True)
        return shares / (tokens.clamp_min(1) * max(int(mask.any(1).sum()), 1))
    if aggregate is Aggregate.constant:
        assert constant_length is not None and constant_length > 0, f"constant_length is {constant_length}"
        return shares / (mask.size(0) * constant_length)
    raise ValueError(f"unknown aggregate {aggregate!r}")
