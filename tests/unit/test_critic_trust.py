"""When warm-up ends and when the baseline takes over, step by step."""

import dataclasses
import json

from aligner.algorithms.critic_trust import CriticTrust
from aligner.algorithms.trainer_state import TrainerState
from aligner.config.ppo import PPOConfig
from aligner.ops.reward_scaling import RunningMoments


def judged(explained, **ppo):
    """(warmed_up, falls back) of each step."""
    trust, settings, found = CriticTrust(), PPOConfig(**ppo), []
    for step, value in enumerate(explained, start=1):
        falls_back = trust.judge(step, value, settings)
        found.append((trust.warmed_up, falls_back))
    return found


def test_fixed_warm_up():
    assert judged([-1.0] * 4, critic_warmup_steps=2) == [(False, False)] * 2 + [(True, False)] * 2


def test_warm_up_ends_with_the_first_positive_step_after_the_least():
    limits = {"critic_warmup_steps": 2, "critic_warmup_max_steps": 5}
    assert [w for w, _ in judged([0.5, 0.5, -0.1, 0.1, -1.0], **limits)] == [False, False, False, True, True]


def test_warm_up_ends_at_the_latest_after_its_maximum(caplog):
    limits = {"critic_warmup_steps": 1, "critic_warmup_max_steps": 3}
    assert [w for w, _ in judged([-0.1, 0.0, -0.1, -0.1], **limits)] == [False, False, False, True]
    assert "ppo.critic_warmup_max_steps=3 although its explained variance is -0.100" in caplog.text


def test_the_baseline_takes_over_after_a_row_of_bad_steps_and_leaves_at_once(caplog):
    row = [-1.0, -1.0, 0.2, -1.0, 0.0, -0.5, -0.5, 0.1, -1.0]
    found = [f for _, f in judged(row, critic_fallback_steps=3)]
    assert found == [False, False, False, False, False, True, True, False, False]
    assert caplog.text.count("reinforce_baseline") == 1


def test_warm_up_does_not_count_towards_the_row_and_0_is_never():
    assert [f for _, f in judged([-1.0] * 5, critic_warmup_steps=2, critic_fallback_steps=2)] == [False] * 3 + [
        True
    ] * 2
    assert not any(f for _, f in judged([-1.0] * 5))


def test_it_survives_a_checkpoint():
    state = TrainerState(step=3, scores=RunningMoments(4.0, 0.5, 2.0), trust=CriticTrust(True, 2))
    saved = json.loads(json.dumps(dataclasses.asdict(state)))
    assert TrainerState.of(saved) == state
    assert TrainerState.of({"step": 6}) == TrainerState(step=6)  # of a checkpoint from before
