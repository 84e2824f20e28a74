"""What the PPO loop carries from step to step, without models: the adaptive KL coefficient, and which validation a pair is saved with."""

from types import SimpleNamespace

import pytest

from aligner.algorithms.ppo import PPOTrainer
from aligner.config.jobs import ActorConfig


class ScriptedCheckpoints:
    def __init__(self, saved=None):
        self.saved, self.pairs = saved, []

    def restore(self, step):
        return self.saved

    def save(self, step, state, *, validation):
        self.pairs.append((step, validation))

    def settle(self, *, wait):
        pass


def trainer(checkpoints=None, critic=None, **ppo):
    config = ActorConfig()
    config.run.max_steps, config.validation.every = 6, 3
    for name, value in ppo.items():
        setattr(config.ppo, name, value)
    parts = dict.fromkeys(("tokenizer", "policy", "engine", "generation", "recorder"))
    made = PPOTrainer(
        config=config,
        topology=SimpleNamespace(is_reporter=True),
        critic=critic,
        checkpoints=checkpoints or ScriptedCheckpoints(),
        validator=SimpleNamespace(run=lambda: None),
        train_samples=[None] * 8,
        stop_token_ids=(),
        **parts,
    )
    made.recorder = SimpleNamespace(start=lambda: None, validation_samples=lambda step, rows: None)
    return made


def test_the_kl_coefficient_rests_in_critic_warmup():
    """KL is 0 there by definition. Then Ziegler et al.'s rule: error clipped to -0.2, times 1 + error * n / horizon."""
    loop = trainer(kl_target=0.5, kl_horizon=100, kl_coefficient=0.1, critic_warmup_steps=2)
    rollouts, experience = [None] * 10, SimpleNamespace(metrics={"kl/sequence": 0.0})
    found = []
    for step in (1, 2, 3):
        loop.advance(step, rollouts, experience, consumed=5)
        found.append(loop.state.kl_coefficient)
    assert found == pytest.approx([0.1, 0.1, 0.1 * (1 - 0.2 * 10 / 100)])
    assert loop.state.prompts_consumed == 3 * 5


def test_a_pair_is_saved_with_its_own_validation_or_none(monkeypatch):
    loop = trainer()
    scores = {3: 0.7, 6: 0.4}

    def validate(step):
        loop.validated = scores[step]
        return {}, 0

    monkeypatch.setattr(loop, "validate", validate)
    found = []
    for step in range(1, 7):
        loop.validate_when_due(step)
        found.append(loop.validated)
    assert found == [None, None, 0.7, None, None, 0.4]


@pytest.mark.parametrize("target, expected", [(None, 0.05), (6.0, 0.3)])
def test_a_resumed_run_takes_a_fixed_coefficient_from_its_settings(target, expected):
    saved = {"step": 6, "prompts_consumed": 48, "weight_version": 6, "kl_coefficient": 0.3}
    loop = trainer(ScriptedCheckpoints(saved), kl_coefficient=0.05, kl_target=target)
    assert loop.fit(resume_from=6).kl_coefficient == expected


def test_a_train_request_that_is_refused_at_once_is_told_where_the_answer_is_awaited():
    def refuse(step, batch):
        raise ValueError("too large")

    loop = trainer(critic=SimpleNamespace(train=refuse))
    update = loop.start_critic_training(1, SimpleNamespace(critic_batch=lambda: None))
    with pytest.raises(ValueError, match="too large"):
        update.result(timeout=0)
