"""Linear layers on a CPU: the product that is fastest here, forward and backward.

In float32 torch's F.linear calls MKL, which runs at half of oneDNN's speed on some AMD CPUs (Zen 5: 200 against 440 GFLOP/s) and level
with it on others (Zen 3), so a micro-timing chooses, once a process. The operator is private to torch: it is probed first, and
F.linear stays the fallback. Weights are plain, so that a refit and an optimizer stay copies in place."""

import functools
import math
import time
from typing import Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

# oneDNN must take less than this share of MKL's time. Where it wins it halves the time, so that noise does not decide, and a resumed
# run, whose process measures anew, chooses as the first one did.
_TRAINING_MARGIN = 0.75
_SMALL_PRODUCT = 2**22  # multiplications; below, the autograd function around the product costs more than it gains


def onednn_product(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """x [n, in] times weight [out, in] transposed, plus bias [out] -> [n, out]; views that are transposed are taken as they are."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@functools.cache
def onednn_works() -> bool:
    """Whether this build of torch has the operator, and it gives the right numbers."""
    x, weight = torch.linspace(-1, 1, 12).view(4, 3), torch.linspace(-2, 1, 15).view(5, 3)
    try:
        answer = onednn_product(x, weight)
    except (RuntimeError, AttributeError, TypeError):
        return False
    return answer.shape == (4, 5) and torch.allclose(answer, F.linear(x, weight))


def fastest(*calls: Callable[[], Tensor], repeats: int = 5) -> list[float]:
    """The least seconds that each call took, of `repeats`. They take turns, so that a busy machine slows all of them alike."""
    best = [math.inf] * len(calls)
    for _ in range(repeats + 1):  # the first to warm up
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


@functools.cache
def _onednn_is_faster() -> bool:
    """By a product of the size of a small model's layer in training."""
    if not onednn_works():
        return False
    x, weight = torch.ones(512, 576), torch.ones(1536, 576)
    onednn, plain = fastest(lambda: onednn_product(x, weight), lambda: F.linear(x, weight))
    return onednn < _TRAINING_MARGIN * plain


class _OneDnnLinear(torch.autograd.Function):
    """y = x W^T on x [n, in], W [out, in]; dx = dy W, dW = dy^T x, all three by oneDNN."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return onednn_product(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = onednn_product(grad, weight.t()) if ctx.needs_input_grad[0] else None
        grad_weight = onednn_product(grad.t(), x.t()) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def linear(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """F.linear, by the faster product: x [..., in], weight [out, in], bias [out] -> [..., out]."""
    if (
        weight.device.type != "cpu"
        or weight.dtype != torch.float32
        or x.numel() * weight.size(0) < _SMALL_PRODUCT
        or not _onednn_is_faster()
    ):
        return F.linear(x, weight, bias)
    y = _OneDnnLinear.apply(x.reshape(-1, x.size(-1)), weight).view(*x.shape[:-1], weight.size(0))
    return y if bias is None else y + bias


def megatron_linear(
    input: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Optional[ProcessGroup] = None,
    grad_output_buffer: None = None,
    wgrad_deferral_limit: Optional[int] = None,
) -> Tensor:
    """What megatron-core's parallel linear layers call on a CPU, in the place of its autograd functions for CUDA (which fuse the
    accumulation of gradients and overlap collectives on streams): the same collectives, around `linear`.

    input [S/tp, B, in] with sequence_parallel (gathered here; its gradient is scattered), else [S, B, in], whose gradient is summed
    over tp_group where allreduce_dgrad."""
    from megatron.core.tensor_parallel import mappings  # not before megatron-core is adapted

    assert not gradient_accumulation_fusion and grad_output_buffer is None and not wgrad_deferral_limit
    if sequence_parallel:
        input = mappings.gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
    elif allreduce_dgrad:
        input = mappings.copy_to_tensor_model_parallel_region(input, group=tp_group)
    return linear(input, weight, bias)
