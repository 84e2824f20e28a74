"""The tensors of a checkpoint's model_weights/, read one unit at a time without building the model."""

import io
from pathlib import Path
from typing import Iterator

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from aligner.models.checkpoint import LAYERS, PREFIX
from aligner.models.checkpoint_folder import WEIGHTS
from aligner.models.heads import HEAD_KEY
from aligner.models.hf_mapping import TE_NAMES, Unit, all_units, from_megatron, hf_shape, pieces, to_megatron
from aligner.models.model_config import ModelShape

SHOWN = 10


class StoredWeights:
    """Reads torch_dist files of any layout: a unit's chunks are put together as one rank would hold them."""

    def __init__(self, folder: Path, shape: ModelShape):
        """Raises ValueError where the files are not those of a model of `shape`."""
        self.folder, self.shape = folder / WEIGHTS, shape
        if not (self.folder / "metadata.json").is_file():
            raise ValueError(
                f"{folder} has no complete {WEIGHTS}/: there is no metadata.json in it; convert or save it again"
            )
        metadata = FileSystemReader(str(self.folder)).read_metadata()
        self._stored = {k: t for k, t in metadata.state_dict_metadata.items() if isinstance(t, TensorStorageMetadata)}
        self._places = metadata.storage_data
        self._check(folder)

    def _check(self, folder: Path) -> None:
        wanted = {key_of(unit): self._size_on_disk(unit) for unit in all_units(self.shape)}
        missing = sorted(set(wanted) - set(self._stored))
        unread = {f"{PREFIX}output_layer.weight"} if self.shape.tied else set()
        unknown = sorted(key for key in set(self._stored) - set(wanted) - unread if "_extra_state" not in key)
        if missing or unknown:
            raise ValueError(
                f"{folder} does not hold the tensors of this model: missing {missing[:SHOWN] or 'none'} ({len(missing)}), "
                f"unknown {unknown[:SHOWN] or 'none'} ({len(unknown)})"
            )
        for key, size in wanted.items():
            if (found := tuple(self._stored[key].size)) != size:
                raise ValueError(f"{folder}: {key} has shape {found}, but model_config.yaml says {size}")

    def _size_on_disk(self, unit: Unit) -> tuple[int, ...]:
        size = unit_shape(unit, self.shape)
        return size if unit.layer is None else (self.shape.num_layers, *size)

    def dtypes(self) -> set[torch.dtype]:
        return {stored.properties.dtype for stored in self._stored.values()}

    def read(self, unit: Unit) -> Tensor:
        """The whole parameter as Megatron holds it on one tensor-parallel rank (padded vocabulary), in the stored type."""
        key = key_of(unit)
        stored, size = self._stored[key], unit_shape(unit, self.shape)
        whole = torch.empty(size, dtype=stored.properties.dtype)
        filled = 0
        for chunk in stored.chunks:
            inside = _inside(chunk, unit.layer)
            if inside is None:
                continue
            part = self._load(key, chunk)
            if unit.layer is not None:
                part = part[unit.layer - chunk.offsets[0]]
            whole[inside] = part
            filled += part.numel()
        if filled != whole.numel():
            raise ValueError(
                f"{self.folder}: {key} is incomplete, {filled} of {whole.numel()} elements of it are there"
            )
        return whole

    def _load(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        place = self._places[MetadataIndex(key, chunk.offsets)]
        if getattr(place, "transform_descriptors", None):
            raise ValueError(
                f"{self.folder}: {key} is stored with {place.transform_descriptors}, which is not read here"
            )
        with (self.folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            return torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)


def hf_tensors(unit: Unit, whole: Tensor, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors of a parameter that was read, with their names."""
    parts = (tensor for piece in pieces(unit, whole) for tensor in from_megatron(unit, piece[None], shape))
    return zip(unit.hf, parts, strict=True)


def key_of(unit: Unit) -> str:
    """The name on disk; layers are stacked under one."""
    if unit.hf == ("score.weight",):
        return PREFIX + HEAD_KEY
    if unit.layer is None:
        return PREFIX + unit.megatron
    return LAYERS + TE_NAMES.get(unit.megatron, unit.megatron)


def unit_shape(unit: Unit, shape: ModelShape) -> tuple[int, ...]:
    """The shape of a unit on one tensor-parallel rank, from the function that makes it; no memory is used."""
    parts = [torch.empty(hf_shape(name, shape), device="meta") for name in unit.hf]
    return tuple(to_megatron(unit, parts, shape, rank=0, tensor=1).shape)


def _inside(chunk: ChunkStorageMetadata, layer: int | None) -> tuple[slice, ...] | None:
    """Where a chunk lies in its layer's parameter (or in the parameter itself); None where it is of other layers."""
    offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
    if layer is not None:
        if not offsets[0] <= layer < offsets[0] + sizes[0]:
            return None
        offsets, sizes = offsets[1:], sizes[1:]
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes))
