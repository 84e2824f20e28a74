"""Attention of short rows against the sum over keys, written out in numpy."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from aligner.models.cpu_layers import short_causal_attention


@pytest.mark.parametrize(("heads", "groups", "columns"), [(4, 2, 7), (3, 3, 5), (6, 1, 1)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_it_is_the_softmax_over_earlier_keys(heads, groups, columns, scale):
    generator = torch.Generator().manual_seed(columns)
    query, key, value = (torch.randn(2, h, columns, 4, generator=generator) for h in (heads, groups, groups))
    found = short_causal_attention(query, key, value, scale=scale).numpy()
    q, k, v = (x.double().numpy() for x in (query, key, value))
    for row, head, at in np.ndindex(2, heads, columns):
        group = head * groups // heads
        scores = k[row, group, : at + 1] @ q[row, head, at] * (0.5 if scale is None else scale)
        weights = np.exp(scores - scores.max())
        expected = weights @ v[row, group, : at + 1] / weights.sum()
        np.testing.assert_allclose(found[row, head, at], expected, rtol=1e-5, atol=1e-6)


def test_its_gradients_are_those_of_the_fused_kernel():
    generator = torch.Generator().manual_seed(3)
    sizes = ((2, 6, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8))
    leaves = [torch.randn(*size, generator=generator, requires_grad=True) for size in sizes]
    grad = torch.randn(2, 6, 9, 8, generator=generator)
    own = torch.autograd.grad(short_causal_attention(*leaves, scale=None), leaves, grad)
    fused = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    for mine, theirs in zip(own, torch.autograd.grad(fused, leaves, grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
