"""Phases of a step sum to the step."""

import contextlib

import pytest

from aligner.runtime.timers import Timers


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_phases_and_the_remainder_sum_to_the_step(clock):
    timers = Timers("refit", "generate", clock=clock)
    clock.now += 1  # other
    with timers.phase("generate"):
        clock.now += 5
    with timers.phase("train"):
        clock.now += 3
    with timers.phase("generate"):
        clock.now += 2
    clock.now += 0.5  # other
    times = timers.finish_step()
    assert times == {
        "time/refit": 0.0,
        "time/generate": 7.0,
        "time/train": 3.0,
        "time/other": 1.5,
        "time/step": 11.5,
    }
    assert sum(times.values()) == 2 * times["time/step"]


def test_the_next_step_begins_where_the_last_ended(clock):
    timers = Timers("train", clock=clock)
    clock.now += 4
    timers.finish_step()
    clock.now += 2
    assert timers.finish_step() == {"time/train": 0.0, "time/other": 2.0, "time/step": 2.0}
    clock.now += 9
    timers.start_step()
    assert timers.finish_step()["time/step"] == 0.0


def test_phases_do_not_nest_and_a_failed_one_is_over(clock):
    timers = Timers(clock=clock)
    with timers.phase("a"), pytest.raises(AssertionError, match="phase b inside phase a"), timers.phase("b"):
        pass
    with timers.phase("a"), pytest.raises(AssertionError, match="cannot end inside phase a"):
        timers.finish_step()
    with contextlib.suppress(KeyError), timers.phase("c"):
        clock.now += 1
        raise KeyError
    assert timers.finish_step()["time/c"] == 1.0


def test_work_that_was_queued_is_charged_to_its_phase(clock):
    """synchronise stands for waiting for a GPU: it takes the time of the work queued so far."""
    queued = []

    def synchronise() -> None:
        clock.now += sum(queued)
        queued.clear()

    seen = []
    timers = Timers(on_phase=seen.append, synchronise=synchronise, clock=clock)
    with timers.phase("train"):
        queued.append(3.0)
    queued.append(1.0)  # between phases
    with timers.phase("save"):
        queued.append(2.0)
    assert timers.finish_step() == {"time/train": 3.0, "time/save": 2.0, "time/other": 1.0, "time/step": 6.0}
    assert seen == ["train", "save"]
