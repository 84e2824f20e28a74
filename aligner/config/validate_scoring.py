"""Checks of what scores: rewards, the critic's part in training, and the jobs that serve. Each names the keys and what to change."""

from pathlib import Path
from typing import Any, Iterator
from urllib.parse import urlsplit

from aligner.config.groups import CriticPlace, RewardKind, RewardPlace
from aligner.config.jobs import ActorConfig, CriticConfig, RewardServerConfig
from aligner.config.ppo import Advantage
from aligner.config.reward import has_model
from aligner.config.validate_reward import parts_problems, verifier_problems


def reward_problems(reward: Any) -> Iterator[str]:
    yield from verifier_problems("reward", reward)
    yield from parts_problems(reward)
    yield from _http(reward)
    if has_model(reward) and reward.checkpoint is None:
        yield "reward.kind=model (or such a part) needs reward.checkpoint (a converted reward model)"
    if not has_model(reward) and reward.standardise:
        yield "reward.standardise=true needs a reward model: reward.kind=model, or a part of kind model"
    if not has_model(reward) and reward.checkpoint is not None:
        yield f"reward.checkpoint={reward.checkpoint} needs a reward model: reward.kind=model, or a part of kind model"


def _http(reward: Any) -> Iterator[str]:
    if reward.kind is not RewardKind.http:
        if reward.url is not None:
            yield f"reward.url={reward.url} needs reward.kind=http, and it is {reward.kind.name}"
        return
    parts = urlsplit(reward.url or "")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        yield f"reward.kind=http needs reward.url=http://HOST:PORT/PATH, and it is {reward.url}"
    elif parts.username is not None:
        yield "reward.url must not hold a user name or password: settings are recorded"
    if reward.deadline < reward.timeout:
        yield f"reward.deadline={reward.deadline:g} is less than reward.timeout={reward.timeout:g}, that of one attempt: raise it"


def served_problems(config: CriticConfig | RewardServerConfig) -> Iterator[str]:
    serving, reward = config.serving, config.reward
    for name in ("port", "metrics_port"):
        if (getattr(serving, name) or 0) > 65535:
            yield f"serving.{name}={getattr(serving, name)} must be at most 65535"
    for name in ("bind", "advertise_host"):
        if getattr(serving, name) == "":
            yield f"serving.{name} is empty: give an address, or leave it out"
    if serving.port and serving.port == serving.metrics_port:
        yield f"serving.port and serving.metrics_port are both {serving.port}: they must differ"
    if serving.token_file is not None and not Path(serving.token_file).is_file():
        yield f"serving.token_file={serving.token_file}: there is no such file"
    loads = isinstance(config, RewardServerConfig) or reward.place is RewardPlace.critic
    if loads and reward.checkpoint is not None and not Path(reward.checkpoint).exists():
        yield f"reward.checkpoint={reward.checkpoint}: there is no such folder or .nemo archive"
    if reward.place is RewardPlace.actor and has_model(reward):
        yield "reward.kind=model (or such a part) with reward.place=actor: the actor job runs no reward model, leave reward.place out"
    if isinstance(config, RewardServerConfig) and reward.place is not RewardPlace.server:
        yield f"reward.place={reward.place.name}: a reward job is asked where it is server; set reward.place=server in all jobs"


def critic_trust_problems(config: ActorConfig) -> Iterator[str]:
    """Warm-up and fall-back."""
    ppo, steps = config.ppo, config.run.max_steps
    for name in ("critic_warmup_steps", "critic_warmup_max_steps", "critic_fallback_steps"):
        if getattr(ppo, name) and config.critic.place is CriticPlace.none:
            yield f"ppo.{name}={getattr(ppo, name)} needs a critic, and critic.place is none"
    for name in ("critic_warmup_max_steps", "critic_fallback_steps"):
        if getattr(ppo, name) and ppo.advantage is not Advantage.gae:
            yield f"ppo.{name}={getattr(ppo, name)} needs ppo.advantage=gae, whose explained variance decides"
    for name in ("critic_warmup_steps", "critic_warmup_max_steps"):
        if (getattr(ppo, name) or 0) >= steps > 0:
            yield f"ppo.{name}={getattr(ppo, name)} leaves no step of run.max_steps={steps} for the policy"
    if ppo.critic_warmup_max_steps is not None and ppo.critic_warmup_max_steps < ppo.critic_warmup_steps:
        yield (
            f"ppo.critic_warmup_max_steps={ppo.critic_warmup_max_steps} is less than "
            f"ppo.critic_warmup_steps={ppo.critic_warmup_steps}: raise it, or leave it out"
        )


def budget_problems(config: Any) -> Iterator[str]:
    for group in ("ppo", "critic", "reward", "train"):
        tokens = getattr(getattr(config, group, None), "micro_batch_tokens", None)
        if tokens is not None and config.parallel.virtual_pipeline is not None:
            yield (
                f"{group}.micro_batch_tokens={tokens} does not go with parallel.virtual_pipeline="
                f"{config.parallel.virtual_pipeline}, whose micro-batches have one shape: leave one out"
            )
