"""The training products of a CPU against numpy, whichever kernel a machine prefers."""

import numpy as np
import pytest
import torch

from aligner.parallel import cpu_linear


@pytest.fixture(params=[True, False], ids=["onednn", "plain"])
def kernel(request, monkeypatch):
    """Either choice of the micro-timing, for products of every size."""
    if request.param and not cpu_linear.onednn_works():
        pytest.skip("this build of torch has no torch.ops.mkldnn._linear_pointwise")
    monkeypatch.setattr(cpu_linear, "_onednn_is_faster", lambda: request.param)
    monkeypatch.setattr(cpu_linear, "_SMALL_PRODUCT", 0)


@pytest.mark.parametrize("shape", [(7, 5), (3, 2, 5), (1, 1, 5)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_forward_and_gradients_equal_numpys(kernel, shape, with_bias):
    generator = torch.Generator().manual_seed(1)
    x, weight, bias, grad = (
        torch.randn(*size, generator=generator) for size in (shape, (4, 5), (4,), (*shape[:-1], 4))
    )
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = cpu_linear.linear(leaves[0], leaves[1], leaves[2] if with_bias else None)
    y.backward(grad)
    x, weight, bias, grad = (t.numpy().astype(np.float64) for t in (x, weight, bias, grad))
    rows, grads = x.reshape(-1, 5), grad.reshape(-1, 4)
    close = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(y.detach(), (rows @ weight.T + bias * with_bias).reshape(*shape[:-1], 4), **close)
    np.testing.assert_allclose(leaves[0].grad, (grads @ weight).reshape(shape), **close)
    np.testing.assert_allclose(leaves[1].grad, grads.T @ rows, **close)
    if with_bias:
        np.testing.assert_allclose(leaves[2].grad, grads.sum(0), **close)


def test_a_frozen_weight_gets_no_gradient(kernel):
    x, weight = torch.ones(3, 5, requires_grad=True), torch.ones(4, 5)
    cpu_linear.linear(x, weight).sum().backward()
    assert weight.grad is None and torch.equal(x.grad, torch.full((3, 5), 4.0))


def test_an_operator_that_is_gone_leaves_the_plain_product(monkeypatch):
    def gone(*args):
        raise AttributeError("no such operator")

    monkeypatch.setattr(cpu_linear, "onednn_product", gone)
    cpu_linear.onednn_works.cache_clear()
    try:
        assert not cpu_linear.onednn_works()
        assert not cpu_linear._onednn_is_faster.__wrapped__()
    finally:
        cpu_linear.onednn_works.cache_clear()
