"""PopArt's statistics against a numpy twin, and its change of the head against the values that must not move."""

import math

import numpy as np
import pytest
import torch

from aligner.ops.value_scale import ValueScale, power_of_two

RATE = 0.25


def step(rng, scale, shift):
    mask = torch.tensor(rng.random((6, 9)) < 0.6)
    returns = torch.tensor(scale * rng.standard_normal((6, 9)) + shift, dtype=torch.float32)
    return torch.where(mask, returns, float("nan")), mask


def test_moments_are_the_debiased_average_of_the_steps():
    """sum_k rate (1 - rate)^(t - k) m_k over the sum of these weights, for both moments."""
    rng, kept, scale = np.random.default_rng(0), [], ValueScale(RATE)
    for number in range(7):
        returns, mask = step(rng, 3.0**number, number)
        scale.observe(returns, mask)
        chosen = returns[mask].numpy().astype(np.float64)
        kept.append((chosen.mean(), (chosen**2).mean()))
        weights = RATE * (1 - RATE) ** np.arange(len(kept))[::-1]
        mean, square = (np.average([m[i] for m in kept], weights=weights) for i in (0, 1))
        assert scale.mean == pytest.approx(mean) and scale.square == pytest.approx(square)
        assert scale.offset == scale.mean
        deviation = math.sqrt(square - mean**2)
        assert 2**-0.51 < deviation / scale.scale < 2**0.51 and math.log2(scale.scale).is_integer()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_stay_while_statistics_move(dtype):
    """v = scale (w h + b) + offset of the rescaled head, rounded to its type, is what it was: to the rounding of float64."""
    rng, scale = np.random.default_rng(1), ValueScale(RATE)
    hidden = torch.tensor(rng.standard_normal((50, 16)))
    weight, bias = torch.tensor(rng.standard_normal(16)).to(dtype), torch.tensor(0.3).to(dtype)

    def values():
        return (hidden @ weight.double() + float(bias)) * scale.scale + scale.offset

    for number in range(8):
        before, old = values(), float(bias)
        change = scale.observe(*step(rng, 7.0**number, 10.0 * number))
        weight, bias = (weight * change.ratio).to(dtype), torch.tensor(old * change.ratio + change.shift).to(dtype)
        scale.settle(change, old, float(bias))
        torch.testing.assert_close(values(), before, rtol=0, atol=1e-9 * (1 + float(before.abs().max())))
        weight, bias = weight + torch.tensor(rng.standard_normal(16)).to(dtype), bias + 0.5  # it learns


def test_normalised_and_denormalised_undo_each_other():
    scale = ValueScale(RATE)
    scale.observe(*step(np.random.default_rng(2), 40.0, -7.0))
    values = torch.linspace(-100, 100, 11)
    torch.testing.assert_close(scale.denormalised(scale.normalised(values)), values)


def test_a_scale_that_has_seen_nothing_changes_nothing():
    scale, values = ValueScale(RATE), torch.randn(5)
    change = scale.observe(torch.full((2, 3), float("nan")), torch.zeros(2, 3, dtype=torch.bool))
    assert (change.ratio, change.shift) == (1.0, 0.0) and scale == ValueScale(RATE)
    assert torch.equal(scale.normalised(values), values) and torch.equal(scale.denormalised(values), values)


def test_returns_that_are_all_alike_leave_the_scale():
    scale, mask = ValueScale(RATE), torch.ones(2, 3, dtype=torch.bool)
    scale.observe(torch.tensor([[0.0, 8.0, 0.0], [8.0, 0.0, 8.0]]), mask)
    before = scale.scale
    alike = ValueScale(RATE)
    alike.observe(torch.full((2, 3), 0.7), mask)
    assert before == 4.0 and alike.scale == 1.0 and alike.offset == pytest.approx(0.7)


def test_a_return_that_is_not_finite_is_refused():
    with pytest.raises(FloatingPointError, match="returns is nan at row 0"):
        ValueScale(RATE).observe(torch.tensor([[float("nan")]]), torch.ones(1, 1, dtype=torch.bool))


def test_the_next_power_of_two():
    assert [power_of_two(x) for x in (1.4, 1.5, 0.1, 1e-9, 1e9)] == [1.0, 2.0, 0.125, 2.0**-13, 2.0**20]
