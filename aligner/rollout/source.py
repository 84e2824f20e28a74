"""What generate.py samples from: a checkpoint of this toolkit or of a run, a .nemo archive, or a Hugging Face folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

import torch
from torch import Tensor

from aligner.data.tokenizer import Tokenizer
from aligner.models.build import build_model
from aligner.models.checkpoint import load_weights
from aligner.models.checkpoint_folder import TOKENIZER, checkpoint_shape, is_archive, opened
from aligner.models.hf import check_names, export_hf
from aligner.models.hf_config import shape_of
from aligner.models.hf_folder import SafeTensors, read_config
from aligner.models.hf_mapping import canonical_name, hf_names
from aligner.models.model_config import ModelShape
from aligner.parallel.topology import Topology
from aligner.runtime.checkpoint_folder import MARKER, CheckpointFolder
from aligner.runtime.errors import UserError


@dataclass(frozen=True)
class Source:
    """A model with an lm head. `path`: a folder, or an archive; `hugging_face`: whose format it has."""

    path: Path
    hugging_face: bool
    shape: ModelShape

    def tokenizer(self, topology: Topology) -> Tokenizer:
        if self.hugging_face:
            return Tokenizer(self.path)
        with opened(self.path, topology, only=TOKENIZER) as folder:
            return Tokenizer(folder / TOKENIZER)

    def tensors(self, topology: Topology, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every tensor under its Hugging Face name. Those of a Hugging Face folder are read one by one; a checkpoint of this toolkit
        is loaded whole, in `dtype`, as a model that is dropped when the last tensor is taken."""
        if self.hugging_face:
            yield from self._from_safetensors()
            return
        chunks = build_model(self.shape, topology, head="lm", dtype=dtype, initialise=False)
        load_weights(chunks, self.shape, topology, self.path)
        yield from export_hf(chunks, self.shape, topology)

    def _from_safetensors(self) -> Iterator[tuple[str, Tensor]]:
        tensors = SafeTensors(self.path, rename=lambda name: canonical_name(name, self.shape))
        check_names(self.shape, tensors)
        for name in hf_names(self.shape):
            yield name, tensors[name]


def find_source(path: Path) -> Source:
    """What --checkpoint names: of a run, or of its checkpoints/, the newest committed checkpoint; of a step_N, what it holds.

    Raises UserError or ValueError where it is nothing of the kind, is not committed, or has no lm head."""
    if not path.exists():
        raise UserError(f"--checkpoint {path} does not exist")
    path = _inside_run(path)
    hugging_face = (path / "config.json").is_file() and not (path / "model_config.yaml").is_file()
    shape = shape_of(read_config(path)) if hugging_face else _checkpoint_shape(path)
    if shape.head != "lm":
        raise UserError(f"--checkpoint {path} has a {shape.head} head and no lm head: it cannot generate")
    return Source(path, hugging_face, shape)


def _checkpoint_shape(path: Path) -> ModelShape:
    if not is_archive(path) and not (path / "model_config.yaml").is_file():
        raise UserError(
            f"--checkpoint {path} is none of: a converted checkpoint (model_config.yaml), a .nemo archive, a Hugging Face folder "
            "(config.json), a run (checkpoints/), or one of its checkpoints/step_N"
        )
    return checkpoint_shape(path)


def _inside_run(path: Path) -> Path:
    """The model (of the actor, or of supervised fine-tuning) that a run's folder stands for; every other path as it is."""
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    steps = CheckpointFolder(path)
    if path.name == "checkpoints" and path.is_dir():
        newest = steps.newest()
        if newest is None:
            raise UserError(f"--checkpoint {path} holds no committed checkpoint yet")
        path = steps.step(newest)
    job = next((path / name for name in ("actor", "sft") if (path / name).is_dir()), None)
    if job is None:
        return path
    if not (path / MARKER).is_file():
        raise UserError(f"--checkpoint {path} was not committed: its save did not end; name another step")
    return job
