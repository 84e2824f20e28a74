"""Settings of reward models that contradict each other are named, in training as in serving."""

import pytest

from aligner.config.jobs import CriticConfig, RewardTrainingConfig
from aligner.config.load import load
from aligner.config.preference import Objective
from aligner.runtime.errors import ConfigError

TRAIN = ["model.checkpoint=somewhere", "data.train=/dev/null"]
SERVE = ["model.checkpoint=somewhere"]


def problems(job, name, *words):
    with pytest.raises(ConfigError) as caught:
        load(job, words, name)
    return caught.value.problems


def test_attributes_arrive_with_their_weights():
    words = ["preference.objective=regression", "preference.attributes={help: 0.65, brief: -0.3}"]
    preference = load(RewardTrainingConfig, [*TRAIN, *words], "reward_training").preference
    assert preference.objective is Objective.regression and preference.attributes == {"help": 0.65, "brief": -0.3}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["preference.objective=regression"], "preference.objective=regression needs preference.attributes"),
        (["preference.attributes.help=1"], "preference.attributes (help) needs preference.objective=regression"),
        (
            ["preference.objective=regression", "preference.attributes.help=0"],
            "preference.attributes are all 0, and so would every score be",
        ),
        (
            ["preference.objective=regression", "preference.attributes.help=inf"],
            "preference.attributes.help=inf must be a finite number",
        ),
        (
            ["preference.objective=regression", "preference.attributes.help=1", "preference.centre=0.1"],
            "preference.centre=0.1 has no meaning with preference.objective=regression",
        ),
        (["preference.centre=-1"], "preference.centre=-1.0 must not be negative"),
        (["preference.calibration_bins=0"], "preference.calibration_bins=0 must be greater than 0"),
        (["preference.head_lr_multiplier=0"], "preference.head_lr_multiplier=0.0 must be greater than 0"),
        (["data.overlong=truncate"], "data.overlong=truncate: a response that is cut is another one"),
        (["preference.objective=pairs"], "one of pairwise, plackett_luce, regression"),
        (
            ["train.micro_batch_tokens=9", "parallel.pipeline=2", "parallel.virtual_pipeline=2"],
            "train.micro_batch_tokens=9 does not go with parallel.virtual_pipeline=2",
        ),
    ],
)
def test_what_contradicts_itself_in_training(words, says):
    (line,) = problems(RewardTrainingConfig, "reward_training", *TRAIN, *words)
    assert says in line


def test_what_contradicts_itself_in_serving():
    (line,) = problems(CriticConfig, "ppo_critic", *SERVE, "reward.standardise=true")
    assert line == "reward.standardise=true needs a reward model: reward.kind=model, or a part of kind model"
