"""Checks between keys. Each names the keys and their values, and what to change. The grid is checked where the rank count is known."""

import math
import os
import string
from pathlib import Path
from typing import Any, Iterator

from aligner.config.groups import CriticPlace, ParallelConfig, RewardKind, RewardPlace, Schedule
from aligner.config.jobs import ActorConfig, CriticConfig, RewardServerConfig
from aligner.config.reward import has_model
from aligner.config.validate_algorithm import algorithm_problems
from aligner.config.validate_rollout import rollout_problems
from aligner.config.validate_scoring import budget_problems, reward_problems, served_problems
from aligner.config.validate_supervised import supervised_problems
from aligner.runtime.time_limit import seconds_of

POSITIVE = [
    "run.max_steps",
    "parallel.timeout",
    "parallel.probe_mb",
    "model.num_layers",
    "optim.eps",
    "data.task_size",
    "sampling.temperature",
    "sampling.top_p",
    "sampling.repetition_penalty",
    "validation.top_p",
    "validation.repetition_penalty",
    "engine.max_batch_size",
    "engine.max_input_len",
    "engine.max_output_len",
    "engine.tensor",
    "engine.memory_fraction",
    "engine.timeout",
    "refit.bucket_mb",
    "ppo.rollout_batch_size",
    "ppo.samples_per_prompt",
    "ppo.mini_batch_size",
    "ppo.micro_batch_size",
    "ppo.micro_batch_tokens",
    "ppo.reward_clip",
    "ppo.critic_warmup_max_steps",
    "ppo.epochs",
    "ppo.whiten_min_std",
    "ppo.clip",
    "ppo.clip_high",
    "ppo.constant_length",
    "ppo.overlong_cache",
    "ppo.overlong_length",
    "ppo.importance_cap",
    "ppo.kl_target",
    "ppo.kl_horizon",
    "refit.sync_every",
    "reward.workers",
    "reward.timeout",
    "reward.memory_mb",
    "reward.deadline",
    "reward.concurrency",
    "reward.batch_size",
    "reward.micro_batch_size",
    "reward.micro_batch_tokens",
    "critic.connect_timeout",
    "critic.request_timeout",
    "critic.heartbeat",
    "critic.infer_batch_size",
    "critic.mini_batch_size",
    "critic.micro_batch_size",
    "critic.micro_batch_tokens",
    "critic.value_normalisation_rate",
    "critic.epochs",
    "critic.value_clip",
    "serving.heartbeat",
    "serving.idle_timeout",
    "serving.silence",
    "serving.max_rows",
    "checkpoint.keep_last",
    "validation.max_prompts",
    "validation.max_rows",
    "data.max_length",
    "train.epochs",
    "train.mini_batch_size",
    "train.micro_batch_size",
    "train.micro_batch_tokens",
    "preference.head_lr_multiplier",
    "preference.calibration_bins",
]

NOT_NEGATIVE = [
    "run.seed",
    "run.max_time_margin",
    "parallel.threads",
    "parallel.training_threads",
    "engine.threads",
    "optim.lr",
    "optim.min_lr",
    "optim.warmup_steps",
    "optim.decay_steps",
    "optim.weight_decay",
    "optim.clip_grad",
    "ppo.entropy_bonus",
    "ppo.kl_coefficient",
    "ppo.truncation_penalty",
    "ppo.overlong_penalty",
    "ppo.critic_warmup_steps",
    "ppo.critic_fallback_steps",
    "reward.format_credit",
    "critic.head_lr_multiplier",
    "critic.reconnect_timeout",
    "serving.port",
    "serving.queue_delay_us",
    "serving.metrics_port",
    "serving.drain_timeout",
    "checkpoint.every",
    "validation.every",
    "validation.temperature",
    "sampling.top_k",
    "sampling.min_p",
    "sampling.min_output_len",
    "validation.top_k",
    "validation.min_p",
    "validation.min_output_len",
    "validation.generations",
    "preference.centre",
    "logging.drift_alarm",
]

LONGEST_NAME = 255  # bytes, on the file systems that Linux uses

# key -> the largest value that is no slip of the keyboard, or that its type holds
AT_MOST = {
    "run.seed": 2**63 - 1,
    "parallel.threads": 1024,
    "parallel.training_threads": 1024,
    "engine.threads": 1024,
    "reward.workers": 1024,
}

AT_MOST_ONE = ["optim.beta1", "optim.beta2", "ppo.gamma", "ppo.lam", "data.holdout", "critic.value_normalisation_rate"]
AT_MOST_ONE += ["engine.memory_fraction"]
AT_MOST_ONE += [f"{group}.{name}" for group in ("sampling", "validation") for name in ("top_p", "min_p")]


def problems(config: Any) -> list[str]:
    """One line a problem of a job's settings; empty where they fit together."""
    found = list(_ranges(config))
    found += _optim(config.optim) if hasattr(config, "optim") else []
    found += degree_problems(config.parallel)
    found += budget_problems(config)
    found += _run(config.run)
    if isinstance(config, ActorConfig):
        found += [*_actor(config), *rollout_problems(config), *_data(config), *algorithm_problems(config)]
    if isinstance(config, (ActorConfig, CriticConfig, RewardServerConfig)):
        found += reward_problems(config.reward)
    if isinstance(config, (CriticConfig, RewardServerConfig)):
        found += served_problems(config)
    if hasattr(config, "train"):
        found += supervised_problems(config)
    return found


def _ranges(config: Any) -> Iterator[str]:
    def given(key: str) -> Any:
        group, name = key.split(".")
        return getattr(getattr(config, group, None), name, None)  # None: absent, or a key of another job

    for group, settings in vars(config).items():
        for name, value in vars(settings).items():
            if isinstance(value, float) and not math.isfinite(value):
                yield f"{group}.{name}={value} must be a finite number"
    for key in POSITIVE:
        if given(key) is not None and given(key) <= 0:
            yield f"{key}={given(key)} must be greater than 0"
    for key in NOT_NEGATIVE:
        if given(key) is not None and given(key) < 0:
            yield f"{key}={given(key)} must not be negative"
    for key, limit in AT_MOST.items():
        if given(key) is not None and given(key) > limit:
            yield f"{key}={given(key)} must be at most {limit}"
    for key in AT_MOST_ONE:
        if given(key) is not None and not 0 <= given(key) <= 1:
            yield f"{key}={given(key)} must lie between 0 and 1"


def _run(run: Any) -> Iterator[str]:
    if not run.name or "/" in run.name or run.name.startswith(".") or run.name != run.name.strip():
        yield f"run.name={run.name!r} must name a folder inside run.dir: no slash, no leading dot, no space at either end"
    elif not run.name.isprintable():
        yield f"run.name={run.name!r} must hold printable characters alone: no line breaks, no control characters"
    elif len(os.fsencode(run.name)) > LONGEST_NAME:
        yield f"run.name is {len(os.fsencode(run.name))} bytes long, and a folder's name has {LONGEST_NAME} at most"
    if not run.dir or "\0" in run.dir:
        yield f"run.dir={run.dir!r} must be the path of a folder"
    try:
        limit = None if run.max_time is None else seconds_of(run.max_time)
    except ValueError as error:
        yield f"run.max_time={error}"
    else:
        if limit is not None and limit <= run.max_time_margin:
            yield f"run.max_time={run.max_time} leaves nothing beside run.max_time_margin={run.max_time_margin:g} s: raise it"


def degree_problems(parallel: ParallelConfig) -> list[str]:
    """What is wrong with the degrees of a grid, whatever the number of ranks and the model (parallel/topology.py checks those)."""
    found = [
        f"parallel.{name}={degree} must be at least 1"
        for name in ("tensor", "pipeline", "virtual_pipeline")
        if (degree := getattr(parallel, name)) is not None and degree < 1
    ]
    if parallel.sequence and parallel.tensor == 1:
        found.append("parallel.sequence=true needs parallel.tensor > 1, and it is 1: set parallel.sequence=false")
    if parallel.virtual_pipeline is not None and parallel.pipeline == 1:
        found.append(
            f"parallel.virtual_pipeline={parallel.virtual_pipeline} needs parallel.pipeline > 1, and it is 1: leave it out"
        )
    return found


def _optim(optim: Any) -> Iterator[str]:
    if optim.schedule is not Schedule.constant and optim.decay_steps <= optim.warmup_steps:
        yield (
            f"optim.schedule={optim.schedule.name} needs optim.decay_steps ({optim.decay_steps}) greater than "
            f"optim.warmup_steps ({optim.warmup_steps})"
        )
    if optim.min_lr > optim.lr:
        yield f"optim.min_lr={optim.min_lr} exceeds optim.lr={optim.lr}"
    for name in ("beta1", "beta2"):
        if getattr(optim, name) == 1:
            yield f"optim.{name}=1 never learns: it must be less than 1"


def _actor(config: ActorConfig) -> Iterator[str]:
    ppo, critic, reward = config.ppo, config.critic, config.reward
    samples = ppo.rollout_batch_size * ppo.samples_per_prompt
    if ppo.mini_batch_size > 0 and samples % ppo.mini_batch_size:
        yield (
            f"ppo.rollout_batch_size={ppo.rollout_batch_size} times ppo.samples_per_prompt={ppo.samples_per_prompt} is {samples} "
            f"samples a step, which is no multiple of ppo.mini_batch_size={ppo.mini_batch_size}"
        )
    patience = critic.request_timeout + critic.reconnect_timeout
    if config.parallel.timeout < patience and critic.place is CriticPlace.remote:
        yield (
            f"parallel.timeout={config.parallel.timeout:g} must be at least critic.request_timeout={critic.request_timeout:g} plus "
            f"critic.reconnect_timeout={critic.reconnect_timeout:g}: "
            "the other ranks wait in a collective while rank 0 waits for the critic"
        )
    if critic.place is CriticPlace.none and reward.place is RewardPlace.critic:
        yield "critic.place=none leaves nobody to score: leave reward.place out, or set it to actor or server"
    if critic.place is not CriticPlace.none and reward.place is RewardPlace.actor and has_model(reward):
        yield "reward.place=actor with reward.kind=model (or such a part): a reward model runs in the critic job, leave reward.place out"
    if critic.place is CriticPlace.none and has_model(reward) and reward.place is not RewardPlace.server:
        yield "reward.kind=model (or such a part) needs a job to run the reward model, and critic.place is none: set reward.place=server"
    for key, endpoint in (("critic", critic.endpoint), ("reward", reward.endpoint)):
        host, _, port = (endpoint or "").rpartition(":")
        if endpoint is not None and (not host or not port.isdigit() or not 0 < int(port) < 65536):
            yield f"{key}.endpoint={endpoint} must be host:port, with a port from 1 to 65535"
    if reward.endpoint is not None and reward.place is not RewardPlace.server:
        yield f"reward.endpoint={reward.endpoint} needs reward.place=server, and it is {reward.place.name}"
    if critic.endpoint is not None and critic.place is not CriticPlace.remote:
        yield f"critic.endpoint={critic.endpoint} needs critic.place=remote, and it is {critic.place.name}"
    if critic.local_overrides and critic.place is not CriticPlace.local:
        yield f"critic.local_overrides needs critic.place=local, and it is {critic.place.name}"


def _data(config: ActorConfig) -> Iterator[str]:
    data = config.data
    if (data.prompts is None) == (data.task is None):
        yield f"exactly one of data.prompts and data.task must be given (data.prompts={data.prompts}, data.task={data.task})"
    for name in ("prompts", "validation_prompts"):
        path = getattr(data, name)
        if path is not None and not Path(path).is_file():
            yield f"data.{name}={path}: there is no such file"
    if data.prompts is not None and config.validation.every > 0 and data.validation_prompts is None:
        yield "validation.every > 0 with data.prompts needs data.validation_prompts (or validation.every=0)"
    if data.task is not None and data.holdout == 0 and config.validation.every > 0:
        yield "data.holdout=0 leaves no problem to validate on: raise it, or set validation.every=0"
    if data.holdout == 1:
        yield "data.holdout=1 leaves no problem to train on: lower it"
    if data.task is not None and data.validation_prompts is not None:
        yield "data.validation_prompts goes with data.prompts; a task holds out problems of its own (data.holdout)"
    if data.task_key not in ("question", "operands"):
        yield f"data.task_key={data.task_key} must be question or operands"
    kinds = [config.reward.kind, *(part.kind for part in config.reward.parts)]
    if RewardKind.task in kinds and data.prompts is not None and data.task is None:
        yield f"reward.kind=task needs data.task: with data.prompts={data.prompts} set reward.kind to another one, maths or model say"
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(data.template) if name is not None}
    except ValueError as error:
        yield f"data.template={data.template!r}: {error}"
    else:
        known = ["prompt", "question"] if data.task is None else ["prompt", "question", "expression"]
        if not names or not names <= set(known):
            some = ", ".join(f"{{{name}}}" for name in known)
            yield f"data.template={data.template!r} must hold one of {some} and no other name (braces themselves are doubled)"
