"""KL estimators against an exact KL over a small vocabulary, and the reward they enter."""

import pytest
import torch

from aligner.config.ppo import KLEstimator, KLReduction
from aligner.ops.kl import AdaptiveKL, kl_per_token, last_true, rewards_with_kl

NAN = float("nan")


def distributions():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 11, generator=generator, dtype=torch.float64).log_softmax(-1)


@pytest.mark.parametrize("estimator", [KLEstimator.k1, KLEstimator.k3])
def test_k1_and_k3_are_unbiased(estimator):
    policy, reference = distributions()
    exact = (policy.exp() * (policy - reference)).sum()
    estimate = (policy.exp() * kl_per_token(policy, reference, estimator)).sum()
    torch.testing.assert_close(estimate, exact, atol=1e-6, rtol=1e-6)


def test_values_by_hand():
    logprobs, reference = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.0])
    expected = {"k1": [1.0, -1.0], "abs": [1.0, 1.0], "k2": [0.5, 0.5], "k3": [0.36787944, 0.71828183]}
    for name, values in expected.items():
        torch.testing.assert_close(kl_per_token(logprobs, reference, KLEstimator[name]), torch.tensor(values))


@pytest.mark.parametrize(
    "estimator,derivative",
    [("k1", lambda d: 1.0), ("k2", lambda d: d), ("k3", lambda d: 1 - torch.exp(-torch.tensor(d)).item())],
)
def test_gradient_of_each_estimator_in_the_policy(estimator, derivative):
    for d in (-0.7, 0.0, 1.3):
        logprobs = torch.tensor([d - 2.0], requires_grad=True)
        kl_per_token(logprobs, torch.tensor([-2.0]), KLEstimator[estimator]).sum().backward()
        assert logprobs.grad.item() == pytest.approx(derivative(d), abs=1e-6)


def test_equal_log_probs_give_exactly_0():
    logprobs = distributions()[0].float()
    for estimator in KLEstimator:
        assert (kl_per_token(logprobs, logprobs.clone(), estimator) == 0).all()


def test_a_shape_that_would_broadcast_is_refused():
    with pytest.raises(AssertionError):
        kl_per_token(torch.zeros(4), torch.zeros(4, 1), KLEstimator.k1)


MASK = torch.tensor([[False, True, True, False], [False, False, False, False], [True, False, True, False]])
KL = torch.where(MASK, torch.tensor([[0.0, 1.0, 2.0, 0.0], [0.0] * 4, [3.0, 0.0, 4.0, 0.0]]), NAN)
SCORES = torch.tensor([10.0, NAN, 20.0])  # a row without a chosen token has no score to place


def test_the_score_lands_on_the_last_chosen_token_and_each_token_pays():
    out = rewards_with_kl(SCORES, KL, MASK, coefficient=0.1, reduction=KLReduction.token)
    torch.testing.assert_close(out, torch.tensor([[0, -0.1, 9.8, 0], [0.0] * 4, [-0.3, 0, 19.6, 0]]))


def test_sequence_reduction_charges_the_sum_to_the_last_token():
    out = rewards_with_kl(SCORES, KL, MASK, coefficient=0.1, reduction=KLReduction.sequence)
    torch.testing.assert_close(out, torch.tensor([[0, 0, 9.7, 0], [0.0] * 4, [0.0, 0, 19.3, 0]]))


def test_bad_scores_and_kl_raise_by_name():
    with pytest.raises(FloatingPointError, match="kl is nan at row 0"):
        rewards_with_kl(SCORES, torch.full((3, 4), NAN), MASK, coefficient=0.1, reduction=KLReduction.token)
    with pytest.raises(FloatingPointError, match="scores is nan at row 2"):
        rewards_with_kl(torch.tensor([1.0, 1.0, NAN]), KL, MASK, coefficient=0.1, reduction=KLReduction.token)
    with pytest.raises(AssertionError):
        rewards_with_kl(SCORES[:, None], KL, MASK, coefficient=0.1, reduction=KLReduction.token)


def test_last_true():
    assert last_true(MASK).tolist() == [[False, False, True, False], [False] * 4, [False, False, True, False]]


@pytest.mark.parametrize("kl,factor", [(6.0, 1.0), (6.6, 1 + 0.1 * 0.1), (60.0, 1 + 0.2 * 0.1), (0.0, 1 - 0.2 * 0.1)])
def test_adaptive_coefficient(kl, factor):
    controller = AdaptiveKL(coefficient=0.2, target=6.0, horizon=1000)
    controller.update(kl, 100)
    assert controller.coefficient == pytest.approx(0.2 * factor)


def test_adaptive_coefficient_refuses_what_it_cannot_use():
    with pytest.raises(ValueError, match="ppo.kl_target"):
        AdaptiveKL(coefficient=0.2, target=0.0, horizon=10)
    with pytest.raises(FloatingPointError):
        AdaptiveKL(coefficient=0.2, target=1.0, horizon=10).update(NAN, 1)
