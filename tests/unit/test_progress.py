"""What a person sees while a run trains."""

import io
import logging

import pytest
from rich.console import Console

from aligner.runtime import progress as module
from aligner.runtime.progress import Progress, duration, phase_line, step_line

METRICS = {
    "reward/mean": 0.51234,
    "kl/mean": 0.012345,
    "tokens_per_second": 812.4,
    "time/step": 7.77,
    "time/generate": 4.0,
    "time/train": 2.5,
    "time/refit": 0.001,
}


def test_a_line_has_reward_kl_speed_and_time_left():
    line = step_line(3, 20, METRICS, eta=125.4)
    assert line == "step 3/20  reward 0.512  KL 0.0123  tokens/s 812  s/step 7.8  2:05 left"
    assert phase_line(METRICS) == "generate 4.0 s  train 2.5 s"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01"), (-1, "0:00")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_without_a_terminal_one_plain_line_a_step(caplog, monkeypatch):
    now = [50.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    progress = Progress(10, done=4, live=False)
    progress.phase("generate")
    assert progress.seconds_left() is None
    now[0] += 30.0
    with caplog.at_level(logging.INFO, logger="aligner"):
        progress.step(6, METRICS)
    progress.close()
    assert progress.seconds_left() == 60.0  # 2 steps took 30 s here, 4 are left
    assert [record.message.split("  ")[0] for record in caplog.records] == ["step 6/10"]
    assert caplog.records[0].message.endswith("1:00 left")


def test_the_live_display_shows_phase_and_keeps_the_last_validation(monkeypatch):
    progress = Progress(10, live=False)
    progress.step(1, {**METRICS, "val/accuracy": 0.25})
    progress.step(2, METRICS)
    progress.phase("train")
    screen = Console(file=io.StringIO(), width=150, force_terminal=False)
    screen.print(progress)
    text = screen.file.getvalue()
    assert "step 2/10" in text
    assert "val accuracy 0.250" in text
    assert "now: train" in text
    assert "generate 4.0 s" in text


def test_the_live_display_starts_and_stops(capfd):
    progress = Progress(2, live=True)
    progress.step(1, METRICS)
    progress.close()
    assert "step 1/2" in capfd.readouterr().err


def test_a_long_phase_says_how_far_it_is(caplog, monkeypatch):
    """Without a terminal a line each 30 s, on one at once; the next phase begins anew."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    progress = Progress(10, live=False)
    progress.phase("generate")
    with caplog.at_level(logging.INFO, logger="aligner"):
        for seconds in (10, 29, 31, 45, 62):
            now[0] = seconds
            progress.detail(f"{seconds} of 99 responses")
    assert [record.message for record in caplog.records] == [
        "generate: 31 of 99 responses",
        "generate: 62 of 99 responses",
    ]
    shown = io.StringIO()
    Console(file=shown, width=200).print(progress)
    assert "now: generate 62 of 99 responses" in shown.getvalue()
    progress.phase("train")
    shown = io.StringIO()
    Console(file=shown, width=200).print(progress)
    assert "responses" not in shown.getvalue()
