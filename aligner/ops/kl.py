"""Estimators of KL(policy || reference) from sampled tokens, the KL penalty in the reward, and the adaptive coefficient."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.config.ppo import KLEstimator, KLReduction
from aligner.ops.masks import clean, same_shapes


def kl_per_token(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Elementwise estimate from log-probs of the tokens that the policy sampled (Schulman 2020, "Approximating KL divergence").

    logprobs, reference_logprobs: the same shape. With d = logprobs - reference_logprobs: k1 = d (unbiased), abs = |d| (an upper
    bias), k2 = d^2 / 2, k3 = exp(-d) - 1 + d (unbiased, never negative). In a reward only the value counts; as a loss the gradient
    of k1 is 0 in expectation."""
    assert logprobs.shape == reference_logprobs.shape, (
        f"{tuple(logprobs.shape)} against {tuple(reference_logprobs.shape)}"
    )
    delta = logprobs.float() - reference_logprobs.float()
    if estimator is KLEstimator.k1:
        return delta
    if estimator is KLEstimator.abs:
        return delta.abs()
    if estimator is KLEstimator.k2:
        return 0.5 * delta.square()
    if estimator is KLEstimator.k3:
        return torch.expm1(-delta) + delta
    raise ValueError(f"unknown KL estimator {estimator!r}")


def last_true(mask: Tensor) -> Tensor:
    """[B, S] bool, True at the last True position of each row; an empty row stays empty."""
    after = mask.flip(1).cumsum(1).flip(1)
    return mask & (after == 1)


def rewards_with_kl(scores: Tensor, kl: Tensor, mask: Tensor, *, coefficient: float, reduction: KLReduction) -> Tensor:
    """Per-token rewards [B, S] float32, 0 outside the mask: the score [B] on the last chosen token minus the KL penalty.

    kl [B, S] as kl_per_token gives it. token: each token pays coefficient * its own kl; sequence: the last token pays the sum.
    A row with an empty mask earns nothing."""
    same_shapes(mask, kl=kl)
    assert scores.shape == mask.shape[:1], f"scores must be [{mask.size(0)}], is {tuple(scores.shape)}"
    scores, kl, last = clean(scores, mask.any(1), "scores"), clean(kl, mask, "kl"), last_true(mask)
    penalty = kl if reduction is KLReduction.token else torch.where(last, kl.sum(1, keepdim=True), 0.0)
    return torch.where(last, scores[:, None], 0.0) - coefficient * penalty


@dataclass
class AdaptiveKL:
    """Proportional controller of the KL coefficient (Ziegler et al. 2019, section 2.2). `coefficient` is its whole state."""

    coefficient: float
    target: float
    """KL per sequence to hold."""
    horizon: int
    """Samples over which the coefficient moves."""

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0 or self.coefficient <= 0:
            raise ValueError(
                f"an adaptive KL needs ppo.kl_target, ppo.kl_horizon and ppo.kl_coefficient above 0; they are "
                f"{self.target}, {self.horizon} and {self.coefficient}"
            )

    def update(self, kl: float, n: int) -> None:
        """Move by the KL per sequence measured over n samples: the error kl / target - 1 is clipped to +-0.2."""
        if not math.isfinite(kl):
            raise FloatingPointError(f"the KL that adapts ppo.kl_coefficient is {kl}")
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coefficient *= 1.0 + error * n / self.horizon
