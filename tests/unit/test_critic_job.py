"""The critic job's steps and restores, with a scripted critic in the place of the model."""

import pytest
import torch

from aligner.algorithms.critic_job import CriticJob
from aligner.algorithms.model_scorer import refuse_other_tokenizer
from aligner.config.jobs import CriticConfig
from aligner.data.batch import CriticBatch
from aligner.data.tokenizer import Tokenizer
from aligner.runtime.errors import UserError
from aligner.serving.backend import Refused
from tests.unit.tiny_tokenizer import write_tokenizer


class ScriptedCritic:
    """`weights` counts updates. The update number `fails_at` (from 0) raises after it has changed them."""

    def __init__(self, fails_at=None):
        self.weights, self.fails_at = 0, fails_at

    @property
    def step_count(self):
        return self.weights

    def observe(self, returns, mask):
        self.observed = returns.shape

    def train(self, batch):
        self.weights += 1
        if self.weights - 1 == self.fails_at:
            raise RuntimeError("out of memory")
        return {"loss": float(self.weights), "skipped": 0.0, "empty": 0.0}

    def load(self, folder):
        self.weights = 100
        return {"step": 7}

    def reset(self):
        self.weights = 0


def batch(rows):
    per_token = torch.zeros(rows, 64)
    whole = torch.zeros(rows, dtype=torch.int64)
    return CriticBatch(per_token.long(), whole + 2, per_token.bool(), per_token, per_token, whole)


def job(critic):
    config = CriticConfig()
    config.critic.mini_batch_size, config.critic.epochs = 2, 2
    return CriticJob(config=config, critic=critic, reward=None, scorer=None, identity={})


def test_a_step_is_all_its_epochs_and_mini_batches():
    served = job(ScriptedCritic())
    assert served.train(1, batch(4)) == {"loss": pytest.approx((1 + 2 + 3 + 4) / 4), "skipped": 0.0, "empty": 0.0}
    assert served.status() == {"step": 1, "weight_version": 4}
    with pytest.raises(Refused, match="step 2 has 3 rows.*critic.mini_batch_size=2"):
        served.train(2, batch(3))


def test_back_to_the_initial_weights_after_a_first_step_that_failed_half_way():
    critic = ScriptedCritic(fails_at=1)
    served = job(critic)
    with pytest.raises(RuntimeError):
        served.train(1, batch(4))
    assert critic.weights == 2 and served.step == 0
    served.restore(0, None)
    assert critic.weights == 0


def test_a_critic_that_never_trained_is_not_loaded_again(tmp_path):
    critic = ScriptedCritic()
    served = job(critic)
    critic.reset = lambda: pytest.fail("its weights are the initial ones")
    served.restore(0, None)
    served.restore(7, tmp_path)
    assert served.step == 7
    with pytest.raises(ValueError, match="step 7, not of step 6"):
        served.restore(6, tmp_path)


def test_a_reward_model_of_another_tokenizer_is_refused(tmp_path):
    """Of the same ids, or without a tokenizer beside it, it is not."""
    policys = Tokenizer(write_tokenizer(tmp_path / "policy"))
    write_tokenizer(tmp_path / "same" / "tokenizer")
    write_tokenizer(tmp_path / "other" / "tokenizer", specials=("<|im_end|>", "<|im_start|>", "<|endoftext|>"))
    for name in ("same", "without"):
        refuse_other_tokenizer(str(tmp_path / name), policys)
    with pytest.raises(UserError, match="other has another tokenizer than model.checkpoint"):
        refuse_other_tokenizer(str(tmp_path / "other"), policys)
