"""The clipped surrogate of PPO."""

from typing import Optional

import torch
from torch import Tensor

from aligner.ops.masks import clean, masked_sum, same_shapes


def per_denominator(total: Tensor, denominator: float | int | Tensor) -> Tensor:
    """total / denominator, where a denominator of 0 (no token in the whole mini-batch) leaves the total, which is 0 then."""
    denominator = float(denominator)
    assert denominator >= 0, f"denominator must not be negative, is {denominator}"
    return total / (denominator or 1.0)


def ppo_clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: float,
    weights: Optional[Tensor] = None,
    entropy: Optional[Tensor] = None,
    entropy_bonus: float = 0.0,
    denominator: float | int | Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of w max(-A r, -A clip(r, 1 - clip, 1 + clip)) - entropy_bonus * entropy over mask, divided by denominator; r = pi / pi_old
    (Schulman et al. 2017, equation 7). weights w: absent (1), or those of ops/importance.py, which make it decoupled PPO.

    All tensors [B, S]; logprobs and entropy carry gradients, weights do not. denominator: the tokens of the whole mini-batch, over all
    ranks and micro-batches. Returns (scalar, metrics): detached SUMS over mask (policy_loss, ratio, clipped, approximate_kl,
    entropy) and their count `tokens`; divide after summing over ranks."""
    same_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    advantages = clean(advantages, mask, "advantages")
    log_ratio = clean(logprobs, mask, "logprobs") - clean(old_logprobs, mask, "old_logprobs")
    ratio = log_ratio.exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1.0 - clip, 1.0 + clip)
    terms = torch.maximum(plain, clipped)
    if weights is not None:
        same_shapes(mask, weights=weights)
        terms = terms * clean(weights.detach(), mask, "weights")
    surrogate = torch.where(mask, terms, 0.0).sum()
    total = surrogate
    metrics = {
        "tokens": mask.sum().float(),
        "policy_loss": surrogate,
        "ratio": masked_sum(ratio, mask, "ratio"),
        "clipped": (mask & (clipped > plain)).sum().float(),
        "approximate_kl": masked_sum(torch.expm1(log_ratio) - log_ratio, mask, "approximate_kl"),
    }
    if entropy is not None:
        metrics["entropy"] = masked_sum(entropy, mask, "entropy")
        total = total - entropy_bonus * metrics["entropy"]
    elif entropy_bonus:
        raise ValueError(f"entropy_bonus is {entropy_bonus} but no entropy was given")
    return per_denominator(total, denominator), {name: value.detach() for name, value in metrics.items()}
