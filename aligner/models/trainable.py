"""A model with its optimizer: what the policy, the critic and supervised training share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Optional

import torch
from torch import Tensor

from aligner.config.groups import ModelConfig, OptimConfig
from aligner.models import pipeline
from aligner.models.build import build_model
from aligner.models.checkpoint import begin_weights, load_weights
from aligner.models.digests import check_digests, write_digests
from aligner.models.micro_batches import MicroBatch
from aligner.models.model_config import ModelShape
from aligner.models.optimizer import (
    Update,
    apply_gradients,
    build_optimizer,
    clear_gradients,
    forget_states,
    learning_rate,
    move_states,
    wrap_for_training,
)
from aligner.models.pipeline import Loss, Positions
from aligner.models.training_state import begin_optimizer, load_training, state_text, write_state
from aligner.models.writing import Writing
from aligner.parallel.device import DEVICE, resolve_dtype
from aligner.parallel.topology import Topology


@dataclass
class Saving:
    """A model on its way to disk."""

    folder: Path
    writings: list[Writing]
    state: str
    topology: Topology

    @property
    def ready(self) -> bool:
        """Whether `finish` has nothing to wait for on this rank. Not collective."""
        return all(writing.ready for writing in self.writings)

    def abandon(self) -> None:
        """Wait for this rank's writers; what they wrote is not made a checkpoint."""
        for writing in self.writings:
            writing.wait()

    def finish(self) -> None:
        """Collective; raises, on every rank, where a rank could not write."""
        for writing in self.writings:
            writing.finish()
        write_state(self.folder, self.state, self.topology)
        written = {f"{w.folder.name}/{name}": digest for w in self.writings for name, digest in w.digests.items()}
        write_digests(self.folder, self.topology, known=written)


class TrainableModel:
    """One model on this rank's grid. Every method is collective over the job, with the same arguments on every rank.

    chunks: this rank's part of the model, under DDP. step_count: updates applied; a skipped step is none."""

    def __init__(
        self,
        model: ModelConfig,
        shape: ModelShape,
        optim: OptimConfig,
        topology: Topology,
        *,
        micro_batch_size: int,
        micro_batch_tokens: Optional[int] = None,
        packed_tokens: Optional[int] = None,
        head_lr_multiplier: float = 1.0,
        head_bias: bool = False,
        fresh_head: bool = False,
    ) -> None:
        """Build the model of `shape`, load its weights from model.checkpoint (but for a value or score head, where fresh_head), and
        wrap it for training. micro_batch_size, micro_batch_tokens, packed_tokens: how mini-batches are cut, as pipeline.micro_batches
        has it."""
        self.source, self.shape, self.optim, self.topology = Path(model.checkpoint), shape, optim, topology
        self.dtype = resolve_dtype(model.dtype)
        self._cut = {"micro_batch_size": micro_batch_size, "micro_batch_tokens": micro_batch_tokens}
        self._cut["packed_tokens"] = packed_tokens
        build = {"dtype": self.dtype, "recompute": model.recompute, "head_bias": head_bias}
        plain = build_model(shape, topology, head=shape.head, **build)
        self._fresh_head = fresh_head
        load_weights(plain, shape, topology, self.source, fresh_head=fresh_head)
        self.chunks = wrap_for_training(plain, optim)
        self.optimizer = build_optimizer(self.chunks, optim, dtype=self.dtype, head_lr_multiplier=head_lr_multiplier)
        self.step_count = 0

    @property
    def plain_chunks(self) -> list[torch.nn.Module]:
        """The chunks without DDP."""
        return [chunk.module for chunk in self.chunks]

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return learning_rate(self.optim, self.step_count)

    def micro_batches(
        self, tokens: Tensor, lengths: Tensor, fields: Mapping[str, Tensor], *, together: Optional[Tensor] = None
    ) -> list[MicroBatch]:
        """This rank's share of a global batch. tokens [B, S], lengths [B], fields [B, S] or [B]; together [B]: ids of rows that must
        not be parted."""
        return pipeline.micro_batches(tokens, lengths, fields, together=together, topology=self.topology, **self._cut)

    def train_step(
        self,
        tokens: Tensor,
        lengths: Tensor,
        fields: Mapping[str, Tensor],
        *,
        loss: Loss,
        positions: Optional[Positions] = None,
        together: Optional[Tensor] = None,
    ) -> tuple[dict[str, float], Update]:
        """Forward, backward and one update on a whole mini-batch. tokens [B, S], lengths [B], fields [B, S] or [B], "mask" among them;
        together [B]: ids of rows that must not be parted.

        An empty mask skips the update: its gradient is 0, but momentum and weight decay would move the weights.
        Returns the sums of `loss`'s metrics over the mini-batch (not divided by anything but what `loss` divided), and the update."""
        micro = self.micro_batches(tokens, lengths, fields, together=together)
        clear_gradients(self.chunks, self.optimizer)
        sums = pipeline.forward_backward(self.chunks, micro, self.topology, loss=loss, positions=positions)
        useful = bool(fields["mask"].any()) and all(torch.isfinite(torch.tensor(list(sums.values()))).tolist())
        update = apply_gradients(
            self.optimizer, self.optim, step=self.step_count, useful=useful, topology=self.topology
        )
        self.step_count += not update.skipped
        return sums, update

    def save(self, folder: Path, *, extra: Mapping[str, Any], beside: bool = False) -> "Saving":
        """Weights, optimizer, trainer_state.json (step_count and `extra`, plain JSON values) and, last, digests.json under `folder`.

        beside: return once all that changes is copied; what is returned is to be finished then, by all ranks together."""
        folder = Path(folder)
        weights = begin_weights(
            self.plain_chunks, self.shape, self.topology, folder, tokenizer_from=self.source, beside=beside
        )
        optimizer = begin_optimizer(folder, self.plain_chunks, self.optimizer, self.topology, beside=beside)
        text = state_text(self.optimizer, {"step_count": self.step_count, "extra": dict(extra)})
        saving = Saving(folder, [weights, *([] if optimizer is None else [optimizer])], text, self.topology)
        if not beside:
            saving.finish()
        return saving

    def load(self, folder: Path) -> dict[str, Any]:
        """Weights, optimizer and step_count of a saved model, of any layout; returns `extra`. Raises ValueError, on every rank, where a
        file is not what was saved."""
        check_digests(Path(folder), self.topology)
        load_weights(self.plain_chunks, self.shape, self.topology, folder)
        forget_states(self.optimizer)
        state = load_training(folder, self.plain_chunks, self.optimizer, self.topology)
        self.step_count = state["step_count"]
        return state["extra"]

    def reset(self) -> None:
        """Back to the initial weights and an optimizer that has seen nothing."""
        load_weights(self.plain_chunks, self.shape, self.topology, self.source, fresh_head=self._fresh_head)
        forget_states(self.optimizer)
        self.step_count = 0

    def offload_optimizer(self) -> None:
        """Adam's moments to the host: they are not needed while the engine generates."""
        move_states(self.optimizer, torch.device("cpu"))

    def restore_optimizer(self) -> None:
        move_states(self.optimizer, DEVICE)
