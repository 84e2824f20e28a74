"""config.json of TensorRT-LLM's unified checkpoint (releases up to 1.3.0rc20): each family with exactly the keys that its config class
takes. An unknown key in `mapping` or `quantization` is a TypeError there."""

from typing import Any

from aligner.models.model_config import ModelShape
from aligner.trtllm.layout import Grid

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPTForCausalLM",
}
# Weight-only: the weights are written plain, and TensorRT-LLM quantizes them when it builds the engine.
QUANTIZATION = {"none": None, "int8": "W8A16", "int4": "W4A16"}


def checkpoint_config(shape: ModelShape, grid: Grid, *, dtype: str, quantization: str) -> dict[str, Any]:
    """dtype: bfloat16, float16 or float32; quantization: a key of QUANTIZATION."""
    learned = shape.gpt2_style
    return {
        "architecture": ARCHITECTURES[shape.family],
        "dtype": dtype,
        "logits_dtype": "float32",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        "head_size": shape.kv_channels,
        "intermediate_size": shape.ffn_hidden_size,
        "hidden_act": "gelu" if learned else "silu",
        "norm_epsilon": shape.layernorm_epsilon,
        "position_embedding_type": "learned_absolute" if learned else "rope_gpt_neox",
        "max_position_embeddings": shape.max_position_embeddings,
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "qk_layernorm": shape.qk_norm,
        "mapping": {"world_size": grid.world, "tp_size": grid.tensor, "pp_size": grid.pipeline},
        "quantization": {"quant_algo": QUANTIZATION[quantization], "kv_cache_quant_algo": None},
        **FAMILY_KEYS[shape.family](shape),
    }


def _rotary(shape: ModelShape) -> dict[str, Any]:
    return {
        "rotary_base": shape.rotary_base,
        "rotary_scaling": shape.rope_scaling,
        "tie_word_embeddings": shape.tied,
        "mlp_bias": False,
    }


def _llama(shape: ModelShape) -> dict[str, Any]:
    return _rotary(shape) | {
        "attn_bias": False,
        "residual_mlp": False,
        "disable_weight_only_quant_plugin": False,
        "remove_duplicated_kv_heads": False,
    }


def _qwen(shape: ModelShape) -> dict[str, Any]:
    return _rotary(shape) | {
        "qwen_type": shape.family,
        "attn_bias": shape.qkv_bias,
        "seq_length": 8192,
        "use_logn_attn": False,
        "moe_intermediate_size": 0,
        "moe_shared_expert_intermediate_size": 0,
        "num_labels": 1,
    }


def _gpt(shape: ModelShape) -> dict[str, Any]:
    return {
        "bias": True,
        "q_scaling": 1.0,
        "rotary_pct": 1.0,
        "rotary_base": 10000.0,
        "apply_query_key_layer_scaling": False,
    }


FAMILY_KEYS = {"llama": _llama, "qwen2": _qwen, "qwen3": _qwen, "gpt2": _gpt}
