"""run.max_time: how it is written, from when it counts, and when a job has to end."""

import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest

from aligner.config.groups import RunConfig
from aligner.config.jobs import ActorConfig
from aligner.config.load import load
from aligner.config.validate import problems
from aligner.runtime.errors import ConfigError
from aligner.runtime.exit_codes import ExitCode
from aligner.runtime.signals import StopSignals
from aligner.runtime.time_limit import TimeLimit, asked_to_stop, process_age, seconds_of

NEEDED = ["model.checkpoint=x", "data.task=chain_sum"]


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("1-02:03:04", 93784),
        ("26:03:04", 93784),
        ("0-00:00:10", 10),
        ("00:30:00", 1800),
        ("90", 90),
        ("0.5", 0.5),
        ("100:00:00", 360000),
    ],
)
def test_forms(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "4h", "10:30", "1-02", "1:60:00", "-5", "00:00:99", "1-1-00:00:00", "nan"])
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="is neither D-HH:MM:SS, HH:MM:SS nor a number of seconds"):
        seconds_of(text)


@pytest.mark.parametrize("written, seconds", [("3:59:00", 14340), ("0-04:00:00", 14400), ("14340", 14340)])
def test_on_the_command_line(written, seconds):
    assert seconds_of(load(ActorConfig, [*NEEDED, f"run.max_time={written}"]).run.max_time) == seconds


def test_in_a_file_yaml_makes_seconds_of_it(tmp_path):
    """PyYAML reads an unquoted 3:59:00 as a number to the base 60."""
    (tmp_path / "mine.yaml").write_text("run:\n  max_time: 3:59:00\n")
    config = load(ActorConfig, ["--config-dir", str(tmp_path), "--config-name", "mine", *NEEDED])
    assert seconds_of(config.run.max_time) == (3 * 60 + 59) * 60


def test_a_limit_that_cannot_be_kept_is_refused():
    with pytest.raises(ConfigError, match="run.max_time='4h' is neither D-HH:MM:SS"):
        load(ActorConfig, [*NEEDED, "run.max_time=4h"])
    with pytest.raises(ConfigError, match="run.max_time=00:01:00 leaves nothing beside run.max_time_margin=60 s"):
        load(ActorConfig, [*NEEDED, "run.max_time=00:01:00"])
    config = load(ActorConfig, [*NEEDED, "run.max_time=00:01:00", "run.max_time_margin=10"])
    assert problems(config) == [] and RunConfig().max_time is None


def test_the_margin_is_the_larger_of_the_setting_and_what_is_needed():
    age = 0.0
    limit = TimeLimit("00:01:40", margin=10, age=lambda: age)
    for age, needed, over in [
        (0, 0, False),
        (89, 0, False),
        (91, 0, True),
        (69, 30, False),
        (71, 30, True),
        (200, 0, True),
    ]:
        assert limit.leaves_less_than(needed) is over, (age, needed)
    assert not TimeLimit(None, margin=10).leaves_less_than(1e9)


def test_a_job_that_runs_out_of_time_stops_as_by_sigterm():
    age, stop = 0.0, StopSignals()
    asked = asked_to_stop(TimeLimit("100", margin=1, age=lambda: age), stop, lambda: 25.0)
    age = 74.0
    assert not asked() and stop.exit_code is ExitCode.DONE
    age = 76.0
    assert asked() and stop.stopping and stop.exit_code is ExitCode.REQUEUE


def test_the_actor_keeps_its_longest_step_and_save_but_ends_a_last_step_in_order(monkeypatch):
    from aligner.algorithms import assemble

    config = load(ActorConfig, [*NEEDED, "run.max_time=100", "run.max_time_margin=1", "run.max_steps=9"])
    recorder, checkpoints = SimpleNamespace(longest_step=40.0), SimpleNamespace(longest_save=20.0)
    trainer = SimpleNamespace(state=SimpleNamespace(step=3), recorder=recorder, checkpoints=checkpoints)
    stop, age = StopSignals(), 39.0
    monkeypatch.setattr(assemble, "TimeLimit", partial(TimeLimit, age=lambda: age))
    asked = assemble.stop_asked(config.run, stop, trainer, steps=config.run.max_steps)
    assert not asked()
    age = 41.0
    trainer.state.step = 9
    assert not asked()  # the run is complete: there is nothing to start again for
    trainer.state.step = 8
    assert asked() and stop.exit_code is ExitCode.REQUEUE


def test_time_counts_from_the_start_of_the_process():
    """Half a second of imports before the first line is counted."""
    code = "import time; time.sleep(0.5); from aligner.runtime.time_limit import process_age; print(process_age())"
    began = time.monotonic()
    age = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0.5 <= age <= time.monotonic() - began + 0.02  # the kernel counts in hundredths
    assert process_age() > age
