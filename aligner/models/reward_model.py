"""A reward model on Megatron: a backbone with a score head, read at the last token."""

from typing import Optional

from torch import Tensor

from aligner.config.groups import ModelConfig
from aligner.models import pipeline
from aligner.models.build import build_model
from aligner.models.checkpoint import checkpoint_shape, load_weights
from aligner.models.critic import last_token
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
    ) -> None:
        """Raises ValueError for a checkpoint without a head, whose scores would all be 0."""
        self.topology = topology
        self._cut = {"micro_batch_size": micro_batch_size, "micro_batch_tokens": micro_batch_tokens}
        found = checkpoint_shape(model.checkpoint)
        if found.head == "lm":
            raise ValueError(
                f"reward.checkpoint={model.checkpoint} is a language model without a score head: convert a sequence classifier "
                "with one label (convert_hf_to_nemo.py)"
            )
        self.shape = found.with_layers(model.num_layers).with_head("score")
        dtype = resolve_dtype(model.dtype)
        self.chunks = build_model(self.shape, topology, head="score", dtype=dtype, recompute=model.recompute)
        load_weights(self.chunks, self.shape, topology, model.checkpoint)
        for chunk in self.chunks:
            chunk.requires_grad_(False)

    def scores(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """tokens [B, S], lengths [B] -> [B] float32, the score head at token lengths[b] - 1. Collective; the same on every rank."""
        micro = pipeline.micro_batches(tokens, lengths, {}, topology=self.topology, **self._cut)
        parts = pipeline.forward(self.chunks, micro, self.topology, read=last_token)
        return pipeline.to_global(parts, micro, (tokens.size(0),), self.topology)
