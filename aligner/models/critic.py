"""The critic: a backbone with a value head.

The shift happens here: values[b, t] is V of the state before tokens[b, t] is chosen, so it is read from the hidden state at t - 1;
values[b, 0] = 0. bootstrap[b] is read from the last token."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Mapping, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.config.groups import ModelConfig, OptimConfig
from aligner.models import pipeline
from aligner.models.build import unwrap
from aligner.models.checkpoint import checkpoint_shape
from aligner.models.micro_batches import MicroBatch
from aligner.models.policy import not_finite
from aligner.models.trainable import Saving, TrainableModel
from aligner.models.training_state import saved_extra
from aligner.ops.masks import clean
from aligner.ops.value_loss import clipped_value_loss
from aligner.ops.value_scale import ValueScale
from aligner.parallel.collectives import broadcast_object
from aligner.parallel.topology import Topology

SCALE = "value_scale"


@dataclass
class CriticMiniBatch:
    """Rows of one optimizer step."""

    tokens: Tensor  # [B, S] int64
    lengths: Tensor  # [B] int64
    mask: Tensor  # [B, S] bool
    old_values: Tensor  # [B, S] float32, as inferred
    returns: Tensor  # [B, S] float32


class CriticModel:
    """Every method is collective over the job, with the same arguments and the same results on every rank."""

    def __init__(
        self,
        model: ModelConfig,
        optim: OptimConfig,
        topology: Topology,
        *,
        micro_batch_size: int,
        micro_batch_tokens: Optional[int] = None,
        value_clip: Optional[float] = 0.2,
        head_lr_multiplier: float = 1.0,
        normalisation_rate: Optional[float] = None,
        fresh_head: bool = False,
    ) -> None:
        """Backbone from model.checkpoint, and a value or score head where it has one: fresh_head, or one that it lacks, starts at zero.
        value_clip None: a plain squared error.

        normalisation_rate: of the average of the returns' moments by which they are normalised (PopArt; value_clip is then in
        normalised units); None: they are not."""
        self.topology, self.value_clip, self._rate = topology, value_clip, normalisation_rate
        self.scale = ValueScale(normalisation_rate or 0.0)
        self.shape = checkpoint_shape(model.checkpoint).with_layers(model.num_layers).with_head("value")
        self.model = TrainableModel(
            model,
            self.shape,
            optim,
            topology,
            micro_batch_size=micro_batch_size,
            micro_batch_tokens=micro_batch_tokens,
            head_lr_multiplier=head_lr_multiplier,
            head_bias=self.normalises,
            fresh_head=fresh_head,
        )

    @property
    def normalises(self) -> bool:
        return self._rate is not None

    def values(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [B, S], lengths [B] -> (values [B, S] float32, bootstrap [B] float32).

        values[:, 0] = 0, and 0 from lengths[b] on; bootstrap is V after the last token, whether or not the row terminated."""
        micro = self.model.micro_batches(tokens, lengths, {})
        parts = pipeline.forward(self.model.plain_chunks, micro, self.topology, read=partial(_read_values, self.scale))
        values = pipeline.to_global([v for v, _ in parts], micro, tuple(tokens.shape), self.topology)
        bootstrap = pipeline.to_global([b for _, b in parts], micro, (tokens.size(0),), self.topology)
        return values, bootstrap

    def observe(self, returns: Tensor, mask: Tensor) -> None:
        """Before a train step's mini-batches: take its returns [B, S] under mask [B, S] into the normalisation, where there is one.

        Values stay what they were. Raises FloatingPointError where a return under the mask is not finite."""
        if not self.normalises:
            return
        change = self.scale.observe(returns, mask)
        biases = None
        if self.topology.is_last_stage:
            biases = unwrap(self.model.plain_chunks[-1]).output_layer.rescale(change)
        if self.topology.pipeline > 1:
            biases = broadcast_object(biases, self.topology.last_stage_rank, self.topology.pipeline_group)
        self.scale.settle(change, *biases)

    def train(self, batch: CriticMiniBatch) -> dict[str, float]:
        """One optimizer step on the clipped squared error. Metrics are means over the mini-batch's tokens; `loss` is of normalised
        values where they are normalised.

        A loss or gradient that is not finite skips the step on every rank (`skipped` 1), as does a mask without a
        token (`skipped` and `empty` 1). Raises FloatingPointError where a return or
        an old value under the mask is not finite."""
        fields = {
            "mask": batch.mask,
            "old_values": self.scale.normalised(clean(batch.old_values, batch.mask, "old_values")),
            "returns": self.scale.normalised(clean(batch.returns, batch.mask, "returns")),
        }
        tokens = int(batch.mask.sum())
        sums, update = self.model.train_step(batch.tokens, batch.lengths, fields, loss=partial(self._loss, tokens))
        count = max(tokens, 1)
        return {
            "loss": sums["loss"],
            "value": self.scale.denormalised(sums["value"] / count),
            "return": self.scale.denormalised(sums["return"] / count),
            "clip_fraction": sums["value_clipped"] / count,
            "grad_norm": update.grad_norm,
            "learning_rate": update.learning_rate,
            "skipped": float(update.skipped),
            "empty": float(tokens == 0),
            **({"scale": self.scale.scale, "offset": self.scale.offset} if self.normalises else {}),
        }

    def _loss(self, denominator: int, micro: MicroBatch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        values = _before_each_token(output)
        try:
            return clipped_value_loss(
                values,
                micro.fields["old_values"],
                micro.fields["returns"],
                micro.fields["mask"],
                clip=self.value_clip,
                denominator=denominator,
            )
        except FloatingPointError:
            return not_finite(values, ("value", "return", "value_clipped", "value_loss", "tokens"))

    def save(self, folder: Path, *, extra: Mapping[str, Any] = {}, beside: bool = False) -> Saving:
        extra = {**extra, **({SCALE: asdict(self.scale)} if self.normalises else {})}
        return self.model.save(folder, extra=extra, beside=beside)

    def load(self, folder: Path) -> dict[str, Any]:
        """Weights, optimizer and normalisation; returns what was saved as `extra`. Raises ValueError where one of the two was saved
        without normalisation and the other has it: the head of the one says something else than that of the other."""
        saved = saved_extra(folder, self.topology).get(SCALE)
        if (saved is not None) != self.normalises:
            was, now = ("popart", "none") if saved else ("none", "popart")
            raise ValueError(
                f"{folder} was saved with critic.value_normalisation={was}, this job has {now}: resume with {was}"
            )
        extra = self.model.load(folder)
        if self.normalises:
            self.scale = ValueScale(**{**extra.pop(SCALE), "rate": self._rate})
        return extra

    def reset(self) -> None:
        """Back to the weights of model.checkpoint, with nothing learned."""
        self.scale = ValueScale(self._rate or 0.0)
        self.model.reset()

    @property
    def step_count(self) -> int:
        return self.model.step_count

    @property
    def learning_rate(self) -> float:
        return self.model.learning_rate


def _before_each_token(output: Tensor) -> Tensor:
    """[m, W, 1] of the head -> [m, W]: V before each token, 0 before the first."""
    return F.pad(output[:, :-1, 0], (1, 0))


def last_token(micro: MicroBatch, output: Tensor) -> Tensor:
    """[m, W, A] of the head -> [m, A]: what it says at the last token of each row."""
    rows = torch.arange(len(output), device=output.device)
    return output[rows, micro.lengths - 1]


def _read_values(scale: ValueScale, micro: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor]:
    at, output = micro.positions, scale.denormalised(output)
    values = torch.where(at < micro.lengths[:, None], _before_each_token(output), 0.0)
    return values, last_token(micro, output)[:, 0]
