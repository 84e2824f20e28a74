"""ModelShape: everything that decides a model's architecture, and its file model_config.yaml in NeMo's key names."""

import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Optional

import yaml

from aligner.models.reward_head import RewardHead

FAMILIES = ("llama", "qwen2", "qwen3", "gpt2")
HEADS = ("lm", "value", "score")
VOCAB_MULTIPLE = 128  # never times the tensor-parallel degree: a checkpoint must load into any layout

# Fields of llama3's rope scaling (Hugging Face's names, which model_config.yaml keeps).
LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

# ModelShape's field -> NeMo's key, where they differ.
_NEMO_KEYS = {"qk_norm": "qk_layernorm", "tied": "share_embeddings_and_output_weights"}

# What NeMo's reader needs beside: of any model, of the Llama-like families, and of GPT-2.
_NEMO_CONSTANTS = {
    "mcore_gpt": True,
    "transformer_block_type": "pre_ln",
    "make_vocab_size_divisible_by": VOCAB_MULTIPLE,
}
_NEMO_LLAMA = {
    "position_embedding_type": "rope",
    "rotary_percentage": 1.0,
    "normalization": "rmsnorm",
    "activation": "fast-swiglu",
    "bias": False,
}
_NEMO_GPT2 = {
    "position_embedding_type": "learned_absolute",
    "normalization": "layernorm",
    "activation": "gelu",
    "openai_gelu": True,  # its tanh form
    "bias": True,
}


@dataclass(frozen=True)
class ModelShape:
    """The architecture. vocab_size is the tokenizer's; the embedding has padded_vocab_size rows, of which the last are never chosen.
    rotary_base is None where positions are learned. reward: of a score head that was trained here."""

    family: str
    head: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    padded_vocab_size: int
    max_position_embeddings: int
    layernorm_epsilon: float
    rotary_base: Optional[float]
    rope_scaling: Optional[dict[str, Any]]
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    reward: Optional[RewardHead] = None

    def __post_init__(self):
        for field in fields(self):
            _check_number(field.name, field.type, getattr(self, field.name))
        _one_of("family", self.family, FAMILIES)
        _one_of("head", self.head, HEADS)
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_query_groups, got {self.num_attention_heads} and {self.num_query_groups}"
            )
        if self.padded_vocab_size % VOCAB_MULTIPLE or self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"padded_vocab_size must be a multiple of {VOCAB_MULTIPLE} and at least "
                f"vocab_size={self.vocab_size}, got {self.padded_vocab_size}"
            )
        if (self.rotary_base is None) is not self.gpt2_style:
            raise ValueError(f"rotary_base={self.rotary_base} does not fit the family {self.family}")
        check_rope_scaling(self.rope_scaling)

    @property
    def gpt2_style(self) -> bool:
        """LayerNorm with a bias, gelu (its tanh form), a bias in every product and learned positions; the other families have
        RMSNorm, SwiGLU, no biases but qkv_bias, and rotary positions."""
        return self.family == "gpt2"

    def with_layers(self, num_layers: Optional[int]) -> "ModelShape":
        """The same shape with only its first layers; None keeps them all. Raises ValueError for more than there are."""
        if num_layers is None:
            return self
        if not 1 <= num_layers <= self.num_layers:
            raise ValueError(
                f"model.num_layers must be between 1 and the checkpoint's {self.num_layers}, got {num_layers}"
            )
        return replace(self, num_layers=num_layers)

    def with_head(self, head: str) -> "ModelShape":
        """The same shape under another head. What a score head says is forgotten with it."""
        return replace(self, head=head, reward=self.reward if head == "score" else None)

    @property
    def outputs(self) -> int:
        """Numbers a token that a value or score head gives."""
        return 1 if self.reward is None else len(self.reward.attributes)


def _check_number(name: str, kind: Any, value: Any) -> None:
    """What is written by hand in a file may be anything."""
    if kind is int and (type(value) is not int or value < 1):
        raise ValueError(f"{name} must be a whole number above 0, got {value!r}")
    if kind is float and (type(value) not in (int, float) or not 0 < value < math.inf):
        raise ValueError(f"{name} must be a number above 0, got {value!r}")
    if kind is bool and type(value) is not bool:
        raise ValueError(f"{name} must be true or false, got {value!r}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def padded(vocab_size: int) -> int:
    """The embedding's rows: vocab_size rounded up to a multiple of 128."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def check_rope_scaling(scaling: Optional[dict[str, Any]]) -> None:
    """Raises ValueError for a rope scaling other than none and llama3, or one that lacks a field."""
    if scaling is None:
        return
    if (kind := scaling.get("rope_type")) != "llama3":
        raise ValueError(f"rope scaling {kind!r} is not supported; only none and llama3 are")
    if missing := [name for name in LLAMA3_SCALING if name not in scaling]:
        raise ValueError(f"llama3 rope scaling lacks {', '.join(missing)}")


def read_model_config(folder: Path | str) -> ModelShape:
    """The shape written in `folder`/model_config.yaml. Raises ValueError naming the file and every missing key."""
    path = Path(folder) / "model_config.yaml"
    if not path.is_file():
        raise ValueError(
            f"{folder} is not a converted checkpoint: it has no model_config.yaml; make one with convert_hf_to_nemo.py"
        )
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold keys and values, found {type(found).__name__}")
    keys = {field: _NEMO_KEYS.get(field, field) for field in ModelShape.__dataclass_fields__ if field != "reward"}
    if missing := [key for key in keys.values() if key not in found]:
        raise ValueError(
            f"{path} lacks {', '.join(missing)}; it was not written by convert_hf_to_nemo.py or by a run of this toolkit"
        )
    try:
        reward = None if found.get("reward") is None else RewardHead.of(found["reward"])
        return ModelShape(**{field: found[key] for field, key in keys.items()}, reward=reward)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write_model_config(shape: ModelShape, folder: Path | str) -> None:
    """Write `folder`/model_config.yaml, NeMo's constants included."""
    values = {_NEMO_KEYS.get(field, field): value for field, value in asdict(replace(shape, reward=None)).items()}
    values |= {} if shape.reward is None else {"reward": shape.reward.written()}
    values |= {
        "encoder_seq_length": shape.max_position_embeddings,
        "scale_positional_embedding": shape.rope_scaling is not None,
    }
    path = Path(folder) / "model_config.yaml"
    constants = _NEMO_CONSTANTS | (_NEMO_GPT2 if shape.gpt2_style else _NEMO_LLAMA)
    path.write_text(yaml.safe_dump(values | constants, sort_keys=False))
