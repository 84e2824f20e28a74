"""Conversion between a Hugging Face folder and a checkpoint of this toolkit, in one process. Bit-exact both ways."""

import json
import shutil
from pathlib import Path
from typing import Callable, Iterable, Iterator

import torch
from torch import Tensor

from aligner.config.groups import ParallelConfig
from aligner.models.build import build_model
from aligner.models.checkpoint import checkpoint_shape, save_weights
from aligner.models.checkpoint_folder import TOKENIZER, WEIGHTS, copy_tokenizer, opened
from aligner.models.damage import damage_is_named
from aligner.models.hf import load_hf
from aligner.models.hf_config import config_of, shape_of
from aligner.models.hf_folder import (
    SafeTensors,
    copy_tokenizer_files,
    read_config,
    special_ids,
)
from aligner.models.hf_mapping import all_units, canonical_name, hf_names
from aligner.models.model_config import ModelShape
from aligner.models.stored_weights import StoredWeights, hf_tensors
from aligner.models.tensor_file import HfWeights
from aligner.parallel.startup import start

Progress = Callable[[str], None]


def hf_to_nemo(source: Path, output: Path, *, progress: Progress) -> ModelShape:
    """Convert the Hugging Face folder `source` to a checkpoint in `output`, which must not exist or be empty.

    The weights keep their dtype where all are bfloat16 or all float32, and become float32 otherwise (float16 fits in it). What is
    written appears under its name only when it is complete. Raises ValueError for another family and for missing files."""
    config = read_config(source)
    shape = shape_of(config)
    tensors = SafeTensors(source, rename=lambda name: canonical_name(name, shape))
    refuse_existing(output)
    dtype = torch.bfloat16 if tensors.dtypes() == {"BF16"} else torch.float32
    progress(f"{source}: {shape.family}, {shape.num_layers} layers, {len(tensors)} tensors, written as {_name(dtype)}")
    topology = start(ParallelConfig(), seed=0)
    chunks = build_model(shape, topology, head=shape.head, dtype=dtype, initialise=False)
    load_hf(chunks, shape, topology, _Counted(tensors, progress))
    with complete_folder(output) as partial:
        copy_tokenizer_files(source, partial / TOKENIZER)
        save_weights(chunks, shape, topology, partial)
    progress(f"{output}: {WEIGHTS}/, model_config.yaml, {TOKENIZER}/")
    return shape


def nemo_to_hf(source: Path, output: Path, *, progress: Progress) -> ModelShape:
    """Convert a checkpoint (folder or .nemo archive) to a Hugging Face folder: config.json, safetensors, tokenizer. Bit-exact.

    Memory: one parameter at a time; the model is never built. Raises ValueError where the weights are not those of its model."""
    shape = checkpoint_shape(source)
    refuse_existing(output)
    topology = start(ParallelConfig(), seed=0)
    with opened(source, topology) as folder, complete_folder(output) as partial, damage_is_named(folder / WEIGHTS):
        stored = StoredWeights(folder, shape)
        dtype = torch.bfloat16 if stored.dtypes() == {torch.bfloat16} else torch.float32
        progress(f"{source}: {shape.family}, {shape.num_layers} layers, stored as {_name(dtype)}")
        flat_tokenizer(folder, partial)
        config = config_of(shape, dtype=_name(dtype), special=special_ids(partial))
        (partial / "config.json").write_text(json.dumps(config, indent=1))
        names = hf_names(shape)
        with HfWeights(partial, names, dtype) as out:
            for name, tensor in _counted(_stored_tensors(stored, shape), len(names), progress):
                out.write(name, tensor.to(dtype))
    progress(f"{output}: {len(names)} tensors, config.json, tokenizer")
    return shape


def _stored_tensors(stored: StoredWeights, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    for unit in all_units(shape):
        yield from hf_tensors(unit, stored.read(unit), shape)


def refuse_existing(output: Path) -> None:
    """Raises ValueError where `output` is a file or a folder that is not empty."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output_dir {output} exists and is not an empty folder; name another, or remove it first")


def publish(folder: Path, output: Path) -> None:
    """Copy a folder to `output`, which appears only when it is complete. Raises ValueError where there is something already."""
    refuse_existing(output)
    with complete_folder(output) as partial:
        shutil.copytree(folder, partial, dirs_exist_ok=True)


class complete_folder:
    """A folder beside `output` that takes its name when the block ends well, and is removed when it does not."""

    def __init__(self, output: Path):
        self.output, self.partial = output, output.with_name(f".{output.name}.partial")

    def __enter__(self) -> Path:
        shutil.rmtree(self.partial, ignore_errors=True)
        try:
            self.partial.mkdir(parents=True)
        except OSError as error:
            raise ValueError(f"--output_dir {self.output} cannot be made ({error.strerror}): name another") from error
        return self.partial

    def __exit__(self, kind, *exc) -> None:
        if kind is not None:
            shutil.rmtree(self.partial, ignore_errors=True)
            return
        if self.output.exists():
            self.output.rmdir()
        self.partial.rename(self.output)


def flat_tokenizer(source: Path, folder: Path) -> None:
    """The files of the checkpoint's tokenizer/, in `folder` itself: Hugging Face keeps them beside the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(source, folder)
    inner = folder / TOKENIZER
    if inner.is_dir():
        for file in inner.iterdir():
            file.rename(folder / file.name)
        inner.rmdir()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _counted(tensors: Iterable[tuple[str, Tensor]], total: int, progress: Progress) -> Iterator[tuple[str, Tensor]]:
    """Pass on, and say at every tenth of them how far it is."""
    for i, item in enumerate(tensors, 1):
        yield item
        if i * 10 // total > (i - 1) * 10 // total:
            progress(f"{i}/{total} tensors")


class _Counted(dict):
    """Names at once, tensors read when asked for, and progress said at every tenth of them."""

    def __init__(self, tensors: SafeTensors, progress: Progress):
        super().__init__((name, None) for name in tensors)
        self.tensors, self.progress, self.read = tensors, progress, 0

    def __getitem__(self, name: str) -> Tensor:
        self.read += 1
        if self.read * 10 // len(self) > (self.read - 1) * 10 // len(self):
            self.progress(f"{self.read}/{len(self)} tensors")
        return self.tensors[name]
