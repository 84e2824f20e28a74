"""Checks between the keys of rollouts: engine, sampling and refit. Each names the keys and their values, and what to change."""

from typing import Iterator

from aligner.config.groups import EngineKind
from aligner.config.jobs import ActorConfig

# Each changes the distribution that is sampled from; the policy's log-probs, which the ratio is made of, know the temperature alone
BIASED_IN_TRAINING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "min_output_len": 0}
NOT_IN_TRTLLM = ("min_p", "repetition_penalty", "min_output_len")


def rollout_problems(config: ActorConfig) -> list[str]:
    return [*_engine(config), *_sampling(config), *_refit(config)]


def _engine(config: ActorConfig) -> Iterator[str]:
    engine = config.engine
    if engine.kind is EngineKind.trtllm:
        yield from _trtllm(config)
    elif engine.tensor not in (None, 1):
        yield f"engine.tensor={engine.tensor} needs engine.kind=trtllm: with the torch engine every rank has its own"


def _trtllm(config: ActorConfig) -> Iterator[str]:
    engine = config.engine
    if config.parallel.timeout < engine.timeout:
        yield (
            f"parallel.timeout={config.parallel.timeout:g} must be at least engine.timeout={engine.timeout:g}: the other ranks of a "
            "generation group wait in a collective while one talks to TensorRT-LLM"
        )
    if config.ppo.importance_cap is not None and config.sampling.temperature != 1:
        yield (
            f"ppo.importance_cap={config.ppo.importance_cap:g} weighs by the engine's log-probs, and whether TensorRT-LLM's are those of "
            f"sampling.temperature={config.sampling.temperature:g} was never verified: set sampling.temperature=1, or engine.kind=torch"
        )
    for name in NOT_IN_TRTLLM:
        if (value := getattr(config.validation, name)) != BIASED_IN_TRAINING[name]:
            yield f"validation.{name}={value} is not there with engine.kind=trtllm: leave it out, or set engine.kind=torch"


def _sampling(config: ActorConfig) -> Iterator[str]:
    chosen = {name: getattr(config.sampling, name) for name in BIASED_IN_TRAINING}
    given = [(name, value) for name, value in chosen.items() if value != BIASED_IN_TRAINING[name]]
    if given:
        said = ", ".join(f"sampling.{name}={value}" for name, value in given)
        yield (
            f"{said}: training samples from the policy's own distribution, or the ratio of log-probs would be biased; leave it out "
            f"(validation.{given[0][0]} and generate.py may use it)"
        )
    if "" in config.sampling.stop_strings:
        yield "sampling.stop_strings holds an empty string, which every response would end with"
    longest = config.engine.max_output_len
    if config.validation.min_output_len > longest:
        yield f"validation.min_output_len={config.validation.min_output_len} exceeds engine.max_output_len={longest}"
    if wrong := [i for i in config.sampling.stop_token_ids if i < 0]:
        yield f"sampling.stop_token_ids={config.sampling.stop_token_ids} must not hold {wrong[0]}: ids count from 0"


def _refit(config: ActorConfig) -> Iterator[str]:
    every, cap = config.refit.sync_every, config.ppo.importance_cap
    if every > 1 and cap is None:
        yield (
            f"refit.sync_every={every} trains on responses of older weights, which biases the policy without a correction: "
            "set ppo.importance_cap (2 is usual), or refit.sync_every=1"
        )
    if cap is not None and 0 < cap < 1:
        yield f"ppo.importance_cap={cap:g} must be at least 1: less would cut tokens that engine and policy agree on"
    if every > 1 and config.engine.offload_during_training:
        yield (
            f"refit.sync_every={every} needs the engine to keep its weights, and engine.offload_during_training=true gives them back "
            "each step: set one of them to its default"
        )
