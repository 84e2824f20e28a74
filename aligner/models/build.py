"""Building this rank's part of a model."""

import torch

from aligner.config.groups import Recompute
from aligner.models.model_config import ModelShape
from aligner.models.rope import llama3_frequencies
from aligner.models.spec import block_spec, transformer_config
from aligner.parallel.device import DEVICE
from aligner.parallel.topology import Topology

from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip  (after aligner.parallel, which adapts it to a CPU)
from megatron.core.transformer.module import Float16Module  # isort: skip

from aligner.models.heads import ResponseOutput, ValueHead  # isort: skip


def build_model(
    shape: ModelShape,
    topology: Topology,
    *,
    head: str,
    dtype: torch.dtype,
    recompute: Recompute = Recompute.none,
    initialise: bool = True,
    head_bias: bool = False,
) -> list[torch.nn.Module]:
    """This rank's chunks, first stage first: one, or virtual_pipeline of them, on DEVICE.

    head must be shape.head (see ModelShape.with_head), since loading and export go by the shape. In bfloat16 each chunk is wrapped in
    Float16Module; unwrap() takes wrappers off. Weights are random, or, where initialise is False, whatever lay in memory: for a
    caller that loads all of them. head_bias: of a value head. Every rank of the world calls it (tied embeddings are summed over a
    group)."""
    if head != shape.head:
        raise ValueError(
            f"the head asked for is {head!r}, but the shape has {shape.head!r}; use shape.with_head({head!r})"
        )
    config = transformer_config(shape, topology, dtype=dtype, recompute=recompute, initialise=initialise)
    stages = [None] if topology.virtual_pipeline is None else range(topology.virtual_pipeline)
    chunks = [_build_chunk(shape, topology, config, head, stage, head_bias).to(DEVICE) for stage in stages]
    return [Float16Module(config, chunk) for chunk in chunks] if dtype == torch.bfloat16 else chunks


def _build_chunk(
    shape: ModelShape, topology: Topology, config, head: str, vp_stage: int | None, head_bias: bool
) -> GPTModel:
    last_stage = None if vp_stage is None else topology.virtual_pipeline - 1
    post_process = topology.is_last_stage and vp_stage in (None, last_stage)
    positions = {"position_embedding_type": "rope", "rotary_base": shape.rotary_base}
    if shape.gpt2_style:
        positions = {"position_embedding_type": "learned_absolute"}
    model = GPTModel(
        config,
        block_spec(config, vp_stage),
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        pre_process=topology.is_first_stage and vp_stage in (None, 0),
        post_process=post_process,
        parallel_output=True,
        # Without logits nothing is tied, and a last stage needs no copy of the embedding.
        share_embeddings_and_output_weights=shape.tied and head == "lm",
        **positions,
        vp_stage=vp_stage,
    )
    if shape.rope_scaling is not None:
        model.rotary_pos_emb.inv_freq = llama3_frequencies(model.rotary_pos_emb.inv_freq, shape.rope_scaling)
    if post_process:
        model.output_layer = _head(model, shape, topology, config, head, head_bias)
    return model


def _head(
    model: GPTModel, shape: ModelShape, topology: Topology, config, head: str, head_bias: bool
) -> torch.nn.Module:
    place = {"sequence_parallel": topology.sequence, "tensor_group": topology.tensor_group}
    if head == "lm":
        return ResponseOutput(model.output_layer.weight, **place)
    how = {"dtype": config.params_dtype, "device": DEVICE, "outputs": shape.outputs, "biased": head_bias}
    return ValueHead(shape.hidden_size, **how, **place)


def unwrap(chunk: torch.nn.Module) -> GPTModel:
    """The GPTModel inside DDP and Float16Module."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk
