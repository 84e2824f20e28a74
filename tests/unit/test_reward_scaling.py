"""Scaled scores against numpy and against numbers worked out by hand."""

import numpy as np
import pytest
import torch

from aligner.config.ppo import RewardScale
from aligner.ops.reward_scaling import RunningMoments, scale_scores

ALL = torch.ones(4, dtype=torch.bool)
SCORES = torch.tensor([1.0, 3.0, 2.0, 10.0])


def scaled(scores, counted, scale, *, groups=(0, 0, 1, 1), moments=None, clip=None):
    how = {"groups": torch.tensor(groups), "moments": moments or RunningMoments()}
    return scale_scores(scores, counted, scale=scale, clip=clip, **how)


def test_running_moments_are_those_of_all_numbers_together():
    rng, moments, seen = np.random.default_rng(0), RunningMoments(), []
    for size in (3, 0, 1, 40, 7):
        part = rng.standard_normal(size) * 5 + 1000
        seen.extend(part)
        moments.update(torch.tensor(part))
        assert moments.mean == pytest.approx(np.mean(seen), rel=1e-12)
        assert moments.std == pytest.approx(np.std(seen), rel=1e-9) and moments.count == len(seen)


def test_running_goes_on_from_step_to_step():
    moments = RunningMoments()
    first = scaled(SCORES, ALL, RewardScale.running, moments=moments)
    np.testing.assert_allclose(first, (SCORES - SCORES.numpy().mean()) / SCORES.numpy().std(), rtol=1e-6)
    second = scaled(SCORES + 1, ALL, RewardScale.running, moments=moments)
    both = np.concatenate([SCORES, SCORES + 1])
    np.testing.assert_allclose(second, (SCORES.numpy() + 1 - both.mean()) / both.std(), rtol=1e-6)


def test_batch_leaves_out_rows_that_do_not_count():
    found = scaled(torch.tensor([1.0, 3.0, 99.0, 5.0]), torch.tensor([True, True, False, True]), RewardScale.batch)
    deviation = (8 / 3) ** 0.5
    assert found.tolist() == pytest.approx([-2 / deviation, 0.0, 99.0, 2 / deviation])


def test_group_by_hand():
    # (1, 3): mean 2, deviation 1. (2, 10): mean 6, deviation 4.
    assert scaled(SCORES, ALL, RewardScale.group).tolist() == [-1.0, 1.0, -1.0, 1.0]
    alone = scaled(SCORES, torch.tensor([True, False, True, True]), RewardScale.group)
    assert alone.tolist() == [0.0, 3.0, -1.0, 1.0]  # a score whose companion does not count is its own mean


@pytest.mark.parametrize("scale", [RewardScale.running, RewardScale.batch, RewardScale.group])
def test_scores_that_are_alike_become_zero(scale):
    assert scaled(torch.full((4,), 0.7), ALL, scale).abs().max() < 1e-3
    none = torch.zeros(4, dtype=torch.bool)
    assert torch.equal(scaled(SCORES, none, scale), SCORES)


def test_clipping_comes_last():
    assert scaled(SCORES, ALL, RewardScale.none, clip=2.5).tolist() == [1.0, 2.5, 2.0, 2.5]
    assert scaled(-SCORES, ALL, RewardScale.group, clip=0.5).tolist() == [0.5, -0.5, 0.5, -0.5]
