"""What is refused, and how: one clear sentence on stderr, a documented exit code, no traceback, no process left behind."""

import json
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from aligner.runtime.exit_codes import ExitCode
from tests.jobs.harness import DEADLINE, Job, Launcher, free_port, user_data

SENTENCE = 700  # characters of a sentence and the values in it, paths included


def assert_refused(job: Job, code: int, *texts: str) -> None:
    codes = job.wait()
    assert code in codes and set(codes) <= {code, -signal.SIGTERM}, job.tail()  # a launcher ends the ranks that wait
    assert "Traceback" not in job.stderr + job.stdout, job.tail()
    said = [line for line in job.stderr.splitlines() if not line.startswith(("INFO ", "WARNING ", "(traceback: "))]
    assert said and said[0].startswith("error: "), job.tail()
    for text in texts:
        assert text in job.stderr, job.tail()
    assert len("".join(said)) < SENTENCE, job.tail()
    assert job.leftovers() == []


# ---- before any model is built


def test_settings_that_cannot_be(jobs: Launcher, tmp_path):
    cases = {
        "an unknown key": (["ppo.lamda=0.9"], ["ppo.lamda", "ppo.lam"]),
        "a missing checkpoint": (["model.checkpoint=/nowhere/model"], ["model.checkpoint=/nowhere/model"]),
        "an impossible grid": (["parallel.tensor=3"], ["parallel.tensor", "3", "1"]),
        "no file of the reward function": (
            ["reward.kind=function", "reward.function=/nowhere/reward.py:f"],
            ["/nowhere/reward.py"],
        ),
        "another Hugging Face folder": ([f"model.checkpoint={jobs.model.parent / 'hf'}"], ["model_config.yaml"]),
    }
    for what, (overrides, texts) in cases.items():
        print(what)
        assert_refused(jobs.actor(what.replace(" ", "_"), *overrides), ExitCode.CONFIGURATION, *texts)


def test_a_port_that_is_taken_is_told_before_the_model_is_read(jobs: Launcher, tmp_path):
    """The checkpoint has no weights: reading them would be told instead."""
    hollow = tmp_path / "hollow"
    shutil.copytree(jobs.model, hollow, ignore=shutil.ignore_patterns("model_weights"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job = jobs.critic("taken", f"model.checkpoint={hollow}", f"serving.port={port}")
        assert_refused(job, ExitCode.CONFIGURATION, f"serving.port={port} cannot be bound on 127.0.0.1")


def test_a_grid_that_does_not_divide_the_heads(jobs: Launcher):
    """Refused on every rank; rank 0 alone speaks."""
    job = jobs.actor("grid", "parallel.tensor=4", ranks=4)
    assert_refused(
        job, ExitCode.CONFIGURATION, "num_query_groups must be a multiple of parallel.tensor: 2 is not one of 4"
    )
    assert "[rank" not in job.stderr


def test_prompts_that_cannot_be_read(jobs: Launcher, tmp_path):
    data, reward = user_data(tmp_path, prompts=4)
    train = tmp_path / "train.jsonl"
    lines = train.read_text().splitlines()
    train.write_text("\n".join([lines[0], '{"prompt": 7}', lines[1], "{oops", lines[2]]))
    more = (*data, *reward, "ppo.advantage=reinforce_baseline", "ppo.critic_warmup_steps=0")
    job = jobs.actor("malformed", *more)
    assert_refused(job, ExitCode.CONFIGURATION, f"{train}:2", f"{train}:4", "2 of 5 lines")
    train.write_text("\n".join(lines))
    job = jobs.actor("overlong", *more, "engine.max_input_len=4", "data.overlong=refuse")
    assert_refused(job, ExitCode.CONFIGURATION, "engine.max_input_len=4", f"{train}:1", "data.overlong")
    job = jobs.actor("overlong_dropped", *more, "engine.max_input_len=4", "data.overlong=drop")
    assert_refused(job, ExitCode.CONFIGURATION, "engine.max_input_len=4")


# ---- while models are built


def test_a_checkpoint_of_something_else(jobs: Launcher, tmp_path):
    """Its configuration says layers that its weights do not have."""
    foreign = tmp_path / "foreign"
    shutil.copytree(jobs.model, foreign)
    config = (foreign / "model_config.yaml").read_text()
    assert "num_layers: 4" in config
    (foreign / "model_config.yaml").write_text(config.replace("num_layers: 4", "num_layers: 6"))
    job = jobs.alone("layers", f"model.checkpoint={foreign}")
    assert_refused(job, ExitCode.CONFIGURATION, str(foreign), "decoder.layers", "does not fit")


def test_a_critic_that_is_not_there(jobs: Launcher):
    port = free_port()
    job = jobs.actor("nobody", f"critic.endpoint=127.0.0.1:{port}")
    assert_refused(job, ExitCode.CONTRACT, f"127.0.0.1:{port}", "critic.endpoint", "serve_ppo_critic.py")


# ---- while it runs


def test_a_reward_function_that_raises(jobs: Launcher, tmp_path):
    data, _ = user_data(tmp_path, prompts=8)
    reward = ("reward.kind=function", f"reward.function={tmp_path}/reward.py:raises", "reward.format_credit=0.0")
    job = jobs.alone("raises", *data, *reward, "validation.every=0", critic=reward)
    assert_refused(job, ExitCode.FAULT, "the reward of sample ", "LookupError: no such answer")


def test_a_disk_that_fills_up_while_saving(jobs: Launcher):
    """A file size limit, which is a real one. The pair before it stays whole, and the run continues where there is room."""
    jobs.alone("full", "run.max_steps=2").finish()
    job = jobs.alone("full", largest_file=100_000)
    assert_refused(
        job,
        ExitCode.STORAGE,
        "the checkpoint of step 3 could not be written",
        "no space left",
        str(jobs.run("full").path),
    )
    assert jobs.run("full").pairs == ["step_000002"]
    assert jobs.run("full").steps == [0, 1, 2, 3]


# ---- one served critic, and what comes its way


def test_a_tokenizer_that_differs_then_stops_and_continues(jobs: Launcher, tmp_path):
    """The critic job refuses a stranger and serves on; its own actor is stopped by SIGTERM, started again, held against a second
    one of its name, and stopped by Ctrl-C."""
    serving = jobs.critic("stops")
    other = with_other_tokenizer(jobs.model, tmp_path / "other")
    stranger = jobs.actor("stops", f"model.checkpoint={other}")
    assert_refused(stranger, ExitCode.CONTRACT, "the tokenizers differ", "model.checkpoint")

    endless = ("run.max_steps=100000", "validation.every=0")
    first = jobs.actor("stops", *endless)
    wait_for_step(jobs, first, 2)
    second = jobs.actor("stops", *endless)
    assert_refused(second, ExitCode.CONFIGURATION, f"pid {first.pids[0]}", "run.name")
    first.signal(signal.SIGTERM)
    assert first.wait() == [ExitCode.REQUEUE], first.tail()
    saved = int(jobs.run("stops").pairs[-1].removeprefix("step_"))
    assert saved == jobs.run("stops").steps[-1]

    again = jobs.actor("stops", *endless)
    wait_for_step(jobs, again, saved + 2)
    again.signal(signal.SIGINT)
    assert again.wait() == [ExitCode.INTERRUPTED], again.tail()
    steps = jobs.run("stops").steps
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= saved + 2
    for job in (first, again):
        assert "Traceback" not in job.stderr and job.leftovers() == []

    serving.signal(signal.SIGTERM)
    assert serving.wait() == [ExitCode.REQUEUE], serving.tail()
    assert serving.leftovers() == []


@pytest.mark.faults
def test_run_max_time_ends_both_jobs_in_time_and_the_actor_continues(jobs: Launcher):
    limit = ("run.max_time=0-00:00:25", "run.max_time_margin=10")
    serving = jobs.critic("limited", *limit, "serving.drain_timeout=5")
    first = jobs.alone("limited", "run.max_steps=100000", "validation.every=0", *limit)
    assert first.wait(60) == [ExitCode.REQUEUE], first.tail()
    run = jobs.run("limited")
    assert run.pairs[-1] == f"step_{run.steps[-1]:06d}" and "run.max_time=0-00:00:25 is over in " in first.stderr
    assert serving.wait(60) == [ExitCode.REQUEUE], serving.tail()
    assert (
        "run.max_time=0-00:00:25 is over in " in serving.stderr and "no actor is there to save a pair" in serving.stderr
    )
    last = run.steps[-1] + 2
    jobs.alone("limited", f"run.max_steps={last}", "validation.every=0", *limit).finish()
    assert run.steps == list(range(1, last + 1))


def with_other_tokenizer(model: Path, folder: Path) -> Path:
    """The same weights with a tokenizer in which two tokens changed places."""
    shutil.copytree(model, folder)
    file = folder / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    return folder


def wait_for_step(jobs: Launcher, job: Job, step: int) -> None:
    until = time.monotonic() + DEADLINE
    while max(jobs.run("stops").steps_so_far, default=-1) < step:
        assert time.monotonic() < until and job.server.code(job.pids[0]) is None, job.tail()
        time.sleep(0.1)


@pytest.mark.faults
def test_sigterm_ends_the_wait_for_a_critic_that_is_not_there(jobs: Launcher):
    job = jobs.actor("waits")
    until = time.monotonic() + 60
    while "waiting for it: the critic job's endpoint file" not in job.stderr:
        assert time.monotonic() < until, job.tail()
        time.sleep(0.1)
    job.signal(signal.SIGTERM)
    assert job.wait(20) == [ExitCode.REQUEUE], job.tail()
    assert "told to stop by SIGTERM while waiting for the critic job" in job.stderr and "Traceback" not in job.stderr


@pytest.mark.faults
def test_ctrl_c_while_it_starts(jobs: Launcher):
    job = jobs.actor("early")
    time.sleep(1)
    job.signal(signal.SIGINT)
    time.sleep(1)
    job.signal(signal.SIGINT)  # the second one does not wait
    assert job.wait(60) == [ExitCode.INTERRUPTED], job.tail()
    assert "Traceback" not in job.stderr and job.leftovers() == []
