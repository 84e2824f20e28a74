"""A resumed run equals the uninterrupted one: *exact* on the same grid, *close* on another.

Runs are ended by SIGKILL at named points (aligner/runtime/faults.py), never by an orderly stop. Oracle: the same run, not disturbed."""

import shutil
from pathlib import Path

import pytest

from tests.jobs.harness import Launcher, Run, user_data
from tests.jobs.test_layouts import BY_NATURE, assert_close

SAMPLE_KEYS = ("sample_id", "origin", "response_ids", "score", "kl", "advantage_mean", "value_first", "weight_version")


def settings(folder: Path, *, steps: int, every: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Overrides of the actor, and of its critic. 20 prompts and 8 a step: step 5 ends an epoch, steps 1 to 4 do not.

    What a resumed run could lose is in use: an adaptive KL coefficient, running statistics of scores and of returns, a row of steps
    that the critic does not explain, schedules, two epochs, best-by-validation."""
    data, reward = user_data(folder, prompts=20)
    actor = (
        *data,
        "ppo.kl_target=0.05",
        "ppo.kl_horizon=40",
        "ppo.kl_coefficient=0.1",
        "ppo.epochs=2",
        "ppo.reward_scale=running",
        "ppo.reward_clip=2.0",
        "ppo.critic_fallback_steps=2",
        "optim.schedule=cosine",
        "optim.warmup_steps=2",
        "optim.decay_steps=40",
        "validation.every=2",
        f"run.max_steps={steps}",
        f"checkpoint.every={every}",
    )
    critic = ("optim.schedule=linear", "optim.decay_steps=60", "critic.epochs=2", "critic.value_normalisation=popart")
    return (*actor, *reward), (*reward, *critic)


def assert_exact(found: Run, expected: Run) -> None:
    assert found.steps == expected.steps
    for row, wanted in zip(found.rows, expected.rows):
        differ = {k for k in row.keys() | wanted.keys() if not k.startswith(BY_NATURE) and row.get(k) != wanted.get(k)}
        assert not differ, f"step {row['step']}: {[(k, row.get(k), wanted.get(k)) for k in sorted(differ)]}"
    for step in expected.steps[1:]:
        ours, theirs = found.samples(step), expected.samples(step)
        assert [[s[k] for k in SAMPLE_KEYS] for s in ours] == [[s[k] for k in SAMPLE_KEYS] for s in theirs]


def test_killed_again_and_again_mid_epoch_and_at_its_end(jobs: Launcher, tmp_path):
    actor, critic = settings(tmp_path, steps=7, every=1)
    jobs.alone("whole", *actor, critic=critic).finish()
    for fault, pairs in (
        ("generated:4", ["step_000002", "step_000003"]),  # in the middle of an epoch of the prompts
        ("before_commit:5", ["step_000003", "step_000004"]),  # both halves of pair 5 are there, and do not count
        ("trained:6", ["step_000004", "step_000005"]),  # at an epoch's end
        ("saving:7", ["step_000005", "step_000006"]),  # half of a pair
    ):
        killed = jobs.alone("broken", *actor, "checkpoint.keep_best=false", critic=critic, fault=fault)
        assert killed.wait() == [-9], killed.tail()
        assert jobs.run("broken").pairs == pairs
    half = jobs.run("broken").path / "checkpoints" / "step_000007" / "leftover"
    half.parent.mkdir(exist_ok=True)
    half.write_text("of a pair that was never committed")
    jobs.alone("broken", *actor, "checkpoint.keep_best=false", critic=critic).finish()
    assert not half.exists()
    coefficients = [
        row["kl/coefficient"] for row in jobs.run("whole").rows[2:]
    ]  # critic warm-up, step 1, moves nothing
    assert len(set(coefficients)) == len(coefficients), "the adaptive coefficient did not move: this test shows nothing"
    assert_exact(jobs.run("broken"), jobs.run("whole"))


def test_both_jobs_killed(jobs: Launcher, tmp_path):
    """The served critic: both jobs die, both are started again with the same commands. The engine follows every third update only."""
    actor, critic = settings(tmp_path, steps=4, every=2)
    actor = (*actor, "validation.every=4", "refit.sync_every=3", "ppo.importance_cap=1.5")

    def both(name, fault=None):
        serving = jobs.critic(name, *critic)
        return serving, jobs.actor(name, *actor, fault=fault)

    serving, training = both("whole")
    training.finish(), serving.finish()
    serving, training = both("broken", fault="trained:3")
    assert training.wait() == [-9], training.tail()
    serving.kill()
    assert serving.wait() == [-9]
    assert jobs.run("broken").pairs == ["step_000002"]
    # Step 3 follows a checkpoint: its engine is up to date in a run that nothing disturbs too.
    assert [row["refit/staleness"] for row in jobs.run("whole").rows[1:]] == [0, 0, 0, 1]
    serving, training = both("broken")
    training.finish(), serving.finish()
    assert_exact(jobs.run("broken"), jobs.run("whole"))


@pytest.mark.faults
@pytest.mark.parametrize("ranks", [1, 2])
def test_dynamic_sampling_goes_on_where_it_was(jobs: Launcher, tmp_path, ranks):
    """Steps consume as many prompts as it takes; without a critic job."""
    data, reward = user_data(tmp_path, prompts=20)
    settings = (
        "ppo.advantage=rloo",
        "ppo.samples_per_prompt=2",
        "ppo.dynamic_sampling=true",
        "ppo.critic_warmup_steps=0",
    )
    settings = (*data, *reward, *settings, "run.max_steps=4", "checkpoint.every=1", "validation.every=0")
    jobs.actor("whole", *settings, ranks=ranks).finish()
    killed = jobs.actor("broken", *settings, ranks=ranks, fault="trained:3")
    assert -9 in killed.wait(), killed.tail()
    jobs.actor("broken", *settings, ranks=ranks).finish()
    consumed = [row["prompts_consumed"] for row in jobs.run("whole").rows]
    assert any(b - a > 8 for a, b in zip(consumed, consumed[1:])), f"nothing was replaced: {consumed}"
    assert_exact(jobs.run("broken"), jobs.run("whole"))


@pytest.mark.faults
@pytest.mark.parametrize("grid", [("parallel.tensor=2",), ("parallel.pipeline=2",), ()], ids=["tp2", "pp2", "dp2"])
def test_into_another_grid(jobs: Launcher, tmp_path, grid):
    """Saved by one rank with the critic inside; continued on two ranks with a served critic on two."""
    actor, critic = settings(tmp_path, steps=4, every=2)
    jobs.alone("one", *actor, critic=critic).finish()
    moved = Launcher(jobs.server, tmp_path / "moved", jobs.model)
    shutil.copytree(jobs.run("one").path, moved.run("one").path)
    shutil.rmtree(moved.run("one").path / "checkpoints" / "step_000004")
    try:
        serving = moved.critic("one", *critic, ranks=2)
        moved.actor("one", *actor, *grid, ranks=2).finish()
        serving.finish()
    finally:
        moved.end()
    assert_close(moved.run("one"), jobs.run("one"), steps=(1, 2, 3, 4))
