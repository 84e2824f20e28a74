"""The mapping between Hugging Face's tensors and Megatron's parameters, both ways. Pure functions of names and shapes first.

Legend: H hidden size, F ffn size, V real vocabulary, D channels a head, tp tensor-parallel degree. Megatron's query, key and value rows
lie together per query group ([its queries, key, value], then the next group); its first MLP product holds gate rows, then up rows, of
this rank."""

import re
from dataclasses import dataclass
from typing import Optional, Sequence

import torch
from torch import Tensor

from aligner.models.model_config import ModelShape

_HEAD_NAME = {"lm": "lm_head.weight", "value": "score.weight", "score": "score.weight"}


@dataclass(frozen=True)
class Unit:
    """One Megatron parameter and the Hugging Face tensors that it is made of.

    split: whole (a copy on every rank), column (first axis), vocabulary (the same, padded), row (second axis), qkv or gated (both:
    first axis). A qkv of one tensor holds all query rows, then all key rows, then all value rows (GPT-2).
    transposed: Hugging Face keeps the matrix as [in, out] (GPT-2's Conv1D), Megatron as [out, in]."""

    megatron: str  # in the local spec's module tree; Transformer Engine's name for it is in TE_NAMES
    hf: tuple[str, ...]
    split: str
    layer: int | None = None  # global, from 0; None outside the layers
    transposed: bool = False


# Transformer Engine's layers keep a norm's weight inside the product that follows it.
TE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "input_layernorm.bias": "self_attention.linear_qkv.layer_norm_bias",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "pre_mlp_layernorm.bias": "mlp.linear_fc1.layer_norm_bias",
}

# GPT-2's layer: Megatron's module, Hugging Face's, and the split of the weight and of the bias.
_GPT2_LAYER = (
    ("input_layernorm", "ln_1", "whole", "whole"),
    ("self_attention.linear_qkv", "attn.c_attn", "qkv", "qkv"),
    ("self_attention.linear_proj", "attn.c_proj", "row", "whole"),
    ("pre_mlp_layernorm", "ln_2", "whole", "whole"),
    ("mlp.linear_fc1", "mlp.c_fc", "column", "column"),
    ("mlp.linear_fc2", "mlp.c_proj", "row", "whole"),
)
_GPT2_BASE = re.compile(r"(wte|wpe|h|ln_f)\.")
_GPT2_BUFFER = re.compile(r"h\.\d+\.attn\.(masked_)?bias$")


def canonical_name(name: str, shape: ModelShape) -> Optional[str]:
    """The name that hf_names has for a tensor of a Hugging Face file; None for what is not a weight.

    GPT-2's own files lack the prefix `transformer.` and hold each layer's causal mask."""
    if not shape.gpt2_style:
        return None if name.endswith("rotary_emb.inv_freq") else name
    if _GPT2_BUFFER.search(name):
        return None
    return f"transformer.{name}" if _GPT2_BASE.match(name) else name


def layer_prefix(shape: ModelShape) -> str:
    """What stands before a layer's number in Hugging Face's names."""
    return "transformer.h." if shape.gpt2_style else "model.layers."


def layer_units(shape: ModelShape, layer: int) -> list[Unit]:
    """The units of one layer; `megatron` is relative to the layer's module."""
    at = f"{layer_prefix(shape)}{layer}."
    if shape.gpt2_style:
        return [unit for parts in _GPT2_LAYER for unit in _weight_and_bias(at, layer, *parts)]

    def unit(megatron: str, split: str, *hf: str) -> Unit:
        return Unit(megatron, tuple(at + name for name in hf), split, layer)

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    units = [
        unit("input_layernorm.weight", "whole", "input_layernorm.weight"),
        unit("self_attention.linear_qkv.weight", "qkv", *(f"{name}.weight" for name in qkv)),
    ]
    if shape.qkv_bias:
        units.append(unit("self_attention.linear_qkv.bias", "qkv", *(f"{name}.bias" for name in qkv)))
    if shape.qk_norm:
        units += [unit(f"self_attention.{x}_layernorm.weight", "whole", f"self_attn.{x}_norm.weight") for x in "qk"]
    return units + [
        unit("self_attention.linear_proj.weight", "row", "self_attn.o_proj.weight"),
        unit("pre_mlp_layernorm.weight", "whole", "post_attention_layernorm.weight"),
        unit("mlp.linear_fc1.weight", "gated", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
        unit("mlp.linear_fc2.weight", "row", "mlp.down_proj.weight"),
    ]


def _weight_and_bias(at: str, layer: int, megatron: str, hf: str, weight: str, bias: str) -> list[Unit]:
    matrix = weight != "whole"
    return [
        Unit(f"{megatron}.weight", (f"{at}{hf}.weight",), weight, layer, transposed=matrix),
        Unit(f"{megatron}.bias", (f"{at}{hf}.bias",), bias, layer),
    ]


def embedding_unit(shape: ModelShape) -> Unit:
    """The embedding of the tokens, which a tied lm head shares."""
    name = "transformer.wte.weight" if shape.gpt2_style else "model.embed_tokens.weight"
    return Unit("embedding.word_embeddings.weight", (name,), "vocabulary")


def first_units(shape: ModelShape) -> list[Unit]:
    """What the first stage has before its layers."""
    learned = [Unit("embedding.position_embeddings.weight", ("transformer.wpe.weight",), "whole")]
    return [embedding_unit(shape), *(learned if shape.gpt2_style else [])]


def final_units(shape: ModelShape) -> list[Unit]:
    """What the last stage has beside its layers; a tied lm head is no unit of its own."""
    parts, name = (("weight", "bias"), "transformer.ln_f") if shape.gpt2_style else (("weight",), "model.norm")
    units = [Unit(f"decoder.final_layernorm.{part}", (f"{name}.{part}",), "whole") for part in parts]
    if shape.head != "lm":
        units.append(Unit("output_layer.weight", (_HEAD_NAME[shape.head],), "whole"))
    elif not shape.tied:
        units.append(Unit("output_layer.weight", (_HEAD_NAME["lm"],), "vocabulary"))
    return units


def all_units(shape: ModelShape) -> list[Unit]:
    """Every parameter of the model, in the order in which it is computed."""
    layers = [unit for layer in range(shape.num_layers) for unit in layer_units(shape, layer)]
    return [*first_units(shape), *layers, *final_units(shape)]


def hf_shape(name: str, shape: ModelShape) -> tuple[int, ...]:
    """The shape of a Hugging Face tensor of this model. Raises ValueError for a name that the model does not have."""
    layer = re.match(re.escape(layer_prefix(shape)) + r"(\d+)\.", name)
    local = name[layer.end() :] if layer and int(layer[1]) < shape.num_layers else name
    inside, outside = _gpt2_shapes(shape) if shape.gpt2_style else _llama_shapes(shape)
    if shape.head != "lm":
        outside[_HEAD_NAME[shape.head]] = (shape.outputs, shape.hidden_size)
    elif not shape.tied:
        outside[_HEAD_NAME["lm"]] = (shape.vocab_size, shape.hidden_size)
    known = inside if local is not name else outside
    if local not in known:
        raise ValueError(
            f"{name!r} is not a tensor of a {shape.num_layers}-layer {shape.family} model with head {shape.head}"
        )
    return known[local]


Shapes = dict[str, tuple[int, ...]]


def _llama_shapes(shape: ModelShape) -> tuple[Shapes, Shapes]:
    """(of the tensors in a layer, of those outside), heads aside."""
    query, kv = (heads * shape.kv_channels for heads in (shape.num_attention_heads, shape.num_query_groups))
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
    inside = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    if shape.qkv_bias:
        inside |= {f"self_attn.{x}_proj.bias": (query if x == "q" else kv,) for x in "qkv"}
    if shape.qk_norm:
        inside |= {f"self_attn.{x}_norm.weight": (shape.kv_channels,) for x in "qk"}
    return inside, {"model.embed_tokens.weight": (shape.vocab_size, hidden), "model.norm.weight": (hidden,)}


def _gpt2_shapes(shape: ModelShape) -> tuple[Shapes, Shapes]:
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
    attended = shape.num_attention_heads * shape.kv_channels
    products = {
        "attn.c_attn": (hidden, 3 * attended),
        "attn.c_proj": (attended, hidden),
        "mlp.c_fc": (hidden, ffn),
        "mlp.c_proj": (ffn, hidden),
    }
    inside: Shapes = {f"{norm}.{part}": (hidden,) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")}
    inside |= {f"{name}.weight": size for name, size in products.items()}
    inside |= {f"{name}.bias": size[1:] for name, size in products.items()}
    outside: Shapes = {
        "transformer.wte.weight": (shape.vocab_size, hidden),
        "transformer.wpe.weight": (shape.max_position_embeddings, hidden),
        "transformer.ln_f.weight": (hidden,),
        "transformer.ln_f.bias": (hidden,),
    }
    return inside, outside


def hf_names(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> full, unpadded shape, of every tensor, in the order of export."""
    return {name: hf_shape(name, shape) for unit in all_units(shape) for name in unit.hf}


def to_megatron(unit: Unit, tensors: list[Tensor], shape: ModelShape, *, rank: int, tensor: int) -> Tensor:
    """Full Hugging Face tensors (in the order of unit.hf) -> the shard of tensor-parallel rank `rank` of `tensor`."""
    if unit.transposed:
        tensors = [x.t() for x in tensors]
    if unit.split == "qkv":
        parts = tensors if len(tensors) == 3 else tensors[0].chunk(3)
        return _merge_qkv(*parts, shape).chunk(tensor, 0)[rank]
    if unit.split == "gated":
        return torch.cat([x.chunk(tensor, 0)[rank] for x in tensors])
    (whole,) = tensors
    if unit.split == "vocabulary":
        whole = _pad_vocabulary(whole, shape)
    if unit.split in ("vocabulary", "column"):
        return whole.chunk(tensor, 0)[rank]
    return whole.chunk(tensor, 1)[rank] if unit.split == "row" else whole


def pieces(unit: Unit, shard: Tensor) -> Sequence[Tensor]:
    """The parts of a shard that from_megatron wants one by one: gate rows and up rows, else the shard."""
    return shard.chunk(2) if unit.split == "gated" else [shard]


def from_megatron(unit: Unit, shards: Tensor, shape: ModelShape) -> list[Tensor]:
    """[tp, *piece], the same piece of every tensor-parallel rank's shard, in order -> the full Hugging Face tensors in it, without
    padding; those of all pieces are in the order of unit.hf.

    Views of `shards`, not always contiguous, but for q, k and v, and for rows of more than one rank, whose order is another."""
    if unit.split == "whole":
        return [shards[0]]
    whole = shards.transpose(0, 1).flatten(1, 2) if unit.split == "row" else shards.flatten(0, 1)
    if unit.split == "vocabulary":
        whole = whole[: shape.vocab_size]
    parts = _split_qkv(whole, shape) if unit.split == "qkv" else [whole]
    if len(unit.hf) < len(parts):
        parts = [torch.cat(parts)]
    return [part.t() for part in parts] if unit.transposed else parts


def _merge_qkv(query: Tensor, key: Tensor, value: Tensor, shape: ModelShape) -> Tensor:
    groups = [x.reshape(shape.num_query_groups, -1, *x.shape[1:]) for x in (query, key, value)]
    return torch.cat(groups, 1).reshape(-1, *query.shape[1:])


def _split_qkv(merged: Tensor, shape: ModelShape) -> list[Tensor]:
    channels = shape.kv_channels
    queries = shape.num_attention_heads // shape.num_query_groups * channels
    groups = merged.reshape(shape.num_query_groups, queries + 2 * channels, *merged.shape[1:])
    return [part.flatten(0, 1) for part in groups.split([queries, channels, channels], 1)]


def _pad_vocabulary(whole: Tensor, shape: ModelShape) -> Tensor:
    """[V, H] -> [padded vocabulary, H] with rows of zeros."""
    return torch.cat([whole, whole.new_zeros(shape.padded_vocab_size - whole.size(0), whole.size(1))])
