"""How far the policy that trains is from the one that sampled, token by token, and the weights that correct for it."""

import math

import torch
from torch import Tensor

from aligner.ops.masks import clean, same_shapes

LARGEST_LOG_RATIO = 30.0  # a metric has to be finite: a single token's ratio counts as e**30 at most


def importance_weights(logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """[B, S] float32: min(cap, pi_prox / pi_behav) under mask, 0 elsewhere; constants, without a gradient.

    logprobs [B, S]: of pi_prox, the policy as it is when it begins to train on these tokens; behaviour_logprobs [B, S]: of pi_behav,
    what the engine sampled them from (older weights, another dtype, other kernels). Multiplied with the clipped term whose ratio is
    pi / pi_prox they make decoupled PPO (Hilton et al. 2021, "Batch size-invariance for policy optimization"), its
    importance ratio truncated from above (Ionides 2008): the cap bounds the variance and makes the estimate smaller where it cuts."""
    assert cap >= 1, f"cap must be at least 1, is {cap}"
    log_ratio = _log_ratio(logprobs, behaviour_logprobs, mask)
    # the minimum is taken before exp, which would overflow
    return torch.where(mask, log_ratio.clamp_max(math.log(cap)).exp().float(), 0.0)


def drift(logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """How pi_prox (logprobs) and pi_behav differ on the sampled tokens; all [B, S], floats over mask, 0 where it is empty.

    mean and max: of |log pi_prox - log pi_behav|. ratio: mean of pi_prox / pi_behav, whose expectation is 1 where the engine samples
    from what it says. effective: the effective sample size of those ratios as a share of the tokens, (sum r)^2 / (n sum r^2); 1 where
    all are equal."""
    count = int(mask.sum())
    if not count:
        return {"mean": 0.0, "max": 0.0, "ratio": 0.0, "effective": 0.0}
    log_ratio = _log_ratio(logprobs, behaviour_logprobs, mask)[mask]
    ratio = log_ratio.clamp_max(LARGEST_LOG_RATIO).exp()
    return {
        "mean": float(log_ratio.abs().mean()),
        "max": float(log_ratio.abs().max()),
        "ratio": float(ratio.mean()),
        "effective": float(ratio.sum().square() / (count * ratio.square().sum())),
    }


def _log_ratio(logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> Tensor:
    """[B, S] float64, 0 outside mask."""
    same_shapes(mask, logprobs=logprobs, behaviour_logprobs=behaviour_logprobs)
    ours, theirs = clean(logprobs, mask, "policy log-probs"), clean(behaviour_logprobs, mask, "engine log-probs")
    return ours.double() - theirs.double()
