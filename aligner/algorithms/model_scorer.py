"""The reward model of a job that scores with one: alone (reward.kind=model), or as one of reward.parts."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Optional

from aligner.algorithms.assemble import Job
from aligner.config.jobs import CriticConfig, RewardServerConfig
from aligner.config.reward import RewardPart, has_model, model_part, part_name
from aligner.data.batch import CriticRows, Score
from aligner.data.tokenizer import Tokenizer
from aligner.models.checkpoint_folder import TOKENIZER
from aligner.models.model_config import ModelShape
from aligner.models.reward_model import RewardModel
from aligner.runtime.errors import UserError


class ModelScorer:
    """Held by every rank of the job's grid."""

    def __init__(self, model: RewardModel, part: Optional[RewardPart] = None) -> None:
        """part: the entry of reward.parts that the model is; absent: the model is the whole reward."""
        self.model, self._part = model, part

    @property
    def shape(self) -> ModelShape:
        return self.model.shape

    def scores(self, rows: CriticRows) -> list[Score]:
        """One a row, with the attributes that it is made of where there are several. Of a part it is what is added to the sum: weight
        times score, recorded as PartsVerifier records (NAME, NAME/attribute). Collective; the same on every rank."""
        outputs = self.model.outputs(rows.tokens, rows.lengths)
        names = self.shape.reward.attributes if self.shape.outputs > 1 else ()
        attributes = [dict(zip(names, row)) for row in outputs.tolist()]
        values = self.model.score(outputs).tolist()
        return [self._score(value, own) for value, own in zip(values, attributes, strict=True)]

    def _score(self, value: float, attributes: dict[str, float]) -> Score:
        if not math.isfinite(value):
            return Score(math.nan, error=f"the reward model's score is {value}")
        if self._part is None:
            return Score(value, attributes)
        name = part_name(self._part)
        return Score(self._part.weight * value, {name: value, **{f"{name}/{a}": v for a, v in attributes.items()}})


def build_model_scorer(config: CriticConfig | RewardServerConfig, job: Job) -> Optional[ModelScorer]:
    """None where no model scores. Raises UserError for a model of another tokenizer."""
    reward = config.reward
    if not has_model(reward):
        return None
    refuse_other_tokenizer(reward.checkpoint, job.tokenizer)
    settings = replace(config.model, checkpoint=reward.checkpoint, num_layers=None)
    cut = {"micro_batch_size": reward.micro_batch_size, "micro_batch_tokens": reward.micro_batch_tokens}
    model = RewardModel(settings, job.topology, standardise=reward.standardise, **cut)
    return ModelScorer(model, model_part(reward))


def refuse_other_tokenizer(checkpoint: str, tokenizer: Tokenizer) -> None:
    """A reward model is given the policy's token ids. Raises UserError where its own tokenizer, if its folder has one, is another."""
    own = Path(checkpoint) / TOKENIZER
    if own.is_dir() and Tokenizer(own).fingerprint() != tokenizer.fingerprint():
        raise UserError(
            f"reward.checkpoint={checkpoint} has another tokenizer than model.checkpoint ({tokenizer.folder}): it would score ids that "
            "mean something else; take a reward model of the same tokenizer, or serve it as reward.kind=http, which is given texts"
        )
