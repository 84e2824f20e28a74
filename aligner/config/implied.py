"""Settings left to others (auto, absent) get the values that those imply: code beyond aligner/config/ never sees an `auto` of these."""

from dataclasses import replace
from typing import Any

from aligner.config.groups import CriticPlace, RewardPlace
from aligner.config.jobs import ActorConfig, CriticConfig
from aligner.config.ppo import Advantage, Aggregate, PolicyObjective, PPOConfig, Truncation

DYNAMIC_SAMPLING_BATCHES = 10


def settled(config: Any) -> Any:
    """The same settings of a job with nothing left open; `config` stays as it is."""
    if isinstance(config, ActorConfig):
        critic, gae = config.critic, config.ppo.advantage is Advantage.gae
        if critic.place is CriticPlace.auto:
            critic = replace(critic, place=CriticPlace.remote if gae else CriticPlace.none)
        bootstraps = gae and critic.place is not CriticPlace.none
        ppo = _settled_ppo(config.ppo, config.engine.max_output_len, bootstraps=bootstraps)
        scores = RewardPlace.actor if critic.place is CriticPlace.none else RewardPlace.critic
        return replace(config, ppo=ppo, critic=critic, reward=_placed(config.reward, scores))
    if isinstance(config, CriticConfig):
        return replace(config, reward=_placed(config.reward, RewardPlace.critic))
    return config


def _placed(reward: Any, place: RewardPlace) -> Any:
    return replace(reward, place=place) if reward.place is RewardPlace.auto else reward


def _settled_ppo(ppo: PPOConfig, max_output_len: int, *, bootstraps: bool) -> PPOConfig:
    implied: dict[str, Any] = {}
    if ppo.whiten is None:
        implied["whiten"] = not ppo.advantage.of_groups
    if ppo.truncation is Truncation.auto:
        implied["truncation"] = Truncation.bootstrap if bootstraps else Truncation.ignore
    if ppo.aggregate is Aggregate.auto:
        implied["aggregate"] = _aggregate(ppo)
    for name in ("constant_length", "overlong_length"):
        if getattr(ppo, name) is None:
            implied[name] = max_output_len
    if ppo.clip_high is None:
        implied["clip_high"] = ppo.clip
    if ppo.dynamic_sampling_max_prompts is None:
        implied["dynamic_sampling_max_prompts"] = DYNAMIC_SAMPLING_BATCHES * ppo.rollout_batch_size
    return replace(ppo, **implied)


def _aggregate(ppo: PPOConfig) -> Aggregate:
    """That of the paper."""
    if ppo.loss is PolicyObjective.gspo:
        return Aggregate.sequence
    if ppo.loss is PolicyObjective.cispo:
        return Aggregate.token
    return {Advantage.group_norm: Aggregate.sequence, Advantage.dr_grpo: Aggregate.constant}.get(
        ppo.advantage, Aggregate.token
    )
