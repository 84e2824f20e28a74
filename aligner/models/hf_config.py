"""Hugging Face's config.json to a ModelShape and back."""

from typing import Any, Mapping, Optional

from aligner.models.model_config import FAMILIES, LLAMA3_SCALING, ModelShape, padded

_ARCHITECTURE = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gpt2": "GPT2"}
_CAUSAL, _GPT2_CAUSAL, _CLASSIFIER = "ForCausalLM", "LMHeadModel", "ForSequenceClassification"
_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh")  # two names of one function


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape of a config.json. Raises ValueError naming the family or feature that is not supported."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model family {family!r} is not supported; these are: {', '.join(FAMILIES)}")
    _refuse_unsupported(family, config)
    try:
        return (_gpt2_shape if family == "gpt2" else _llama_shape)(config)
    except KeyError as error:
        raise ValueError(f"config.json lacks {error} of a {family} model") from error


def _llama_shape(config: Mapping[str, Any]) -> ModelShape:
    heads, hidden, family = config["num_attention_heads"], config["hidden_size"], config["model_type"]
    base, scaling = _rope(config)
    return ModelShape(
        family=family,
        head=_head(config),
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        kv_channels=config.get("head_dim") or hidden // heads,
        vocab_size=config["vocab_size"],
        padded_vocab_size=padded(config["vocab_size"]),
        max_position_embeddings=config["max_position_embeddings"],
        layernorm_epsilon=float(config["rms_norm_eps"]),
        rotary_base=base,
        rope_scaling=scaling,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _gpt2_shape(config: Mapping[str, Any]) -> ModelShape:
    heads, hidden = config["n_head"], config["n_embd"]
    return ModelShape(
        family="gpt2",
        head=_head(config),
        num_layers=config["n_layer"],
        hidden_size=hidden,
        ffn_hidden_size=config.get("n_inner") or 4 * hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        vocab_size=config["vocab_size"],
        padded_vocab_size=padded(config["vocab_size"]),
        max_position_embeddings=config["n_positions"],
        layernorm_epsilon=float(config.get("layer_norm_epsilon", 1e-5)),
        rotary_base=None,
        rope_scaling=None,
        qkv_bias=True,
        qk_norm=False,
        tied=bool(config.get("tie_word_embeddings", True)),
    )


def _refuse_unsupported(family: str, config: Mapping[str, Any]) -> None:
    wrong = _gpt2_unsupported(config) if family == "gpt2" else _llama_unsupported(family, config)
    wrong["quantization_config"] = config.get("quantization_config") is not None
    if found := [f"{key}={config.get(key)!r}" for key, is_wrong in wrong.items() if is_wrong]:
        raise ValueError(f"config.json has {', '.join(found)}, which is not supported for {family} models")


def _llama_unsupported(family: str, config: Mapping[str, Any]) -> dict[str, bool]:
    return {
        "attention_bias": family != "qwen2" and bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "partial_rotary_factor": _rope_field(config, "partial_rotary_factor", 1.0) != 1.0,
    }


def _gpt2_unsupported(config: Mapping[str, Any]) -> dict[str, bool]:
    return {
        "activation_function": config.get("activation_function", "gelu_new") not in _GELU_TANH,
        "scale_attn_weights": not config.get("scale_attn_weights", True),
        "scale_attn_by_inverse_layer_idx": bool(config.get("scale_attn_by_inverse_layer_idx")),
        "add_cross_attention": bool(config.get("add_cross_attention")),
    }


def _head(config: Mapping[str, Any]) -> str:
    """score for a sequence classifier with one label, else lm."""
    architecture = (config.get("architectures") or [_CAUSAL])[0]
    if architecture.endswith((_CAUSAL, _GPT2_CAUSAL)):
        return "lm"
    # transformers writes labels as id2label and leaves num_labels out where it is 2
    labels = config.get("num_labels") or len(config.get("id2label") or {0: "", 1: ""})
    if architecture.endswith(_CLASSIFIER) and labels == 1:
        return "score"
    raise ValueError(
        f"architecture {architecture} with {labels} labels is not supported: a causal model, or a classifier with one label"
    )


def _rope_field(config: Mapping[str, Any], name: str, default: Any) -> Any:
    """transformers 5 keeps rotary settings in rope_parameters, earlier versions beside the others."""
    return (config.get("rope_parameters") or {}).get(name, config.get(name, default))


def _rope(config: Mapping[str, Any]) -> tuple[float, Optional[dict[str, Any]]]:
    """(base, scaling or None). A scaling of another kind than llama3 is passed on for ModelShape to refuse."""
    base = float(_rope_field(config, "rope_theta", 10000.0))
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return base, None
    return base, {"rope_type": kind, **{name: scaling[name] for name in LLAMA3_SCALING if name in scaling}}


def config_of(shape: ModelShape, *, dtype: str, special: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json for a shape. dtype: float32 or bfloat16; special: bos_token_id, eos_token_id and pad_token_id, where known.

    Rotary settings stand in both spellings, of transformers 4 and 5. Raises ValueError for a value head, which it has no class for."""
    if shape.head == "value":
        raise ValueError(
            "a critic's value head has no Hugging Face class: only models with an lm or a score head are converted"
        )
    causal = _GPT2_CAUSAL if shape.gpt2_style else _CAUSAL
    return {
        "architectures": [_ARCHITECTURE[shape.family] + (causal if shape.head == "lm" else _CLASSIFIER)],
        "model_type": shape.family,
        "vocab_size": shape.vocab_size,
        **(_gpt2_fields(shape) if shape.gpt2_style else _llama_fields(shape)),
        "tie_word_embeddings": shape.tied,
        "dtype": dtype,
        "torch_dtype": dtype,
        **({} if shape.head == "lm" else _labels(shape)),
        **special,
    }


def _labels(shape: ModelShape) -> dict[str, Any]:
    """One a number that the head gives: LABEL_0, or the attribute's name where there are several."""
    names = ("LABEL_0",) if shape.outputs == 1 else shape.reward.attributes
    return {"id2label": {str(i): name for i, name in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}


def _gpt2_fields(shape: ModelShape) -> dict[str, Any]:
    return {
        "n_embd": shape.hidden_size,
        "n_inner": shape.ffn_hidden_size,
        "n_layer": shape.num_layers,
        "n_head": shape.num_attention_heads,
        "n_positions": shape.max_position_embeddings,
        "n_ctx": shape.max_position_embeddings,
        "layer_norm_epsilon": shape.layernorm_epsilon,
        "activation_function": "gelu_new",
    }


def _llama_fields(shape: ModelShape) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        "head_dim": shape.kv_channels,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.layernorm_epsilon,
        "rope_theta": shape.rotary_base,
        "rope_scaling": shape.rope_scaling,
        "rope_parameters": {"rope_type": "default", **(shape.rope_scaling or {}), "rope_theta": shape.rotary_base},
        "attention_bias": shape.qkv_bias,
        "hidden_act": "silu",
    }
