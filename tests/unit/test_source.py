"""What --checkpoint of generate.py stands for, and what is said of a path that stands for nothing."""

import json

import pytest

from aligner.models.hf_config import config_of
from aligner.models.model_config import write_model_config
from aligner.rollout.source import find_source
from tests.unit.tiny_engine import tiny_shape

SHAPE = tiny_shape("llama")


@pytest.fixture
def run(tmp_path):
    """A run with pairs 3, 10 and 12, of which the last was not committed."""
    checkpoints = tmp_path / "runs" / "mine" / "checkpoints"
    for step in (3, 10, 12):
        for side, head in (("actor", "lm"), ("critic", "value")):
            folder = checkpoints / f"step_{step:06d}" / side
            folder.mkdir(parents=True)
            write_model_config(SHAPE.with_head(head), folder)
        if step < 12:
            (folder.parent / "COMMITTED").write_text(json.dumps({"step": step, "validation": None}))
    return checkpoints.parent


def test_a_run_is_the_actor_of_its_newest_committed_pair(run):
    newest = run / "checkpoints" / "step_000010" / "actor"
    for path in (run, run / "checkpoints", newest.parent, newest):
        assert find_source(path).path == newest
    assert find_source(run / "checkpoints" / "step_000003").path.parent.name == "step_000003"
    found = find_source(newest)
    assert found.shape == SHAPE and not found.hugging_face


def test_a_hugging_face_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of(SHAPE, dtype="float32", special={})))
    assert find_source(tmp_path).hugging_face and find_source(tmp_path).shape == SHAPE
    scores = config_of(SHAPE.with_head("score"), dtype="float32", special={})
    (tmp_path / "config.json").write_text(json.dumps(scores))
    with pytest.raises(ValueError, match="has a score head and no lm head: it cannot generate"):
        find_source(tmp_path)


def test_what_stands_for_nothing_is_refused(run, tmp_path):
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    (tmp_path / "file.nemo").write_bytes(b"")
    (tmp_path / "file.txt").write_bytes(b"")
    (tmp_path / "bare").mkdir()
    for path, said in (
        (tmp_path / "nowhere", "nowhere does not exist"),
        (tmp_path / "bare", "bare is none of: a converted checkpoint"),
        (tmp_path / "file.txt", "file.txt is none of"),
        (tmp_path / "file.nemo", "no whole tar archive"),
        (tmp_path / "new", "holds no committed checkpoint yet"),
        (run / "checkpoints" / "step_000012", "step_000012 was not committed: its save did not end"),
        (run / "checkpoints" / "step_000010" / "critic", "has a value head and no lm head"),
    ):
        with pytest.raises(ValueError, match=said):
            find_source(path)
