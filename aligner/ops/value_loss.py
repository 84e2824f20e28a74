"""The clipped squared error of PPO's critic."""

from typing import Optional

import torch
from torch import Tensor

from aligner.ops.masks import clean, masked_sum, same_shapes
from aligner.ops.policy_loss import per_denominator


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: Optional[float],
    denominator: float | int | Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of 0.5 * max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) over mask, divided by denominator.

    All tensors [B, S]; values carries gradients. clip None: plain 0.5 * (v - R)^2. denominator: the tokens of the whole mini-batch,
    over all ranks and micro-batches. Returns (scalar, metrics): detached SUMS over mask (value_loss, value_clipped, value, return)
    and their count `tokens`; divide after summing over ranks."""
    same_shapes(mask, values=values, old_values=old_values, returns=returns)
    values, returns = clean(values, mask, "values"), clean(returns, mask, "returns")
    old_values = clean(old_values, mask, "old_values")
    error = (values - returns).square()
    worst = error
    if clip is not None:
        assert clip > 0, f"clip must be positive, is {clip}"
        near = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
        worst = torch.maximum(error, (near - returns).square())
    total = 0.5 * torch.where(mask, worst, 0.0).sum()
    metrics = {
        "tokens": mask.sum().float(),
        "value_loss": total,
        "value_clipped": (mask & (worst > error)).sum().float(),
        "value": masked_sum(values, mask),
        "return": masked_sum(returns, mask),
    }
    return per_denominator(total, denominator), {name: value.detach() for name, value in metrics.items()}
