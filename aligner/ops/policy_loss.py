"""Policy gradients with a bounded ratio: PPO's clipped surrogate and its kin.

Legend: r = pi / pi_old of a token, A its advantage. The functions of terms give each token's loss; policy_loss adds them up."""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from aligner.config.ppo import KLEstimator, PolicyObjective
from aligner.ops.kl import kl_per_token
from aligner.ops.masks import clean, masked_sum, same_shapes


@dataclass(frozen=True)
class Objective:
    """What of a policy's loss is set. The ratio is clipped to [1 - low, 1 + high]; low of 1 or more is no lower bound."""

    kind: PolicyObjective = PolicyObjective.clip
    low: float = 0.2
    high: float = 0.2
    dual: Optional[float] = None
    entropy_bonus: float = 0.0
    kl_estimator: KLEstimator = KLEstimator.k3


METRICS = ("tokens", "policy_loss", "ratio", "clipped", "dual_clipped", "approximate_kl", "entropy", "kl")
"""Of policy_loss, whatever the objective."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Optional[Tensor],
    advantages: Tensor,
    mask: Tensor,
    *,
    objective: Objective,
    shares: Tensor,
    sequences: Optional[Tensor] = None,
    weights: Optional[Tensor] = None,
    entropy: Optional[Tensor] = None,
    reference_logprobs: Optional[Tensor] = None,
    kl_coefficient: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over mask of share * (w * term - entropy_bonus * entropy + kl_coefficient * kl), where term is the objective's.

    All tensors have one shape, [B, S] or any other; logprobs and entropy carry gradients. old_logprobs: None where the policy has not
    changed since, so that the ratio is 1 and has its gradient all the same. shares: of each token in the loss of the
    whole mini-batch (ops/aggregate.py). sequences: int64, names each token's response, of which all tokens are there; for gspo.
    weights w: constants, absent 1 (ops/importance.py: decoupled PPO). reference_logprobs: of the frozen reference, where a KL penalty
    is part of the loss. Returns (scalar, METRICS): detached plain SUMS over mask, and their count `tokens`; divide after summing over
    ranks."""
    old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
    same_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, shares=shares)
    if objective.entropy_bonus and entropy is None:
        raise ValueError(f"entropy_bonus is {objective.entropy_bonus} but no entropy was given")
    advantages, logprobs = clean(advantages, mask, "advantages"), clean(logprobs, mask, "logprobs")
    log_ratio = logprobs - clean(old_logprobs, mask, "old_logprobs")
    terms, clipped, dual_clipped = _terms(logprobs, log_ratio, advantages, mask, objective, sequences)
    if weights is not None:
        same_shapes(mask, weights=weights)
        terms = terms * clean(weights.detach(), mask, "weights")
    zero = torch.zeros_like(logprobs)
    kl = zero
    if reference_logprobs is not None:
        kl = kl_per_token(logprobs, clean(reference_logprobs, mask, "reference_logprobs"), objective.kl_estimator)
    entropy = zero if entropy is None else clean(entropy, mask, "entropy")
    whole = terms - objective.entropy_bonus * entropy + kl_coefficient * kl
    metrics = {
        "tokens": mask.sum().float(),
        "policy_loss": torch.where(mask, terms, 0.0).sum(),
        "ratio": masked_sum(log_ratio.exp(), mask, "ratio"),
        "clipped": (mask & clipped).sum().float(),
        "dual_clipped": (mask & dual_clipped).sum().float(),
        "approximate_kl": masked_sum(torch.expm1(log_ratio) - log_ratio, mask, "approximate_kl"),
        "entropy": entropy.sum(),
        "kl": masked_sum(kl, mask, "kl"),
    }
    total = torch.where(mask, shares * whole, 0.0).sum()
    return total, {name: metrics[name].detach() for name in METRICS}


def _terms(
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    objective: Objective,
    sequences: Optional[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss of each token, which ones were clipped, which ones met the bound of dual clip)."""
    if objective.kind is PolicyObjective.clip:
        return clip_terms(log_ratio, advantages, low=objective.low, high=objective.high, dual=objective.dual)
    if objective.kind is PolicyObjective.gspo:
        assert sequences is not None, "gspo has to know which tokens are of one response"
        ratio = sequence_log_ratio(log_ratio, mask, sequences)
        return clip_terms(ratio, advantages, low=objective.low, high=objective.high)
    if objective.kind is PolicyObjective.cispo:
        return cispo_terms(logprobs, log_ratio, advantages, low=objective.low, high=objective.high)
    raise ValueError(f"unknown objective {objective.kind!r}")


def clip_terms(
    log_ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: Optional[float] = None
) -> tuple[Tensor, Tensor, Tensor]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)): Schulman et al. 2017, equation 7; low < high is DAPO's clip-higher (Yu et al. 2025,
    equation 10). dual c > 1: where A < 0 at most -A c, so that a large ratio cannot make it as large as it likes (Ye et al. 2020,
    "Mastering complex control in MOBA games with deep reinforcement learning", its dual-clip PPO)."""
    ratio = log_ratio.exp()
    plain, bounded = -advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    terms, clipped = torch.maximum(plain, bounded), bounded > plain
    if dual is None:
        return terms, clipped, torch.zeros_like(clipped)
    ceiling = -advantages * dual
    met = (advantages < 0) & (terms > ceiling)
    return torch.where(met, ceiling, terms), clipped, met


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor, sequences: Tensor) -> Tensor:
    """log s of each token's response, s = (pi(y) / pi_old(y))^(1 / |y|): GSPO (Zheng et al. 2025, equation 7), in the form of its
    equation 14, GSPO-token: sg[log s] + log pi - sg[log pi].

    So the value is the response's, and the gradient each token's own. Where all tokens of a response have the same advantage, as with
    estimators of groups, the sum over the response is that of GSPO itself, value and gradient (sections 4.2 and 4.3 there); where they
    differ (gae) it still means something. sequences: int64 from 0, names each token's response; others than mask's do not count."""
    names, index = sequences.flatten().unique(return_inverse=True)
    fixed = torch.where(mask, log_ratio.detach(), 0.0).flatten()
    sums = torch.zeros(len(names), dtype=fixed.dtype, device=fixed.device).index_add(0, index, fixed)
    counts = torch.zeros_like(sums).index_add(0, index, mask.flatten().to(fixed.dtype))
    mean = (sums / counts.clamp_min(1))[index].view_as(log_ratio)
    return mean + log_ratio - log_ratio.detach()


def cispo_terms(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, *, low: float, high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """-sg[clip(r, 1 - low, 1 + high)] A log pi: CISPO (MiniMax 2025, "MiniMax-M1", equations 4 and 5). The clipped ratio is a weight
    without a gradient, so that every token keeps its own."""
    ratio = log_ratio.detach().exp()
    bounded = ratio.clamp(max(1.0 - low, 0.0), 1.0 + high)
    clipped = bounded != ratio
    return -bounded * advantages * logprobs, clipped, torch.zeros_like(clipped)


def per_denominator(total: Tensor, denominator: float | int | Tensor) -> Tensor:
    """total / denominator, where a denominator of 0 (no token in the whole mini-batch) leaves the total, which is 0 then."""
    denominator = float(denominator)
    assert denominator >= 0, f"denominator must not be negative, is {denominator}"
    return total / (denominator or 1.0)
