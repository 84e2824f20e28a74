"""The policy: log-probs at the sampling temperature, updates of it, the frozen reference, and the weights for the engine.

Legend: B rows of a global batch, replicated on the CPU of every rank; S columns. The shift between tokens and the hidden states that
predict them happens here only: log pi(tokens[b, t]) comes from the hidden state at t - 1."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional

import torch
from torch import Tensor

from aligner.config.groups import ModelConfig, OptimConfig
from aligner.config.ppo import Aggregate, ReferencePlace
from aligner.data.batch import Rollouts
from aligner.models import pipeline
from aligner.models.checkpoint import checkpoint_shape
from aligner.models.hf import export_hf
from aligner.models.micro_batches import MicroBatch
from aligner.models.reference import make_reference
from aligner.models.trainable import Saving, TrainableModel
from aligner.ops.aggregate import token_shares
from aligner.ops.masks import clean
from aligner.ops.policy_loss import METRICS, Objective, policy_loss
from aligner.parallel.topology import Topology
from aligner.parallel.vocab import vocab_parallel_logprobs, vocab_parallel_logprobs_and_entropy


@dataclass(frozen=True)
class PolicyLoss:
    """Settings of the policy's loss. temperature: of sampling; log-probs and entropy are those of the tempered distribution.
    constant_length: in tokens, for aggregate constant."""

    temperature: float = 1.0
    objective: Objective = Objective()
    aggregate: Aggregate = Aggregate.token
    constant_length: Optional[int] = None


@dataclass
class PolicyMiniBatch:
    """Rows of one optimizer step."""

    tokens: Tensor  # [B, S] int64
    lengths: Tensor  # [B] int64
    mask: Tensor  # [B, S] bool
    old_logprobs: Optional[
        Tensor
    ]  # [B, S] float32; None: the policy is as it was when it sampled, see trained_logprobs
    advantages: Tensor  # [B, S] float32
    weights: Optional[Tensor] = None  # [B, S] float32, of each token's loss (ops/importance.py); absent: 1
    reference_logprobs: Optional[Tensor] = None  # [B, S] float32, where the KL penalty is part of the loss
    kl_coefficient: float = 0.0  # of that penalty


class Policy:
    """Every method is collective over the job, with the same arguments and the same results on every rank."""

    def __init__(
        self,
        model: ModelConfig,
        optim: OptimConfig,
        topology: Topology,
        *,
        loss: PolicyLoss,
        micro_batch_size: int,
        micro_batch_tokens: Optional[int] = None,
        reference: Optional[ReferencePlace] = ReferencePlace.held,
    ) -> None:
        """Weights from model.checkpoint; those are the reference's for the whole run. reference None: there is none."""
        self.topology, self.loss = topology, loss
        shape = checkpoint_shape(model.checkpoint).with_layers(model.num_layers).with_head("lm")
        cut = {"micro_batch_size": micro_batch_size, "micro_batch_tokens": micro_batch_tokens}
        self.model = TrainableModel(model, shape, optim, topology, **cut)
        self.shape = shape
        self.trained_logprobs: Optional[Tensor] = (
            None  # [B, S] of the last batch without old_logprobs, before its update
        )
        self._reference = None
        if reference is not None:
            chunks = self.model.plain_chunks
            self._reference = make_reference(reference, chunks, shape, topology, dtype=self.model.dtype)

    # Log-probs

    def logprobs(self, rollouts: Rollouts, *, temperature: float) -> Tensor:
        """[B, S] float32: log pi(tokens[b, t] | tokens[b, <t]) of the present weights under rollouts.mask, 0 elsewhere."""
        return self._logprobs(self.model.plain_chunks, rollouts, temperature)

    def reference_logprobs(self, rollouts: Rollouts, *, temperature: float) -> Tensor:
        """[B, S] float32: the same of the frozen reference."""
        assert self._reference is not None, "this policy was built without a reference"
        with self._reference.chunks() as chunks:
            return self._logprobs(chunks, rollouts, temperature)

    def _logprobs(self, chunks: list[torch.nn.Module], rollouts: Rollouts, temperature: float) -> Tensor:
        micro = self.model.micro_batches(rollouts.tokens, rollouts.lengths, {"mask": rollouts.mask})
        read = partial(self._read_logprobs, temperature)
        parts = pipeline.forward(chunks, micro, self.topology, read=read, positions=predicting_positions)
        return pipeline.to_global(parts, micro, tuple(rollouts.tokens.shape), self.topology)

    def _read_logprobs(self, temperature: float, micro: MicroBatch, logits: Tensor) -> Tensor:
        chosen = chosen_positions(micro)
        found = vocab_parallel_logprobs(
            logits[0],
            micro.tokens[chosen],
            group=self.topology.tensor_group,
            temperature=temperature,
            vocab_size=self.shape.vocab_size,
        )
        return self._spread(found, micro)

    def _spread(self, logprobs: Tensor, micro: MicroBatch) -> Tensor:
        """[m, W] float32 of those at chosen_positions, 0 where the mask is False."""
        spread = torch.zeros(micro.tokens.shape, dtype=torch.float32, device=logprobs.device)
        spread[chosen_positions(micro)] = logprobs.float()
        return torch.where(micro.fields["mask"], spread, 0.0)

    # Training

    def train(self, batch: PolicyMiniBatch) -> dict[str, float]:
        """One optimizer step. Metrics are means over the mini-batch's tokens, whatever the layout.

        A loss or gradient that is not finite skips the step on every rank (`skipped` 1) and changes nothing; so
        does a mask without a token (`skipped` and `empty` 1). Raises FloatingPointError
        where an advantage or an old log-prob under the mask is not finite: that is an error of the caller's."""
        fields = {"mask": batch.mask, "advantages": clean(batch.advantages, batch.mask, "advantages")}
        for name in ("old_logprobs", "weights", "reference_logprobs"):
            if (given := getattr(batch, name)) is not None:
                fields[name] = clean(given, batch.mask, name)
        settings = self.loss
        fields["shares"] = token_shares(batch.mask, settings.aggregate, constant_length=settings.constant_length)
        tokens = int(batch.mask.sum())
        seen: list[tuple[MicroBatch, Tensor]] = []
        loss = partial(self._loss, batch.kl_coefficient, seen)
        sums, update = self.model.train_step(
            batch.tokens, batch.lengths, fields, loss=loss, positions=predicting_positions
        )
        if batch.old_logprobs is None:
            parts, micro = [part for _, part in seen], [one for one, _ in seen]
            self.trained_logprobs = pipeline.to_global(parts, micro, tuple(batch.tokens.shape), self.topology)
        count = max(tokens, 1)
        return {
            "loss": sums["loss"],
            "ratio": sums["ratio"] / count,
            "clip_fraction": sums["clipped"] / count,
            "approximate_kl": sums["approximate_kl"] / count,
            "entropy": sums["entropy"] / count,
            **self._metrics_of_settings(sums, count, batch),
            "grad_norm": update.grad_norm,
            "learning_rate": update.learning_rate,
            "skipped": float(update.skipped),
            "empty": float(tokens == 0),
        }

    def _metrics_of_settings(self, sums: dict[str, float], count: int, batch: PolicyMiniBatch) -> dict[str, float]:
        """What only some settings make worth telling."""
        told = {}
        if batch.reference_logprobs is not None:
            told["kl"] = sums["kl"] / count
        if self.loss.objective.dual is not None:
            told["dual_clip_fraction"] = sums["dual_clipped"] / count
        return told

    def _loss(
        self, kl_coefficient: float, seen: list[tuple[MicroBatch, Tensor]], micro: MicroBatch, logits: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """seen: told the log-probs [m, W] of micro-batches that have no old ones."""
        chosen = chosen_positions(micro)
        logprobs, entropy = vocab_parallel_logprobs_and_entropy(
            logits[0],
            micro.tokens[chosen],
            group=self.topology.tensor_group,
            temperature=self.loss.temperature,
            vocab_size=self.shape.vocab_size,
        )
        given = {name: field[chosen] for name, field in micro.fields.items()}
        old_logprobs = given.pop("old_logprobs", None)
        if old_logprobs is None:
            seen.append((micro, self._spread(logprobs.detach(), micro)))
        try:
            return policy_loss(
                logprobs,
                old_logprobs,
                **given,
                objective=self.loss.objective,
                sequences=chosen.nonzero()[:, 0],  # rows are never cut: a response's tokens are all in one micro-batch
                entropy=entropy,
                kl_coefficient=kl_coefficient,
            )
        except FloatingPointError:
            return not_finite(logprobs, METRICS)

    # Weights and state

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every weight, on every rank, layer by layer."""
        return export_hf(self.model.plain_chunks, self.shape, self.topology)

    def save(self, folder: Path, *, extra: Mapping[str, Any] = {}, beside: bool = False) -> Saving:
        return self.model.save(folder, extra=extra, beside=beside)

    def load(self, folder: Path) -> dict[str, Any]:
        """Weights, optimizer and step count; the reference keeps the run's initial weights. Returns what was saved as `extra`."""
        return self.model.load(folder)

    def offload_optimizer(self) -> None:
        self.model.offload_optimizer()

    def restore_optimizer(self) -> None:
        self.model.restore_optimizer()

    @property
    def step_count(self) -> int:
        return self.model.step_count

    @property
    def learning_rate(self) -> float:
        return self.model.learning_rate


def chosen_positions(micro: MicroBatch) -> Tensor:
    """[m, W] bool: the tokens whose log-probs are wanted, micro.fields["mask"]. A micro-batch without any has one token all the same,
    since empty tensors are no good guests in collectives; the mask keeps it out of every result."""
    mask = micro.fields["mask"]
    if mask.any():
        return mask
    stand_in = mask.clone()
    stand_in[0, 1] = True
    return stand_in


def predicting_positions(micro: MicroBatch) -> Tensor:
    """Flat indices b * W + t - 1 of the hidden states that predict the chosen tokens (b, t), in their order.

    Raises ValueError where a first token is chosen: nothing predicts it."""
    flat = chosen_positions(micro).flatten().nonzero()[:, 0]
    if (flat % micro.tokens.size(1) == 0).any():
        raise ValueError("mask is True at column 0, but a first token has no state that predicts it")
    return flat - 1


def not_finite(output: Tensor, metrics: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that is NaN yet has a backward pass, so that the ranks stay in step until all of them skip the update."""
    loss = output.sum() * float("nan")
    return loss, {name: loss.detach() for name in metrics}
