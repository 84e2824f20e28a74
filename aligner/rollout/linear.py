"""Linear layers of the inference model, with the kernel that is fastest on this machine.

On a CPU in float32, oneDNN takes 0.5 to 0.9 of the time of the BLAS behind F.linear at the row counts of a decode step (measured: Zen 3,
4 to 64 rows), on plain weights, so that a refit stays a copy. Weights packed ahead for it would save a further quarter of a step, but
packing after each refit costs as much as twenty steps and twice the memory. The operator is private to torch, so it is probed first."""

import math
import time
from enum import Enum
from typing import Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

SMALL_WEIGHT = 2**18  # elements; below, call overhead hides any gain, and one fixed kernel keeps results reproducible
MARGIN = 0.9  # oneDNN must take less than this share of the time, so that noise does not decide


class Kernel(Enum):
    plain = "plain"
    onednn = "onednn"


def onednn_linear(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class Linear:
    """y = x W^T + b on x [n, in]. `weight` [out, in] and `bias` [out] are filled in place."""

    def __init__(self, weight: Tensor, bias: Optional[Tensor], kernel: Kernel):
        self.weight, self.bias, self.kernel = weight, bias, kernel

    def __call__(self, x: Tensor) -> Tensor:
        if self.kernel is Kernel.plain:
            return F.linear(x, self.weight, self.bias)
        return onednn_linear(x, self.weight, self.bias)


def choose_kernel(
    out_features: int, in_features: int, *, rows: int, dtype: torch.dtype, device: torch.device
) -> Kernel:
    """The faster kernel for `rows` rows, by a micro-timing; plain wherever there is nothing to choose."""
    if device.type != "cpu" or dtype != torch.float32 or out_features * in_features < SMALL_WEIGHT:
        return Kernel.plain
    x, weight = torch.ones(rows, in_features), torch.ones(out_features, in_features)
    try:
        answer = onednn_linear(x, weight, None)
    except (RuntimeError, AttributeError, TypeError):  # this build of torch lacks the operator, or it changed
        return Kernel.plain
    plain = F.linear(x, weight)
    if answer.shape != plain.shape or not torch.allclose(answer, plain):
        return Kernel.plain
    onednn_time, plain_time = fastest(lambda: onednn_linear(x, weight, None), lambda: F.linear(x, weight))
    return Kernel.onednn if onednn_time < MARGIN * plain_time else Kernel.plain


def fastest(*calls: Callable[[], Tensor], repeats: int = 5) -> list[float]:
    """The least seconds that each call took, of `repeats`. They take turns, so that a busy machine slows all of them alike."""
    best = [math.inf] * len(calls)
    for _ in range(repeats + 1):  # the first to warm up
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    return best
