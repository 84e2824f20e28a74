"""From rollouts, log-probs, values and scores to what the two models train on. Pure tensors: no groups, no ranks.

Legend: B rows, S columns; every tensor is the whole rollout, the same on every rank."""

from dataclasses import dataclass
from typing import Callable, Optional

import torch
from torch import Tensor

from aligner.config.groups import Advantage, PPOConfig, RewardScale
from aligner.data.batch import CriticBatch, Rollouts
from aligner.ops.advantages import gae, monte_carlo_returns, reinforce_baseline
from aligner.ops.explained_variance import explained_variance, explained_variance_parts
from aligner.ops.importance import drift, importance_weights
from aligner.ops.kl import kl_per_token, rewards_with_kl
from aligner.ops.masks import clean, masked_mean, whiten
from aligner.ops.reward_scaling import RunningMoments, scale_scores
from aligner.ops.truncation import handle_truncation


@dataclass
class Signals:
    """What was asked about a rollout, in the order of its rows."""

    logprobs: Tensor  # [B, S] float32, policy before this step's updates
    reference_logprobs: Tensor  # [B, S] float32
    scores: Tensor  # [B] float32
    values: Tensor  # [B, S] float32; zeros without a critic
    bootstrap: Tensor  # [B] float32; zeros without a critic
    weight_version: int = 0  # of logprobs


@dataclass
class Experience:
    """One step's training data. `mask` is the response mask less what the truncation setting leaves out of both losses."""

    rollouts: Rollouts
    logprobs: Tensor  # [B, S]
    advantages: Tensor  # [B, S]
    values: Tensor  # [B, S]
    returns: Tensor  # [B, S]
    mask: Tensor  # [B, S] bool
    kl: Tensor  # [B, S] log-ratio to the reference (k1), 0 outside the response
    weights: Optional[Tensor]  # [B, S] of each token's policy loss, where ppo.importance_cap asks for a correction
    metrics: dict[str, float]

    def critic_batch(self) -> CriticBatch:
        r = self.rollouts
        return CriticBatch(
            tokens=r.tokens,
            lengths=r.lengths,
            mask=self.mask,
            values=self.values,
            returns=self.returns,
            sample_ids=r.sample_ids,
        )


def build_experience(
    rollouts: Rollouts,
    signals: Signals,
    ppo: PPOConfig,
    kl_coefficient: float,
    *,
    moments: Optional[RunningMoments] = None,
    falls_back: Callable[[float], bool] = lambda explained: False,
) -> Experience:
    """Rewards, advantages and returns of a rollout.

    moments: of the run's scores so far, moved on where ppo.reward_scale is running. falls_back: told the explained variance, says
    whether the policy's advantages are to be the critic-free baseline's.

    Raises FloatingPointError where a value under a True mask is not finite."""
    scores, bootstrap, mask = handle_truncation(
        signals.scores,
        signals.bootstrap,
        rollouts.mask,
        rollouts.truncated,
        truncation=ppo.truncation,
        penalty=ppo.truncation_penalty,
    )
    scores, reward_metrics = _scaled(scores, mask, rollouts, ppo, moments or RunningMoments())
    logprobs = clean(signals.logprobs, rollouts.mask, "policy log-probs")
    values = clean(signals.values, rollouts.mask, "values")
    reference = clean(signals.reference_logprobs, rollouts.mask, "reference log-probs")
    penalised = kl_per_token(logprobs, reference, ppo.kl_estimator)
    rewards = rewards_with_kl(scores, penalised, mask, coefficient=kl_coefficient, reduction=ppo.kl_reduction)
    kl = logprobs - reference
    metrics = {"kl/coefficient": kl_coefficient, **reward_metrics, **_rollout_metrics(rollouts, signals, kl)}
    if ppo.advantage is Advantage.gae:
        metrics |= _critic_metrics(rewards, values, mask, bootstrap, ppo.gamma)
    fallen_back = falls_back(metrics.get("critic/explained_variance", 0.0))
    advantages, returns = _advantages(rewards, values, mask, bootstrap, ppo)
    if fallen_back:
        advantages = reinforce_baseline(rewards, mask, gamma=ppo.gamma)
    if ppo.critic_fallback_steps:
        metrics["critic/fallback"] = float(fallen_back)
    if ppo.whiten:
        advantages = whiten(advantages, mask, min_std=ppo.whiten_min_std)
    weights = None
    if ppo.importance_cap is not None:
        weights = importance_weights(logprobs, rollouts.engine_logprobs, rollouts.mask, cap=ppo.importance_cap)
        metrics["drift/weight"] = float(masked_mean(weights, rollouts.mask))
    return Experience(rollouts, logprobs, advantages, values, returns, mask, kl, weights, metrics)


def _scaled(
    scores: Tensor, mask: Tensor, rollouts: Rollouts, ppo: PPOConfig, moments: RunningMoments
) -> tuple[Tensor, dict[str, float]]:
    """Scores as ppo.reward_scale and ppo.reward_clip have them, and what is told of that."""
    if ppo.reward_scale is RewardScale.none and ppo.reward_clip is None:
        return scores, {}
    counted, groups = mask.any(1), rollouts.sample_ids // ppo.samples_per_prompt
    how = {"scale": ppo.reward_scale, "clip": ppo.reward_clip}
    scaled = scale_scores(scores, counted, groups=groups, moments=moments, **how)
    metrics = {
        "reward/scaled_mean": float(masked_mean(scaled, counted)),
        "reward/scaled_max": float(clean(scaled, counted).abs().max()),
    }
    if ppo.reward_scale is RewardScale.running:
        metrics |= {"reward/running_mean": moments.mean, "reward/running_std": moments.std}
    return scaled, metrics


def _advantages(rewards, values, mask, bootstrap, ppo: PPOConfig) -> tuple[Tensor, Tensor]:
    if ppo.advantage is Advantage.gae:
        return gae(rewards, values, mask, bootstrap, gamma=ppo.gamma, lam=ppo.lam)
    # The returns train the critic of a run that has one all the same (for its reward model, say).
    returns = monte_carlo_returns(rewards, mask, torch.zeros_like(bootstrap), gamma=ppo.gamma)
    return reinforce_baseline(rewards, mask, gamma=ppo.gamma), returns


def _rollout_metrics(rollouts: Rollouts, signals: Signals, k1: Tensor) -> dict[str, float]:
    """k1: [B, S] log-ratio of policy to reference, 0 outside the mask."""
    mask, scores = rollouts.mask, signals.scores
    found = drift(signals.logprobs, rollouts.engine_logprobs, mask)
    return {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std(unbiased=False)),
        "kl/mean": float(masked_mean(k1, mask)),
        "kl/sequence": float(k1.sum(1).mean()),
        "response/length": float(mask.sum(1).float().mean()),
        "response/truncated": float(rollouts.truncated.float().mean()),
        "refit/staleness": float(signals.weight_version - rollouts.weight_version),
        **{f"drift/{name}": value for name, value in found.items()},
    }


def _critic_metrics(rewards: Tensor, values: Tensor, mask: Tensor, bootstrap: Tensor, gamma: float) -> dict[str, float]:
    # Monte-Carlo returns: GAE targets contain the critic's own values and would flatter it.
    returns = monte_carlo_returns(rewards, mask, bootstrap, gamma=gamma)
    parts = explained_variance_parts(values, returns, mask)
    return {
        "critic/explained_variance": explained_variance(values, returns, mask),
        "critic/value_mean": float(masked_mean(values, mask)),
        **{f"critic/explained_variance/{name}": part for name, part in parts.items()},
    }
