"""The critic's loss against hand-computed values and finite differences."""

import pytest
import torch

from aligner.ops.value_loss import clipped_value_loss

NAN = float("nan")


@pytest.mark.parametrize("junk", [NAN, float("inf"), 100.0])
def test_by_hand(junk):
    # v = 1, old 0, R = 2: clipped to 0.2, error 1.8 > 1. v = -1, old 0, R = 0.5: -0.2; 1.5 > 0.7. v = 0.1, old 0, R = 0: inside.
    mask = torch.tensor([[True, True, True, False]])
    values = torch.tensor([[1.0, -1.0, 0.1, junk]], requires_grad=True)
    old, returns = torch.tensor([[0.0, 0.0, 0.0, junk]]), torch.tensor([[2.0, 0.5, 0.0, junk]])
    loss, metrics = clipped_value_loss(values, old, returns, mask, clip=0.2, denominator=4)
    assert loss.item() == pytest.approx(0.5 * (1.8**2 + 1.5**2 + 0.1**2) / 4)
    assert metrics["tokens"] == 3 and metrics["value_clipped"] == 1
    assert metrics["value"].item() == pytest.approx(0.1) and metrics["return"].item() == pytest.approx(2.5)
    loss.backward()
    torch.testing.assert_close(values.grad, torch.tensor([[0.0, -1.5 / 4, 0.1 / 4, 0.0]]))


def test_both_sides_are_clipped():
    """v = -1 becomes -0.3, 0.2 below its old value, and 1 becomes 0.3."""
    values = torch.tensor([[-1.0, 1.0]])
    old, returns = torch.tensor([[-0.1, 0.1]]), torch.tensor([[-2.0, 2.0]])
    loss, metrics = clipped_value_loss(
        values, old, returns, torch.ones(1, 2, dtype=torch.bool), clip=0.2, denominator=1
    )
    assert loss.item() == pytest.approx(2 * 0.5 * 1.7**2) and metrics["value_clipped"] == 2


def test_without_clipping_it_is_half_the_squared_error():
    values, returns = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 2.5]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, metrics = clipped_value_loss(values, torch.zeros(1, 2), returns, mask, clip=None, denominator=1)
    assert loss.item() == pytest.approx(0.5 * (4 + 0.25)) and metrics["value_clipped"] == 0


@pytest.mark.parametrize("clip", [0.3, None])
def test_finite_differences(clip):
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) < 0.6
    values.requires_grad_()
    torch.autograd.gradcheck(
        lambda v: clipped_value_loss(v, old, returns, mask, clip=clip, denominator=7)[0], (values,)
    )


def test_an_empty_mask_gives_0():
    x, mask = torch.full((2, 3), NAN, requires_grad=True), torch.zeros(2, 3, dtype=torch.bool)
    loss, metrics = clipped_value_loss(x, x.detach(), x.detach(), mask, clip=0.2, denominator=0)
    loss.backward()
    assert loss == 0 and (x.grad == 0).all() and all(value == 0 for value in metrics.values())


@pytest.mark.parametrize("name", ["values", "old_values", "returns"])
def test_nan_under_the_mask_raises_by_name(name):
    tensors = {n: torch.zeros(2, 3) for n in ("values", "old_values", "returns")}
    tensors[name][1, 2] = NAN
    with pytest.raises(FloatingPointError, match=f"^{name} is nan at row 1"):
        clipped_value_loss(**tensors, mask=torch.ones(2, 3, dtype=torch.bool), clip=0.2, denominator=6)


def test_shapes_are_asserted():
    x, mask = torch.zeros(4), torch.ones(4, dtype=torch.bool)
    with pytest.raises(AssertionError):
        clipped_value_loss(x, x, x[:, None], mask, clip=None, denominator=1)
