"""Hugging Face tensors in and out of the chunks of a running model, layer by layer over tensor and pipeline parallelism."""

from typing import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.models.build import unwrap
from aligner.models.hf_mapping import (
    TE_NAMES,
    Unit,
    all_units,
    embedding_unit,
    final_units,
    first_units,
    from_megatron,
    hf_names,
    hf_shape,
    layer_units,
    pieces,
    to_megatron,
)
from aligner.models.model_config import ModelShape
from aligner.parallel.device import DEVICE
from aligner.parallel.topology import Topology


def load_hf(
    chunks: list[torch.nn.Module], shape: ModelShape, topology: Topology, tensors: Mapping[str, Tensor]
) -> None:
    """Copy full Hugging Face tensors into this rank's shards; each rank reads what it needs. The vocabulary's padding becomes 0.

    Raises ValueError listing names that are missing, unknown or misshaped. A value or score head that is missing keeps its zeros; an
    lm head beside a tied embedding, or where the model has another head, is not read. An optimizer made before must be told
    (reload_model_params)."""
    check_names(shape, tensors)
    for unit, parameter in local_parameters(chunks, shape):
        if all(name in tensors for name in unit.hf):
            whole = [tensors[name] for name in unit.hf]
            _check_shapes(unit, whole, shape)
            shard = to_megatron(unit, whole, shape, rank=topology.tensor_rank, tensor=topology.tensor)
            with torch.no_grad():
                parameter.copy_(shard)


def check_names(shape: ModelShape, tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError listing the names that the model has and `tensors` lack, and the other way round."""
    needed = set(hf_names(shape))
    head = "score.weight"
    missing = sorted(needed - set(tensors) - {head})
    unread = {"lm_head.weight"} if shape.tied or shape.head != "lm" else set()
    unknown = sorted(set(tensors) - needed - unread)
    if missing or unknown:
        raise ValueError(
            f"the tensors are not those of a {shape.num_layers}-layer {shape.family} model with head {shape.head}: "
            f"missing {missing[:10] or 'none'} ({len(missing)}), unknown {unknown[:10] or 'none'} ({len(unknown)})"
        )


def _check_shapes(unit: Unit, tensors: list[Tensor], shape: ModelShape) -> None:
    expected = _expected_shapes(unit, shape)
    for name, tensor in zip(unit.hf, tensors):
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but model_config says {expected[name]}")


def _expected_shapes(unit: Unit, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    return {name: hf_shape(name, shape) for name in unit.hf}


def local_parameters(chunks: list[torch.nn.Module], shape: ModelShape) -> Iterator[tuple[Unit, torch.nn.Parameter]]:
    """Each unit of which this rank holds a shard, with the parameter; the last stage's copy of a tied embedding is one too."""
    for model in map(unwrap, chunks):
        if model.pre_process:
            own = dict(model.named_parameters())
            yield from ((unit, own[unit.megatron]) for unit in first_units(shape))
        for layer in model.decoder.layers:
            own = dict(layer.named_parameters())
            for unit in layer_units(shape, layer.layer_number - 1):
                yield unit, own.get(unit.megatron, own.get(TE_NAMES.get(unit.megatron)))
        if model.post_process:
            own = dict(model.named_parameters())
            for unit in final_units(shape):
                yield unit, own[unit.megatron]
            if shape.head == "lm" and shape.tied and not model.pre_process:
                yield embedding_unit(shape), model.output_layer.weight


def export_hf(chunks: list[torch.nn.Module], shape: ModelShape, topology: Topology) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full unpadded tensor) for every tensor, in the order of hf_names, on every rank of the model replica.

    A collective over pipeline and tensor groups: consume it whole, on all ranks. Tensors have the model's dtype and are on DEVICE. They
    may share memory with the parameters: copy what outlives the next update.

    What exists beside the model at a time, if the caller keeps nothing, is at most one layer, or twice the embedding."""
    own = {(unit.megatron, unit.layer): parameter.detach() for unit, parameter in local_parameters(chunks, shape)}
    if shape.head == "lm" and shape.tied and not topology.is_first_stage:
        own.pop((embedding_unit(shape).megatron, None), None)  # the first stage's is the one that is sent
    dtype = unwrap(chunks[0]).config.params_dtype
    for unit in all_units(shape):
        shard = _from_stage(unit, own.get((unit.megatron, unit.layer)), shape, topology, dtype)
        names = iter(unit.hf)
        for piece in pieces(unit, shard):
            wholes = from_megatron(unit, _from_tensor_ranks(unit, piece, topology), shape)
            for whole, name in zip(wholes, names):  # in this order: zip asks the first once more at its end
                yield name, whole


def stage_of(unit: Unit, shape: ModelShape, topology: Topology) -> int:
    """The pipeline rank that holds a unit. With virtual stages, consecutive groups of layers go round the ranks."""
    if unit.layer is None:
        return 0 if unit.megatron.startswith("embedding") else topology.pipeline - 1
    layers_a_chunk = shape.num_layers // (topology.pipeline * (topology.virtual_pipeline or 1))
    return unit.layer // layers_a_chunk % topology.pipeline


def _from_stage(unit: Unit, shard: Tensor | None, shape: ModelShape, topology: Topology, dtype: torch.dtype) -> Tensor:
    """This tensor-parallel rank's shard, on every pipeline stage."""
    if topology.pipeline == 1:
        return shard
    stage = stage_of(unit, shape, topology)
    if topology.pipeline_rank != stage:
        shard = torch.empty(shard_shape(unit, shape, topology), dtype=dtype, device=DEVICE)
    source = dist.get_global_rank(topology.pipeline_group, stage)
    dist.broadcast(shard, src=source, group=topology.pipeline_group)
    return shard


def _from_tensor_ranks(unit: Unit, piece: Tensor, topology: Topology) -> Tensor:
    """[tp, *piece]: every tensor-parallel rank's; [1, *piece] where one has all."""
    if unit.split == "whole" or topology.tensor == 1:
        return piece[None]
    gathered = piece.new_empty(topology.tensor * piece.size(0), *piece.shape[1:])
    dist.all_gather_into_tensor(gathered, piece.contiguous(), group=topology.tensor_group)
    return gathered.unflatten(0, (topology.tensor, -1))


def shard_shape(unit: Unit, shape: ModelShape, topology: Topology) -> tuple[int, ...]:
    """The shape of one tensor-parallel rank's shard, from the same function that makes it; no memory is used."""
    whole = [torch.empty(size, device="meta") for size in _expected_shapes(unit, shape).values()]
    return tuple(to_megatron(unit, whole, shape, rank=0, tensor=topology.tensor).shape)
