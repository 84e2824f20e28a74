"""aligner.ops.masks against flat numpy over the chosen entries."""

import numpy as np
import pytest
import torch

from aligner.ops.masks import clean, masked_mean, masked_moments, masked_sum, same_shapes, whiten

JUNK = [float("nan"), float("inf"), -float("inf"), 1e30]


def case(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 7, generator=generator)
    mask = torch.rand(5, 7, generator=generator) < 0.6
    mask[3] = False
    return x, mask


def flat(x, mask):
    return x.double().numpy()[mask.numpy()]


@pytest.mark.parametrize("junk", JUNK)
def test_reductions_equal_flat_numpy_whatever_the_mask_hides(junk):
    x, mask = case()
    dirty = torch.where(mask, x, junk)
    chosen = flat(x, mask)
    mean, variance = masked_moments(dirty, mask)
    assert masked_sum(dirty, mask).item() == pytest.approx(chosen.sum(), abs=1e-5)
    assert masked_mean(dirty, mask).item() == pytest.approx(chosen.mean(), abs=1e-6)
    assert mean.item() == pytest.approx(chosen.mean(), abs=1e-6)
    assert variance.item() == pytest.approx(chosen.var(), abs=1e-6)


@pytest.mark.parametrize("junk", JUNK)
def test_whiten_has_mean_0_and_deviation_1_under_the_mask_and_0_outside(junk):
    x, mask = case(1)
    out = whiten(torch.where(mask, 3 * x + 7, junk), mask, 1e-4)
    expected = (flat(x, mask) - flat(x, mask).mean()) / flat(x, mask).std()
    np.testing.assert_allclose(flat(out, mask), expected, atol=1e-5)
    assert (out[~mask] == 0).all()


def test_whiten_floor_leaves_nearly_equal_values_small():
    x = torch.tensor([[1.0, 1.001]])
    out = whiten(x, torch.ones(1, 2, dtype=torch.bool), 0.1)
    torch.testing.assert_close(out, torch.tensor([[-0.005, 0.005]]), atol=1e-5, rtol=0)


def test_moments_of_large_values_keep_their_variance():
    x = 1e6 + torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    assert masked_moments(x, torch.ones_like(x, dtype=torch.bool))[1].item() == pytest.approx(1.25)


def test_an_empty_mask_gives_0():
    x, mask = torch.full((2, 3), float("nan")), torch.zeros(2, 3, dtype=torch.bool)
    assert masked_sum(x, mask) == 0 and masked_mean(x, mask) == 0
    assert masked_moments(x, mask) == (0, 0)
    assert (whiten(x, mask, 1e-4) == 0).all()


@pytest.mark.parametrize("bad", JUNK[:3])
def test_a_bad_value_under_the_mask_raises_and_names_tensor_and_row(bad):
    x, mask = torch.zeros(4, 3), torch.ones(4, 3, dtype=torch.bool)
    x[2, 1] = bad
    with pytest.raises(FloatingPointError, match=r"values is .* at row 2, index \[2, 1\]"):
        clean(x, mask, "values")


def test_gradients_do_not_leak_from_masked_entries():
    x = torch.tensor([[1.0, 0.0]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    masked_mean(x.log(), mask).backward()  # log(0) is hidden
    assert clean(x, mask).dtype == torch.float32
    assert x.grad[0, 0] == 1 and not torch.isinf(x.grad[0, 1])


def test_shapes_never_broadcast():
    with pytest.raises(AssertionError, match=r"\(4, 1\)"):
        same_shapes(torch.ones(4, dtype=torch.bool), values=torch.zeros(4, 1))
    with pytest.raises(AssertionError, match="bool"):
        clean(torch.zeros(4), torch.ones(4))


def test_half_precision_comes_back_as_float32():
    assert clean(torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bool)).dtype == torch.float32
