"""Layout invariance (*close*): the same three PPO steps on any grid give the same tokens, and losses and metrics to 1e-4.

Oracle: the run on one rank with its critic in the same process."""

import pytest

from tests.jobs.harness import Launcher, Run

TOLERANCE = 1e-4
BY_NATURE = ("time/", "memory/", "tokens_per_second", "refit/overlapped_seconds")  # of the machine, not of the run

GRIDS = {
    "dp2": (2, ()),
    "tp2": (2, ("parallel.tensor=2",)),
    "pp2": (2, ("parallel.pipeline=2",)),
    "tp2_pp2": (4, ("parallel.tensor=2", "parallel.pipeline=2")),
}


@pytest.fixture(scope="module")
def reference(shared_jobs: Launcher) -> Run:
    shared_jobs.alone("reference").finish()
    return shared_jobs.run("reference")


def served(
    jobs: Launcher, name: str, *, ranks: int, actor: tuple[str, ...], critic_ranks: int, critic: tuple[str, ...] = ()
) -> Run:
    critic_job = jobs.critic(name, *critic, ranks=critic_ranks)
    jobs.actor(name, *actor, ranks=ranks).finish()
    critic_job.finish()
    return jobs.run(name)


def assert_close(found: Run, expected: Run, *, steps=(1, 2, 3)) -> None:
    for step in steps:
        ours, theirs = found.samples(step), expected.samples(step)
        for key in ("sample_id", "origin", "response_ids", "parts", "finish_reason", "weight_version"):
            assert [s[key] for s in ours] == [s[key] for s in theirs], f"{key} in step {step}"
        assert [s["score"] for s in ours] == pytest.approx([s["score"] for s in theirs])  # float32 on the wire
    assert found.steps == expected.steps
    for row, wanted in zip(found.rows, expected.rows):
        assert row.keys() == wanted.keys()
        for key, value in wanted.items():
            if not key.startswith(BY_NATURE):
                assert row[key] == pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE), f"{key} in step {row['step']}"
    last = expected.steps[-1]
    assert [s["response_ids"] for s in found.validation(last)] == [s["response_ids"] for s in expected.validation(last)]


def test_four_ranks_and_a_critic_on_two(shared_jobs, reference):
    ranks, grid = GRIDS["tp2_pp2"]
    assert_close(served(shared_jobs, "smoke", ranks=ranks, actor=grid, critic_ranks=2), reference)


@pytest.mark.faults
@pytest.mark.parametrize("name", ["dp2", "tp2", "pp2"])
def test_two_ranks(shared_jobs, reference, name):
    ranks, grid = GRIDS[name]
    assert_close(served(shared_jobs, name, ranks=ranks, actor=grid, critic_ranks=1), reference)
