"""train_sft.py as a user runs it: what a run leaves, that it learns, that it comes back, what its checkpoint is good for, bad input."""

import json
import math
import shutil
import signal
import time
from pathlib import Path

import pytest

from aligner.runtime.exit_codes import ExitCode
from tests.jobs.harness import DEADLINE, Launcher, read_jsonl
from tests.jobs.test_bad_input import assert_refused
from tests.jobs.test_layouts import BY_NATURE

SCRIPT = "train_sft.py"
STEPS = 9


def told(n: int) -> dict:
    """A row: a question with one answer, every third as a conversation of two turns with a system message."""
    question, answer = f"Say {n % 5}", f"{n % 5}."
    if n % 3:
        return {"prompt": question, "completion": answer}
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hi."), ("user", question), ("assistant", answer)]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def write_data(folder: Path) -> tuple[str, str]:
    """20 rows to train on, 6 held-out ones."""
    for name, rows in (("train", range(20)), ("held_out", range(30, 36))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(told(n)) + "\n" for n in rows))
    return f"data.train={folder}/train.jsonl", f"data.validation={folder}/held_out.jsonl"


def sft(jobs: Launcher, name: str, *overrides: str, **how):
    """9 rows a step of 20, four epochs: steps 3, 5 and 7 span two of them, and the last has the 8 rows that are left."""
    settings = [
        f"run.dir={jobs.runs}", f"run.name={name}", f"model.checkpoint={jobs.model}", "model.dtype=float32",
        "parallel.threads=1", "parallel.timeout=120", "train.mini_batch_size=9", "train.epochs=4", "data.max_length=128",
        "optim.lr=1e-2", "optim.schedule=cosine", "optim.warmup_steps=1", "optim.decay_steps=40", "checkpoint.every=2",
        "validation.every=5", "logging.tensorboard=false",
    ]  # fmt: skip
    return jobs.start(SCRIPT, *settings, *overrides, **how)


GENERATES = ("validation.generations=3", "engine.max_input_len=64", "engine.max_output_len=8")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> tuple[str, str]:
    return write_data(tmp_path_factory.mktemp("sft"))


@pytest.fixture(scope="module")
def whole(shared_jobs: Launcher, data):
    """The run that nothing disturbs: packed, on one rank."""
    job = sft(shared_jobs, "whole", *data, *GENERATES, "sft.packing=true").finish()
    return shared_jobs.run("whole"), job


def test_what_a_run_leaves(whole):
    run, job = whole
    assert run.steps == list(range(STEPS + 1)) and "Traceback" not in job.stderr
    for row in run.rows:
        assert all(math.isfinite(value) for value in row.values())
    last = run.rows[-1]
    assert (last["rows_consumed"], last["epoch"]) == (80, 4.0)
    assert [row["rows_consumed"] for row in run.rows] == [*range(0, 73, 9), 80]
    validated = [row for row in run.rows if "val/loss" in row]
    assert [row["step"] for row in validated] == [0, 5, 9]
    for row in validated:
        assert row["val/perplexity"] == pytest.approx(math.exp(row["val/loss"]))
        assert 0 <= row["val/token_accuracy"] <= 1 and row["val/rows"] == 6
    assert validated[-1]["val/loss"] < 0.5 * validated[0]["val/loss"], "it does not learn"
    assert run.rows[1]["train/loss"] == pytest.approx(validated[0]["val/loss"], rel=0.2)  # the same kind of rows
    assert run.pairs == ["step_000008", "step_000009"]
    record = json.loads((run.path / "run_sft.json").read_text())
    assert (record["train_rows"], record["held_out_rows"], record["steps"], record["complete"]) == (20, 6, 9, True)
    page = (run.path / "report.html").read_text()
    assert "Held-out perplexity" in page and ">Loss<" in page and f"report: {run.path}/report.html" in job.stdout
    assert (run.path / "config_sft.yaml").is_file()


def test_held_out_prompts_are_answered(whole):
    run, _ = whole
    for step in (0, 5, 9):
        samples = run.validation(step)
        assert [s["sample_id"] for s in samples] == [0, 1, 2]
        assert [s["origin"][-2:] for s in samples] == [
            ":2",
            ":3",
            ":5",
        ]  # the conversations are too long for the engine
        assert "score" not in samples[0] and samples[0]["certificate"].startswith("sampled:")
    assert run.rows[-1]["val/response_length"] == pytest.approx(sum(len(s["response_ids"]) for s in samples) / 3)
    assert run.rows[-1]["val/finished"] == sum(s["finish_reason"] == "stop" for s in samples) / 3


@pytest.mark.faults
def test_padded_rows_and_two_ranks_give_the_same_run(whole, shared_jobs: Launcher, data):
    run, _ = whole
    sft(shared_jobs, "padded", *data, "train.micro_batch_size=3", "parallel.tensor=2", ranks=2).finish()
    other = shared_jobs.run("padded")
    for row, wanted in zip(other.rows, run.rows, strict=True):
        for key in ("train/loss", "train/grad_norm", "val/loss"):
            assert (key in row) == (key in wanted)
            if key in row:
                assert row[key] == pytest.approx(wanted[key], rel=1e-3), f"step {row['step']}, {key}"


def test_a_killed_run_continues_exactly(whole, shared_jobs: Launcher, data):
    run, _ = whole
    settings = (*data, *GENERATES, "sft.packing=true")
    assert sft(shared_jobs, "killed", *settings, fault="trained:5").wait() == [-9]
    assert shared_jobs.run("killed").pairs == ["step_000002", "step_000004"]
    sft(shared_jobs, "killed", *settings).finish()
    found = shared_jobs.run("killed")
    for row, wanted in zip(found.rows, run.rows, strict=True):
        differ = {k for k in row.keys() | wanted.keys() if not k.startswith(BY_NATURE) and row.get(k) != wanted.get(k)}
        assert not differ, f"step {row['step']}: {sorted(differ)}"
    assert found.validation(9) == run.validation(9)
    again = sft(shared_jobs, "killed", *settings).finish()
    assert "has its 9 steps already" in again.stderr


def test_it_stops_when_told_with_a_checkpoint(shared_jobs: Launcher, data):
    job = sft(
        shared_jobs,
        "told",
        *data,
        "train.epochs=null",
        "run.max_steps=100000",
        "validation.every=0",
        "checkpoint.every=0",
    )
    metrics, until = shared_jobs.run("told").path / "metrics.jsonl", time.monotonic() + DEADLINE
    while not (metrics.exists() and metrics.read_text().count("\n") > 2):
        assert time.monotonic() < until, job.tail()
        time.sleep(0.05)
    job.signal(signal.SIGTERM)
    assert job.wait() == [ExitCode.REQUEUE], job.tail()
    run = shared_jobs.run("told")
    assert run.pairs == [f"step_{run.steps[-1]:06d}"] and "the same command continues it" in job.stdout


def test_its_checkpoint_is_a_model(whole, shared_jobs: Launcher, tmp_path):
    """generate.py answers as the run's last validation did; the policy of a critic-free run begins where it ended."""
    run, _ = whole
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps(told(31)).replace('"completion"', '"answer"') + "\n")
    options = ("--prompts", str(asked), "--greedy", "--max_output_len", "8", "--dtype", "float32")
    (answer,) = read_jsonl(shared_jobs.start("generate.py", "--checkpoint", str(run.path), *options).finish().output)
    assert answer["text"] == run.validation(9)[0]["response"] and answer["finish_reason"] == "stop"
    checkpoint = run.path / "checkpoints" / "step_000009" / "sft"
    ppo = ("critic.place=none", "ppo.advantage=reinforce_baseline", "ppo.truncation=ignore", "reward.place=actor")
    steps = ("run.max_steps=1", "ppo.critic_warmup_steps=0", "validation.every=0", f"model.checkpoint={checkpoint}")
    shared_jobs.actor("after", *ppo, *steps).finish()
    assert shared_jobs.run("after").rows[-1]["weight_version"] == 1 and shared_jobs.run("after").pairs == [
        "step_000001"
    ]
    shutil.rmtree(shared_jobs.run("after").path)


@pytest.mark.faults
def test_real_problems(jobs: Launcher, shared_data, tmp_path):
    """gsm8k as prompts and completions, a letter a token: most are longer than this model, and are cut; the record counts them."""
    lines = shared_data("gsm8k/gsm8k_train.jsonl").read_text().splitlines()[:60]
    rows = [{"prompt": p["question"], "completion": p["answer"]} for p in map(json.loads, lines)]
    file = tmp_path / "gsm8k.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (
        f"data.train={file}",
        "data.holdout=0.2",
        "data.overlong=truncate",
        "data.max_length=256",
        "run.max_steps=2",
    )
    sft(jobs, "gsm8k", *settings, "sft.packing=true").finish()
    run = jobs.run("gsm8k")
    record = json.loads((run.path / "run_sft.json").read_text())
    long = [row for row in rows if len(row["prompt"].encode()) + len(row["completion"].encode()) > 256]
    assert record["train_rows"] + record["held_out_rows"] + record["dropped_rows"] == 60
    assert len(long) - 5 <= record["truncated_rows"] + record["dropped_rows"] <= 60 and record["truncated_rows"] > 0
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]


def test_what_is_refused(jobs: Launcher, data, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(told(1)) + "\n" + json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    cases = {
        "malformed": ([f"data.train={bad}"], [f"{bad}:2: `messages` has no turn of the assistant"]),
        "absent": (["data.train=/nowhere/rows.jsonl"], ["data.train=/nowhere/rows.jsonl: there is no such file"]),
        "too long for the model": ([data[0], "data.max_length=4096"], ["data.max_length=4096 exceeds the 256 positions"]),
    }  # fmt: skip
    for what, (overrides, texts) in cases.items():
        assert_refused(sft(jobs, what.replace(" ", "_"), *overrides), ExitCode.CONFIGURATION, *texts)
