"""A checkpoint of this toolkit as TensorRT-LLM's unified checkpoint and as a Hugging Face folder, tensor by tensor.

Memory: one parameter at a time, its bytes as read and its converted parts; the model is never built."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Callable

import torch
from torch import Tensor

from aligner.config.groups import ParallelConfig
from aligner.models.checkpoint_folder import checkpoint_shape, opened
from aligner.models.convert import complete_folder, flat_tokenizer, refuse_existing
from aligner.models.hf_config import config_of
from aligner.models.hf_folder import special_ids
from aligner.models.hf_mapping import all_units, hf_names
from aligner.models.model_config import ModelShape
from aligner.models.stored_weights import StoredWeights, hf_tensors, unit_shape
from aligner.models.tensor_file import HfWeights, TensorFile
from aligner.parallel.startup import start
from aligner.trtllm.checkpoint_config import checkpoint_config
from aligner.trtllm.engine_build import EngineBuild
from aligner.trtllm.layout import Grid, rank_shapes, rank_tensors, split_problems

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Advance = Callable[[], None]


def nemo_to_trtllm(source: Path, output: Path, *, grid: Grid, build: EngineBuild, advance: Advance) -> ModelShape:
    """Convert the checkpoint `source` (folder or .nemo archive) to `output`, which appears under its name only when it is complete.

    advance is called once a parameter (parameters(shape) times in all). Raises ValueError for what TensorRT-LLM could not serve."""
    shape = checkpoint_shape(source)
    refuse_impossible(source, shape, grid, build)
    refuse_existing(output)
    topology = start(ParallelConfig(), seed=0)
    with opened(source, topology) as folder, complete_folder(output) as partial:
        stored = StoredWeights(folder, shape)
        flat_tokenizer(folder, partial / "hf")
        _write_texts(shape, grid, build, partial)
        write_weights(stored, shape, grid, DTYPES[build.dtype], partial, advance)
    return shape


def parameters(shape: ModelShape) -> int:
    """How many parameters a conversion goes through."""
    return len(all_units(shape))


def refuse_impossible(source: Path, shape: ModelShape, grid: Grid, build: EngineBuild) -> None:
    """Raises ValueError with every reason why TensorRT-LLM could not serve the model so."""
    if shape.head != "lm":
        raise ValueError(f"{source} has a {shape.head} head: only language models are converted for TensorRT-LLM")
    problems = split_problems(shape, grid, tensor_key="--tp_size", pipeline_key="--pp_size")
    problems += [] if problems else build.problems(shape, grid)
    if problems:
        raise ValueError(f"{source} cannot be converted: " + "; ".join(problems))


def _write_texts(shape: ModelShape, grid: Grid, build: EngineBuild, folder: Path) -> None:
    config = checkpoint_config(shape, grid, dtype=build.dtype, quantization=build.quantization)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "build.json").write_text(json.dumps(build.settings(grid), indent=1))
    (folder / "build.sh").write_text(build.script())
    (folder / "build.sh").chmod(0o755)
    hf = folder / "hf"
    described = config_of(shape, dtype=build.dtype, special=special_ids(hf))
    (hf / "config.json").write_text(json.dumps(described, indent=1))


def write_weights(
    stored: StoredWeights, shape: ModelShape, grid: Grid, dtype: torch.dtype, folder: Path, advance: Advance
) -> None:
    units = all_units(shape)
    names = rank_shapes([(unit, unit_shape(unit, shape)) for unit in units], shape, grid)
    with ExitStack() as files:
        ranks = [
            files.enter_context(TensorFile(folder / f"rank{rank}.safetensors", of_rank, dtype))
            for rank, of_rank in enumerate(names)
        ]
        hf = files.enter_context(HfWeights(folder / "hf", hf_names(shape), dtype))
        for unit in units:
            whole = converted(stored.read(unit), dtype, unit.megatron)
            for rank, name, tensor in rank_tensors(unit, whole, shape, grid):
                ranks[rank].write(name, tensor)
            for name, tensor in hf_tensors(unit, whole, shape):
                hf.write(name, tensor)
            advance()


def converted(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The tensor as `dtype`. Raises ValueError where float16 cannot hold a value that was finite."""
    result = tensor.to(dtype)
    if dtype is torch.float16 and tensor.dtype is not dtype and not torch.equal(result.isfinite(), tensor.isfinite()):
        largest = tensor.abs().max().item()
        raise ValueError(f"{name} has values up to {largest:g}, beyond float16's 65504: use --dtype bfloat16")
    return result
