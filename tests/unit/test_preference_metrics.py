"""What held-out scores say: by hand, and against simple simulations."""

import math

import pytest
import torch

from aligner.ops.preference_metrics import calibration, clustered_mean, correlation, ordered_pairs


def test_ordered_pairs_by_hand():
    """Group 5: 2 > 0 and 2 > 1 and 0 > 1; group 3: two of equal rank, and one below both."""
    scores = torch.tensor([1.0, 0.0, 3.0, 0.5, 0.25, -1.0])
    pairs = ordered_pairs(scores, torch.tensor([5, 5, 5, 3, 3, 3]), torch.tensor([1, 2, 0, 0, 0, 1]))
    assert sorted(pairs.margins[pairs.groups == 5].tolist()) == [1.0, 2.0, 3.0]
    assert sorted(pairs.margins[pairs.groups == 3].tolist()) == [1.25, 1.5]
    assert pairs.weights.tolist() == pytest.approx([1 / 3] * 3 + [1 / 2] * 2)


def test_the_half_width_of_independent_values_is_the_usual_one():
    right = torch.tensor([1.0] * 30 + [0.0] * 10, dtype=torch.float64)
    mean, band = clustered_mean(right, torch.ones(40, dtype=torch.float64), torch.arange(40))
    assert mean == 0.75
    assert band == pytest.approx(1.96 * math.sqrt(0.75 * 0.25 / 39))


def test_values_that_repeat_within_a_prompt_do_not_make_it_narrower():
    """Each value five times over in its cluster: the half-width of the values without repetition."""
    values = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    ones = torch.ones(7, dtype=torch.float64)
    single = clustered_mean(values, ones, torch.arange(7))
    repeated = clustered_mean(values.repeat(5), ones.repeat(5), torch.arange(7).repeat(5))
    assert repeated == pytest.approx(single)
    weighted = clustered_mean(values, 3 * ones, torch.arange(7))
    assert weighted == pytest.approx(single)
    assert clustered_mean(values, ones, torch.zeros(7, dtype=torch.int64))[1] == pytest.approx(0, abs=1e-12)


def pairs_of(margins):
    scores = torch.tensor([x for margin in margins for x in (margin, 0.0)])
    groups = torch.arange(len(margins)).repeat_interleave(2)
    return ordered_pairs(scores, groups, torch.tensor([0, 1] * len(margins)))


def test_calibration_by_hand():
    """Two bins: in [0.5, 0.75) one right at 0.6 and a tie at 0.5; in [0.75, 1] two right and one wrong at 0.8."""
    low, high = math.log(0.6 / 0.4), math.log(0.8 / 0.2)
    error, table = calibration(pairs_of([low, 0.0, high, high, -high]), 2)
    assert [(line.low, line.high, line.weight) for line in table] == [(0.5, 0.75, 2), (0.75, 1.0, 3)]
    assert [line.confidence for line in table] == pytest.approx([0.55, 0.8])
    assert [line.accuracy for line in table] == pytest.approx([0.75, 2 / 3])
    assert error == pytest.approx(2 / 5 * 0.2 + 3 / 5 * (0.8 - 2 / 3))


def test_scores_that_mean_what_they_say_are_calibrated():
    """The better one is drawn with the probability that the scores give it: the error vanishes, and doubled scores are overconfident."""
    generator = torch.Generator().manual_seed(0)
    margins = 2 * torch.randn(20_000, generator=generator)
    won = torch.rand(20_000, generator=generator) < margins.sigmoid()
    signed = torch.where(won, margins, -margins)
    assert calibration(pairs_of(signed.tolist()), 10)[0] < 0.015
    assert calibration(pairs_of((2 * signed).tolist()), 10)[0] > 0.05


def test_certain_scores_fall_into_the_last_bin():
    error, table = calibration(pairs_of([100.0, 100.0]), 10)
    assert error == pytest.approx(0) and table[0].high == 1.0 and len(table) == 1


def test_correlation():
    x = torch.tensor([1.0, 2.0, 4.0])
    assert correlation(x, 3 * x + 1) == pytest.approx(1) and correlation(x, -x) == pytest.approx(-1)
    assert correlation(x, torch.ones(3)) == 0
    assert correlation(x, torch.tensor([2.0, 1.0, 1.0])) == pytest.approx(-0.7559289460184544)  # by numpy.corrcoef
