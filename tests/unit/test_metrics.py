"""One finite row a step, and none of another run."""

import json
import logging
import sys
import warnings

import numpy as np
import pytest
import torch

from aligner.config.groups import LoggingConfig
from aligner.runtime.errors import UserError
from aligner.runtime.log import setup_logging
from aligner.runtime.metrics import MetricsWriter, read_jsonl

QUIET = LoggingConfig(tensorboard=False)


def test_rows_are_plain_json(tmp_path):
    writer = MetricsWriter(tmp_path, QUIET)
    numbers = {"a": 1, "b": np.float32(0.5), "c": torch.tensor(2.5), "d": np.int64(3), "e": True, "f": 1e-30}
    writer.write(0, numbers)
    writer.write(1, {"a": 2})
    writer.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"step": 0, "a": 1, "b": 0.5, "c": 2.5, "d": 3, "e": 1, "f": 1e-30}
    assert json.loads(lines[1]) == {"step": 1, "a": 2}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), torch.tensor(float("-inf")), np.float32("nan")])
def test_a_value_that_is_not_finite_is_refused_by_name(tmp_path, value):
    writer = MetricsWriter(tmp_path, QUIET)
    with pytest.raises(FloatingPointError, match="metric reward/mean is"):
        writer.write(1, {"kl/mean": 0.1, "reward/mean": value})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""  # no half row


@pytest.mark.parametrize("value", ["text", None, [1.0]])
def test_what_is_no_number_is_refused_by_name(tmp_path, value):
    with pytest.raises(TypeError, match="metric x is"):
        MetricsWriter(tmp_path, QUIET).write(1, {"x": value})


@pytest.mark.parametrize(("keep", "steps"), [(None, [3]), (1, [0, 1, 3]), (2, [0, 1, 2, 3])])
def test_a_resumed_run_has_one_row_a_step(tmp_path, keep, steps):
    first = MetricsWriter(tmp_path, QUIET)
    for step in range(4):
        first.write(step, {"x": 0})
    first.close()
    again = MetricsWriter(tmp_path, QUIET, keep_through=keep)
    again.write(3, {"x": 1})
    again.close()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == steps
    assert [row["x"] for row in rows] == [0] * (len(steps) - 1) + [1]


def test_lines_end_at_newlines_alone(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": "x\u2028y"}\n{"a": "\x85"}\n', encoding="utf-8")
    assert read_jsonl(file) == [{"a": "x\u2028y"}, {"a": "\x85"}]


def test_a_line_cut_by_a_kill_is_dropped_and_one_in_the_middle_is_named(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2, "x"')
    assert read_jsonl(file) == [{"step": 1}]
    file.write_text('{"step": 1}\noops\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2 is not JSON: 'oops'"):
        read_jsonl(file)
    assert read_jsonl(tmp_path / "absent") == []


def test_tensorboard_has_the_same_values(tmp_path):
    writer = MetricsWriter(tmp_path, LoggingConfig())
    for step in range(3):
        writer.write(step, {"reward/mean": step / 2})
    writer.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(0, 0.0), (1, 0.5), (2, 1.0)]


def test_wandb_that_is_not_installed_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"logging.wandb_project=mine needs the package wandb: pip install"):
        MetricsWriter(tmp_path, LoggingConfig(wandb_project="mine"))


class FakeWandb:
    """The few calls that are made of wandb, recorded."""

    def __init__(self):
        self.started, self.rows, self.util = [], [], self

    def generate_id(self):
        return "id7"

    def init(self, *, project, name, id, resume, dir, config):
        self.started.append((project, name, id, resume, config))
        return self

    def log(self, row, *, step):
        self.rows.append((step, row))

    def finish(self):
        pass


def test_a_resumed_run_keeps_its_wandb_id(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for keep in (None, 1):
        writer = MetricsWriter(
            tmp_path, LoggingConfig(tensorboard=False, wandb_project="p"), keep_through=keep, config={"a": 1}
        )
        writer.write(2, {"x": 1.0})
        writer.close()
    assert fake.started == [("p", tmp_path.name, "id7", "allow", {"a": 1})] * 2
    assert fake.rows == [(2, {"x": 1.0})] * 2


# The log


@pytest.fixture
def clean_logging():
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    yield
    for handler in [h for h in root.handlers if h not in before[0]]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(before[1])
    logging.captureWarnings(False)


def test_every_rank_has_a_file_and_rank_0_alone_speaks(tmp_path, capsys, clean_logging):
    for rank in (1, 0):
        log = setup_logging(tmp_path, job="actor", rank=rank)
        log.info("hello from %d", rank)
        logging.getLogger("someone.else").warning("chatter %d", rank)
        logging.getLogger("someone.else").error("alarm %d", rank)
        log.info("secret %d", rank, extra={"file_only": True})
        warnings.warn(f"a warning of {rank}", stacklevel=1)
    shown = capsys.readouterr().err
    assert shown == "INFO hello from 0\nERROR alarm 0\n"
    for rank in (0, 1):
        text = (tmp_path / f"actor_rank{rank}.log").read_text()
        for said in (
            f"hello from {rank}",
            f"chatter {rank}",
            f"alarm {rank}",
            f"secret {rank}",
            f"a warning of {rank}",
        ):
            assert said in text
        assert f"hello from {1 - rank}" not in text
