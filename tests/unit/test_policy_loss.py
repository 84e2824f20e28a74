"""The clipped surrogate against a per-token numpy twin and finite differences."""

import numpy as np
import pytest
import torch

from aligner.ops.policy_loss import Objective, policy_loss

NAN = float("nan")


def ppo_clip_loss(logprobs, old_logprobs, advantages, mask, *, clip, denominator, entropy_bonus=0.0, **more):
    """PPO's own objective, every token with the same share."""
    objective = Objective(low=clip, high=clip, entropy_bonus=entropy_bonus)
    shares = torch.full(mask.shape, 1 / max(float(denominator), 1))
    return policy_loss(logprobs, old_logprobs, advantages, mask, objective=objective, shares=shares, **more)


def case(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    logprobs, old, advantages, entropy = torch.randn(4, 5, 6, generator=generator, dtype=dtype)
    mask = torch.rand(5, 6, generator=generator) < 0.6
    mask[2] = False
    return logprobs * 0.3 - 1, old * 0.3 - 1, advantages, entropy.abs(), mask


def numpy_terms(logprobs, old, advantages, mask, clip):
    terms, clipped = [], 0
    for lp, ol, a in zip(*(x.numpy().astype(float)[mask.numpy()] for x in (logprobs, old, advantages))):
        ratio = np.exp(lp - ol)
        bounded = min(max(ratio, 1 - clip), 1 + clip)
        terms.append(-min(a * ratio, a * bounded))
        clipped += a * bounded < a * ratio
    return np.array(terms), clipped


@pytest.mark.parametrize("junk", [NAN, float("inf"), 50.0])
def test_equals_the_numpy_twin_whatever_the_mask_hides(junk):
    logprobs, old, advantages, entropy, mask = case()
    hidden = [torch.where(mask, x, junk) for x in (logprobs, old, advantages, entropy)]
    loss, metrics = ppo_clip_loss(*hidden[:3], mask, clip=0.2, entropy=hidden[3], entropy_bonus=0.1, denominator=40)
    terms, clipped = numpy_terms(logprobs, old, advantages, mask, 0.2)
    bonus = 0.1 * entropy[mask].sum().item()
    assert loss.item() == pytest.approx((terms.sum() - bonus) / 40, abs=1e-6)
    assert metrics["tokens"] == mask.sum() and metrics["clipped"] == clipped
    assert metrics["policy_loss"].item() == pytest.approx(terms.sum(), abs=1e-5)
    ratio = np.exp((logprobs - old).numpy()[mask.numpy()])
    assert metrics["ratio"].item() == pytest.approx(ratio.sum(), rel=1e-5)
    assert metrics["approximate_kl"].item() == pytest.approx((ratio - 1 - np.log(ratio)).sum(), rel=1e-4)
    assert not any(value.requires_grad for value in metrics.values())


def test_finite_differences():
    logprobs, old, advantages, entropy, mask = case(1, torch.float64)
    assert not ((logprobs - old).exp().sub(1).abs() - 0.2).abs().lt(1e-4).any()  # no kink within reach
    logprobs.requires_grad_(), entropy.requires_grad_()

    def loss(lp, en):
        return ppo_clip_loss(lp, old, advantages, mask, clip=0.2, entropy=en, entropy_bonus=0.1, denominator=13)[0]

    torch.autograd.gradcheck(loss, (logprobs, entropy))


def test_a_clipped_token_has_no_gradient_and_a_hidden_nan_neither():
    logprobs = torch.tensor([[0.5, -0.5, 0.0, NAN]], requires_grad=True)  # ratios 1.65, 0.61, 1
    mask = torch.tensor([[True, True, True, False]])
    ppo_clip_loss(logprobs, torch.zeros(1, 4), torch.ones(1, 4), mask, clip=0.2, denominator=1)[0].backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, -0.60653067, -1.0, 0.0]]))


def test_splits_of_a_mini_batch_add_up():
    logprobs, old, advantages, _, mask = case(2)
    whole, metrics = ppo_clip_loss(logprobs, old, advantages, mask, clip=0.2, denominator=mask.sum())
    parts = [
        ppo_clip_loss(logprobs[r], old[r], advantages[r], mask[r], clip=0.2, denominator=mask.sum())
        for r in (slice(0, 1), slice(1, 4), slice(4, 5))
    ]
    torch.testing.assert_close(sum(p[0] for p in parts), whole)
    for name, value in metrics.items():
        torch.testing.assert_close(sum(p[1][name] for p in parts), value)


def test_an_empty_mask_gives_0_even_with_a_denominator_of_0():
    x, mask = torch.full((2, 3), NAN, requires_grad=True), torch.zeros(2, 3, dtype=torch.bool)
    loss, metrics = ppo_clip_loss(x, x.detach(), x.detach(), mask, clip=0.2, denominator=0)
    loss.backward()
    assert loss == 0 and (x.grad == 0).all() and all(value == 0 for value in metrics.values())


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "advantages", "entropy"])
def test_nan_under_the_mask_raises_by_name(name):
    tensors = {n: torch.zeros(2, 3) for n in ("logprobs", "old_logprobs", "advantages", "entropy")}
    tensors[name][1, 2] = NAN
    with pytest.raises(FloatingPointError, match=f"^{name} is nan at row 1"):
        ppo_clip_loss(**tensors, mask=torch.ones(2, 3, dtype=torch.bool), clip=0.2, denominator=6)


def test_shapes_and_a_bonus_without_entropy_are_refused():
    x, mask = torch.zeros(4), torch.ones(4, dtype=torch.bool)
    with pytest.raises(AssertionError):
        ppo_clip_loss(x, x, x[:, None], mask, clip=0.2, denominator=1)
    with pytest.raises(ValueError, match="entropy"):
        ppo_clip_loss(x, x, x, mask, clip=0.2, entropy_bonus=0.1, denominator=1)
