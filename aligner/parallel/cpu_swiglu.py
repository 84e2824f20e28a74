"""SwiGLU on a CPU, silu(gate) * up (Shazeer 2020, eq. 6), keeping for its backward pass what the linear layer before it gave and no more.

megatron-core's plain form keeps two further tensors of the feed-forward size a layer: a fifth of a small model's activations. Its form
for fusing compilers keeps none either, but without a compiler takes a quarter longer than this, and rounds its gradients otherwise than
the plain one."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        return torch.cat((torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)), -1)


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 F], the gate's half first -> [..., F]."""
    return _SwiGLU.apply(gate_up)


def megatron_swiglu(input: Tensor, bias: Optional[Tensor], fp8_input_store: bool, cpu_offload_input: bool) -> Tensor:
    """What megatron-core's MLP calls on a CPU, in the place of its function for fusing compilers."""
    assert not fp8_input_store and not cpu_offload_input
    return swiglu(input if bias is None else input + bias)
