"""When the engine follows the policy, and what is said when the two part. Oracle: the schedule written down here."""

import logging
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from aligner.algorithms import agreement, engine_sync
from aligner.algorithms.engine_sync import EngineSync, seconds_beside
from aligner.algorithms.records import DriftAlarm
from aligner.config.groups import Certify
from aligner.data.interfaces import RefitCertificate


class ScriptedEngine:
    certify = Certify.sampled

    def __init__(self):
        self.versions = []


@pytest.fixture
def sync(monkeypatch):
    """Makes a sync of one rank over an engine that notes its refits."""

    def refit(engine, tensors, *, version):
        engine.versions.append(version)
        if tensors == "broken":
            raise ValueError("no such tensor")
        return RefitCertificate(version=version, tensors=1, checksums={"a": tensors})

    def agree(error, topology):
        if error is not None:
            raise RuntimeError(f"rank 0: {error}")

    monkeypatch.setattr(engine_sync, "certified_refit", refit)
    monkeypatch.setattr(engine_sync, "gather_objects", lambda obj, group: [obj])
    monkeypatch.setattr(agreement, "agree", agree)

    def make(every):
        policy = SimpleNamespace(export=lambda: "sum")
        return EngineSync(ScriptedEngine(), policy, SimpleNamespace(cpu_group=None), every=every)

    return make


@pytest.mark.parametrize(
    ("every", "expected"),
    [(1, [0, 1, 2, 3, 4, 5, 6]), (2, [0, 2, 4, 6]), (3, [0, 3, 6])],
)
def test_it_follows_every_so_many_versions(sync, every, expected):
    made = sync(every)
    for version in (
        0,
        0,
        0,
        1,
        2,
        2,
        3,
        4,
        5,
        6,
    ):  # two steps of critic warm-up, and one whose updates were all skipped
        made.follow(version)
    assert made.engine.versions == expected


def test_validation_and_checkpoints_bring_it_up_to_date(sync):
    made = sync(4)
    made.follow(0)
    made.follow(1)
    made.catch_up(2)  # a validation
    made.follow(2)
    made.follow(5)  # 3 behind
    made.catch_up_next()  # a checkpoint at version 5 ...
    assert made.engine.versions == [0, 2]
    made.follow(5)  # ... so the next step refits, as a run that continues from it has to
    made.follow(8)
    made.follow(9)
    assert made.engine.versions == [0, 2, 5, 9]
    made.catch_up_next()
    made.follow(9)  # it holds them already
    made.forget()
    made.follow(9)
    assert made.engine.versions == [0, 2, 5, 9, 9]


def test_a_refit_that_failed_is_repeated_and_leaves_no_certificate(sync):
    made = sync(1)
    made.follow(0)
    whole = made.certificate
    made.policy.export = lambda: "broken"
    with pytest.raises(RuntimeError, match="rank 0: no such tensor"):
        made.follow(1)
    assert made.certificate is None
    made.policy.export = lambda: "other"
    made.follow(1)
    assert made.engine.versions == [0, 1, 1] and made.certificate not in (None, whole)
    assert made.certificate.startswith("sampled:")
    made.engine.certify = Certify.off
    assert made.certificate is None


def test_copies_of_the_policy_that_parted_are_told(sync, monkeypatch):
    made = sync(1)
    monkeypatch.setattr(engine_sync, "gather_objects", lambda obj, group: [obj, obj, "another"])
    with pytest.raises(RuntimeError, match=r"ranks \[2\] hold other weights than rank 0's"):
        made.follow(3)


def test_only_what_overlaps_counts():
    ticks = iter([10.0, 13.0, 20.0])  # act begins, the other ends, act ends
    clock = SimpleNamespace(monotonic=lambda: next(ticks))
    other = Future()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_sync, "time", clock)
        assert seconds_beside(other, lambda: other.set_result(None)) == 3.0
        ticks = iter([10.0, 20.0])
        assert seconds_beside(Future(), lambda: None) == 10.0  # the other still runs
        ticks = iter([9.0, 10.0, 20.0])
        done = Future()
        done.set_result(None)
        assert seconds_beside(done, lambda: None) == 0.0
        ticks = iter([10.0])
        assert seconds_beside(None, lambda: None) == 0.0


def test_the_drift_alarm_is_raised_once_and_ends(caplog):
    alarm = DriftAlarm(0.5)
    with caplog.at_level(logging.INFO):
        for step, mean in enumerate([0.1, 0.6, 0.7, 0.5, 0.9], start=1):
            alarm.check(step, {"drift/mean": mean, "drift/max": 2 * mean, "refit/staleness": float(step == 5)})
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [(level, text.split(":")[0]) for level, text in said] == [
        ("WARNING", "step 2"),
        ("INFO", "step 4"),
        ("WARNING", "step 5"),
    ]
    assert "differ by 0.600 on average and 1.200 at most" in said[0][1] and "compare engine.dtype" in said[0][1]
    assert "1 updates old" in said[2][1] and "refit.sync_every" in said[2][1]
