"""Rewards, advantages and metrics of a rollout against a case computed by hand."""

import dataclasses
import math

import pytest
import torch

from aligner.algorithms.experience import Signals, build_experience
from aligner.algorithms.schedule import mini_batches
from aligner.config.ppo import Advantage, KLEstimator, KLPlace, PPOConfig, Truncation
from aligner.data.batch import Completion, collate


def completion(sample_id, prompt, response, reason="stop"):
    return Completion(sample_id, prompt, response, [-1.0] * len(response), reason, weight_version=0)


@pytest.fixture
def rollouts():
    """Row 0: two prompt tokens, two chosen, terminated. Row 1: one prompt token, three chosen, cut at its length."""
    return collate([completion(1, [7], [8, 9, 8], "length"), completion(0, [5, 6], [7, 2])], pad_id=0)


def signals(rollouts, **changes):
    shape = rollouts.tokens.shape
    full = {
        "logprobs": torch.full(shape, -1.0),
        "reference_logprobs": torch.full(shape, -1.5),
        "scores": torch.tensor([1.0, 0.5]),
        "values": torch.zeros(shape),
        "bootstrap": torch.tensor([9.0, 0.25]),
    }
    return Signals(**{**full, **changes})


SETTINGS = PPOConfig(gamma=1.0, lam=1.0, whiten=False, kl_coefficient=0.1, truncation=Truncation.bootstrap)


def test_collate_orders_by_sample_id_and_pads_right(rollouts):
    assert rollouts.sample_ids.tolist() == [0, 1]
    assert rollouts.tokens.shape == (2, 64)
    assert rollouts.tokens[0, :5].tolist() == [5, 6, 7, 2, 0]
    assert rollouts.mask[0].nonzero().flatten().tolist() == [2, 3]
    assert rollouts.mask[1].nonzero().flatten().tolist() == [1, 2, 3]
    assert rollouts.truncated.tolist() == [False, True]


def test_advantages_by_hand(rollouts):
    # kl per token 0.5, so each chosen token pays 0.05; lambda 1 and zero values make the advantage the reward to go.
    got = build_experience(rollouts, signals(rollouts), SETTINGS, kl_coefficient=0.1)
    assert got.advantages[0, 2:4].tolist() == pytest.approx([1.0 - 0.1, 1.0 - 0.05])
    assert got.advantages[1, 1:4].tolist() == pytest.approx(
        [0.75 - 0.15, 0.75 - 0.1, 0.75 - 0.05]
    )  # 0.5 + bootstrap 0.25
    assert got.metrics["kl/mean"] == pytest.approx(0.5)
    assert got.metrics["kl/sequence"] == pytest.approx((1.0 + 1.5) / 2)
    assert got.metrics["reward/mean"] == pytest.approx(0.75)
    assert got.metrics["response/truncated"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "truncation, first, rows",
    [
        (Truncation.ignore, 0.5 - 0.15, 2),
        (Truncation.penalise, 0.5 - 1.0 - 0.15, 2),
        (Truncation.mask, 0.0, 1),
    ],
)
def test_truncation_settings(rollouts, truncation, first, rows):
    settings = dataclasses.replace(SETTINGS, truncation=truncation, truncation_penalty=1.0)
    got = build_experience(rollouts, signals(rollouts), settings, kl_coefficient=0.1)
    assert got.advantages[1, 1].item() == pytest.approx(first)
    assert got.mask.any(1).sum().item() == rows


def test_importance_weights_and_staleness_by_hand(rollouts):
    """The engine sampled at log-prob -1 with weights of version 0; row 0's first token has since become 4 times as likely."""
    later = signals(rollouts, weight_version=3)
    later.logprobs[0, 2] = -1.0 + math.log(4)
    settings = dataclasses.replace(SETTINGS, importance_cap=2.0)
    got = build_experience(rollouts, later, settings, kl_coefficient=0.1)
    assert got.weights[rollouts.mask].tolist() == pytest.approx([2.0, 1.0, 1.0, 1.0, 1.0])
    assert got.weights[~rollouts.mask].sum() == 0
    assert got.metrics["refit/staleness"] == 3 and got.metrics["drift/weight"] == pytest.approx(6 / 5)
    assert got.metrics["drift/ratio"] == pytest.approx(8 / 5) and got.metrics["drift/max"] == pytest.approx(math.log(4))
    assert build_experience(rollouts, later, SETTINGS, kl_coefficient=0.1).weights is None


def test_what_lies_outside_the_mask_changes_nothing(rollouts):
    clean = build_experience(rollouts, signals(rollouts), SETTINGS, kl_coefficient=0.1)
    dirty = signals(rollouts)
    for name in ("logprobs", "reference_logprobs", "values"):
        setattr(dirty, name, torch.where(rollouts.mask, getattr(dirty, name), float("nan")))
    got = build_experience(rollouts, dirty, SETTINGS, kl_coefficient=0.1)
    assert torch.equal(got.advantages, clean.advantages) and torch.equal(got.returns, clean.returns)
    assert got.metrics == clean.metrics


def test_a_nan_under_the_mask_is_named(rollouts):
    bad = signals(rollouts)
    bad.values[0, 2] = float("nan")
    with pytest.raises(FloatingPointError, match="values"):
        build_experience(rollouts, bad, SETTINGS, kl_coefficient=0.1)


def test_critic_free_needs_no_values(rollouts):
    settings = dataclasses.replace(SETTINGS, advantage=Advantage.reinforce_baseline, truncation=Truncation.ignore)
    got = build_experience(rollouts, signals(rollouts), settings, kl_coefficient=0.0)
    baseline = (1.0 * 2 + 0.5 * 3) / 5
    assert got.advantages[0, 2].item() == pytest.approx(1.0 - baseline)
    assert got.advantages[1, 3].item() == pytest.approx(0.5 - baseline)
    assert got.returns[0, 2:4].tolist() == [1.0, 1.0] and got.returns[1, 1:4].tolist() == [0.5] * 3
    assert "critic/explained_variance" not in got.metrics


@pytest.fixture
def groups():
    """Two prompts with three responses each, of 2, 3, 1 and 1, 2, 4 tokens; the last one of the second was cut."""
    lengths = [2, 3, 1, 1, 2, 4]
    return collate(
        [completion(12 + k, [7], [8] * n, "length" if n == 4 else "stop") for k, n in enumerate(lengths)], pad_id=0
    )


GROUPS = dataclasses.replace(SETTINGS, samples_per_prompt=3, truncation=Truncation.ignore)
SCORES = torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0, 1.0])


def first_advantages(groups, settings, **changes):
    shape = groups.tokens.shape
    given = {"logprobs": torch.full(shape, -1.0), "reference_logprobs": torch.full(shape, -1.5), "scores": SCORES}
    given |= {"values": torch.zeros(shape), "bootstrap": torch.zeros(6), **changes}
    found = build_experience(groups, Signals(**given), settings, settings.kl_coefficient)
    assert torch.equal(found.advantages != 0, (found.advantages != 0) & found.mask)
    return [row[mask].unique().tolist() for row, mask in zip(found.advantages, found.mask)], found


def test_estimators_of_groups_by_hand(groups):
    """KL 0.5 a token at 0.1: whole returns are 0.9, -0.15, 1.95 and 0.95, 0.9, 0.8; every token of a response has its advantage."""
    settings = dataclasses.replace(GROUPS, advantage=Advantage.rloo)
    found, experience = first_advantages(groups, settings)
    expected = [0.9 - 0.9, -0.15 - 1.425, 1.95 - 0.375, 0.95 - 0.85, 0.9 - 0.875, 0.8 - 0.925]
    assert [x for (x,) in found] == pytest.approx(expected, abs=1e-6)
    assert experience.metrics["groups/equal"] == 0.5
    found, _ = first_advantages(groups, dataclasses.replace(GROUPS, advantage=Advantage.dr_grpo, kl_coefficient=0.0))
    assert [x for (x,) in found] == pytest.approx([0.0, -1.0, 1.0, 0.0, 0.0, 0.0], abs=1e-6)
    found, _ = first_advantages(groups, dataclasses.replace(GROUPS, advantage=Advantage.group_norm, kl_coefficient=0.0))
    assert [x for (x,) in found] == pytest.approx([0.0, -(1.5**0.5), 1.5**0.5, 0.0, 0.0, 0.0], abs=1e-6)


def test_a_masked_response_leaves_its_group(groups):
    """The cut one scored 7: the others of its group, 1 and 2, are compared with each other alone."""
    settings = dataclasses.replace(GROUPS, advantage=Advantage.rloo, truncation=Truncation.mask, kl_coefficient=0.0)
    found, _ = first_advantages(groups, settings, scores=torch.tensor([1.0, 0.0, 2.0, 1.0, 2.0, 7.0]))
    assert found[3:] == [[-1.0], [1.0], []]


def test_a_kl_in_the_loss_leaves_the_rewards_alone(groups):
    settings = dataclasses.replace(
        GROUPS, advantage=Advantage.dr_grpo, kl_place=KLPlace.loss, kl_estimator=KLEstimator.k3
    )
    found, experience = first_advantages(groups, settings)
    assert [x for (x,) in found] == pytest.approx([0.0, -1.0, 1.0, 0.0, 0.0, 0.0], abs=1e-6)
    assert experience.reference_logprobs[groups.mask].unique().tolist() == [-1.5]
    assert experience.metrics["kl/mean"] == pytest.approx(0.5)
    rewarded, other = first_advantages(groups, dataclasses.replace(settings, kl_place=KLPlace.reward))
    assert rewarded != found and experience.kl_in_loss and not other.kl_in_loss


def test_log_probs_may_be_known_later(groups):
    settings = dataclasses.replace(GROUPS, advantage=Advantage.dr_grpo, kl_place=KLPlace.loss)
    before, known = first_advantages(groups, settings)
    found, experience = first_advantages(groups, settings, logprobs=None)
    assert found == before and not {"drift/mean", "kl/mean"} & experience.metrics.keys()
    experience.observe(torch.where(groups.mask, -1.0, float("nan")))
    assert experience.metrics == known.metrics and torch.equal(experience.kl, known.kl)
    assert torch.equal(experience.logprobs, known.logprobs)


def test_without_a_reference_there_is_no_kl(groups):
    settings = dataclasses.replace(GROUPS, advantage=Advantage.dr_grpo, kl_coefficient=0.0)
    _, experience = first_advantages(groups, settings, reference_logprobs=None)
    assert not {"kl/mean", "kl/sequence"} & experience.metrics.keys() and (experience.kl == 0).all()


def test_the_soft_overlong_penalty_by_hand(groups):
    """Yu et al. 2025, equation 13 with L_max 4 and L_cache 2: lengths 2, 3, 1 and 1, 2, 4 pay 0, 1/2, 0 and 0, 0, 1 (times 0.2)."""
    settings = dataclasses.replace(
        GROUPS,
        advantage=Advantage.dr_grpo,
        kl_coefficient=0.0,
        overlong_cache=2,
        overlong_length=4,
        overlong_penalty=0.2,
    )
    found, experience = first_advantages(groups, settings, scores=torch.zeros(6))
    third = 0.1 / 3
    assert [x for (x,) in found[:3]] == pytest.approx([third, -2 * third, third], abs=1e-6)
    assert [x for (x,) in found[3:]] == pytest.approx([0.2 / 3, 0.2 / 3, -0.4 / 3], abs=1e-6)
    assert experience.metrics["reward/mean"] == 0


def test_mini_batches_are_a_partition_that_depends_on_seed_step_and_epoch_only():
    first = mini_batches(12, 4, seed=1, step=3, epoch=0)
    assert [len(b) for b in first] == [4, 4, 4]
    assert sorted(torch.cat(first).tolist()) == list(range(12))
    assert all(torch.equal(a, b) for a, b in zip(first, mini_batches(12, 4, seed=1, step=3, epoch=0), strict=True))
    others = [mini_batches(12, 4, seed=s, step=n, epoch=e) for s, n, e in ((2, 3, 0), (1, 4, 0), (1, 3, 1))]
    assert all(not torch.equal(torch.cat(first), torch.cat(other)) for other in others)
