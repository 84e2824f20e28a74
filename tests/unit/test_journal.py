"""The journal of train requests, and what is decided from it when a critic job comes back."""

import numpy as np
import pytest

from aligner.runtime.errors import ContractError
from aligner.runtime.journal import Journal, JournalError
from aligner.serving.recovery import Plan, plan

ARRAYS = {"tokens": np.arange(6, dtype=np.int32).reshape(2, 3), "values": np.array([[np.nan, 1.5]], np.float32)}


def test_what_is_written_is_read_until_a_pair_holds_it(tmp_path):
    journal = Journal(tmp_path / "journal", run_id="r")
    assert journal.steps() == []
    for step in (9, 10, 11):
        journal.write(step, {name: array + step for name, array in ARRAYS.items()})
    found = Journal(tmp_path / "journal", run_id="r").read(10)
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array + 10)
    journal.forget(through=10)
    assert journal.steps() == [11] and [f.name for f in journal.path.iterdir()] == ["step_11"]
    journal.clear()
    assert journal.steps() == []


def test_a_request_that_was_cut_while_written_is_not_there(tmp_path):
    journal = Journal(tmp_path, run_id="r")
    (tmp_path / "step_3.tmp").write_bytes(b"half")
    assert journal.steps() == []
    journal.clear()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("at", [0, 20, 150, -1])
def test_a_flipped_byte_is_found(tmp_path, at):
    journal = Journal(tmp_path, run_id="r")
    journal.write(1, ARRAYS)
    data = bytearray((tmp_path / "step_1").read_bytes())
    data[at] ^= 1
    (tmp_path / "step_1").write_bytes(data)
    with pytest.raises(JournalError, match="step_1 (cannot be read|is damaged or of another run)"):
        journal.read(1)


def test_requests_of_another_run_or_step_are_refused(tmp_path):
    Journal(tmp_path, run_id="r").write(1, ARRAYS)
    with pytest.raises(JournalError, match="of another run"):
        Journal(tmp_path, run_id="s").read(1)
    (tmp_path / "step_1").rename(tmp_path / "step_2")
    with pytest.raises(JournalError, match="step_2 is damaged"):
        Journal(tmp_path, run_id="r").read(2)
    with pytest.raises(JournalError, match="step_7 cannot be read"):
        Journal(tmp_path, run_id="r").read(7)


# actor_step, critic_step, trusted, pair_step, journalled, asked -> plan
PLANS = {
    "the same critic in step": ((5, 5, True, 4, [5], []), Plan(False)),
    "its answer was lost, the step was applied": ((5, 6, True, 4, [5, 6], [6]), Plan(False)),
    "its answer was lost, the step was not": ((5, 5, True, 4, [5, 6], [6]), Plan(False)),
    "another critic, behind": ((5, 0, False, 2, [3, 4, 5, 6], [6]), Plan(True, (3, 4, 5))),
    "another critic, no pair yet": ((2, 0, False, 0, [1, 2], []), Plan(True, (1, 2))),
    "another critic that says the same step": ((5, 5, False, 5, [], []), Plan(True)),
    "another critic before the first step": ((0, 0, False, 0, [1], [1]), Plan(True)),
    "ahead of an actor that came back": ((4, 7, True, 4, [], []), Plan(True)),
    "a step ahead that nobody asked for": ((4, 5, True, 4, [], []), Plan(True)),
    "undefined weights": ((5, 5, False, 4, [5], []), Plan(True, (5,))),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_brings_a_critic_back(name):
    values, expected = PLANS[name]
    keys = ("actor_step", "critic_step", "trusted", "pair_step", "journalled", "asked")
    assert plan(**dict(zip(keys, values))) == expected


def test_a_journal_with_a_gap_is_refused():
    with pytest.raises(
        ContractError, match="critic job is at step 0, the actor at step 5, .*pair of step 2 .* lacks 3, 5:"
    ):
        plan(actor_step=5, critic_step=0, trusted=False, pair_step=2, journalled=[4], asked=[])
