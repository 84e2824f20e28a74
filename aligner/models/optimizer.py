"""Megatron's Adam over DDP-wrapped chunks: float32 master weights, ZeRO-1, clipping, schedules, and steps that are skipped as one."""

import math
from dataclasses import dataclass
from typing import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.config.groups import OptimConfig, Schedule
from aligner.models.pipeline import Chunks, finalize
from aligner.parallel.device import DEVICE, ON_GPU, empty_cache
from aligner.parallel.topology import Topology

from megatron.core import optimizer as megatron_optimizer  # isort: skip  (after aligner.parallel, which adapts it to a CPU)
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # isort: skip
from megatron.core.optimizer.optimizer import MegatronOptimizer  # isort: skip
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate  # isort: skip

# Neither Transformer Engine's nor apex's fused Adam is installed.
_TORCH_ADAM: bool = megatron_optimizer.USING_PYTORCH_OPTIMIZER


def learning_rate(optim: OptimConfig, step: int) -> float:
    """Learning rate of the update that comes after `step` updates (so the first is 0).

    Warm-up is linear and reaches optim.lr at update number warmup_steps; cosine and linear then fall to min_lr at update decay_steps."""
    update = step + 1
    if update <= optim.warmup_steps:
        return optim.lr * update / optim.warmup_steps
    if optim.schedule is Schedule.constant:
        return optim.lr
    if optim.decay_steps <= optim.warmup_steps:
        raise ValueError(
            f"optim.schedule={optim.schedule.value} needs optim.decay_steps > optim.warmup_steps, "
            f"but they are {optim.decay_steps} and {optim.warmup_steps}"
        )
    done = min(1.0, (update - optim.warmup_steps) / (optim.decay_steps - optim.warmup_steps))
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if optim.schedule is Schedule.cosine else 1.0 - done
    return optim.min_lr + (optim.lr - optim.min_lr) * left


def wrap_for_training(chunks: Chunks, optim: OptimConfig) -> Chunks:
    """The chunks under Megatron's DDP, gradients kept and reduced in float32 and only summed (see models/pipeline.py)."""
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=optim.distributed)
    config = chunks[0].config
    # Before DDP is built: it reads the flag to decide whether to divide gradients by the data-parallel degree.
    config.calculate_per_token_loss = True
    config.finalize_model_grads_func = finalize
    return [DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]


def build_optimizer(
    chunks: Chunks, optim: OptimConfig, *, dtype: torch.dtype, head_lr_multiplier: float = 1.0
) -> MegatronOptimizer:
    """Adam over the wrapped chunks, whose weights must be there already: master weights are copied from them.

    dtype: of the chunks' weights. head_lr_multiplier: learning rate of the output layer over that of the rest. Raises ValueError where
    optim.cpu_offload cannot work."""
    settings = megatron_optimizer.OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=optim.distributed,
        **(_offload_settings(optim) if optim.cpu_offload else {}),
    )
    overrides = megatron_optimizer.get_standard_config_overrides(settings)  # no weight decay on norms and biases
    if head_lr_multiplier != 1.0:
        head = ParamWithNamePredicate(name="head", fn=lambda _, name: "output_layer." in name)
        overrides[ParamKey(with_name_predicate=head)] = {"lr_mult": head_lr_multiplier}
    optimizer = megatron_optimizer.get_megatron_optimizer(settings, chunks, config_overrides=overrides)
    choose_kernel(optimizer)
    return optimizer


def _offload_settings(optim: OptimConfig) -> dict:
    if not ON_GPU:
        raise ValueError(
            "optim.cpu_offload=true needs a GPU: without one optimizer states are on the host already; set it to false"
        )
    if _TORCH_ADAM or not optim.distributed:
        raise ValueError(
            "optim.cpu_offload=true needs Transformer Engine or apex and optim.distributed=true (megatron-core's hybrid optimizer is "
            f"built on both); here optim.distributed={str(optim.distributed).lower()} and "
            f"{'neither library is' if _TORCH_ADAM else 'one of the libraries is'} installed"
        )
    return {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "use_precision_aware_optimizer": True}


def choose_kernel(optimizer: MegatronOptimizer) -> None:
    """Switch torch's AdamW to its fused kernel: Megatron builds it with the default, a Python loop over parameters on a CPU.

    AdamW reads the choice from its parameter groups at every step; a loaded state brings the groups of another machine."""
    if not _TORCH_ADAM:
        return
    for inner in inner_optimizers(optimizer):
        for group in inner.optimizer.param_groups:
            group["fused"], group["foreach"] = True, False


def inner_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers with parameters on this rank (a pipeline stage may have none)."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in chained if inner.optimizer is not None]


@dataclass(frozen=True)
class Update:
    """grad_norm: over all parameters of all ranks, before clipping; not finite where the step was skipped for its gradients."""

    grad_norm: float
    learning_rate: float
    skipped: bool


def clear_gradients(chunks: Chunks, optimizer: MegatronOptimizer) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def apply_gradients(
    optimizer: MegatronOptimizer, optim: OptimConfig, *, step: int, useful: bool, topology: Topology
) -> Update:
    """One update with the gradients in the DDP buffers, or none at all where it is not `useful` or their norm is not finite on some rank.

    step: updates applied before this one. Collective; every rank takes the same decision. A skipped step changes nothing."""
    rate = learning_rate(optim, step)
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not _everywhere(useful and math.isfinite(norm), topology):
        return Update(norm, rate, skipped=True)
    if optim.clip_grad > 0.0 and norm > optim.clip_grad:
        for grads in _gradients(optimizer):
            torch._foreach_mul_(grads, optim.clip_grad / norm)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_mult"]
        group["weight_decay"] = optim.weight_decay * group["wd_mult"]
    optimizer.step_with_ready_grads()
    return Update(norm, rate, skipped=False)


def _everywhere(condition: bool, topology: Topology) -> bool:
    if topology.world_size == 1:
        return condition
    flag = torch.tensor(float(condition), device=DEVICE)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=topology.world_group)
    return bool(flag.item())


def _gradients(optimizer: MegatronOptimizer) -> Iterator[list[Tensor]]:
    """In-place views of the gradients that the update reads."""
    for inner in inner_optimizers(optimizer):
        name = "decoupled_grad" if inner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"
        found = [getattr(p, name, None) for p in inner.get_parameters()]
        yield [grad for grad in found if grad is not None]


def move_states(optimizer: MegatronOptimizer, device: torch.device) -> None:
    """Move Adam's moments to `device`. Weights stay: the float32 ones may be views of the model's own. (Megatron's offload_to_cpu
    moves them too, which unties a float32 model from its DDP buffers.)"""
    for inner in inner_optimizers(optimizer):
        for state in inner.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[name] = value.to(device)
    empty_cache()


def forget_states(optimizer: MegatronOptimizer) -> None:
    """As before the first step: no moments, master weights copied from the model's."""
    for inner in inner_optimizers(optimizer):
        inner.optimizer.state.clear()
    optimizer.reload_model_params()
