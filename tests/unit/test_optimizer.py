"""Learning rates against values computed by hand, and settings that cannot work."""

import pytest
import torch

from aligner.config.groups import OptimConfig, Schedule
from aligner.models.optimizer import build_optimizer, learning_rate


def _rates(count: int, **settings) -> list[float]:
    optim = OptimConfig(lr=8.0, **settings)
    return [learning_rate(optim, step) for step in range(count)]


def test_constant():
    assert _rates(3) == [8.0, 8.0, 8.0]


def test_warm_up_reaches_the_peak_at_its_last_update():
    assert _rates(6, warmup_steps=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_linear_falls_to_min_lr_at_decay_steps():
    found = _rates(8, schedule=Schedule.linear, warmup_steps=2, decay_steps=6, min_lr=4.0)
    assert found == [4.0, 8.0, 7.0, 6.0, 5.0, 4.0, 4.0, 4.0]


def test_cosine_falls_to_min_lr_at_decay_steps():
    found = _rates(7, schedule=Schedule.cosine, warmup_steps=1, decay_steps=5, min_lr=0.0)
    half = 2**0.5 / 2  # cos of 45 degrees
    assert found == pytest.approx([8.0, 4 * (1 + half), 4.0, 4 * (1 - half), 0.0, 0.0, 0.0])


@pytest.mark.parametrize("schedule", [Schedule.cosine, Schedule.linear])
def test_a_schedule_that_falls_needs_to_know_how_long(schedule):
    with pytest.raises(ValueError, match=r"optim.decay_steps > optim.warmup_steps, but they are 0 and 3"):
        _rates(4, schedule=schedule, warmup_steps=3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the rule is about machines without a GPU")
def test_cpu_offload_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match=r"optim.cpu_offload=true needs a GPU"):
        build_optimizer([], OptimConfig(cpu_offload=True), dtype=torch.float32)
