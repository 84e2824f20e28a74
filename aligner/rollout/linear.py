"""Linear layers of the inference model, with the kernels that are fastest on this machine.

A decode step multiplies few rows with every weight. On a CPU the kernels of kernels/ read each weight once and are made for that;
oneDNN's are next, on plain weights, so that a refit stays a copy; F.linear works everywhere. Which it is, is timed at build with the
largest weight of a layer. Both others may be absent (no C compiler; oneDNN's operator is private to torch), so each is probed."""

from enum import Enum
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.model_config import ModelShape
from aligner.parallel.cpu_linear import fastest, onednn_product, onednn_works
from aligner.rollout import native

SMALL_WEIGHT = 2**18  # elements; below, call overhead hides any gain, and one fixed kernel keeps results reproducible
MOST_ROWS = 128  # timed; larger batches meet the weights in parts of this size
NATIVE_MARGIN = 1.3  # they may take this much longer in the timing: it also attends and samples faster than torch
MARGIN = 0.9  # oneDNN must take less than this share of the time, so that noise does not decide


class Kernel(Enum):
    plain = "plain"
    onednn = "onednn"
    native = "native"


class Linear:
    """y = x W^T + b on x [n, in]. `weight` [out, in] and `bias` [out] are filled in place."""

    def __init__(self, weight: Tensor, bias: Optional[Tensor], kernel: Kernel):
        self.weight, self.bias, self.kernel = weight, bias, kernel

    def __call__(self, x: Tensor) -> Tensor:
        if self.kernel is Kernel.onednn:
            return onednn_product(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


def choose_kernel(
    shape: ModelShape, *, rows: int, dtype: torch.dtype, device: torch.device, use_native: bool = True
) -> Kernel:
    """The fastest kernel for `rows` rows. Small models are not timed: call overhead would hide any difference, and one fixed kernel
    keeps results reproducible."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return Kernel.plain
    size = (2 * shape.ffn_hidden_size, shape.hidden_size)
    x, weight = torch.ones(min(rows, MOST_ROWS), size[1], dtype=dtype), torch.ones(size, dtype=dtype)
    kernels = {Kernel.plain: lambda: F.linear(x, weight)}
    if dtype == torch.float32 and weight.numel() >= SMALL_WEIGHT and onednn_works():
        kernels[Kernel.onednn] = lambda: onednn_product(x, weight, None)
    if use_native and native.library() is not None:
        if weight.numel() < SMALL_WEIGHT:
            return Kernel.native
        panel, activations = torch.empty(native.PANEL_TOKENS * size[1]), x.float()
        kernels[Kernel.native] = lambda: native.linear(activations, weight, panel)
    times = dict(zip(kernels, fastest(*kernels.values())))
    best = min(times, key=times.get)
    if Kernel.native in times and times[Kernel.native] < NATIVE_MARGIN * times[best]:
        return Kernel.native
    return best if times[best] < MARGIN * times[Kernel.plain] else Kernel.plain
