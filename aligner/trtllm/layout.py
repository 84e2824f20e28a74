"""How a model lies in TensorRT-LLM's unified checkpoint: names, and each rank's part of each of Megatron's parameters.

Legend: t tensor-parallel degree, V real vocabulary, a heads, k key-value heads, d channels a head, h hidden, f ffn. Rank N is stage
N // t, tensor rank N % t. Pure functions; linear weights are [out, in] on both sides."""

import math
from dataclasses import dataclass
from typing import Iterator

import torch
from torch import Tensor

from aligner.models.hf_mapping import Unit
from aligner.models.model_config import ModelShape

MODULES = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.q_layernorm": "attention.q_layernorm",
    "self_attention.k_layernorm": "attention.k_layernorm",
    "self_attention.linear_proj": "attention.dense",
    "pre_mlp_layernorm": "post_layernorm",
    "mlp.linear_fc1": "mlp.fc",
    "mlp.linear_fc2": "mlp.proj",
}
OUTSIDE = {
    "embedding.word_embeddings.weight": "transformer.vocab_embedding.weight",
    "embedding.position_embeddings.weight": "transformer.position_embedding.weight",
    "decoder.final_layernorm.weight": "transformer.ln_f.weight",
    "decoder.final_layernorm.bias": "transformer.ln_f.bias",
    "output_layer.weight": "lm_head.weight",
}
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Grid:
    """Over how many ranks TensorRT-LLM spreads the model."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline


def split_problems(shape: ModelShape, grid: Grid, *, tensor_key: str, pipeline_key: str) -> list[str]:
    """What keeps a model from being split over a grid, each with the rule and its numbers; empty where nothing does."""
    t, kv = grid.tensor, shape.num_query_groups
    bad = [f"{k}={v} must be at least 1" for k, v in ((tensor_key, t), (pipeline_key, grid.pipeline)) if v < 1]
    if bad:
        return bad
    rules = (
        ("num_attention_heads", shape.num_attention_heads, t, tensor_key),
        ("ffn_hidden_size", shape.ffn_hidden_size, t, tensor_key),
        ("num_layers", shape.num_layers, grid.pipeline, pipeline_key),
    )
    found = [
        f"the model's {name} must be a multiple of {key}: {value} is not one of {divisor}"
        for name, value, divisor, key in rules
        if value % divisor
    ]
    if kv % t and t % kv:
        found.append(
            f"the model's num_query_groups and {tensor_key} must be a multiple one of the other (key-value heads are split, or "
            f"repeated where there are fewer than ranks): {kv} and {t}"
        )
    return found


def rank_shapes(units: list[tuple[Unit, tuple[int, ...]]], shape: ModelShape, grid: Grid) -> list[dict[str, tuple]]:
    """For each rank name -> shape of its tensors, from the function that makes them; no memory is used."""
    found: list[dict[str, tuple]] = [{} for _ in range(grid.world)]
    for unit, size in units:
        for rank, name, tensor in rank_tensors(unit, torch.empty(size, device="meta"), shape, grid):
            found[rank][name] = tuple(tensor.shape)
    return found


def rank_tensors(unit: Unit, whole: Tensor, shape: ModelShape, grid: Grid) -> Iterator[tuple[int, str, Tensor]]:
    """(rank, name, tensor) of everything that one parameter becomes, one at a time.

    whole: the parameter as Megatron holds it unsharded (vocabulary padded). Raises ValueError for a parameter without a rule."""
    if unit.layer is None:
        yield from _outside(unit, whole, shape, grid)
        return
    module, _, kind = unit.megatron.rpartition(".")
    if module not in MODULES:
        raise ValueError(f"Megatron's {unit.megatron} has no place in a checkpoint of TensorRT-LLM")
    layers = shape.num_layers // grid.pipeline
    stage, local = divmod(unit.layer, layers)
    for t in range(grid.tensor):
        for name, part in _layer_parts(unit, MODULES[module], whole, shape, t, grid.tensor):
            yield stage * grid.tensor + t, f"transformer.layers.{local}.{name}.{kind}", part


def _layer_parts(
    unit: Unit, name: str, whole: Tensor, shape: ModelShape, rank: int, tensor: int
) -> Iterator[tuple[str, Tensor]]:
    if name == "attention.qkv":
        yield name, _qkv(whole, shape, rank, tensor)
    elif unit.split == "gated":
        # Megatron stacks gate over up; TensorRT-LLM's fc is the gate projection, its gate the up projection.
        gate, up = whole.chunk(2)
        yield name, gate.chunk(tensor)[rank]
        yield "mlp.gate", up.chunk(tensor)[rank]
    elif name == "mlp.fc":
        yield name, whole.chunk(tensor)[rank]
    elif name in ("attention.dense", "mlp.proj") and whole.dim() == 2:
        yield name, whole.chunk(tensor, 1)[rank]
    else:
        yield name, whole


def _qkv(whole: Tensor, shape: ModelShape, rank: int, tensor: int) -> Tensor:
    """[a/t + 2 * max(k, t)/t heads of d rows, ...]: queries, keys, values. Megatron has them per group: its queries, key, value."""
    heads, kv, d = shape.num_attention_heads, shape.num_query_groups, shape.kv_channels
    groups = whole.reshape(kv, heads // kv + 2, d, *whole.shape[1:])
    query = groups[:, :-2].reshape(heads * d, *whole.shape[1:]).chunk(tensor)[rank]
    if kv >= tensor:
        own = slice(rank * kv // tensor, (rank + 1) * kv // tensor)
    else:
        own = slice(rank // (tensor // kv), rank // (tensor // kv) + 1)
    key, value = (groups[own, at].reshape(-1, *whole.shape[1:]) for at in (-2, -1))
    return torch.cat([query, key, value])


def _outside(unit: Unit, whole: Tensor, shape: ModelShape, grid: Grid) -> Iterator[tuple[int, str, Tensor]]:
    if unit.megatron not in OUTSIDE:
        raise ValueError(f"Megatron's {unit.megatron} has no place in a checkpoint of TensorRT-LLM")
    name = OUTSIDE[unit.megatron]
    word_embedding = unit.megatron == "embedding.word_embeddings.weight"
    first, last = range(grid.tensor), range(grid.world - grid.tensor, grid.world)
    if name != LM_HEAD:
        copy = whole[: shape.vocab_size] if word_embedding else whole
        for rank in first if unit.megatron.startswith("embedding.") else last:
            yield rank, name, copy
    if name == LM_HEAD or (word_embedding and shape.tied):
        for rank in last:
            yield rank, LM_HEAD, _head_rows(whole, shape.vocab_size, rank - last.start, grid.tensor)


def _head_rows(whole: Tensor, vocab_size: int, rank: int, tensor: int) -> Tensor:
    """This rank's rows of the head, [ceil(V / t), h]; rows beyond the real vocabulary are 0."""
    rows = math.ceil(vocab_size / tensor)
    own = whole[min(rank * rows, vocab_size) : min((rank + 1) * rows, vocab_size)]
    return torch.cat([own, own.new_zeros(rows - own.size(0), own.size(1))]) if own.size(0) < rows else own
