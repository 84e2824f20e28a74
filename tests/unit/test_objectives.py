"""Every objective and aggregation against numpy twins written per response from the papers' equations, and against finite differences."""

import numpy as np
import pytest
import torch

from aligner.config.ppo import Aggregate, KLEstimator, PolicyObjective
from aligner.ops.aggregate import token_shares
from aligner.ops.kl import kl_per_token
from aligner.ops.policy_loss import METRICS, Objective, policy_loss, sequence_log_ratio

NAN = float("nan")
LONGEST = 9

OBJECTIVES = {
    "clip": Objective(low=0.2, high=0.2),
    "clip-higher": Objective(low=0.2, high=0.28),
    "dual": Objective(low=0.2, high=0.2, dual=1.5),
    "gspo": Objective(kind=PolicyObjective.gspo, low=0.1, high=0.15),
    "cispo": Objective(kind=PolicyObjective.cispo, low=1.0, high=0.3),
    "cispo, both bounds": Objective(kind=PolicyObjective.cispo, low=0.1, high=0.1),
}


def case(seed=0, dtype=torch.float32):
    """Rows of unlike length, one of them empty; a response's tokens share their advantage."""
    generator = torch.Generator().manual_seed(seed)
    logprobs, old, reference = torch.randn(3, 5, 8, generator=generator, dtype=dtype) * 0.4 - 1
    advantages = torch.randn(5, 1, generator=generator, dtype=dtype).expand(5, 8).clone()
    mask = torch.arange(8) < torch.tensor([3, 8, 0, 5, 1])[:, None]
    return logprobs, old, reference, advantages, mask


def run(logprobs, old, reference, advantages, mask, objective, aggregate, **more):
    rows = torch.arange(len(mask))[:, None].expand_as(mask)
    shares = token_shares(mask, aggregate, constant_length=LONGEST)
    return policy_loss(
        logprobs, old, advantages, mask, objective=objective, shares=shares, sequences=rows,
        reference_logprobs=reference, **more,
    )  # fmt: skip


def twin_of_a_response(lp, old, a, objective):
    """Objective J of each token (to be maximised) of one response, in numpy."""
    low, high = 1 - objective.low, 1 + objective.high
    if (
        objective.kind is PolicyObjective.gspo
    ):  # Zheng et al. 2025, equations 5 and 7: the response's, once for each token
        s = (np.exp(lp.sum()) / np.exp(old.sum())) ** (1 / len(lp))
        return np.full(len(lp), min(s * a, min(max(s, low), high) * a))
    ratio = np.exp(lp) / np.exp(old)
    if objective.kind is PolicyObjective.cispo:  # MiniMax-M1, equations 4 and 5
        return np.clip(ratio, low, high) * a * lp
    surrogate = np.minimum(ratio * a, np.clip(ratio, low, high) * a)  # Schulman et al. 2017, 7; Yu et al. 2025, 10
    if objective.dual is not None and a < 0:  # Ye et al. 2020: max(min(...), c A)
        surrogate = np.maximum(surrogate, objective.dual * a)
    return surrogate


def twin(logprobs, old, reference, advantages, mask, objective, aggregate, beta):
    """The loss: each response by itself, then added up as the papers do."""
    responses = []
    for lp, ol, rf, a, m in zip(
        *(x.numpy().astype(float) for x in (logprobs, old, reference, advantages)), mask.numpy()
    ):
        if not m.any():
            continue
        d = lp[m] - rf[m]
        k3 = np.exp(-d) - 1 + d  # Shao et al. 2024, equation 4
        responses.append(twin_of_a_response(lp[m], ol[m], a[m][0], objective) - beta * k3)
    if aggregate is Aggregate.token:  # Yu et al. 2025, equation 12
        return -np.concatenate(responses).mean()
    if aggregate is Aggregate.sequence:  # Shao et al. 2024, equation 3
        return -np.mean([r.mean() for r in responses])
    return -sum(r.sum() for r in responses) / (len(mask) * LONGEST)  # Liu et al. 2025: a constant


REAL = [Aggregate.token, Aggregate.sequence, Aggregate.constant]


@pytest.mark.parametrize("aggregate", REAL)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_equals_its_twin_whatever_the_mask_hides(name, aggregate):
    *tensors, mask = case()
    expected = twin(*tensors, mask, OBJECTIVES[name], aggregate, 0.3)
    for junk in (NAN, float("inf"), 50.0):
        hidden = [torch.where(mask, x, junk) for x in tensors]
        loss, metrics = run(*hidden, mask, OBJECTIVES[name], aggregate, kl_coefficient=0.3)
        assert loss.item() == pytest.approx(expected, abs=1e-6)
        assert tuple(metrics) == METRICS and not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if "cispo" not in n])
def test_the_gradient_is_that_of_finite_differences(name):
    logprobs, old, reference, advantages, mask = case(3, torch.float64)
    gradient_of = torch.func.grad(
        lambda lp: run(lp, old, reference, advantages, mask, OBJECTIVES[name], Aggregate.sequence, kl_coefficient=0.2)[
            0
        ]
    )
    found, step = gradient_of(logprobs), 1e-6
    for at in mask.nonzero().tolist():
        moved = logprobs.clone()
        ends = []
        for sign in (1, -1):
            moved[tuple(at)] = logprobs[tuple(at)] + sign * step
            ends.append(twin(moved, old, reference, advantages, mask, OBJECTIVES[name], Aggregate.sequence, 0.2))
        assert found[tuple(at)].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-6), at
    assert (found[~mask] == 0).all()


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    """By hand: ratios 2 and 1 of advantage 3, upper bound 1.5: gradients -1.5 * 3 / 2 and -1 * 3 / 2."""
    logprobs = torch.tensor([[np.log(2.0) - 1, -1.0]], dtype=torch.float32, requires_grad=True)
    old, mask = torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    objective = Objective(kind=PolicyObjective.cispo, low=1.0, high=0.5)
    loss, metrics = run(logprobs, old, None, torch.full((1, 2), 3.0), mask, objective, Aggregate.token)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-2.25, -1.5]]))
    assert metrics["clipped"] == 1


def test_dual_clip_bounds_what_clipping_does_not():
    """By hand: ratio 5 with advantage -1 would cost 5; c = 3 makes it 3, without a gradient. With advantage 1 nothing changes."""
    logprobs = torch.log(torch.tensor([[5.0, 5.0]])).requires_grad_()
    mask, advantages = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[-1.0, 1.0]])
    objective = Objective(dual=3.0)
    loss, metrics = run(logprobs, torch.zeros(1, 2), None, advantages, mask, objective, Aggregate.token)
    loss.backward()
    assert loss.item() == pytest.approx((3.0 - 1.2) / 2)
    assert metrics["dual_clipped"] == 1 and metrics["clipped"] == 1
    torch.testing.assert_close(logprobs.grad, torch.zeros(1, 2))


def test_gspo_moves_all_tokens_of_a_response_alike():
    """Equation 10 of the paper: s A / |y| times the mean gradient; equal for tokens whose own ratios differ."""
    logprobs = torch.tensor([[0.3, -0.1, 0.1]], requires_grad=True)
    mask, advantages = torch.ones(1, 3, dtype=torch.bool), torch.full((1, 3), 2.0)
    objective = Objective(kind=PolicyObjective.gspo, low=0.2, high=0.2)
    run(logprobs, torch.zeros(1, 3), None, advantages, mask, objective, Aggregate.sequence)[0].backward()
    torch.testing.assert_close(logprobs.grad, torch.full((1, 3), -np.exp(0.1) * 2.0 / 3).float())


def test_a_response_is_what_has_its_id_wherever_its_tokens_lie():
    ratio = torch.tensor([1.0, 10.0, 3.0, 20.0, 99.0])
    mask = torch.tensor([True, True, True, True, False])
    found = sequence_log_ratio(ratio, mask, torch.tensor([7, 2, 7, 2, 2]))
    assert found[:4].tolist() == [2.0, 15.0, 2.0, 15.0]


@pytest.mark.parametrize("aggregate", REAL)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_add_up_and_padding_does_not_count(name, aggregate):
    """The shares are the whole mini-batch's, so rows may go in any parts, in any order, in wider tensors."""
    *tensors, mask = case(5)
    shares = token_shares(mask, aggregate, constant_length=LONGEST)
    whole, told = run(*tensors, mask, OBJECTIVES[name], aggregate, kl_coefficient=0.1)
    sums, total = dict.fromkeys(METRICS, 0.0), 0.0
    for rows in ([4, 0], [2], [3, 1]):
        wide = [torch.nn.functional.pad(x[rows], (1, 3), value=NAN) for x in (*tensors, shares)]
        inside = torch.nn.functional.pad(mask[rows], (1, 3), value=False)
        logprobs, old, reference, advantages, share = wide
        loss, metrics = policy_loss(
            logprobs, old, advantages, inside, objective=OBJECTIVES[name], shares=torch.where(inside, share, 0.0),
            sequences=torch.arange(len(rows))[:, None].expand_as(inside), reference_logprobs=reference, kl_coefficient=0.1,
        )  # fmt: skip
        total += loss
        sums = {key: sums[key] + metrics[key] for key in METRICS}
    torch.testing.assert_close(total, whole)
    for key in METRICS:
        torch.testing.assert_close(sums[key], told[key], msg=key)


def test_shares_by_hand():
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    token, sequence, constant = (token_shares(mask, a, constant_length=5) for a in REAL)
    torch.testing.assert_close(token, mask / 3)
    torch.testing.assert_close(sequence, mask * torch.tensor([[1 / 4], [1 / 2], [0.0]]))
    torch.testing.assert_close(constant, mask / 15)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert all((token_shares(nothing, a, constant_length=5) == 0).all() for a in REAL)


def expected_gradient(logits, reference, estimator):
    """Exact expectation over a policy's own tokens of the gradient of an estimator used as a loss."""
    logprobs = torch.log_softmax(logits, 0)
    kl = kl_per_token(logprobs, reference, estimator)
    per_token = [torch.autograd.grad(kl[i], logits, retain_graph=True)[0] for i in range(len(logits))]
    return sum(p * g for p, g in zip(logprobs.exp().detach(), per_token))


def test_whose_gradient_each_kl_estimator_has():
    """k2: of KL(policy || reference), the one that is penalised; k3: of KL(reference || policy); abs: of the sum of |p - q|; k1: 0."""
    logits = torch.tensor([0.5, -1.0, 0.3, 0.0], dtype=torch.float64, requires_grad=True)
    q = torch.log_softmax(torch.tensor([0.1, 0.4, -0.7, 0.2], dtype=torch.float64), 0)

    def p():
        return torch.log_softmax(logits, 0)

    wanted = {
        KLEstimator.k1: torch.zeros(4, dtype=torch.float64),
        KLEstimator.k2: torch.autograd.grad((p().exp() * (p() - q)).sum(), logits)[0],
        KLEstimator.k3: torch.autograd.grad((q.exp() * (q - p())).sum(), logits)[0],
        KLEstimator.abs: torch.autograd.grad((p().exp() - q.exp()).abs().sum(), logits)[0],
    }
    for estimator, gradient in wanted.items():
        torch.testing.assert_close(expected_gradient(logits, q, estimator), gradient, msg=estimator.name)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_without_old_log_probs_the_policy_is_its_own_old_one(name):
    logprobs, _, reference, advantages, mask = case(7)
    results = []
    for old in (None, logprobs.clone()):
        given = torch.where(mask, logprobs, NAN).requires_grad_()
        loss, metrics = run(
            given, old, reference, advantages, mask, OBJECTIVES[name], Aggregate.token, kl_coefficient=0.1
        )
        loss.backward()
        results.append((loss.detach(), given.grad, metrics))
    torch.testing.assert_close(results[0][:2], results[1][:2])
    assert results[0][2] == results[1][2] and results[0][2]["ratio"] == mask.sum()


def test_nan_in_the_reference_is_named_and_gspo_wants_sequences():
    *tensors, mask = case()
    tensors[2][1, 2] = NAN
    with pytest.raises(FloatingPointError, match="^reference_logprobs is nan at row 1"):
        run(*tensors, mask, OBJECTIVES["clip"], Aggregate.token)
    with pytest.raises(AssertionError, match="which tokens are of one response"):
        policy_loss(*tensors[:2], tensors[3], mask, objective=OBJECTIVES["gspo"], shares=mask.float())
