"""A reward model on Megatron: a backbone with a score head, read at the last token."""

from typing import Optional

from torch import Tensor

from aligner.config.groups import ModelConfig
from aligner.models import pipeline
from aligner.models.build import build_model
from aligner.models.checkpoint import checkpoint_shape, load_weights
from aligner.models.critic import last_token
from aligner.models.micro_batches import MicroBatch
from aligner.parallel.device import resolve_dtype
from aligner.parallel.topology import Topology


class RewardModel:
    """Scores of finished rows; frozen."""

    def __init__(
        self,
        model: ModelConfig,
        topology: Topology,
        *,
        micro_batch_size: int,
        micro_batch_tokens: Optional[int] = None,
        standardise: bool = False,
    ) -> None:
        """standardise: scores less their mean over their deviation, as training measured them on held-out responses.

        Raises ValueError for a checkpoint without a head, whose scores would all be 0, and for one without these numbers."""
        self.topology, self._standardise = topology, standardise
        self._cut = {"micro_batch_size": micro_batch_size, "micro_batch_tokens": micro_batch_tokens}
        found = checkpoint_shape(model.checkpoint)
        if found.head == "lm":
            raise ValueError(
                f"reward.checkpoint={model.checkpoint} is a language model without a score head: train one (train_reward_model.py), or "
                "convert a sequence classifier with one label (convert_hf_to_nemo.py)"
            )
        if standardise and (found.reward is None or not found.reward.std):
            raise ValueError(
                f"reward.standardise=true, but reward.checkpoint={model.checkpoint} does not say the mean and deviation of its scores: "
                "set it to false, or train the model with held-out rows (train_reward_model.py)"
            )
        self.shape = found.with_layers(model.num_layers).with_head("score")
        dtype = resolve_dtype(model.dtype)
        self.chunks = build_model(self.shape, topology, head="score", dtype=dtype, recompute=model.recompute)
        load_weights(self.chunks, self.shape, topology, model.checkpoint)
        for chunk in self.chunks:
            chunk.requires_grad_(False)

    def scores(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """tokens [B, S], lengths [B] -> [B] float32, what the outputs add up to. Collective; the same on every rank."""
        return self.score(self.outputs(tokens, lengths))

    def score(self, outputs: Tensor) -> Tensor:
        """[B, A] -> [B]."""
        reward = self.shape.reward
        scores = outputs[:, 0] if reward is None else reward.merged(outputs)
        return reward.standardised(scores) if self._standardise else scores

    def outputs(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """tokens [B, S], lengths [B] -> [B, A] float32, what the head says at token lengths[b] - 1. Collective; the same everywhere."""
        micro = pipeline.micro_batches(tokens, lengths, {}, topology=self.topology, **self._cut)
        return last_outputs(self.chunks, micro, self.topology, (tokens.size(0), self.shape.outputs))


def last_outputs(
    chunks: pipeline.Chunks, micro: list[MicroBatch], topology: Topology, shape: tuple[int, int]
) -> Tensor:
    """What a head of A outputs says at the last token of every row of the micro-batches: `shape` [B, A], on every rank."""
    return pipeline.to_global(pipeline.forward(chunks, micro, topology, read=last_token), micro, shape, topology)
