"""Supervised fine-tuning: cross entropy of the learned tokens, each given all tokens before it in its row.

Legend: B rows of a mini-batch, replicated on the CPU of every rank; S columns. The shift happens here: the loss of tokens[b, t] comes from
the hidden state at t - 1."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional

import torch
from torch import Tensor

from aligner.config.groups import ModelConfig, OptimConfig
from aligner.models import pipeline
from aligner.models.checkpoint import checkpoint_shape
from aligner.models.hf import export_hf
from aligner.models.micro_batches import MicroBatch
from aligner.models.policy import chosen_positions, predicting_positions
from aligner.models.trainable import Saving, TrainableModel
from aligner.parallel.topology import Topology
from aligner.parallel.vocab import vocab_parallel_is_best, vocab_parallel_logprobs


@dataclass
class SFTBatch:
    """Rows of one optimizer step."""

    tokens: Tensor  # [B, S] int64
    lengths: Tensor  # [B] int64
    mask: Tensor  # [B, S] bool, True at the tokens that are learned; never in column 0


@dataclass(frozen=True)
class Likelihood:
    """Of the learned tokens of some rows: sums, so that those of several batches add up."""

    loss: float = 0.0  # nats
    correct: float = 0.0  # tokens that were the likeliest
    tokens: int = 0

    def __add__(self, other: "Likelihood") -> "Likelihood":
        return Likelihood(self.loss + other.loss, self.correct + other.correct, self.tokens + other.tokens)

    def metrics(self) -> dict[str, float]:
        """Means over the tokens; perplexity = exp(loss), capped where a float would overflow."""
        count = max(self.tokens, 1)
        loss = self.loss / count
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "token_accuracy": self.correct / count}


class SFTModel:
    """Every method is collective over the job, with the same arguments and the same results on every rank."""

    def __init__(
        self,
        model: ModelConfig,
        optim: OptimConfig,
        topology: Topology,
        *,
        micro_batch_size: int,
        micro_batch_tokens: Optional[int] = None,
        packed_tokens: Optional[int] = None,
    ) -> None:
        """Weights from model.checkpoint. packed_tokens: rows are packed up to this many tokens a forward pass; None: they are padded."""
        self.topology = topology
        self.shape = checkpoint_shape(model.checkpoint).with_layers(model.num_layers).with_head("lm")
        cut = {"micro_batch_tokens": micro_batch_tokens, "packed_tokens": packed_tokens}
        self.model = TrainableModel(model, self.shape, optim, topology, micro_batch_size=micro_batch_size, **cut)

    def train(self, batch: SFTBatch) -> dict[str, float]:
        """One optimizer step on the mean cross entropy of the mini-batch's learned tokens, whatever the layout.

        A loss or gradient that is not finite skips the step on every rank (`skipped` 1); so does a mask without a token (`skipped` and
        `empty` 1)."""
        tokens = int(batch.mask.sum())
        sums, update = self.model.train_step(
            batch.tokens,
            batch.lengths,
            {"mask": batch.mask},
            loss=partial(self._loss, max(tokens, 1)),
            positions=predicting_positions,
        )
        count = max(tokens, 1)
        finite = {} if update.skipped else Likelihood(sums["loss"] * count, sums["correct"], tokens).metrics()
        return {
            **finite,
            "tokens": float(tokens),
            "grad_norm": update.grad_norm,
            "learning_rate": update.learning_rate,
            "skipped": float(update.skipped),
            "empty": float(tokens == 0),
        }

    def likelihood(self, batch: SFTBatch) -> Likelihood:
        """Of the present weights, which stay what they are."""
        micro = self.model.micro_batches(batch.tokens, batch.lengths, {"mask": batch.mask})
        chunks, loss = self.model.plain_chunks, partial(self._loss, 1)
        sums = pipeline.forward_sums(chunks, micro, self.topology, loss=loss, positions=predicting_positions)
        return Likelihood(sums["loss"], sums["correct"], int(batch.mask.sum()))

    def _loss(self, denominator: int, micro: MicroBatch, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, mask = chosen_positions(micro), micro.fields["mask"]
        targets, learned = micro.tokens[chosen], mask[chosen]
        how = {"group": self.topology.tensor_group, "vocab_size": self.shape.vocab_size}
        logprobs = vocab_parallel_logprobs(logits[0], targets, **how)
        best = vocab_parallel_is_best(logits[0].detach(), targets, **how)
        loss = -torch.where(learned, logprobs, 0.0).sum() / denominator
        return loss, {"correct": (best & learned).sum()}

    # Weights and state

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every weight, on every rank, layer by layer."""
        return export_hf(self.model.plain_chunks, self.shape, self.topology)

    def save(self, folder: Path, *, extra: Mapping[str, Any], beside: bool = False) -> Saving:
        return self.model.save(folder, extra=extra, beside=beside)

    def load(self, folder: Path) -> dict[str, Any]:
        return self.model.load(folder)

    @property
    def step_count(self) -> int:
        return self.model.step_count
