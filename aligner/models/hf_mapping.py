"""The mapping between Hugging Face's tensors and Megatron's parameters, both ways. Pure functions of names and shapes first.

Legend: H hidden size, F ffn size, V real vocabulary, D channels a head, tp tensor-parallel degree. Megatron's query, key and value rows
lie together per query group ([its queries, key, value], then the next group); its first MLP product holds gate rows, then up rows, of
this rank."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.models.model_config import ModelShape

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_HEAD_NAME = {"lm": "lm_head.weight", "value": "score.weight", "score": "score.weight"}


@dataclass(frozen=True)
class Unit:
    """One Megatron parameter and the Hugging Face tensors that it is made of.

    split: whole (a copy on every rank), column (first axis), row (second axis), qkv or gated (both: first axis)."""

    megatron: str  # in the local spec's module tree; Transformer Engine's name for it is in TE_NAMES
    hf: tuple[str, ...]
    split: str
    layer: int | None = None  # global, from 0; None outside the layers


# Transformer Engine's layers keep a norm's weight inside the product that follows it.
TE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def layer_units(shape: ModelShape, layer: int) -> list[Unit]:
    """The units of one layer; `megatron` is relative to the layer's module."""
    at = f"model.layers.{layer}."

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


def embedding_unit() -> Unit:
    return Unit("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "column")


def final_units(shape: ModelShape) -> list[Unit]:
    """What the last stage has beside its layers; a tied lm head is no unit of its own."""
    units = [Unit("decoder.final_layernorm.weight", ("model.norm.weight",), "whole")]
    if shape.head != "lm":
        units.append(Unit("output_layer.weight", (_HEAD_NAME[shape.head],), "whole"))
    elif not shape.tied:
        units.append(Unit("output_layer.weight", (_HEAD_NAME["lm"],), "column"))
    return units


def all_units(shape: ModelShape) -> list[Unit]:
    """Every parameter of the model, in the order in which it is computed."""
    layers = [unit for layer in range(shape.num_layers) for unit in layer_units(shape, layer)]
    return [embedding_unit(), *layers, *final_units(shape)]


def hf_shape(name: str, shape: ModelShape) -> tuple[int, ...]:
    """The shape of a Hugging Face tensor of this model. Raises ValueError for a name that the model does not have."""
    layer = _LAYER.match(name)
    local = name[layer.end() :] if layer and int(layer[1]) < shape.num_layers else name
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
    outside = {"model.embed_tokens.weight": (shape.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if shape.head != "lm":
        outside[_HEAD_NAME[shape.head]] = (1, hidden)
    elif not shape.tied:
        outside[_HEAD_NAME["lm"]] = (shape.vocab_size, hidden)
    known = inside if local is not name else outside
    if local not in known:
        raise ValueError(
            f"{name!r} is not a tensor of a {shape.num_layers}-layer {shape.family} model with head {shape.head}"
        )
    return known[local]


def hf_names(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> full, unpadded shape, of every tensor, in the order of export."""
    return {name: hf_shape(name, shape) for unit in all_units(shape) for name in unit.hf}


def to_megatron(unit: Unit, tensors: list[Tensor], shape: ModelShape, *, rank: int, tensor: int) -> Tensor:
    """Full Hugging Face tensors (in the order of unit.hf) -> the shard of tensor-parallel rank `rank` of `tensor`."""
    if unit.split == "qkv":
        return _merge_qkv(*tensors, shape).chunk(tensor, 0)[rank]
    if unit.split == "gated":
        return torch.cat([x.chunk(tensor, 0)[rank] for x in tensors])
    (whole,) = tensors
    if unit.split == "column":
        return _pad_vocabulary(whole, shape).chunk(tensor, 0)[rank]
    return whole.chunk(tensor, 1)[rank] if unit.split == "row" else whole


def from_megatron(unit: Unit, shards: list[Tensor], shape: ModelShape) -> list[Tensor]:
    """The shards of all tensor-parallel ranks, in order -> full Hugging Face tensors in the order of unit.hf, without padding."""
    if unit.split == "whole":
        return shards[:1]
    if unit.split == "row":
        return [torch.cat(shards, 1)]
    if unit.split == "gated":
        return [torch.cat(halves) for halves in zip(*(shard.chunk(2, 0) for shard in shards))]
    whole = torch.cat(shards)
    return _split_qkv(whole, shape) if unit.split == "qkv" else [whole[: shape.vocab_size]]


def _merge_qkv(query: Tensor, key: Tensor, value: Tensor, shape: ModelShape) -> Tensor:
    groups = [x.reshape(shape.num_query_groups, -1, *x.shape[1:]) for x in (query, key, value)]
    return torch.cat(groups, 1).reshape(-1, *query.shape[1:])


def _split_qkv(merged: Tensor, shape: ModelShape) -> list[Tensor]:
    channels = shape.kv_channels
    queries = shape.num_attention_heads // shape.num_query_groups * channels
    groups = merged.reshape(shape.num_query_groups, queries + 2 * channels, *merged.shape[1:])
    return [part.reshape(-1, *merged.shape[1:]) for part in groups.split([queries, channels, channels], 1)]


def _pad_vocabulary(whole: Tensor, shape: ModelShape) -> Tensor:
    """[V, H] -> [padded vocabulary, H] with rows of zeros."""
    return torch.cat([whole, whole.new_zeros(shape.padded_vocab_size - whole.size(0), whole.size(1))])
