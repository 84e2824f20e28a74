"""Every key is documented, and docs/configuration.md is what the dataclasses say."""

from pathlib import Path

from aligner.config import keys
from aligner.config.docs import markdown
from aligner.config.jobs import JOBS
from aligner.config.validate import AT_MOST_ONE, NOT_NEGATIVE, POSITIVE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_every_key_has_a_docstring():
    undocumented = [
        key for job in JOBS.values() for key, text in keys.docs(job).items() if not text.endswith((".", ")"))
    ]
    assert undocumented == []


def test_the_page_is_generated():
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run: python -m aligner.config.docs docs/configuration.md"


def test_the_page_names_every_key_once_a_group():
    text = markdown()
    for job in JOBS.values():
        for key in keys.docs(job):
            assert f"| `{key}` |" in text
    assert text.count("| `run.seed` |") == 1  # shared by both jobs
    assert "one of gae, group_norm, dr_grpo, rloo, reinforce_baseline | `gae`" in text
    assert "| `model.checkpoint` | text | required |" in text


def test_checked_keys_exist():
    known = {key for job in JOBS.values() for key in keys.docs(job)}
    assert {*POSITIVE, *NOT_NEGATIVE, *AT_MOST_ONE} <= known
