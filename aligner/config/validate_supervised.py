"""Checks between the keys of supervised jobs. Each names the keys and their values, and what to change."""

import math
from pathlib import Path
from typing import Any, Iterator

from aligner.config.groups import EngineKind, Overlong
from aligner.config.jobs import RewardTrainingConfig, SFTConfig
from aligner.config.preference import Objective


def supervised_problems(config: Any) -> list[str]:
    """config: of a job with the groups run, train, data and validation of aligner/config/supervised.py."""
    found = [*_length_of_run(config), *_files(config)]
    if isinstance(config, SFTConfig):
        found += [*_sft(config), *_generations(config)]
    if isinstance(config, RewardTrainingConfig):
        found += _preference(config)
    return found


def _length_of_run(config: Any) -> Iterator[str]:
    if config.train.epochs is None and config.run.max_steps is None:
        yield "train.epochs=null and run.max_steps=null: the run would have no end, set one of them"


def _files(config: Any) -> Iterator[str]:
    data = config.data
    for name in ("train", "validation"):
        path = getattr(data, name)
        if path not in (None, "missing") and not Path(path).exists():
            yield f"data.{name}={path}: there is no such file"
    if data.validation is not None and data.holdout:
        yield f"data.holdout={data.holdout} holds out rows of data.train, and data.validation={data.validation} is given: leave one out"
    if data.holdout == 1:
        yield "data.holdout=1 leaves no row to train on: lower it"


def _sft(config: SFTConfig) -> Iterator[str]:
    if config.sft.packing and config.parallel.virtual_pipeline is not None:
        yield (
            f"sft.packing=true does not go with parallel.virtual_pipeline={config.parallel.virtual_pipeline}, whose micro-batches have "
            "one shape: leave one out"
        )
    if config.sft.packing and (config.train.micro_batch_tokens or config.data.max_length) < config.data.max_length:
        yield (
            f"sft.packing=true packs up to train.micro_batch_tokens={config.train.micro_batch_tokens} tokens, which is less than "
            f"data.max_length={config.data.max_length}: raise it, or leave it out"
        )


def _preference(config: RewardTrainingConfig) -> Iterator[str]:
    preference, regresses = config.preference, config.preference.objective is Objective.regression
    objective = f"preference.objective={preference.objective.name}"
    if regresses and not preference.attributes:
        yield f"{objective} needs preference.attributes, the weight of each by its name (preference.attributes.helpfulness=1.0)"
    if preference.attributes and not regresses:
        names = ", ".join(preference.attributes)
        yield f"preference.attributes ({names}) needs preference.objective=regression, and it is {preference.objective.name}"
    if bad := [name for name, weight in preference.attributes.items() if not math.isfinite(weight)]:
        yield f"preference.attributes.{bad[0]}={preference.attributes[bad[0]]} must be a finite number"
    if preference.attributes and not any(preference.attributes.values()):
        yield "preference.attributes are all 0, and so would every score be: give one of them a weight"
    if preference.centre and regresses:
        yield f"preference.centre={preference.centre} has no meaning with {objective}, whose scores have values to reach: set it to 0"
    if config.data.overlong is Overlong.truncate:
        yield "data.overlong=truncate: a response that is cut is another one, set it to drop or refuse"


def _generations(config: SFTConfig) -> Iterator[str]:
    count, held_out = config.validation.generations, config.data.validation is not None or config.data.holdout > 0
    if count and not (config.validation.every and held_out):
        yield (
            f"validation.generations={count} needs validation.every > 0 and held-out rows (data.validation, or data.holdout > 0): "
            "their prompts are answered"
        )
    if config.engine.kind is not EngineKind.torch:
        yield f"engine.kind={config.engine.kind.name}: the samples of train_sft.py come from the embedded engine, set engine.kind=torch"
    if config.refit.sync_every != 1:
        yield f"refit.sync_every={config.refit.sync_every} has no meaning here: the engine is refitted before each validation; leave it out"
    longest = config.engine.max_output_len
    if config.validation.min_output_len > longest:
        yield f"validation.min_output_len={config.validation.min_output_len} exceeds engine.max_output_len={longest}"
