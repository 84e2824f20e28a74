"""SwiGLU against a numpy twin of Shazeer 2020, eq. 6, finite differences, and megatron-core's plain form; and what it keeps."""

from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

from aligner.config.groups import Recompute
from aligner.models.spec import transformer_config
from aligner.parallel.cpu_swiglu import megatron_swiglu, swiglu
from tests.unit.tiny_engine import tiny_shape


def some(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_forward_is_numpys_and_the_gradient_that_of_finite_differences():
    x = some(2, 3, 8)
    gate, up = np.split(x.numpy(), 2, -1)
    np.testing.assert_allclose(swiglu(x), gate / (1 + np.exp(-gate)) * up, rtol=1e-12)
    assert torch.autograd.gradcheck(swiglu, x.requires_grad_())


def test_it_is_the_plain_form_bit_for_bit():
    """So that a run that began with one may go on with the other."""
    for dtype in (torch.float32, torch.bfloat16):
        ours, plain = (some(5, 3, 64, dtype=dtype).requires_grad_() for _ in range(2))
        gate, up = plain.chunk(2, -1)
        expected, found = F.silu(gate) * up, megatron_swiglu(ours, None, False, False)
        grad = some(5, 3, 32, seed=1, dtype=dtype)
        found.backward(grad), expected.backward(grad)
        assert torch.equal(found, expected) and torch.equal(ours.grad, plain.grad)


def test_a_bias_is_added_first():
    x, bias = some(4, 6), some(6, seed=1)
    assert torch.equal(megatron_swiglu(x, bias, False, False), swiglu(x + bias))


def test_nothing_but_its_input_is_kept():
    kept, x = [], some(4, 6).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        swiglu(x)
    assert kept == [x.data_ptr()]


def test_megatrons_feed_forward_layer_calls_it():
    one = SimpleNamespace(tensor=1, pipeline=1, virtual_pipeline=None, sequence=False)
    how = {"dtype": torch.float32, "recompute": Recompute.none, "initialise": True}
    assert transformer_config(tiny_shape("llama"), one, **how).bias_activation_fusion
    from megatron.core.transformer import mlp  # after aligner, which adapts it to a CPU

    assert mlp.bias_swiglu_impl is megatron_swiglu
