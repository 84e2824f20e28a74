"""The supervised loop without models: how long a run is, which rows a step takes, what is validated and saved when."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

import aligner.algorithms.supervised as supervised
from aligner.algorithms.supervised import Course, Evaluation, SupervisedTrainer
from aligner.config.groups import Overlong
from aligner.config.jobs import SFTConfig
from aligner.config.load import load
from aligner.config.supervised import SupervisedRunConfig, TrainConfig
from aligner.data.rows import limit_rows, split_rows
from aligner.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("epochs", "max_steps", "wanted"),
    [
        (1, None, Course(rows=10, steps=3)),  # 4, 4 and 2 of ten rows
        (2, None, Course(rows=20, steps=5)),
        (1, 2, Course(rows=8, steps=2)),
        (1, 99, Course(rows=10, steps=3)),
        (None, 7, Course(rows=28, steps=7)),
    ],
)
def test_how_long_a_run_is(epochs, max_steps, wanted):
    train = TrainConfig(epochs=epochs, mini_batch_size=4)
    assert Course.of(train, SupervisedRunConfig(max_steps=max_steps), 10) == wanted


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train.epochs=null"], "train.epochs=null and run.max_steps=null: the run would have no end"),
        (["validation.generations=3"], "validation.generations=3 needs validation.every > 0 and held-out rows"),
        (["data.holdout=0.1", "data.validation=/dev/null"], "data.validation=/dev/null is given: leave one out"),
        (
            ["sft.packing=true", "parallel.pipeline=2", "parallel.virtual_pipeline=2"],
            "sft.packing=true does not go with",
        ),
        (["sft.packing=true", "train.micro_batch_tokens=64"], "which is less than data.max_length=2048: raise it"),
        (["engine.kind=trtllm"], "engine.kind=trtllm: the samples of train_sft.py come from the embedded engine"),
        (["refit.sync_every=2"], "refit.sync_every=2 has no meaning here"),
        (["data.task=chain_sum"], "data.task: it belongs to the actor job"),
    ],
)
def test_settings_that_contradict_each_other(words, says):
    with pytest.raises(ConfigError) as caught:
        load(SFTConfig, ["model.checkpoint=somewhere", "data.train=/dev/null", *words], "sft")
    assert [says in line for line in caught.value.problems] == [True]


class Learner:
    """Remembers what it was trained on. Its quality falls with every validation."""

    def __init__(self, rows):
        self.trained, self.validations, self.saved, self.rows = [], 0, [], rows

    def collate(self, rows):
        return SimpleNamespace(rows=rows)

    def train(self, batch):
        self.trained.append(batch.rows)
        return {"loss": 1.0, "skipped": 0.0, "empty": 0.0}

    def evaluate(self, rows):
        self.validations += 1
        return Evaluation({"loss": 2.0}, quality=-self.validations, tokens=len(rows))

    def tokens(self, rows):
        return 3 * len(rows)

    # as PairedCheckpoints

    def restore(self, step):
        if step is None:
            return None
        counted = {"step": step, "rows_consumed": 4 * step, "tokens_consumed": 12 * step}
        return {**counted, "train_rows": self.rows, "mini_batch_size": 4}

    def save(self, step, state, *, validation):
        self.saved.append((step, state["rows_consumed"], validation))

    def settle(self, *, wait):
        pass


@pytest.fixture
def alone(monkeypatch):
    """One process, without process groups."""
    monkeypatch.setattr(supervised, "broadcast_object", lambda value, *_: value)
    monkeypatch.setattr(supervised, "gather_objects", lambda value, _: [value])
    monkeypatch.setattr(supervised, "on_all", lambda act, _: act())


def run(*, resume_from=None, should_stop=lambda: False, every=2, rows_before=10):
    """Ten rows, four a step, two epochs: five steps."""
    config, learner, rows = SFTConfig(), Learner(rows_before), []
    config.train.mini_batch_size, config.checkpoint.every, config.validation.every = 4, 2, every
    recorder = SimpleNamespace(
        start=lambda: None,
        phase=lambda name: nullcontext(),
        keep_batch=lambda *_: "",
        end_step=lambda step, metrics, tokens: rows.append((step, metrics, tokens)),
    )
    trainer = SupervisedTrainer(
        config=config,
        topology=SimpleNamespace(cpu_group=None, is_reporter=True),
        learner=learner,
        checkpoints=learner,
        recorder=recorder,
        train_rows=list(range(10)),
        held_out=[1, 2, 3],
        course=Course(20, 5),
    )
    return trainer.fit(resume_from=resume_from, should_stop=should_stop), learner, rows


def test_every_epoch_has_every_row_once_and_the_last_step_what_is_left(alone):
    state, learner, rows = run()
    assert [len(taken) for taken in learner.trained] == [4, 4, 4, 4, 4]
    order = [row for taken in learner.trained for row in taken]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10)) and order[:10] != order[10:]
    assert (state.step, state.rows_consumed, state.tokens_consumed) == (5, 20, 60)
    assert [step for step, *_ in rows] == [0, 1, 2, 3, 4, 5]
    assert rows[5][1]["epoch"] == 2.0 and rows[5][1]["train/loss"] == 1.0 and rows[5][2] == 12


def test_validations_and_the_checkpoints_that_know_them(alone):
    _, learner, rows = run()
    assert [step for step, metrics, _ in rows if "val/loss" in metrics] == [0, 2, 4, 5]
    assert learner.saved == [(2, 8, -2), (4, 16, -3), (5, 20, -4)]
    _, learner, _ = run(every=0)
    assert learner.validations == 0 and learner.saved[-1] == (5, 20, None)


def test_a_run_that_continues_sees_what_an_undisturbed_one_sees(alone):
    _, whole, _ = run()
    _, rest, rows = run(resume_from=2)
    assert rest.trained == whole.trained[2:]
    assert [step for step, *_ in rows] == [3, 4, 5]  # and no validation before training


def test_a_run_that_continues_with_other_rows_is_refused(alone):
    with pytest.raises(ConfigError, match="the run was begun with the rows to train on = 12, now it is 10: restore it"):
        run(resume_from=2, rows_before=12)


def test_it_saves_when_it_is_told_to_stop(alone):
    state, learner, _ = run(should_stop=lambda: True)
    assert state.step == 1 and learner.saved == [(1, 4, None)]


def test_rows_that_cannot_be_cut():
    how = {"max_length": 2, "length": len, "origin": str, "cut": None}
    assert limit_rows(["a", "bbb"], overlong=Overlong.drop, **how).train == ["a"]
    with pytest.raises(ValueError, match="rows of this kind cannot be cut, set it to drop or refuse"):
        limit_rows(["a", "bbb"], overlong=Overlong.truncate, **how)


def test_a_side_that_stays_empty_is_named():
    with pytest.raises(
        ValueError, match="data.holdout=1e-09 leaves 2 rows to train on and 0 held out, of 1 distinct prompts"
    ):
        split_rows(["a", "a"], 1e-9, str)
