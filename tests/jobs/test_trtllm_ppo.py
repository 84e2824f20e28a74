"""PPO steps with engine.kind=trtllm against the stand-in: the real entry script, refits included."""

import pytest

from tests.fake_trtllm import FAKE

SETTINGS = (
    "engine.kind=trtllm",
    "engine.offload_during_training=true",
    "engine.memory_fraction=0.3",
    "engine.timeout=100",
    "refit.bucket_mb=1",
    "refit.certify=full",
)


@pytest.fixture(scope="module")
def runs(shared_jobs):
    shared_jobs.alone("trtllm", *SETTINGS, packages=FAKE).finish()
    shared_jobs.alone("torch").finish()
    return shared_jobs.run("trtllm"), shared_jobs.run("torch")


def test_steps_are_made_and_log_probs_agree(runs):
    ours, theirs = runs
    assert ours.steps == theirs.steps == [0, 1, 2, 3] and ours.pairs == theirs.pairs
    for row in ours.rows[1:]:
        assert row["drift/max"] < 1e-3, "the engine's log-probs are the policy's: it holds its weights"
    assert [s["weight_version"] for s in ours.samples(3)] == [1] * 8


def test_greedy_responses_are_the_torch_engines(runs):
    """Before training both hold the same weights."""
    ours, theirs = runs
    keys = ("sample_id", "response_ids", "finish_reason", "parts")
    found, expected = ([[s[key] for key in keys] for s in run.validation(0)] for run in runs)
    assert found == expected and len(found) == 8


def test_without_the_package_the_job_says_what_to_install(shared_jobs):
    job = shared_jobs.alone("absent", "engine.kind=trtllm", "engine.timeout=100")
    assert job.wait() == [2]
    assert "engine.kind=trtllm needs TensorRT-LLM" in job.stderr and "engine.kind=torch works without it" in job.stderr
    assert "Traceback" not in job.stderr


@pytest.mark.faults
def test_two_ranks_share_an_engine_beside_a_served_critic(shared_jobs, runs):
    """TP2 with one generation group of two: the greedy responses before training are those of one rank's torch engine."""
    critic = shared_jobs.critic("shared")
    shared_jobs.actor("shared", "parallel.tensor=2", *SETTINGS, ranks=2, packages=FAKE).finish()
    critic.finish()
    ours, theirs = shared_jobs.run("shared"), runs[1]
    assert ours.steps == theirs.steps
    assert [s["response_ids"] for s in ours.validation(0)] == [s["response_ids"] for s in theirs.validation(0)]
    assert all(row["drift/max"] < 1e-3 for row in ours.rows[1:])
