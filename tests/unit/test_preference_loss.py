"""The reward model's losses against the papers' equations, numpy twins and finite differences."""

import itertools
import math

import numpy as np
import pytest
import torch

from aligner.ops.preference_loss import COMPARISON_SUMS, pairwise_loss, plackett_luce_loss, regression_loss

NAN = float("nan")


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def tensors(scores, groups, ranks, margins=None, mask=None, dtype=torch.float32):
    m = len(scores)
    return {
        "scores": torch.tensor(scores, dtype=dtype, requires_grad=True),
        "groups": torch.tensor(groups),
        "ranks": torch.tensor(ranks),
        "margins": torch.tensor(margins or [0.0] * m, dtype=dtype),
        "mask": torch.ones(m, dtype=torch.bool) if mask is None else torch.tensor(mask),
    }


def without_margins(rows):
    return {name: value for name, value in rows.items() if name != "margins"}


def test_a_pair_by_hand():
    """Llama 2, equation 2: -log sigmoid(1.5 - 0.5 - 0.25), and its gradient -sigmoid(-0.75)."""
    rows = tensors([0.5, 1.5], [7, 7], [1, 0], margins=[9.0, 0.25])
    loss, metrics = pairwise_loss(**rows, denominator=1)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-0.75)))
    loss.backward()
    slope = 1 / (1 + math.exp(0.75))
    torch.testing.assert_close(rows["scores"].grad, torch.tensor([slope, -slope]))
    assert (metrics["correct"], metrics["margin"], metrics["groups"]) == (1, 1, 1)
    assert set(metrics) == set(COMPARISON_SUMS)
    assert metrics["score"] == 2 and metrics["score_square"] == 2.5 and metrics["responses"] == 2


@pytest.mark.parametrize("junk", [NAN, math.inf, 50.0])
def test_instructgpts_equation_1(junk):
    """Four responses are six comparisons, each of a sixth; the pair beside them counts as much; a masked row does not count."""
    scores, ranks = [0.3, -1.0, 2.0, 0.1, 0.7, 0.2], [2, 0, 1, 3, 1, 0]
    rows = tensors([*scores, junk], [4, 4, 4, 4, 9, 9, 9], [*ranks, 5], mask=[True] * 6 + [False])
    loss, metrics = pairwise_loss(**rows, denominator=5)
    ordered = [scores[i] for i in (1, 2, 0, 3)]
    four = [-log_sigmoid(a - b) for a, b in itertools.combinations(ordered, 2)]
    assert loss.item() == pytest.approx((sum(four) / 6 - log_sigmoid(0.2 - 0.7)) / 5)
    right = sum(a > b for a, b in itertools.combinations(ordered, 2))
    assert metrics["correct"].item() == pytest.approx(right / 6) and metrics["groups"].item() == pytest.approx(2)
    loss.backward()
    assert torch.isfinite(rows["scores"].grad).all() and rows["scores"].grad[6] == 0


def test_responses_of_equal_rank_are_not_compared():
    """Three responses, two of them equal: two comparisons, not three."""
    rows = tensors([1.0, 2.0, 0.0], [1, 1, 1], [0, 1, 1])
    loss, _ = pairwise_loss(**rows, denominator=1)
    assert loss.item() == pytest.approx(-(log_sigmoid(-1.0) + log_sigmoid(1.0)) / 2)
    tied = pairwise_loss(**tensors([1.0, 1.0, 0.0], [0, 0, 0], [0, 1, 2]), denominator=1)
    assert tied[1]["correct"].item() == pytest.approx(2.5 / 3)
    equal = pairwise_loss(**tensors([1.0, 2.0], [0, 0], [0, 0]), denominator=1)
    assert equal[0] == 0 and equal[1]["groups"] == 0


def test_plackett_luce_by_hand():
    """The likelihood of 3 > 1 > 2 is e^s3 / (e^s1 + e^s2 + e^s3) * e^s1 / (e^s1 + e^s2)."""
    s1, s2, s3 = 0.2, -0.4, 1.1
    rows = tensors([s1, s2, s3, NAN], [0, 0, 0, 0], [1, 2, 0, 0], mask=[True, True, True, False])
    loss, metrics = plackett_luce_loss(**without_margins(rows), denominator=2)
    e1, e2, e3 = math.exp(s1), math.exp(s2), math.exp(s3)
    assert loss.item() == pytest.approx(-math.log(e3 / (e1 + e2 + e3) * e1 / (e1 + e2)) / 2)
    assert metrics["correct"].item() == pytest.approx(1) and metrics["groups"].item() == pytest.approx(1)


def test_plackett_luce_of_two_is_bradley_terry():
    rows = tensors([0.5, 1.5, -2.0, 0.25], [3, 3, 1, 1], [1, 0, 0, 1])
    one, other = plackett_luce_loss(**without_margins(rows), denominator=3), pairwise_loss(**rows, denominator=3)
    assert one[0].item() == pytest.approx(other[0].item(), abs=1e-6)


@pytest.mark.parametrize("loss", [pairwise_loss, plackett_luce_loss])
def test_the_centre_of_a_pair_is_the_square_of_its_sum(loss):
    """Eisenstein et al. 2023: (s_chosen + s_rejected)^2, here of a pair and of three responses by their mean."""
    rows = tensors([1.0, 0.5, 1.0, 2.0, 3.5], [0, 0, 1, 1, 1], [0, 1, 0, 1, 2])
    given = rows if loss is pairwise_loss else without_margins(rows)
    plain, metrics = loss(**given, denominator=2)
    centred, _ = loss(**given, denominator=2, centre=0.1)
    off = 1.5**2 + (2 * 6.5 / 3) ** 2
    assert (centred - plain).item() == pytest.approx(0.1 * off / 2, rel=1e-5)
    assert metrics["off_centre"].item() == pytest.approx(off, rel=1e-5)


def twin(scores, groups, ranks, margins, mask, denominator, centre):
    """Loops."""
    total = 0.0
    for group in {g for g, real in zip(groups, mask) if real}:
        rows = [i for i in range(len(scores)) if mask[i] and groups[i] == group]
        pairs = [(i, j) for i in rows for j in rows if ranks[i] < ranks[j]]
        losses = [np.logaddexp(0, -(scores[i] - scores[j] - margins[i])) for i, j in pairs]
        total += np.mean(losses) if pairs else 0.0
        total += centre * (2 * np.mean([scores[i] for i in rows])) ** 2
    return total / denominator


def random_rows(seed):
    generator = torch.Generator().manual_seed(seed)
    m = 11
    return {
        "scores": torch.randn(m, generator=generator, dtype=torch.float64, requires_grad=True),
        "groups": torch.randint(0, 4, (m,), generator=generator),
        "ranks": torch.randperm(m, generator=generator),
        "margins": torch.rand(m, generator=generator, dtype=torch.float64),
        "mask": torch.rand(m, generator=generator) < 0.8,
    }


@pytest.mark.parametrize("seed", range(3))
def test_against_numpy(seed):
    rows = random_rows(seed)
    loss, _ = pairwise_loss(**rows, denominator=7, centre=0.3)
    assert loss.item() == pytest.approx(twin(**{k: v.tolist() for k, v in rows.items()}, denominator=7, centre=0.3))


@pytest.mark.parametrize("centre", [0.0, 0.3])
def test_finite_differences(centre):
    rows = random_rows(5)
    rest = {name: value for name, value in rows.items() if name != "scores"}
    bare = {name: value for name, value in rest.items() if name != "margins"}
    how = {"denominator": 7, "centre": centre}
    torch.autograd.gradcheck(lambda s: pairwise_loss(s, **rest, **how)[0], (rows["scores"],))
    torch.autograd.gradcheck(lambda s: plackett_luce_loss(s, **bare, **how)[0], (rows["scores"],))


def test_the_parts_of_a_mini_batch_add_up_to_it():
    """Whole groups may be dealt to micro-batches in any way, and their rows may lie in any order."""
    rows = random_rows(1)
    rows["mask"][:] = True
    whole, metrics = pairwise_loss(**rows, denominator=4)
    parts = []
    for group in range(4):
        chosen = (rows["groups"] == group).nonzero()[:, 0].flip(0)
        parts.append(pairwise_loss(**{name: value[chosen] for name, value in rows.items()}, denominator=4))
    assert sum(p[0] for p in parts).item() == pytest.approx(whole.item())
    for name, value in metrics.items():
        assert sum(p[1][name] for p in parts).item() == pytest.approx(value.item())


def test_regression_by_hand():
    """Two attributes, of which the second response lacks one: three values."""
    predicted = torch.tensor([[1.0, 2.0], [0.5, NAN]], requires_grad=True)
    wanted, mask = torch.tensor([[0.0, 4.0], [1.0, NAN]]), torch.tensor([[True, True], [True, False]])
    loss, metrics = regression_loss(predicted, wanted, mask, denominator=3)
    assert loss.item() == pytest.approx((1 + 4 + 0.25) / 3)
    assert metrics["squared_error/0"] == 1.25 and metrics["squared_error/1"] == 4
    assert metrics["values/0"] == 2 and metrics["values/1"] == 1
    loss.backward()
    torch.testing.assert_close(predicted.grad, torch.tensor([[2 / 3, -4 / 3], [-1 / 3, 0.0]]))


def test_finite_differences_of_regression():
    generator = torch.Generator().manual_seed(0)
    predicted, wanted = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, 3, generator=generator) < 0.6
    predicted.requires_grad_()
    torch.autograd.gradcheck(lambda p: regression_loss(p, wanted, mask, denominator=7)[0], (predicted,))
    assert regression_loss(predicted, wanted, mask, denominator=7)[0].item() == pytest.approx(
        float(np.square(predicted.detach().numpy() - wanted.numpy())[mask.numpy()].sum() / 7)
    )


@pytest.mark.parametrize("loss", [pairwise_loss, plackett_luce_loss])
def test_nothing_real_gives_0(loss):
    rows = tensors([NAN, NAN], [0, 0], [0, 1], mask=[False, False])
    value, metrics = loss(**(rows if loss is pairwise_loss else without_margins(rows)), denominator=0)
    value.backward()
    assert value == 0 and (rows["scores"].grad == 0).all() and all(v == 0 for v in metrics.values())


def test_a_score_that_is_not_finite_raises_by_name():
    with pytest.raises(FloatingPointError, match="^scores is nan at row 1"):
        pairwise_loss(**tensors([0.0, NAN], [0, 0], [0, 1]), denominator=1)
