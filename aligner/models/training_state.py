"""The optimizer's part of a checkpoint: `optimizer/` (torch_dist, any layout loads into any other) and trainer_state.json."""

import json
from pathlib import Path
from typing import Any, Callable, Mapping, Optional

import torch
from torch import Tensor

from aligner.config.groups import Dtype
from aligner.models.checkpoint import read_sharded, sharded_weights
from aligner.models.optimizer import choose_kernel, inner_optimizers
from aligner.models.writing import Writing
from aligner.parallel.collectives import agree, broadcast_object
from aligner.parallel.topology import Topology
from aligner.runtime.checkpoint_folder import empty_folder

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # isort: skip
from megatron.core.optimizer.optimizer import MegatronOptimizer  # isort: skip

STATE_FILE = "trainer_state.json"
OPTIMIZER_FOLDER = "optimizer"


def begin_optimizer(
    folder: Path, chunks: list[torch.nn.Module], optimizer: MegatronOptimizer, topology: Topology, *, beside: bool
) -> Optional[Writing]:
    """Begin to write optimizer/. Collective. None before the first update: there is no optimizer state then, and no optimizer/."""
    if _is_fresh(optimizer):
        return None
    target = folder / OPTIMIZER_FOLDER
    _on_reporter(lambda: empty_folder(target), topology)
    return Writing(_sharded(chunks, optimizer, topology, loading=False), target, topology, beside=beside)


def state_text(optimizer: MegatronOptimizer, state: Mapping[str, Any]) -> str:
    """What trainer_state.json is to say: `state` (plain JSON values) and the kind of the optimizer."""
    kind = {"fresh": _is_fresh(optimizer), **_kind(optimizer)}
    return json.dumps({"optimizer": kind, "state": dict(state)}, indent=1)


def write_state(folder: Path, text: str, topology: Topology) -> None:
    """Write trainer_state.json, once all else is there. Collective."""
    _on_reporter(lambda: _write(folder / STATE_FILE, text), topology)


def resumed_dtype(setting: Dtype, folder: Optional[Path], topology: Topology) -> Dtype:
    """The setting model.dtype of a run that continues from `folder` (None: that begins): where it is auto, the type that `folder` was
    saved with, which another choice on this machine would not fit. Collective."""
    if setting is not Dtype.auto or folder is None:
        return setting
    saved = broadcast_object(saved_dtype(folder) if topology.is_reporter else None, 0, topology.cpu_group)
    return saved or setting


def saved_dtype(folder: Path) -> Optional[Dtype]:
    """The type of the weights that trainer_state.json in `folder` goes with; None where there is no such file."""
    saved = _read(Path(folder))
    return None if isinstance(saved, str) else Dtype(saved["optimizer"]["dtype"])


def _on_reporter(act: Callable[[], None], topology: Topology) -> None:
    """Do it on the one rank that writes files; every rank waits for it, and raises where it fails (a full disk)."""
    error = None
    if topology.is_reporter:
        try:
            act()
        except OSError as problem:
            error = problem
    agree(error, topology)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def load_training(
    folder: Path, chunks: list[torch.nn.Module], optimizer: MegatronOptimizer, topology: Topology
) -> dict[str, Any]:
    """Fill the optimizer (which holds no state yet; the chunks' weights are loaded already) and return `state`. Collective.

    Raises ValueError where trainer_state.json is missing or the optimizer is of another kind."""
    folder = Path(folder)
    saved = _read_everywhere(folder, topology)
    if not saved["optimizer"].pop("fresh"):
        _refuse_other_kind(folder, saved["optimizer"], _kind(optimizer))
        _load_optimizer(folder / OPTIMIZER_FOLDER, chunks, optimizer, topology)
    return saved["state"]


def saved_extra(folder: Path, topology: Topology) -> dict[str, Any]:
    """What was saved beside the weights in `folder`, before anything of it is loaded. Collective. Raises ValueError where there is none."""
    return _read_everywhere(Path(folder), topology)["state"]["extra"]


def _read_everywhere(folder: Path, topology: Topology) -> dict[str, Any]:
    saved = broadcast_object(_read(folder) if topology.is_reporter else None, 0, topology.cpu_group)
    if isinstance(saved, str):
        raise ValueError(saved)
    return saved


def _load_optimizer(
    folder: Path, chunks: list[torch.nn.Module], optimizer: MegatronOptimizer, topology: Topology
) -> None:
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, DistributedOptimizer):
            # It asserts on an empty state. The values are overwritten, those of the weights included.
            inner._init_optimizer_states_with_dummy_values()
    wanted = _sharded(chunks, optimizer, topology, loading=True)
    optimizer.load_state_dict(read_sharded(wanted, folder)["optimizer"])
    for inner in inner_optimizers(optimizer):
        for state in inner.optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                # The distributed optimizer gives all parameters one tensor, which Adam would then count up once a parameter.
                state["step"] = state["step"].clone()
    choose_kernel(optimizer)


def _sharded(
    chunks: list[torch.nn.Module], optimizer: MegatronOptimizer, topology: Topology, *, loading: bool
) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": topology.data_group,
    }
    weights = sharded_weights(chunks, topology)
    return {"optimizer": optimizer.sharded_state_dict(weights, is_loading=loading, metadata=metadata)}


def _is_fresh(optimizer: MegatronOptimizer) -> bool:
    """Every rank has parameters and updates them together, so this is the same everywhere."""
    return all(not inner.optimizer.state for inner in inner_optimizers(optimizer))


def _kind(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """What two optimizers must share for the state of one to fit the other."""
    config = inner_optimizers(optimizer)[0].config
    return {"distributed": config.use_distributed_optimizer, "dtype": str(config.params_dtype).removeprefix("torch.")}


def _read(folder: Path) -> dict[str, Any] | str:
    """The file's content, or a sentence that says what is wrong."""
    path = folder / STATE_FILE
    if not path.is_file():
        return f"{folder} has no {STATE_FILE}: it holds weights at most, and no training can continue from it"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return {"optimizer": dict(saved["optimizer"]), "state": dict(saved["state"])}
    except (ValueError, TypeError, KeyError):
        return f"{path} cannot be read ({path.stat().st_size} bytes): it was cut or overwritten; take an earlier checkpoint"


def _refuse_other_kind(folder: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    keys = {"distributed": "optim.distributed", "dtype": "model.dtype"}
    differ = [f"{keys[k]}={saved[k]}, this run has {wanted[k]}" for k in keys if saved[k] != wanted[k]]
    if differ:
        raise ValueError(
            f"{folder / OPTIMIZER_FOLDER} was saved with {'; '.join(differ)}: resume with what it was saved with"
        )
