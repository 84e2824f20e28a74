"""A resumed run is the uninterrupted run: bit for bit on the same grid, closely on another.

Each checkpoint is loaded by other processes than wrote it, into a model that has trained on something else in the meantime."""

import hashlib
import json

import numpy as np
import pytest

from tests.dist.harness import run_ranks, topologies
from tests.dist.test_training import _critic, _policy
from tests.dist.training_data import critic_batch, policy_batch, rollouts_of, write_checkpoint

ONE, DATA = (1, 1, None, False), (1, 1, None, False)
TENSOR, SEQUENCE, PIPELINE = (2, 1, None, False), (2, 1, None, True), (1, 2, None, False)
VIRTUAL = (1, 2, 2, False)

# name -> (ranks, grid, ZeRO-1, dtype)
SAVED = {
    "plain": (1, ONE, False, "float32"),
    "plain-pipeline": (2, PIPELINE, False, "float32"),
    "plain-virtual": (2, VIRTUAL, False, "float32"),
    "zero-data": (2, DATA, True, "float32"),
    "zero-pipeline": (2, PIPELINE, True, "float32"),
    "zero-bfloat16": (2, DATA, True, "bfloat16"),
    "plain-bfloat16": (2, TENSOR, False, "bfloat16"),
}
# Written while the policy trains on: what is loaded is what it was when the save began
BESIDE = {"plain-pipeline", "zero-data", "zero-bfloat16"}
# name -> grids of two ranks that also load it
ELSEWHERE = {
    "plain": [DATA, TENSOR, PIPELINE, VIRTUAL],
    "plain-pipeline": [SEQUENCE],
    "plain-virtual": [TENSOR],
    "zero-data": [SEQUENCE, PIPELINE, VIRTUAL],
    "zero-pipeline": [DATA, TENSOR],
}


def _continue(policy):
    metrics = [policy.train(policy_batch(seed)) for seed in (2, 3)]
    return metrics, policy.logprobs(rollouts_of(policy_batch(9)), temperature=1.0).numpy()


def _digests_are_right(folder):
    """Every file is listed, with what hashlib says of it."""
    listed = json.loads((folder / "digests.json").read_text())
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    files.pop("digests.json")
    assert listed == {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def _save_body(rank, source, folders):
    """Two steps, a save, and two more steps of each case."""
    found = {}
    for name, folder in folders.items():
        _, grid, zero, dtype = SAVED[name]
        for topology in topologies(grid):
            policy = _policy(source, topology, zero=zero, dtype=dtype, warmup_steps=3)
            for seed in (0, 1):
                policy.train(policy_batch(seed))
            saving = policy.save(folder, extra={"step": 2, "note": "two"}, beside=name in BESIDE)
            found[name] = _continue(policy)
            if name in BESIDE:
                assert not (folder / "digests.json").exists() and not (folder / "trainer_state.json").exists()
                saving.finish()
            _digests_are_right(folder)
    return found


def _load_body(rank, source, cases):
    """Each (name, folder, grid) loaded into a policy that has gone astray, and continued."""
    found = []
    for name, folder, grid in cases:
        _, _, zero, dtype = SAVED[name]
        for topology in topologies(grid):
            policy = _policy(source, topology, zero=zero, dtype=dtype, warmup_steps=3)
            policy.train(policy_batch(50))
            assert policy.load(folder) == {"step": 2, "note": "two"} and policy.step_count == 2
            found.append(_continue(policy))
    return found


def _of_world(world):
    return [name for name, (ranks, *_) in SAVED.items() if ranks == world]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(initial checkpoint, {name: folder}, {name: (metrics, log-probs) of the uninterrupted run})"""
    base = tmp_path_factory.mktemp("training")
    run_ranks(_write_body, 1, base / "initial")
    folders = {name: base / name for name in SAVED}
    ends = {}
    for world in (1, 2):
        ends |= run_ranks(_save_body, world, base / "initial", {n: folders[n] for n in _of_world(world)}, deadline=300)[
            0
        ]
    return base / "initial", folders, ends


def _write_body(rank, folder):
    write_checkpoint(folder, tied=True)


@pytest.mark.parametrize("world", [1, 2])
def test_the_same_grid_continues_bit_for_bit(saved, world):
    source, folders, ends = saved
    names = _of_world(world)
    cases = [(name, folders[name], SAVED[name][1]) for name in names]
    for rank in run_ranks(_load_body, world, source, cases, deadline=300):
        for name, (metrics, logprobs) in zip(names, rank, strict=True):
            assert metrics == ends[name][0], name
            assert np.array_equal(logprobs, ends[name][1]), name


def test_another_grid_continues_closely(saved):
    source, folders, ends = saved
    cases = [(name, folders[name], grid) for name, grids in ELSEWHERE.items() for grid in grids]
    found = run_ranks(_load_body, 2, source, cases, deadline=300)[0]
    for (name, _, grid), (metrics, logprobs) in zip(cases, found, strict=True):
        for one, other in zip(metrics, ends[name][0], strict=True):
            assert one == pytest.approx(other, abs=1e-4, rel=1e-4), f"{name} on {grid}"
        assert np.allclose(logprobs, ends[name][1], atol=2e-4), f"{name} on {grid}"


def _edges_body(rank, source, base):
    for topology in topologies(ONE):
        _critic_starts_over(source, base, topology)
        _an_automatic_type_is_the_saved_one(source, base, topology)
        _refusals(source, base, topology)


def _critic_starts_over(source, base, topology):
    """A critic saved before its first step, and one that was reset, are as new."""
    batch = critic_batch()
    fresh = _critic(source, topology)
    fresh.save(base / "fresh", extra={"step": 0})
    assert not (base / "fresh" / "optimizer").exists()
    expected = [fresh.train(batch), fresh.train(batch)]
    astray = _critic(source, topology)
    astray.train(critic_batch(50))
    assert astray.load(base / "fresh") == {"step": 0} and astray.step_count == 0
    assert [astray.train(batch), astray.train(batch)] == expected
    astray.reset()
    assert [astray.train(batch), astray.train(batch)] == expected


def _an_automatic_type_is_the_saved_one(source, base, topology):
    """Whatever this machine would choose: of either type, before the first update and after it."""
    from aligner.config.groups import Dtype
    from aligner.models.training_state import resumed_dtype

    for dtype, steps in ((Dtype.float32, 0), (Dtype.bfloat16, 1)):
        policy = _policy(source, topology, dtype=dtype.value)
        for _ in range(steps):
            policy.train(policy_batch())
        policy.save(base / dtype.value)
        assert resumed_dtype(Dtype.auto, base / dtype.value, topology) is dtype
        assert resumed_dtype(Dtype.float32, base / dtype.value, topology) is Dtype.float32
    assert resumed_dtype(Dtype.auto, None, topology) is resumed_dtype(Dtype.auto, source, topology) is Dtype.auto


def _refusals(source, base, topology):
    policy = _policy(source, topology)
    policy.train(policy_batch())
    policy.save(base / "policy")
    assert json.loads((base / "policy" / "trainer_state.json").read_text())["optimizer"]["distributed"] is False
    with pytest.raises(ValueError, match=r"saved with optim.distributed=False, this run has True"):
        _policy(source, topology, zero=True).load(base / "policy")
    with pytest.raises(ValueError, match=r"has no trainer_state.json"):
        policy.load(source)


def test_a_critic_starts_over_and_foreign_states_are_refused(saved, tmp_path):
    run_ranks(_edges_body, 1, saved[0], tmp_path)
