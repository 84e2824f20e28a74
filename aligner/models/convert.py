"""Conversion between a Hugging Face folder and a checkpoint of this toolkit, in one process. Bit-exact both ways."""

import json
import shutil
from pathlib import Path
from typing import Callable, Iterable, Iterator

import torch
from torch import Tensor

from aligner.config.groups import ParallelConfig
from aligner.models.build import build_model
from aligner.models.checkpoint import checkpoint_shape, load_weights, save_weights
from aligner.models.checkpoint_folder import TOKENIZER, WEIGHTS, copy_tokenizer, opened
from aligner.models.damage import damage_is_named
from aligner.models.hf import export_hf, load_hf
from aligner.models.hf_config import config_of, shape_of
from aligner.models.hf_folder import (
    SafeTensors,
    copy_tokenizer_files,
    read_config,
    special_ids,
    write_safetensors,
)
from aligner.models.hf_mapping import canonical_name, hf_names
from aligner.models.model_config import ModelShape
from aligner.parallel.startup import start
from aligner.parallel.topology import Topology

from megatron.core import dist_checkpointing  # isort: skip  (after aligner.parallel, which adapts it to a CPU)

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
    """Convert a checkpoint (folder or .nemo archive) to a Hugging Face folder: config.json, safetensors, tokenizer. Bit-exact."""
    shape = checkpoint_shape(source)
    refuse_existing(output)
    topology = start(ParallelConfig(), seed=0)
    dtype = _stored_dtype(source, topology)
    config = config_of(shape, dtype=_name(dtype), special={})
    progress(f"{source}: {shape.family}, {shape.num_layers} layers, stored as {_name(dtype)}")
    chunks = build_model(shape, topology, head=shape.head, dtype=dtype, initialise=False)
    load_weights(chunks, shape, topology, source)
    with complete_folder(output) as partial:
        flat_tokenizer(source, partial)
        config |= special_ids(partial)
        (partial / "config.json").write_text(json.dumps(config, indent=1))
        total = len(hf_names(shape))
        write_safetensors(_counted(export_hf(chunks, shape, topology), total, progress), partial)
    progress(f"{output}: {total} tensors, config.json, tokenizer")
    return shape


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


def _stored_dtype(source: Path, topology: Topology) -> torch.dtype:
    with opened(source, topology) as folder:
        if not (folder / WEIGHTS / "metadata.json").is_file():
            raise ValueError(f"{source} has no complete {WEIGHTS}/: there is no metadata.json in it")
        with damage_is_named(folder / WEIGHTS):
            found = {t.dtype for t in dist_checkpointing.load_tensors_metadata(str(folder / WEIGHTS)).values()}
    return torch.bfloat16 if found == {torch.bfloat16} else torch.float32


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
