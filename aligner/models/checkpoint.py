"""Weight checkpoints: torch_dist files under NeMo's names (prefix `model.`, Transformer Engine's layer names), from and to any layout."""

import contextlib
import copy
import logging
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

import torch
from torch.distributed.checkpoint.api import CheckpointException

from aligner.models.build import unwrap
from aligner.models.checkpoint_folder import WEIGHTS, checkpoint_shape, copy_tokenizer, opened
from aligner.models.damage import damage_is_named
from aligner.models.heads import HEAD_BIAS_KEY, HEAD_KEY
from aligner.models.model_config import ModelShape, write_model_config
from aligner.models.writing import Writing, write_sharded
from aligner.parallel.collectives import agree, gather_objects
from aligner.parallel.topology import Topology
from aligner.runtime.checkpoint_folder import empty_folder

from megatron.core import dist_checkpointing  # isort: skip  (after aligner.parallel, which adapts it to a CPU)
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # isort: skip
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding  # isort: skip

__all__ = ["checkpoint_shape", "load_weights", "read_sharded", "save_weights", "sharded_weights", "write_sharded"]

PREFIX = "model."
LAYERS = f"{PREFIX}decoder.layers."
_LAYER_KEY = re.compile(re.escape(LAYERS) + r"\d+\.")
_LM_HEAD, _VALUE_HEAD = f"{PREFIX}output_layer.weight", {PREFIX + HEAD_KEY, PREFIX + HEAD_BIAS_KEY}

logger = logging.getLogger(__name__)


def sharded_weights(chunks: list[torch.nn.Module], topology: Topology, *, per_layer: bool = False) -> dict[str, Any]:
    """Megatron's sharded state dict of the chunks, with this toolkit's names on disk: flat for one chunk, else {"model0": ...}.

    Layers are stacked along a first axis, as NeMo does; per_layer gives each its own name. Extra states (Transformer Engine's FP8
    scales; empty here) are left out, so that a checkpoint written on a CPU has the same names as one written on a GPU."""
    metadata = {
        "singleton_local_shards": False,
        "non_homogeneous_layers": per_layer,
        "dp_cp_group": topology.data_group,
    }
    found = []
    for model in map(unwrap, chunks):
        state = model.sharded_state_dict(metadata=metadata)
        state = {
            name: value for name, value in state.items() if isinstance(value, (ShardedTensor, ShardedTensorFactory))
        }
        add_prefix_for_sharding(state, PREFIX)
        found.append(state)
    return found[0] if len(found) == 1 else {f"model{i}": state for i, state in enumerate(found)}


def _flat(weights: dict[str, Any]) -> list[ShardedTensor | ShardedTensorFactory]:
    return [t for value in weights.values() for t in (value.values() if isinstance(value, dict) else [value])]


def save_weights(
    chunks: list[torch.nn.Module],
    shape: ModelShape,
    topology: Topology,
    folder: Path | str,
    *,
    tokenizer_from: Optional[Path | str] = None,
) -> None:
    """Write model_weights/ and model_config.yaml under `folder`, and copy tokenizer/ of the checkpoint `tokenizer_from`. Collective."""
    begin_weights(chunks, shape, topology, folder, tokenizer_from=tokenizer_from).finish()


def begin_weights(
    chunks: list[torch.nn.Module],
    shape: ModelShape,
    topology: Topology,
    folder: Path | str,
    *,
    tokenizer_from: Optional[Path | str] = None,
    beside: bool = False,
) -> Writing:
    """The same, complete once the Writing is finished."""
    folder = Path(folder)
    agree(_prepare(shape, folder, tokenizer_from) if topology.is_reporter else None, topology)
    return Writing(sharded_weights(chunks, topology), folder / WEIGHTS, topology, beside=beside)


def read_sharded(state: dict[str, Any], folder: Path, **how: Any) -> dict[str, Any]:
    """Fill a sharded state dict from torch_dist files. Collective. Raises ValueError, on every rank, where they do not fit or are
    damaged."""
    try:
        with damage_is_named(folder):
            return dist_checkpointing.load(state, str(folder), **how)
    except CheckpointException as failed:  # a BaseException, which no `except Exception` would catch
        said = "; ".join(sorted({str(error) for error, _ in failed.failures.values()}))
        raise ValueError(f"{folder} does not fit this model: {said or 'another rank failed'}") from None


def _prepare(shape: ModelShape, folder: Path, tokenizer_from: Optional[Path | str]) -> Optional[Exception]:
    try:
        empty_folder(folder / WEIGHTS)
        write_model_config(shape, folder)
        if tokenizer_from is not None:
            copy_tokenizer(Path(tokenizer_from), folder)
    except (OSError, ValueError) as error:
        return error
    return None


def load_weights(
    chunks: list[torch.nn.Module],
    shape: ModelShape,
    topology: Topology,
    folder: Path | str,
    *,
    fresh_head: bool = False,
) -> None:
    """Fill the chunks from a folder or .nemo archive that any layout wrote, whatever its dtype. Collective.

    `shape` may have fewer layers than the checkpoint (its first ones are taken) and another head: a value or score head that is not
    there, or is not wanted (fresh_head), starts at zero; one output of a head of several is what they add up to. An optimizer made
    before must be told (reload_model_params). Raises ValueError, on every rank, for a checkpoint that is missing, of another
    architecture, or with missing or unknown tensors."""
    folder = Path(folder)
    found = checkpoint_shape(folder)
    _refuse_other_architecture(folder, found, shape)
    if not fresh_head and found.head != "lm" and shape.head != "lm" and shape.outputs not in (1, found.outputs):
        raise ValueError(
            f"{folder} has a head of {found.outputs} outputs, and {shape.outputs} are wanted: start with a fresh head"
        )
    with opened(folder, topology) as unpacked:
        on_disk = _tensors_on_disk(unpacked / WEIGHTS, folder)
        per_layer = any(map(_LAYER_KEY.match, on_disk))
        with _wide_head(chunks, found, shape, fresh_head):
            weights = sharded_weights(chunks, topology, per_layer=per_layer)
            _refuse_other_tensors(folder, {t.key for t in _flat(weights)}, on_disk, topology)
            _drop_head(weights, _VALUE_HEAD if fresh_head else _VALUE_HEAD - set(on_disk), chunks, folder)
            if not per_layer and found.num_layers != shape.num_layers:
                _within(weights, found.num_layers, topology)
            # Not all of the checkpoint need be read (fewer layers, another head), which the check of its coverage would refuse.
            loaded = read_sharded(weights, unpacked / WEIGHTS, validate_access_integrity=False)
            for i, model in enumerate(map(unwrap, chunks)):
                model.load_state_dict(loaded if len(chunks) == 1 else loaded[f"model{i}"], strict=False)


@contextlib.contextmanager
def _wide_head(chunks: list[torch.nn.Module], found: ModelShape, wanted: ModelShape, fresh: bool) -> Iterator[None]:
    """While a head of several outputs is read for a model that has one: a weight of their number in its place, added up at the end."""
    last = unwrap(chunks[-1])
    adds_up = wanted.head != "lm" and wanted.outputs == 1 < found.outputs
    if fresh or not adds_up or not last.post_process:
        yield
        return
    head = last.output_layer
    narrow, size = head.weight, (found.outputs, wanted.hidden_size)
    head.weight = torch.nn.Parameter(narrow.new_zeros(size), requires_grad=False)
    try:
        yield
        with torch.no_grad():
            narrow.copy_(found.reward.merged(head.weight.float().T)[None])
    finally:
        head.weight = narrow


def _refuse_other_architecture(folder: Path, found: ModelShape, wanted: ModelShape) -> None:
    theirs, ours = asdict(found), asdict(wanted)
    differ = [k for k in ours if k not in ("head", "num_layers", "reward") and theirs[k] != ours[k]]
    if found.num_layers < wanted.num_layers:
        differ.append("num_layers")
    if differ:
        said = ", ".join(f"{k}={theirs[k]} (wanted {ours[k]})" for k in differ)
        raise ValueError(f"{folder} holds another architecture: {said}")


def _tensors_on_disk(weights: Path, folder: Path) -> dict[str, ShardedTensor]:
    if not (weights / "metadata.json").is_file():
        raise ValueError(
            f"{folder} has no complete {WEIGHTS}/: there is no metadata.json in it; convert or save the model again"
        )
    with damage_is_named(weights):
        return dist_checkpointing.load_tensors_metadata(str(weights))


def _refuse_other_tensors(folder: Path, here: set[str], on_disk: dict[str, Any], topology: Topology) -> None:
    """Compare what all ranks want with what there is."""
    wanted = set().union(*gather_objects(here, topology.cpu_group))
    missing = sorted(wanted - set(on_disk) - _VALUE_HEAD)
    unread = {_LM_HEAD, PREFIX + HEAD_KEY}  # a bias means normalised values: not to be left out unseen
    unknown = sorted(
        key for key in set(on_disk) - wanted - unread if "_extra_state" not in key and not _LAYER_KEY.match(key)
    )
    if missing or unknown:
        raise ValueError(
            f"{folder} does not hold the tensors of this model: missing {missing[:10] or 'none'} ({len(missing)}), "
            f"unknown {unknown[:10] or 'none'} ({len(unknown)})"
        )


def _drop_head(weights: dict[str, Any], absent: set[str], chunks: list[torch.nn.Module], folder: Path) -> None:
    """absent: keys of a value or score head that are not there, or not wanted."""
    for state in [weights] if len(chunks) == 1 else weights.values():
        for name in [name for name, tensor in state.items() if tensor.key in absent]:
            state.pop(name).data.detach().zero_()
            logger.info(
                "no %s of a value or score head is taken from %s: it starts at zero", name.rpartition(".")[2], folder
            )


def _within(weights: dict[str, Any], layers: int, topology: Topology) -> None:
    """Address stacked layers within the checkpoint's number of them, which may be larger than the model's.

    On one rank megatron-core can only read a tensor whole, so the layers that are not wanted are read too, and dropped."""
    first = {name: tensor for name, tensor in weights.items() if name.startswith("decoder.layers.0.")}
    own = sum(name.startswith("decoder.layers.") for name in weights) // max(1, len(first))
    for tensor in _flat(weights):
        if tensor.key.startswith(LAYERS):
            _edit(tensor, lambda part: _widen(part, layers))
    if topology.world_size == 1:
        for layer in range(own, layers):
            for name, tensor in first.items():
                weights[f"unread.{layer}.{name}"] = _unread(tensor, layer)


def _edit(tensor: ShardedTensor | ShardedTensorFactory, edit: Callable[[ShardedTensor], None]) -> None:
    """Change a sharded tensor, or those that a factory makes while it is loaded (of the first MLP product: gate and up)."""
    if not isinstance(tensor, ShardedTensorFactory):
        edit(tensor)
        return
    build = tensor.build_fn

    def edited(*args, **kwargs):
        parts = build(*args, **kwargs)
        for part in parts:
            edit(part)
        return parts

    tensor.build_fn = edited


def _widen(tensor: ShardedTensor, layers: int) -> None:
    tensor.global_shape = (layers, *tensor.global_shape[1:])
    tensor.axis_fragmentations = (layers, *tensor.axis_fragmentations[1:])


def _unread(tensor: ShardedTensor | ShardedTensorFactory, layer: int):
    """A sharded tensor like one of layer 0, of another layer, with memory of its own."""
    other = copy.copy(tensor)
    other.data = torch.empty_like(tensor.data)

    def move(part: ShardedTensor) -> None:
        part.global_offset = (layer, *part.global_offset[1:])

    _edit(other, move)
    return other
