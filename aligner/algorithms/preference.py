"""What train_reward_model.py trains: a reward model as a Learner (algorithms/supervised.py), and what held-out rows say of it."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import torch
from torch import Tensor

from aligner.algorithms.assemble import Job
from aligner.algorithms.pairs import Half
from aligner.algorithms.supervised import Evaluation
from aligner.config.jobs import RewardTrainingConfig
from aligner.config.preference import Objective
from aligner.data.preference_rows import PreferenceRow, load_preferences, padded_rows
from aligner.data.rows import Rows
from aligner.data.tokenizer import Tokenizer
from aligner.models.reward_training import PreferenceBatch, TrainedRewardModel
from aligner.ops.preference_loss import pairwise_loss, plackett_luce_loss
from aligner.ops.preference_metrics import calibration, clustered_mean, correlation, ordered_pairs

LOSS_GROUPS = 64  # compared at once: memory grows with the square of their responses


def load_rows(config: RewardTrainingConfig, tokenizer: Tokenizer) -> Rows[PreferenceRow]:
    """Lines to train on and held-out ones."""
    limit = config.validation.max_rows
    return load_preferences(config.data, config.preference, tokenizer=tokenizer, max_held_out=limit)


def build_learner(config: RewardTrainingConfig, job: Job, rows: Rows[PreferenceRow]) -> "PreferenceLearner":
    """The model from its settings; rank 0 keeps the reliability table of the last validation in the run's folder."""
    model = TrainedRewardModel(
        config.model,
        config.optim,
        job.topology,
        preference=config.preference,
        micro_batch_size=config.train.micro_batch_size,
        micro_batch_tokens=config.train.micro_batch_tokens,
    )
    keep = {"keep_calibration": job.folder.write_calibration} if job.topology.is_reporter else {}
    return PreferenceLearner(model, pad_id=job.tokenizer.pad_id, held_out=rows.held_out, **keep)


class PreferenceLearner:
    """All methods are collective over the job."""

    def __init__(
        self,
        model: TrainedRewardModel,
        *,
        pad_id: int,
        held_out: Sequence[PreferenceRow],
        keep_calibration: Callable[[dict[str, Any]], None] = lambda table: None,
    ) -> None:
        """held_out: whose responses measure the size of the scores that a checkpoint is saved with. keep_calibration: is given the
        reliability table of each validation."""
        self.model, self.pad_id, self.held_out = model, pad_id, held_out
        self.keep_calibration = keep_calibration
        self._measured = False  # whether the model says the size of its present scores

    def collate(self, rows: Sequence[PreferenceRow]) -> PreferenceBatch:
        tensor = self.model.topology.tensor
        tokens, lengths = padded_rows(
            [ids for row in rows for ids in row.ids], pad_id=self.pad_id, tensor_parallel=tensor
        )
        wanted, given = self._attributes(rows)
        return PreferenceBatch(
            tokens=tokens,
            lengths=lengths,
            groups=torch.tensor([i for i, row in enumerate(rows) for _ in row.ids]),
            ranks=torch.tensor([rank for row in rows for rank in row.ranks]),
            margins=torch.tensor([margin for row in rows for margin in row.margins]),
            wanted=wanted,
            given=given,
        )

    def _attributes(self, rows: Sequence[PreferenceRow]) -> tuple[Tensor, Tensor]:
        names = self.model.shape.reward.attributes
        values = [[(row.attributes or {}).get(name) for name in names] for row in rows for _ in row.ids]
        wanted = torch.tensor([[0.0 if v is None else v for v in line] for line in values])
        return wanted, torch.tensor([[v is not None for v in line] for line in values])

    def tokens(self, rows: Sequence[PreferenceRow]) -> int:
        return sum(row.tokens for row in rows)

    def train(self, batch: PreferenceBatch) -> dict[str, float]:
        self._measured = False
        return self.model.train(batch)

    def evaluate(self, rows: Sequence[PreferenceRow]) -> Evaluation:
        """The loss, how well the scores order or predict, and their mean and deviation, which are saved with the model."""
        batch = self.collate(rows)
        outputs = self.model.outputs(batch.tokens, batch.lengths)
        scores = self.model.shape.reward.merged(outputs)
        prompts = [asked for row in rows for asked in [row.asked] * len(row.ids)]
        regresses = self.model.preference.objective is Objective.regression
        metrics = self._fit(outputs, batch) if regresses else self._order(scores, batch, prompts)
        metrics |= self._measure(scores) | {"count": float(len(rows)), "prompts": float(len(set(prompts)))}
        quality = -metrics["loss"] if regresses else metrics["accuracy"]
        return Evaluation(metrics, quality, self.tokens(rows), _records(rows, scores))

    def _measure(self, scores: Tensor) -> dict[str, float]:
        """Mean and deviation (of the population) of the responses' scores."""
        wide = scores.double()
        mean, std = float(wide.mean()), float(wide.std(correction=0))
        if math.isfinite(mean) and math.isfinite(std):
            self.model.describe(mean=mean, std=std, count=len(scores))
            self._measured = True
        return {"score": mean, "score_std": std}

    def _order(self, scores: Tensor, batch: PreferenceBatch, prompts: list[str]) -> dict[str, float]:
        pairs = ordered_pairs(scores, batch.groups, batch.ranks)
        numbers = {asked: i for i, asked in enumerate(dict.fromkeys(prompts))}
        prompt_of = dict(zip(batch.groups.tolist(), prompts, strict=True))
        clusters = torch.tensor([numbers[prompt_of[group]] for group in pairs.groups.tolist()])
        accuracy, band = clustered_mean(pairs.right, pairs.weights, clusters)
        error, table = calibration(pairs, self.model.preference.calibration_bins)
        rows = [asdict(line) for line in table]
        self.keep_calibration({"updates": self.model.step_count, "expected_calibration_error": error, "bins": rows})
        margin = float((pairs.weights * pairs.margins).sum() / pairs.weights.sum())
        return {
            "loss": self._held_out_loss(scores, batch),
            "accuracy": accuracy,
            "accuracy_ci95": band,
            "margin": margin,
            "calibration_error": error,
        }

    def _held_out_loss(self, scores: Tensor, batch: PreferenceBatch) -> float:
        """As in training, without the margin and the centre's part."""
        total, count = 0.0, int(batch.groups.max()) + 1
        ranked = self.model.preference.objective is Objective.plackett_luce
        for first in range(0, count, LOSS_GROUPS):
            chosen = (batch.groups >= first) & (batch.groups < first + LOSS_GROUPS)
            rows = (scores[chosen].double(), batch.groups[chosen], batch.ranks[chosen])
            real, no_margin = torch.ones(len(rows[0]), dtype=torch.bool), torch.zeros(len(rows[0]))
            if ranked:
                loss, _ = plackett_luce_loss(*rows, real, denominator=count)
            else:
                loss, _ = pairwise_loss(*rows, no_margin, real, denominator=count)
            total += float(loss)
        return total

    def _fit(self, outputs: Tensor, batch: PreferenceBatch) -> dict[str, float]:
        error = torch.where(batch.given, outputs - batch.wanted, 0.0).double().square()
        found = {"loss": float(error.sum() / batch.given.sum())}
        for i, name in enumerate(self.model.shape.reward.attributes):
            given = batch.given[:, i]
            if given.any():
                found[f"rmse/{name}"] = float(error[given, i].mean()) ** 0.5
                found[f"correlation/{name}"] = correlation(outputs[given, i], batch.wanted[given, i])
        return found

    def save(self, folder: Path, *, extra: Mapping[str, Any], beside: bool) -> Half:
        if self.held_out and not self._measured:  # saved at a step without a validation
            batch = self.collate(self.held_out)
            outputs = self.model.outputs(batch.tokens, batch.lengths)
            self._measure(self.model.shape.reward.merged(outputs))
        return self.model.save(folder, extra=extra, beside=beside)

    def load(self, folder: Path) -> dict[str, Any]:
        extra = self.model.load(folder)
        self._measured = self.model.shape.reward.mean is not None
        return extra


def _records(rows: Sequence[PreferenceRow], scores: Tensor):
    """A JSON object a response, the best of each line first."""
    values = iter(scores.tolist())
    number = 0
    for row in rows:
        own = [next(values) for _ in row.ids]
        for i in sorted(range(len(own)), key=lambda i: row.ranks[i]):
            told = {"origin": row.origin, "prompt": row.prompt, "response": row.texts[i], "score": own[i]}
            aside = {"rank": row.ranks[i]} if row.attributes is None else {"attributes": row.attributes}
            yield {"sample_id": number, **told, **aside}
            number += 1
