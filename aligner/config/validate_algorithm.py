"""Checks of the algorithm: estimators, losses and what is done with rewards. Each names the keys and their values, and what to change."""

from typing import Iterator

from aligner.config.groups import CriticPlace
from aligner.config.jobs import ActorConfig
from aligner.config.ppo import (
    Advantage,
    Aggregate,
    KLEstimator,
    KLPlace,
    KLReduction,
    PolicyObjective,
    PPOConfig,
    ReferencePlace,
    RewardScale,
    Truncation,
)
from aligner.config.validate_scoring import critic_trust_problems


def algorithm_problems(config: ActorConfig) -> list[str]:
    ppo = config.ppo
    found = [*_critic(config), *critic_trust_problems(config), *_kl(ppo), *_groups(ppo), *_loss(ppo)]
    return [*found, *_overlong(config)]


def _critic(config: ActorConfig) -> Iterator[str]:
    ppo, place = config.ppo, config.critic.place
    if ppo.advantage is Advantage.gae and place is CriticPlace.none:
        free = ", ".join(a.name for a in Advantage if a is not Advantage.gae)
        yield f"ppo.advantage=gae needs a critic, and critic.place is none: set ppo.advantage to one of {free}"
    if ppo.truncation is Truncation.bootstrap and (place is CriticPlace.none or ppo.advantage is not Advantage.gae):
        yield (
            f"ppo.truncation=bootstrap needs a critic and ppo.advantage=gae (critic.place={place.name}, "
            f"ppo.advantage={ppo.advantage.name}): set ppo.truncation to mask, penalise or ignore"
        )


def _kl(ppo: PPOConfig) -> Iterator[str]:
    if ppo.kl_target is not None and ppo.kl_coefficient == 0:
        yield f"ppo.kl_target={ppo.kl_target} adapts ppo.kl_coefficient by factors: it must start above 0"
    if ppo.reference is ReferencePlace.none and ppo.kl_coefficient:
        yield (
            f"ppo.reference=none leaves nothing to measure the KL to, and ppo.kl_coefficient is {ppo.kl_coefficient:g}: "
            "set it to 0, or ppo.reference=held"
        )
    if ppo.kl_place is not KLPlace.loss or not ppo.kl_coefficient:
        return
    if ppo.kl_estimator is KLEstimator.k1:
        yield "ppo.kl_place=loss with ppo.kl_estimator=k1 has a gradient of 0 on average: set ppo.kl_estimator to k3 or k2"
    if ppo.kl_reduction is KLReduction.sequence:
        yield "ppo.kl_reduction=sequence is of ppo.kl_place=reward: in the loss every token has its own KL (ppo.aggregate)"


def _groups(ppo: PPOConfig) -> Iterator[str]:
    named = f"ppo.advantage={ppo.advantage.name}"
    if ppo.advantage.of_groups and ppo.samples_per_prompt == 1:
        yield f"{named} compares the responses to one prompt, and ppo.samples_per_prompt is 1: raise it"
    if ppo.advantage.of_groups and ppo.gamma != 1:
        yield f"{named} takes a response's whole return, and ppo.gamma={ppo.gamma:g} discounts it by token: set ppo.gamma=1"
    if ppo.reward_scale is RewardScale.group and ppo.samples_per_prompt == 1:
        yield "ppo.reward_scale=group needs ppo.samples_per_prompt > 1: a score alone is its own mean"
    if ppo.reward_scale is RewardScale.group and ppo.advantage.of_groups:
        yield f"ppo.reward_scale=group takes off the mean that {named} takes off: leave one out"
    if not ppo.dynamic_sampling:
        return
    if ppo.samples_per_prompt == 1:
        yield "ppo.dynamic_sampling drops groups whose scores are all equal, and ppo.samples_per_prompt is 1: raise it"
    if (most := ppo.dynamic_sampling_max_prompts) is not None and most < ppo.rollout_batch_size:
        yield f"ppo.dynamic_sampling_max_prompts={most} must be at least ppo.rollout_batch_size={ppo.rollout_batch_size}"


def _loss(ppo: PPOConfig) -> Iterator[str]:
    if ppo.dual_clip is not None and ppo.dual_clip <= 1:
        yield f"ppo.dual_clip={ppo.dual_clip:g} must be greater than 1: less would bound tokens that did not change"
    if ppo.dual_clip is not None and ppo.loss is not PolicyObjective.clip:
        yield f"ppo.dual_clip={ppo.dual_clip:g} needs ppo.loss=clip, and it is {ppo.loss.name}"
    if ppo.loss is PolicyObjective.gspo and ppo.aggregate not in (Aggregate.sequence, Aggregate.auto):
        yield (
            f"ppo.loss=gspo has one ratio a response, which counts once: ppo.aggregate={ppo.aggregate.name} would count it by "
            "tokens; set it to sequence"
        )


def _overlong(config: ActorConfig) -> Iterator[str]:
    ppo, longest = config.ppo, config.engine.max_output_len
    if ppo.overlong_cache is None:
        return
    whole = longest if ppo.overlong_length is None else ppo.overlong_length
    if whole > longest:
        yield f"ppo.overlong_length={whole} is never reached: engine.max_output_len is {longest}"
    if ppo.overlong_cache > whole:
        yield f"ppo.overlong_cache={ppo.overlong_cache} exceeds ppo.overlong_length={whole}: every response would pay"
