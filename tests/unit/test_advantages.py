"""GAE, returns and truncation against hand-computed cases and a numpy twin that first drops what is not chosen."""

import numpy as np
import pytest
import torch

from aligner.config.ppo import Truncation
from aligner.ops.advantages import gae, monte_carlo_returns, reinforce_baseline
from aligner.ops.truncation import handle_truncation

NAN = float("nan")


def numpy_gae(rewards, values, bootstrap, gamma, lam):
    """The definition, sum of (gamma lam)^l delta, on the chosen tokens of one row."""
    following = np.append(values[1:], bootstrap)
    delta = rewards + gamma * following - values
    return np.array([sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))])


def random_case(seed=0):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 6, 9, generator=generator)
    mask = torch.rand(6, 9, generator=generator) < 0.6
    mask[4] = False
    return rewards, values, mask, torch.randn(6, generator=generator)


def test_hand_computed_row():
    # prompt of 2, response of 3, one pad; gamma 0.5, lam 0.5, bootstrap 4
    mask = torch.tensor([[False, False, True, True, True, False]])
    rewards = torch.tensor([[NAN, NAN, 1.0, 0.0, 2.0, NAN]])
    values = torch.tensor([[0.0, NAN, 1.0, 2.0, 3.0, 100.0]])
    advantages, returns = gae(rewards, values, mask, torch.tensor([4.0]), gamma=0.5, lam=0.5)
    # deltas: 1 + 1 - 1 = 1; 0 + 1.5 - 2 = -0.5; 2 + 2 - 3 = 1
    torch.testing.assert_close(advantages, torch.tensor([[0, 0, 1 + 0.25 * -0.25, -0.5 + 0.25, 1.0, 0]]))
    torch.testing.assert_close(returns, torch.tensor([[0, 0, 1.9375, 1.75, 4.0, 0]]))


@pytest.mark.parametrize("gamma,lam", [(1.0, 1.0), (1.0, 0.95), (0.9, 0.0), (0.97, 0.8)])
def test_equals_the_definition_on_rows_with_gaps(gamma, lam):
    rewards, values, mask, bootstrap = random_case()
    advantages, returns = gae(rewards, values, mask, bootstrap, gamma=gamma, lam=lam)
    for b in range(len(mask)):
        m = mask[b].numpy()
        expected = numpy_gae(rewards[b].numpy()[m], values[b].numpy()[m], bootstrap[b].item(), gamma, lam)
        np.testing.assert_allclose(advantages[b].numpy()[m], expected, atol=1e-5)
        np.testing.assert_allclose(returns[b].numpy()[m], expected + values[b].numpy()[m], atol=1e-5)
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


@pytest.mark.parametrize("junk", [NAN, float("inf"), 100.0])
def test_masked_entries_never_change_anything(junk):
    rewards, values, mask, bootstrap = random_case(1)
    empty = ~mask.any(1)
    clean = gae(rewards, values, mask, bootstrap, gamma=0.9, lam=0.9)
    dirty = gae(
        torch.where(mask, rewards, junk),
        torch.where(mask, values, junk),
        mask,
        torch.where(empty, junk, bootstrap),
        gamma=0.9,
        lam=0.9,
    )
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])


def test_lambda_1_gives_monte_carlo_returns():
    rewards, values, mask, bootstrap = random_case(2)
    _, returns = gae(rewards, values, mask, bootstrap, gamma=0.9, lam=1.0)
    torch.testing.assert_close(returns, monte_carlo_returns(rewards, mask, bootstrap, gamma=0.9), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["rewards", "values", "bootstrap"])
def test_nan_under_the_mask_raises(name):
    rewards, values, mask, bootstrap = random_case(3)
    mask[2, 5] = True
    {"rewards": rewards, "values": values, "bootstrap": bootstrap[:, None].expand(6, 9)}[name][2, 5] = NAN
    with pytest.raises(FloatingPointError, match=f"{name} is nan at row 2"):
        gae(rewards, values, mask, bootstrap, gamma=1.0, lam=1.0)


def test_shapes_are_asserted():
    rewards, values, mask, bootstrap = random_case()
    with pytest.raises(AssertionError):
        gae(rewards, values, mask, bootstrap[:, None], gamma=1.0, lam=1.0)
    with pytest.raises(AssertionError):
        gae(rewards, values[:, :1], mask, bootstrap, gamma=1.0, lam=1.0)


def test_reinforce_subtracts_the_mean_of_all_returns_to_go():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    rewards = torch.tensor([[0.0, 2.0, NAN], [5.0, NAN, NAN]])
    # returns to go at gamma 0.5: 1, 2 and 5; mean 8/3
    expected = torch.tensor([[1.0, 2.0, 0.0], [5.0, 0.0, 0.0]]) - torch.where(mask, 8 / 3, 0.0)
    torch.testing.assert_close(reinforce_baseline(rewards, mask, gamma=0.5), expected)


def truncation_case(truncation):
    scores, bootstrap = torch.tensor([1.0, 1.0]), torch.tensor([0.7, 0.7])
    mask, truncated = torch.ones(2, 3, dtype=torch.bool), torch.tensor([False, True])
    return handle_truncation(scores, bootstrap, mask, truncated, truncation=truncation, penalty=0.25)


@pytest.mark.parametrize(
    "truncation,scores,bootstrap,kept",
    [
        (Truncation.bootstrap, [1.0, 1.0], [0.0, 0.7], True),
        (Truncation.mask, [1.0, 1.0], [0.0, 0.0], False),
        (Truncation.penalise, [1.0, 0.75], [0.0, 0.0], True),
        (Truncation.ignore, [1.0, 1.0], [0.0, 0.0], True),
    ],
)
def test_truncation(truncation, scores, bootstrap, kept):
    out = truncation_case(truncation)
    torch.testing.assert_close(out[0], torch.tensor(scores))
    torch.testing.assert_close(out[1], torch.tensor(bootstrap))
    assert out[2].tolist() == [[True] * 3, [kept] * 3]
