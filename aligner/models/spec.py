"""megatron-core's configuration and layer spec of a ModelShape on this device."""

import importlib.util

import torch
import torch.nn.functional as F

from aligner.config.groups import Recompute
from aligner.models.model_config import ModelShape
from aligner.parallel.device import ON_GPU
from aligner.parallel.topology import Topology

from megatron.core.transformer import TransformerConfig  # isort: skip  (after aligner.parallel, which adapts it to a CPU)


def has_transformer_engine() -> bool:
    return ON_GPU and importlib.util.find_spec("transformer_engine") is not None


def transformer_config(
    shape: ModelShape, topology: Topology, *, dtype: torch.dtype, recompute: Recompute, initialise: bool
) -> TransformerConfig:
    """The TransformerConfig of one rank. Dropout is off: a policy must give a token the same probability each time."""
    fused, gpt2 = has_transformer_engine(), shape.gpt2_style
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        normalization="LayerNorm" if gpt2 else "RMSNorm",
        layernorm_epsilon=shape.layernorm_epsilon,
        gated_linear_unit=not gpt2,
        activation_func=gelu_tanh if gpt2 else F.silu,
        add_bias_linear=gpt2,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=topology.tensor,
        pipeline_model_parallel_size=topology.pipeline,
        virtual_pipeline_model_parallel_size=topology.virtual_pipeline,
        sequence_parallel=topology.sequence,
        # Each micro-batch is as wide as its own longest row, and its shape is sent with it. Not in the interleaved schedule, where
        # megatron-core sends shapes in an order that deadlocks: all micro-batches of a call have one width there.
        variable_seq_lengths=topology.pipeline > 1 and topology.virtual_pipeline is None,
        moe_token_dispatcher_type="alltoall",  # the default one refuses variable lengths, experts or none
        use_cpu_initialization=not ON_GPU,
        perform_initialization=initialise,
        cuda_graph_scope=[],
        deallocate_pipeline_outputs=True,
        # Sends and receives one at a time: overlapped ones with virtual stages give silently wrong numbers on gloo.
        overlap_p2p_comm=False,
        batch_p2p_comm=ON_GPU,
        # Needs apex, and the head's own product would have to take part in it.
        gradient_accumulation_fusion=False,
        # On a CPU it is parallel/cpu_swiglu.py's. megatron-core refuses it for an activation that it does not know.
        bias_activation_fusion=(fused or not ON_GPU) and not gpt2,
        bias_dropout_fusion=fused,
        apply_rope_fusion=fused and not gpt2,
        masked_softmax_fusion=fused,
        persist_layer_norm=fused,
        cross_entropy_loss_fusion=False,
        **_recompute(recompute),
    )


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GPT-2's activation, which Hugging Face calls gelu_new."""
    return F.gelu(x, approximate="tanh")


def _recompute(recompute: Recompute) -> dict:
    if recompute is Recompute.none:
        return {}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def block_spec(config: TransformerConfig, vp_stage: int | None):
    """What GPTModel builds its decoder from: Transformer Engine's layers where they are installed, torch's otherwise."""
    if has_transformer_engine():
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    return _local_block_spec(config, vp_stage)


def _local_block_spec(config: TransformerConfig, vp_stage: int | None):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    from aligner.models.cpu_layers import LayerNorm, RMSNorm, SDPAttention

    norm = LayerNorm if config.normalization == "LayerNorm" else RMSNorm
    layer = get_gpt_layer_local_spec(
        normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )  # its norms are replaced
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = SDPAttention
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=vp_stage), layer_norm=norm
    )
