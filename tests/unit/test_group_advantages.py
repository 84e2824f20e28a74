"""Estimators of groups against the papers' formulas by hand and numpy twins; groups are ids, in any order and of any size."""

import numpy as np
import pytest
import torch

from aligner.ops.group_advantages import dr_grpo, equal_groups, group_norm, rloo

NAN = float("nan")


def everyone(n):
    return torch.ones(n, dtype=torch.bool)


def test_grpo_by_hand():
    """Shao et al. 2024, section 4.1.2, outcome supervision: rewards 1, 0, 0, 1 and 2, 2, 5 have means 0.5 and 3, deviations 0.5 and
    sqrt(2)."""
    returns = torch.tensor([1.0, 0, 0, 1, 2, 2, 5])
    groups = torch.tensor([3, 3, 3, 3, 8, 8, 8])
    expected = [1, -1, -1, 1, -1 / 2**0.5, -1 / 2**0.5, 2 / 2**0.5]
    torch.testing.assert_close(group_norm(returns, everyone(7), groups), torch.tensor(expected))


def test_dr_grpo_by_hand():
    """Liu et al. 2025: the reward less the group's mean, and nothing else."""
    returns, groups = torch.tensor([1.0, 0, 0, 1, 2, 2, 5]), torch.tensor([0, 0, 0, 0, 1, 1, 1])
    found = dr_grpo(returns, everyone(7), groups)
    torch.testing.assert_close(found, torch.tensor([0.5, -0.5, -0.5, 0.5, -1, -1, 2]))


def test_rloo_by_hand():
    """Ahmadian et al. 2024, section 2.3: R_i - 1/(k - 1) sum of the others. Of 2, 2, 5: 2 - 3.5, 2 - 3.5, 5 - 2."""
    found = rloo(torch.tensor([2.0, 2, 5]), everyone(3), torch.zeros(3, dtype=torch.int64))
    torch.testing.assert_close(found, torch.tensor([-1.5, -1.5, 3.0]))


TWINS = {
    group_norm: lambda r, i: (r[i] - r.mean()) / max(r.std(), 1e-4),
    dr_grpo: lambda r, i: r[i] - r.mean(),
    rloo: lambda r, i: r[i] - np.delete(r, i).mean() if len(r) > 1 else 0.0,
}


def random_case(seed=0):
    """Twenty responses of six groups in no order, some of which a filter took away or masked out."""
    generator = torch.Generator().manual_seed(seed)
    returns = torch.randn(20, generator=generator)
    groups = torch.randint(0, 6, (20,), generator=generator) * 1000003 + 2**40
    counted = torch.rand(20, generator=generator) < 0.8
    return returns, counted, groups


@pytest.mark.parametrize("estimator", TWINS)
@pytest.mark.parametrize("seed", range(4))
def test_equals_its_twin_with_missing_and_masked_rows(estimator, seed):
    returns, counted, groups = random_case(seed)
    expected = np.zeros(20)
    for group in set(groups.tolist()):
        rows = np.flatnonzero(((groups == group) & counted).numpy())
        r = returns.numpy()[rows].astype(float)
        expected[rows] = [TWINS[estimator](r, i) for i in range(len(r))]
    hidden = torch.where(counted, returns, NAN)
    np.testing.assert_allclose(estimator(hidden, counted, groups).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("estimator", TWINS)
def test_order_does_not_matter(estimator):
    returns, counted, groups = random_case(7)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    found = estimator(returns, counted, groups)
    torch.testing.assert_close(
        estimator(returns[order], counted[order], groups[order]), found[order], atol=1e-7, rtol=0
    )


@pytest.mark.parametrize("estimator", TWINS)
def test_a_group_of_equal_returns_or_of_one_response_teaches_nothing(estimator):
    found = estimator(torch.tensor([0.3, 0.3, 0.3, 9.0]), everyone(4), torch.tensor([0, 0, 0, 1]))
    assert found.tolist() == [0.0] * 4


def test_group_norm_is_invariant_to_scale_and_shift_of_a_prompts_rewards():
    returns, groups = torch.tensor([1.0, 2, 4, 8]), torch.zeros(4, dtype=torch.int64)
    one = group_norm(returns, everyone(4), groups)
    torch.testing.assert_close(group_norm(returns * 30 - 7, everyone(4), groups), one)


def test_equal_groups_are_counted_among_what_counts():
    returns = torch.tensor([1.0, 1, 0, 1, 5, NAN])
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    counted = torch.tensor([True, True, True, True, True, False])
    assert equal_groups(returns, counted, groups) == (2, 3)


def test_nan_that_counts_raises_and_shapes_are_asserted():
    with pytest.raises(FloatingPointError, match="returns is nan at row 1"):
        rloo(torch.tensor([0.0, NAN]), everyone(2), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(AssertionError):
        rloo(torch.zeros(2, 1), everyone(2), torch.zeros(2, dtype=torch.int64))
