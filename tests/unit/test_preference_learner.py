"""What held-out rows say of a reward model, from scores that are known: numbers worked out by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from aligner.algorithms.preference import PreferenceLearner
from aligner.config.preference import Objective, PreferenceConfig
from aligner.data.preference_rows import PreferenceRow
from aligner.models.reward_head import RewardHead

SCORE = RewardHead(("reward",), (1.0,))


class Known:
    """A model that says of a row what stands for its first id in `says`."""

    def __init__(self, says, preference, reward=SCORE):
        self.says, self.preference = says, preference
        self.shape = SimpleNamespace(reward=reward)
        self.topology, self.step_count, self.saved = SimpleNamespace(tensor=1), 3, []

    def outputs(self, tokens, lengths):
        return torch.tensor([self.says[first] for first in tokens[:, 0].tolist()])

    def train(self, batch):
        return {"empty": 0.0}

    def describe(self, *, mean, std, count):
        self.shape.reward = replace(self.shape.reward, mean=mean, std=std, count=count)

    def save(self, folder, *, extra, beside):
        self.saved.append(self.shape.reward)


def row(asked, firsts, ranks, attributes=None):
    ids = [[first, 9, 9] for first in firsts]
    return PreferenceRow(
        f"f:{asked}", asked, asked, [f"r{f}" for f in firsts], ids, ranks, [0.5] * len(firsts), attributes
    )


# Two pairs of one prompt, in order by 2 and out of order by 1; a ranking of three with all three pairs in order.
ROWS = [row("a", [1, 2], [0, 1]), row("a", [3, 4], [1, 0]), row("b", [5, 6, 7], [2, 0, 1])]
SAYS = {1: [3.0], 2: [1.0], 3: [2.0], 4: [1.0], 5: [-1.0], 6: [1.0], 7: [0.0]}


def loss(*margins):
    return sum(math.log1p(math.exp(-m)) for m in margins) / len(margins)


def test_comparisons_by_hand():
    tables = []
    model = Known(SAYS, PreferenceConfig(calibration_bins=1))
    learner = PreferenceLearner(model, pad_id=0, held_out=ROWS, keep_calibration=tables.append)
    found = learner.evaluate(ROWS)
    m = found.metrics
    assert m["accuracy"] == pytest.approx(2 / 3) == found.quality
    assert m["margin"] == pytest.approx((2 - 1 + (2 + 1 + 1) / 3) / 3)
    assert m["loss"] == pytest.approx((loss(2) + loss(-1) + loss(2, 1, 1)) / 3)
    assert (m["count"], m["prompts"], found.tokens) == (3, 2, 21)
    # prompt a: one of two right, that is -1/3 together; prompt b: one of one, +1/3
    assert m["accuracy_ci95"] == pytest.approx(1.96 * math.sqrt(2 * (1 / 9) / 9 * 2))
    values = [3, 1, 2, 1, -1, 1, 0]
    assert m["score"] == pytest.approx(1.0) and m["score_std"] == pytest.approx(
        math.sqrt(sum((v - 1) ** 2 for v in values) / 7)
    )
    mean = model.shape.reward.mean, model.shape.reward.std, model.shape.reward.count
    assert mean == (pytest.approx(1.0), pytest.approx(m["score_std"]), 7)
    sigmoid = [1 / (1 + math.exp(-x)) for x in (2, 1)]
    confidence = (sigmoid[0] + sigmoid[1] + (sigmoid[0] + 2 * sigmoid[1]) / 3) / 3
    assert m["calibration_error"] == pytest.approx(abs(confidence - 2 / 3))
    assert tables[0]["updates"] == 3 and tables[0]["bins"][0]["weight"] == pytest.approx(3)
    shown = list(found.rows)
    assert [(s["response"], s["rank"], s["score"]) for s in shown[2:4]] == [("r4", 0, 1.0), ("r3", 1, 2.0)]
    assert [s["sample_id"] for s in shown] == list(range(7)) and shown[0]["origin"] == "f:a"


def test_whole_rankings_by_hand():
    model = Known(SAYS, PreferenceConfig(Objective.plackett_luce))
    found = PreferenceLearner(model, pad_id=0, held_out=[]).evaluate(ROWS[2:]).metrics
    e = math.exp
    assert found["loss"] == pytest.approx(-math.log(e(1) / (e(1) + e(0) + e(-1)) * e(0) / (e(0) + e(-1))))
    assert found["accuracy"] == 1


def test_attributes_by_hand():
    rows = [
        row("a", [1], [0], {"help": 1.0, "brief": 2.0, "other": 5.0}),
        row("b", [2], [0], {"help": 3.0, "brief": None}),
        row("c", [3], [0], {"brief": 4.0}),
    ]
    says = {1: [1.5, 2.0], 2: [2.0, 7.0], 3: [9.0, 2.0]}
    head = RewardHead(("help", "brief"), (1.0, -2.0))
    model = Known(says, PreferenceConfig(Objective.regression, {"help": 1.0, "brief": -2.0}), head)
    found = PreferenceLearner(model, pad_id=0, held_out=rows).evaluate(rows)
    m = found.metrics
    assert m["loss"] == pytest.approx((0.25 + 1 + 0 + 4) / 4) == -found.quality
    assert m["rmse/help"] == pytest.approx(math.sqrt(1.25 / 2)) and m["rmse/brief"] == pytest.approx(math.sqrt(2))
    assert m["correlation/help"] == pytest.approx(1)
    assert m["score"] == pytest.approx((1.5 - 4 + 2 - 14 + 9 - 4) / 3)
    assert list(found.rows)[1]["attributes"] == {"help": 3.0, "brief": None}


def test_a_checkpoint_says_the_size_of_the_scores_of_its_own_weights(tmp_path):
    """After a step without a validation they are measured anew; without held-out rows none are said."""
    model = Known(SAYS, PreferenceConfig())
    learner = PreferenceLearner(model, pad_id=0, held_out=ROWS)
    learner.evaluate(ROWS)
    model.says = {first: [2 * score[0]] for first, score in SAYS.items()}
    learner.save(tmp_path, extra={}, beside=False)
    learner.train(learner.collate(ROWS))
    learner.save(tmp_path, extra={}, beside=False)
    assert [head.mean for head in model.saved] == pytest.approx([1.0, 2.0])
    unmeasured = Known(SAYS, PreferenceConfig())
    PreferenceLearner(unmeasured, pad_id=0, held_out=[]).save(tmp_path, extra={}, beside=False)
    assert unmeasured.saved[0].mean is None


def test_rows_become_a_batch():
    learner = PreferenceLearner(Known(SAYS, PreferenceConfig()), pad_id=0, held_out=[])
    batch = learner.collate(ROWS)
    assert batch.groups.tolist() == [0, 0, 1, 1, 2, 2, 2] and batch.ranks.tolist() == [0, 1, 1, 0, 2, 0, 1]
    assert batch.lengths.tolist() == [3] * 7 and tuple(batch.tokens.shape) == (7, 64)
    assert batch.margins.tolist() == [0.5] * 7 and not batch.given.any() and learner.tokens(ROWS) == 21
