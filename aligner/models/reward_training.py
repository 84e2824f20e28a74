"""A reward model that is trained: a backbone with a score head, on comparisons of responses or on attributes of single ones."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Mapping, Optional

import torch
from torch import Tensor

from aligner.config.groups import ModelConfig, OptimConfig
from aligner.config.preference import Objective, PreferenceConfig
from aligner.models.checkpoint import checkpoint_shape
from aligner.models.critic import last_token
from aligner.models.micro_batches import MicroBatch
from aligner.models.optimizer import Update
from aligner.models.policy import not_finite
from aligner.models.reward_head import RewardHead
from aligner.models.reward_model import last_outputs
from aligner.models.trainable import Saving, TrainableModel
from aligner.ops.preference_loss import COMPARISON_SUMS, pairwise_loss, plackett_luce_loss, regression_loss
from aligner.parallel.topology import Topology

SCORE = RewardHead(attributes=("reward",), weights=(1.0,))
"""The head of a model that is trained on comparisons."""


@dataclass
class PreferenceBatch:
    """Responses of one optimizer step. Rows of a group answer one prompt and are compared with each other; ranks order them, 0 is best."""

    tokens: Tensor  # [B, S] int64
    lengths: Tensor  # [B] int64
    groups: Tensor  # [B] int64
    ranks: Tensor  # [B] int64
    margins: Tensor  # [B] float32, by which the row is to be better than those below it
    wanted: Tensor  # [B, A] float32, values of the attributes; only for regression
    given: Tensor  # [B, A] bool, where there is a value


class TrainedRewardModel:
    """Every method is collective over the job, with the same arguments and the same results on every rank."""

    def __init__(
        self,
        model: ModelConfig,
        optim: OptimConfig,
        topology: Topology,
        *,
        preference: PreferenceConfig,
        micro_batch_size: int,
        micro_batch_tokens: Optional[int] = None,
    ) -> None:
        """Backbone from model.checkpoint; a score head that it lacks, or that is to be fresh, starts at zero. Raises ValueError where
        the checkpoint's head gives other attributes than preference.attributes."""
        self.topology, self.preference = topology, preference
        found = checkpoint_shape(model.checkpoint)
        reward = head_of(preference)
        if not preference.fresh_head and found.head != "lm":
            _refuse_other_outputs(model.checkpoint, found.reward or SCORE, reward)
        self.shape = replace(found.with_layers(model.num_layers).with_head("score"), reward=reward)
        self.model = TrainableModel(
            model,
            self.shape,
            optim,
            topology,
            micro_batch_size=micro_batch_size,
            micro_batch_tokens=micro_batch_tokens,
            head_lr_multiplier=preference.head_lr_multiplier,
            fresh_head=preference.fresh_head,
        )

    def train(self, batch: PreferenceBatch) -> dict[str, float]:
        """One optimizer step. A loss or gradient that is not finite skips it on every rank (`skipped` 1), as does a batch in which
        nothing is compared and nothing has a value (`empty` 1)."""
        count = self._denominator(batch)
        sums, update = self.model.train_step(
            batch.tokens,
            batch.lengths,
            self._fields(batch, useful=count > 0),
            loss=partial(self._loss, count),
            together=batch.groups,
        )
        told = self._regression_metrics(sums) if self._regresses else _comparison_metrics(sums)
        return {"loss": sums["loss"], **told, **_update_metrics(update), "empty": float(count == 0)}

    @property
    def _regresses(self) -> bool:
        return self.preference.objective is Objective.regression

    def _denominator(self, batch: PreferenceBatch) -> int:
        """Values, or groups in which a response is better than another: of the whole mini-batch."""
        if self._regresses:
            return int(batch.given.sum())
        return compared_groups(batch.groups, batch.ranks)

    def _fields(self, batch: PreferenceBatch, *, useful: bool) -> dict[str, Tensor]:
        fields = {"mask": torch.full((len(batch.lengths),), useful)}
        if not self._regresses:
            return {**fields, "groups": batch.groups, "ranks": batch.ranks, "margins": batch.margins}
        for i in range(self.shape.outputs):
            fields |= {f"wanted/{i}": batch.wanted[:, i], f"given/{i}": batch.given[:, i]}
        return fields

    def _loss(self, denominator: int, micro: MicroBatch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        outputs = last_token(micro, output)
        loss = self._regression if self._regresses else self._comparison
        try:
            return loss(denominator, micro, outputs)
        except FloatingPointError:
            return not_finite(output, self._sums)

    @property
    def _sums(self) -> tuple[str, ...]:
        """Names of what the loss tells."""
        if not self._regresses:
            return COMPARISON_SUMS
        return tuple(f"{name}/{i}" for name in ("squared_error", "values") for i in range(self.shape.outputs))

    def _comparison(self, denominator: int, micro: MicroBatch, outputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        fields, how = micro.fields, {"denominator": denominator, "centre": self.preference.centre}
        rows = {"groups": fields["groups"], "ranks": fields["ranks"], "mask": _real(micro)}
        if self.preference.objective is Objective.plackett_luce:
            return plackett_luce_loss(outputs[:, 0], **rows, **how)
        return pairwise_loss(outputs[:, 0], margins=fields["margins"], **rows, **how)

    def _regression(self, denominator: int, micro: MicroBatch, outputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        wanted, given = (
            torch.stack([micro.fields[f"{name}/{i}"] for i in range(outputs.size(1))], 1)
            for name in ("wanted", "given")
        )
        return regression_loss(outputs, wanted, given, denominator=denominator)

    def _regression_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Root mean squared errors, of the attributes that had a value."""
        found = {}
        for i, name in enumerate(self.shape.reward.attributes):
            if values := sums[f"values/{i}"]:
                found[f"rmse/{name}"] = (sums[f"squared_error/{i}"] / values) ** 0.5
        return found

    def outputs(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """tokens [B, S], lengths [B] -> [B, A] float32: what the head says at the last token of each row."""
        micro = self.model.micro_batches(tokens, lengths, {})
        return last_outputs(self.model.plain_chunks, micro, self.topology, (tokens.size(0), self.shape.outputs))

    def describe(self, *, mean: float, std: float, count: int) -> None:
        """The size of the scores on held-out responses, to be saved with the model from now on."""
        self.shape = replace(self.shape, reward=replace(self.shape.reward, mean=mean, std=std, count=count))
        self.model.shape = self.shape

    def save(self, folder: Path, *, extra: Mapping[str, Any] = {}, beside: bool = False) -> Saving:
        return self.model.save(folder, extra=extra, beside=beside)

    def load(self, folder: Path) -> dict[str, Any]:
        """Weights, optimizer and the size of the scores; returns what was saved as `extra`. Raises ValueError where the head that was saved
        gives other attributes."""
        saved = checkpoint_shape(folder).reward
        if saved.attributes != self.shape.reward.attributes:
            raise ValueError(
                f"{folder} was saved with a head that gives {', '.join(saved.attributes)}, and this run trains "
                f"{', '.join(self.shape.reward.attributes)}: resume with preference.attributes as they were, in their order"
            )
        extra = self.model.load(folder)
        self.shape = replace(self.shape, reward=replace(saved, weights=self.shape.reward.weights))
        self.model.shape = self.shape
        return extra

    @property
    def step_count(self) -> int:
        return self.model.step_count


def head_of(preference: PreferenceConfig) -> RewardHead:
    """What the head of a model with these settings says."""
    if preference.objective is not Objective.regression:
        return SCORE
    return RewardHead(tuple(preference.attributes), tuple(map(float, preference.attributes.values())))


def compared_groups(groups: Tensor, ranks: Tensor) -> int:
    """How many groups have a response that is better than another. groups, ranks [B] int64."""
    best: dict[int, set[int]] = {}
    for group, rank in zip(groups.tolist(), ranks.tolist(), strict=True):
        best.setdefault(group, set()).add(rank)
    return sum(len(found) > 1 for found in best.values())


def _real(micro: MicroBatch) -> Tensor:
    """[m] bool: the rows that are not padding."""
    return torch.arange(len(micro.lengths), device=micro.lengths.device) < len(micro.rows)


def _comparison_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    groups, responses = max(sums["groups"], 1.0), max(sums["responses"], 1.0)
    mean = sums["score"] / responses
    return {
        "accuracy": sums["correct"] / groups,
        "margin": sums["margin"] / groups,
        "score": mean,
        "score_std": max(0.0, sums["score_square"] / responses - mean**2) ** 0.5,
    }


def _update_metrics(update: Update) -> dict[str, float]:
    skipped = float(update.skipped)
    return {"grad_norm": update.grad_norm, "learning_rate": update.learning_rate, "skipped": skipped}


def _refuse_other_outputs(checkpoint: str, found: RewardHead, wanted: RewardHead) -> None:
    if found.attributes != wanted.attributes:
        raise ValueError(
            f"model.checkpoint={checkpoint} has a head that gives {', '.join(found.attributes)}, and this run trains "
            f"{', '.join(wanted.attributes)}: set preference.fresh_head=true"
        )
