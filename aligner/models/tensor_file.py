"""Safetensors files written tensor by tensor, so that no more than one tensor is held: the header needs shapes only, and comes first.

The safetensors library writes whole dictionaries. The format: eight bytes with the length of the header (little-endian), the header
(JSON: name -> dtype, shape, data_offsets; padded with spaces to a multiple of eight), then the tensors' bytes without gaps."""

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Mapping

import torch
from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]

NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000


class TensorFile:
    """One file that will hold the tensors of `shapes`, all of `dtype`. Write each once, in any order, then leave the `with` block."""

    def __init__(self, path: Path, shapes: Shapes, dtype: torch.dtype):
        self.path, self.dtype, self.shapes = path, dtype, {name: tuple(size) for name, size in shapes.items()}
        self._places, end = {}, 0
        for name, size in self.shapes.items():
            begin, end = end, end + math.prod(size) * dtype.itemsize
            self._places[name] = (begin, end)
        self._left = set(self.shapes)

    def _header(self) -> bytes:
        entries = {
            name: {"dtype": NAMES[self.dtype], "shape": list(size), "data_offsets": list(self._places[name])}
            for name, size in self.shapes.items()
        }
        text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
        return text + b" " * (-len(text) % 8)

    def __enter__(self) -> "TensorFile":
        header = self._header()
        self._file = self.path.open("wb")
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._begin = self._file.tell()
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Put one tensor in its place. Raises ValueError where it is unknown, comes twice, or differs in shape or dtype."""
        if name not in self._left:
            raise ValueError(
                f"{self.path.name}: tensor {name!r} {'came twice' if name in self.shapes else 'is unknown'}"
            )
        if tuple(tensor.shape) != self.shapes[name] or tensor.dtype != self.dtype:
            raise ValueError(
                f"{self.path.name}: tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, the header says {self.dtype} "
                f"{list(self.shapes[name])}"
            )
        self._left.discard(name)
        self._file.seek(self._begin + self._places[name][0])
        self._file.write(memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))

    def __exit__(self, kind, *exc) -> None:
        self._file.close()
        if kind is None and self._left:
            raise ValueError(f"{self.path.name} lacks {len(self._left)} tensors, first {sorted(self._left)[:5]}")


class HfWeights:
    """model.safetensors of a Hugging Face folder, or numbered shards of at most `shard_bytes` and their index."""

    def __init__(self, folder: Path, shapes: Shapes, dtype: torch.dtype, *, shard_bytes: int = SHARD_BYTES):
        parts = _parts(shapes, dtype, shard_bytes)
        names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
        if len(parts) == 1:
            names = ["model.safetensors"]
        self._files = [TensorFile(folder / name, part, dtype) for name, part in zip(names, parts)]
        self._of = {name: file for file in self._files for name in file.shapes}
        self._index = folder / INDEX
        self._total = sum(math.prod(size) for size in shapes.values()) * dtype.itemsize

    def __enter__(self) -> "HfWeights":
        self._open = ExitStack()
        for file in self._files:
            self._open.enter_context(file)
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """As TensorFile.write."""
        self._of[name].write(name, tensor)

    def __exit__(self, *exc) -> None:
        self._open.__exit__(*exc)
        if len(self._files) > 1:
            index = {
                "metadata": {"total_size": self._total},
                "weight_map": {n: f.path.name for n, f in self._of.items()},
            }
            self._index.write_text(json.dumps(index, indent=1))


def _parts(shapes: Shapes, dtype: torch.dtype, limit: int) -> list[dict[str, tuple[int, ...]]]:
    """The names in their order, cut where a part would exceed `limit` bytes; a larger tensor has a part of its own."""
    parts: list[dict[str, tuple[int, ...]]] = []
    size = 0
    for name, shape in shapes.items():
        bytes_ = math.prod(shape) * dtype.itemsize
        if not parts or size + bytes_ > limit:
            parts.append({})
            size = 0
        parts[-1][name] = shape
        size += bytes_
    return parts
