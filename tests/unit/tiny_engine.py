"""Tiny Hugging Face models with random weights: the oracle of the torch engine, and the engine built to their shape."""

from typing import Optional

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from aligner.models.model_config import ModelShape, padded
from aligner.rollout import native
from aligner.rollout.linear import Kernel
from aligner.rollout.refit import weight_update
from aligner.rollout.torch_engine import TorchEngine

VOCAB = 150  # not a multiple of 128: the padded vocabulary is larger
KERNELS = [Kernel.plain] + ([Kernel.native] if native.library() is not None else [])
FAMILIES = ("llama", "llama3_rope", "qwen2", "qwen3", "gpt2")
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def tiny_shape(kind: str) -> ModelShape:
    return ModelShape(
        family={"llama3_rope": "llama"}.get(kind, kind),
        head="lm",
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=4 if kind in ("llama3_rope", "gpt2") else 2,
        kv_channels=16 if kind == "qwen3" else 8,
        vocab_size=VOCAB,
        padded_vocab_size=padded(VOCAB),
        max_position_embeddings=128,
        layernorm_epsilon=1e-5,
        rotary_base=None if kind == "gpt2" else 500.0,
        rope_scaling={"rope_type": "llama3", **LLAMA3} if kind == "llama3_rope" else None,
        qkv_bias=kind in ("qwen2", "gpt2"),
        qk_norm=kind == "qwen3",
        tied=kind in ("llama", "qwen3", "gpt2"),
    )


def tiny_hf(kind: str, seed: int = 0) -> torch.nn.Module:
    """The model of tiny_shape(kind), float32; weights large enough that predictions are far from uniform."""
    shape = tiny_shape(kind)
    families = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "gpt2": GPT2Config}
    config = families[shape.family](
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        max_position_embeddings=shape.max_position_embeddings,
        **(_gpt2_sizes(shape) if kind == "gpt2" else _llama_sizes(shape)),
        tie_word_embeddings=shape.tied,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator) * 0.2
                + (1.0 if "norm" in name or ".ln_" in name else 0.0)
            )
    return model


def _llama_sizes(shape: ModelShape) -> dict:
    return {
        "intermediate_size": shape.ffn_hidden_size,
        "num_key_value_heads": shape.num_query_groups,
        "head_dim": shape.kv_channels,
        "rms_norm_eps": shape.layernorm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rotary_base, **(shape.rope_scaling or {})},
    }


def _gpt2_sizes(shape: ModelShape) -> dict:
    return {"n_inner": shape.ffn_hidden_size, "layer_norm_epsilon": shape.layernorm_epsilon}


def tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every tensor under its Hugging Face name; a tied head is named once."""
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def tiny_engine(kind: str, model: Optional[torch.nn.Module] = None, version: int = 0, **changes) -> TorchEngine:
    build = {"max_batch_size": 5, "max_input_len": 24, "max_output_len": 40, "dtype": torch.float32}
    engine = TorchEngine(tiny_shape(kind), **{**build, **changes})
    if model is not None:
        engine.refit(weight_update(tensors(model), version))
    return engine
