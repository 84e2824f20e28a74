"""From rollouts, log-probs, values and scores to what the two models train on. Pure tensors: no groups, no ranks.

Legend: B rows, S columns; every tensor is the whole rollout, the same on every rank."""

from dataclasses import dataclass
from typing import Callable, Optional

import torch
from torch import Tensor

from aligner.config.ppo import Advantage, KLPlace, PPOConfig, RewardScale
from aligner.data.batch import CriticBatch, Rollouts
from aligner.ops.advantages import gae, monte_carlo_returns, reinforce_baseline
from aligner.ops.explained_variance import explained_variance, explained_variance_parts
from aligner.ops.group_advantages import dr_grpo, equal_groups, group_norm, rloo
from aligner.ops.importance import drift, importance_weights
from aligner.ops.kl import kl_per_token, rewards_with_kl
from aligner.ops.masks import clean, masked_mean, whiten
from aligner.ops.reward_scaling import RunningMoments, scale_scores
from aligner.ops.truncation import handle_truncation, soft_overlong_penalty


@dataclass
class Signals:
    """What was asked about a rollout, in the order of its rows."""

    logprobs: Optional[
        Tensor
    ]  # [B, S] float32, policy before this step's updates; None: read off the only update, see observe
    reference_logprobs: Optional[Tensor]  # [B, S] float32; None where there is no reference
    scores: Tensor  # [B] float32
    values: Tensor  # [B, S] float32; zeros without a critic
    bootstrap: Tensor  # [B] float32; zeros without a critic
    weight_version: int = 0  # of logprobs


@dataclass
class Experience:
    """One step's training data. `mask` is the response mask less what the truncation setting leaves out of both losses."""

    rollouts: Rollouts
    logprobs: Optional[Tensor]  # [B, S]
    advantages: Tensor  # [B, S]
    values: Tensor  # [B, S]
    returns: Tensor  # [B, S]
    mask: Tensor  # [B, S] bool
    kl: Tensor  # [B, S] log-ratio to the reference (k1), 0 outside the response and without a reference
    reference_logprobs: Optional[Tensor]  # [B, S]
    kl_in_loss: bool
    weights: Optional[Tensor]  # [B, S] of each token's policy loss, where ppo.importance_cap asks for a correction
    metrics: dict[str, float]

    def observe(self, logprobs: Tensor) -> None:
        """The policy's log-probs [B, S] before this step's updates, and what is told of them, where that was not known before."""
        self.logprobs = clean(logprobs, self.rollouts.mask, "policy log-probs")
        if self.reference_logprobs is not None:
            self.kl = self.logprobs - self.reference_logprobs
        self.metrics |= _logprob_metrics(self.rollouts, self.logprobs, self.reference_logprobs)

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
    if ppo.overlong_cache is not None:
        how = {"whole": ppo.overlong_length, "cache": ppo.overlong_cache}
        scores = scores + ppo.overlong_penalty * soft_overlong_penalty(rollouts.mask.sum(1), **how)
    scores, reward_metrics = _scaled(scores, mask, rollouts, ppo, moments or RunningMoments())
    values = clean(signals.values, rollouts.mask, "values")
    in_loss = ppo.kl_place is KLPlace.loss and kl_coefficient > 0
    logprobs, reference = _cleaned(signals, rollouts.mask)
    kl = penalised = torch.zeros_like(values)
    if logprobs is not None and reference is not None:
        kl, penalised = logprobs - reference, kl_per_token(logprobs, reference, ppo.kl_estimator)
    how = {"coefficient": 0.0 if in_loss else kl_coefficient, "reduction": ppo.kl_reduction}
    rewards = rewards_with_kl(scores, penalised, mask, **how)
    metrics = {"kl/coefficient": kl_coefficient, **reward_metrics, **_rollout_metrics(rollouts, signals)}
    if logprobs is not None:
        metrics |= _logprob_metrics(rollouts, logprobs, reference)
    groups = rollouts.sample_ids // ppo.samples_per_prompt
    if ppo.samples_per_prompt > 1:
        metrics |= _group_metrics(signals.scores, mask, groups)
    if ppo.advantage is Advantage.gae:
        metrics |= _critic_metrics(rewards, values, mask, bootstrap, ppo.gamma)
    fallen_back = falls_back(metrics.get("critic/explained_variance", 0.0))
    advantages, returns = _advantages(rewards, values, mask, bootstrap, groups, ppo)
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
    return Experience(rollouts, logprobs, advantages, values, returns, mask, kl, reference, in_loss, weights, metrics)


def _cleaned(signals: Signals, mask: Tensor) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """Log-probs of policy and reference, 0 outside mask."""
    named = ((signals.logprobs, "policy log-probs"), (signals.reference_logprobs, "reference log-probs"))
    policy, reference = (None if given is None else clean(given, mask, name) for given, name in named)
    return policy, reference


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


OF_GROUPS = {Advantage.group_norm: group_norm, Advantage.dr_grpo: dr_grpo, Advantage.rloo: rloo}


def _advantages(rewards, values, mask, bootstrap, groups, ppo: PPOConfig) -> tuple[Tensor, Tensor]:
    if ppo.advantage is Advantage.gae:
        return gae(rewards, values, mask, bootstrap, gamma=ppo.gamma, lam=ppo.lam)
    # The returns train the critic of a run that has one all the same (for its reward model, say).
    returns = monte_carlo_returns(rewards, mask, torch.zeros_like(bootstrap), gamma=ppo.gamma)
    if ppo.advantage is Advantage.reinforce_baseline:
        return reinforce_baseline(rewards, mask, gamma=ppo.gamma), returns
    of_rows = OF_GROUPS[ppo.advantage](rewards.sum(1), mask.any(1), groups)
    return torch.where(mask, of_rows[:, None], 0.0), returns


def _group_metrics(scores: Tensor, mask: Tensor, groups: Tensor) -> dict[str, float]:
    """Of the raw scores. Groups whose scores are all alike teach nothing."""
    alike, all_of_them = equal_groups(scores, mask.any(1), groups)
    return {"groups/equal": alike / max(all_of_them, 1)}


def _rollout_metrics(rollouts: Rollouts, signals: Signals) -> dict[str, float]:
    mask, scores = rollouts.mask, signals.scores
    return {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std(unbiased=False)),
        "response/length": float(mask.sum(1).float().mean()),
        "response/truncated": float(rollouts.truncated.float().mean()),
        "refit/staleness": float(signals.weight_version - rollouts.weight_version),
    }


def _logprob_metrics(rollouts: Rollouts, logprobs: Tensor, reference: Optional[Tensor]) -> dict[str, float]:
    """Of the policy before this step's updates, against the engine that sampled and the reference, where there is one."""
    found = drift(logprobs, rollouts.engine_logprobs, rollouts.mask)
    metrics = {f"drift/{name}": value for name, value in found.items()}
    if reference is not None:
        kl = logprobs - reference
        metrics |= {"kl/mean": float(masked_mean(kl, rollouts.mask)), "kl/sequence": float(kl.sum(1).mean())}
    return metrics


def _critic_metrics(rewards: Tensor, values: Tensor, mask: Tensor, bootstrap: Tensor, gamma: float) -> dict[str, float]:
    # Monte-Carlo returns: GAE targets contain the critic's own values and would flatter it.
    returns = monte_carlo_returns(rewards, mask, bootstrap, gamma=gamma)
    parts = explained_variance_parts(values, returns, mask)
    return {
        "critic/explained_variance": explained_variance(values, returns, mask),
        "critic/value_mean": float(masked_mean(values, mask)),
        **{f"critic/explained_variance/{name}": part for name, part in parts.items()},
    }
