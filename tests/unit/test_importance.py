"""Importance weights, drift, and the decoupled loss that they make, against numpy twins, numbers by hand and finite differences."""

import math

import numpy as np
import pytest
import torch

from aligner.ops.importance import drift, importance_weights
from tests.unit.test_policy_loss import ppo_clip_loss

NAN = float("nan")


def case(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    new, prox, behaviour, advantages = torch.randn(4, 5, 6, generator=generator, dtype=dtype)
    mask = torch.rand(5, 6, generator=generator) < 0.6
    mask[2] = False
    return new * 0.3 - 1, prox * 0.3 - 1, behaviour * 0.6 - 1, advantages, mask


def decoupled(new, prox, behaviour, advantage, *, clip, cap):
    """One token's term of Hilton et al.'s objective, as a loss, in Python's floats."""
    ratio = math.exp(new - prox)
    bounded = min(max(ratio, 1 - clip), 1 + clip)
    return -min(cap, math.exp(prox - behaviour)) * min(advantage * ratio, advantage * bounded)


@pytest.mark.parametrize("junk", [NAN, float("inf"), 50.0])
def test_the_decoupled_loss_equals_its_twin_whatever_the_mask_hides(junk):
    new, prox, behaviour, advantages, mask = case()
    hidden = [torch.where(mask, x, junk) for x in (new, prox, behaviour, advantages)]
    weights = importance_weights(hidden[1], hidden[2], mask, cap=1.3)
    assert weights.dtype == torch.float32 and (weights[~mask] == 0).all()
    loss, _ = ppo_clip_loss(
        hidden[0], hidden[1], hidden[3], mask, clip=0.2, weights=weights.where(mask, torch.tensor(junk)), denominator=7
    )
    rows = [x[mask].tolist() for x in (new, prox, behaviour, advantages)]
    terms = [decoupled(*token, clip=0.2, cap=1.3) for token in zip(*rows)]
    assert loss.item() == pytest.approx(sum(terms) / 7, abs=1e-6)
    cut = np.exp(np.array(rows[1]) - np.array(rows[2])) > 1.3
    assert 0 < cut.sum() < len(cut), "the cap cut all or none: this case shows nothing"
    assert (weights[mask] == torch.tensor(1.3)).numpy().tolist() == cut.tolist()


def test_the_gradient_is_that_of_finite_differences_and_none_goes_through_the_weights():
    new, prox, behaviour, advantages, mask = case()
    assert not ((new - prox).exp().sub(1).abs() - 0.2).abs().lt(1e-4).any()  # no kink within reach
    prox.requires_grad_()
    weights = importance_weights(prox.detach(), behaviour, mask, cap=1.3).double()

    def loss(lp):
        return ppo_clip_loss(lp, prox.detach(), advantages, mask, clip=0.2, weights=weights, denominator=13)[0]

    torch.autograd.gradcheck(loss, (new.requires_grad_(),))
    live = (prox - behaviour).exp()  # weights that carry a gradient by mistake
    ppo_clip_loss(new, prox.detach(), advantages, mask, clip=0.2, weights=live, denominator=13)[0].backward()
    assert prox.grad is None


def test_weights_of_one_change_nothing():
    new, prox, _, advantages, mask = case()
    plain = ppo_clip_loss(new, prox, advantages, mask, clip=0.2, denominator=13)
    weighted = ppo_clip_loss(
        new, prox, advantages, mask, clip=0.2, weights=importance_weights(prox, prox, mask, cap=2.0), denominator=13
    )
    assert torch.equal(plain[0], weighted[0]) and plain[1] == weighted[1]


def test_weights_and_drift_by_hand():
    """pi_prox / pi_behav of 1, 3 and 0.5, the last under a False mask; cap 2."""
    behaviour = torch.tensor([[-1.0, -2.0, -0.1]])
    prox = behaviour + torch.tensor([[1.0, 3.0, 0.5]]).log()
    mask = torch.tensor([[True, True, False]])
    assert importance_weights(prox, behaviour, mask, cap=2.0)[0].tolist() == pytest.approx([1.0, 2.0, 0.0])
    found = drift(prox, behaviour, mask)
    assert found["mean"] == pytest.approx(math.log(3) / 2) and found["max"] == pytest.approx(math.log(3))
    assert found["ratio"] == pytest.approx(2.0) and found["effective"] == pytest.approx(16 / (2 * 10))
    assert drift(prox, behaviour, torch.zeros_like(mask)) == {"mean": 0, "max": 0, "ratio": 0, "effective": 0}


def test_a_huge_ratio_stays_finite():
    mask = torch.ones(1, 2, dtype=torch.bool)
    prox, behaviour = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-900.0, -1.0]])
    assert importance_weights(prox, behaviour, mask, cap=2.0)[0].tolist() == [2.0, 1.0]
    assert all(map(math.isfinite, drift(prox, behaviour, mask).values()))


def test_the_mean_ratio_of_samples_from_the_behaviour_is_one():
    """E_q[p / q] = 1, drawn; and the truncated weight equals the sum it estimates, sum of min(c q, p)."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(20)), rng.dirichlet(np.full(20, 3.0))
    tokens = rng.choice(20, size=200_000, p=q)
    prox, behaviour = torch.from_numpy(np.log(p)[tokens])[None], torch.from_numpy(np.log(q)[tokens])[None]
    mask = torch.ones_like(prox, dtype=torch.bool)
    assert drift(prox, behaviour, mask)["ratio"] == pytest.approx(1.0, abs=0.02)
    weights = importance_weights(prox, behaviour, mask, cap=2.0)
    assert weights.mean().item() == pytest.approx(np.minimum(2 * q, p).sum(), abs=0.01)


def test_a_nan_under_the_mask_names_the_engine():
    prox, behaviour = torch.zeros(1, 2), torch.tensor([[0.0, NAN]])
    with pytest.raises(FloatingPointError, match="^engine log-probs is nan at row 0"):
        importance_weights(prox, behaviour, torch.ones(1, 2, dtype=torch.bool), cap=2.0)
