"""The whole road of launch/local/pipeline.py with a tiny model: broken off in the middle, it goes on and ends with its report."""

import json
import os
import subprocess
import sys
import time

import pytest

from tests.jobs.harness import DEADLINE, REPO, environment

SMALL = ("--demonstrations", "96", "--pair-problems", "64", "--samples", "16", "--held-out", "40")
COMMON = ("model.dtype=float32", "parallel.threads=1", "logging.tensorboard=false")
RL = ("run.max_steps=2", "checkpoint.every=1", "engine.max_input_len=48")
# A random model of bytes: after these steps its answers are short numbers, some of which are right.
OVERRIDES = {
    "sft": (*COMMON, "optim.lr=1e-2", "train.epochs=20"),
    "reward-model": (*COMMON, "model.num_layers=null", "optim.lr=1e-3", "train.epochs=1"),
    "actor": (*COMMON, *RL, "ppo.rollout_batch_size=8", "ppo.mini_batch_size=4", "ppo.critic_warmup_steps=1"),
    "critic": ("model.dtype=float32", "parallel.threads=1", "critic.mini_batch_size=4"),
    "critic-free": (*COMMON, *RL),
}


def pipeline(model, folder):
    command = [
        sys.executable,
        str(REPO / "launch/local/pipeline.py"),
        "--model",
        str(model),
        "--folder",
        str(folder),
        *SMALL,
    ]
    for job, overrides in OVERRIDES.items():
        command += [f"--{job}", *overrides]
    return {"args": command, "env": environment(), "cwd": "/", "text": True}


@pytest.mark.faults
def test_the_whole_road_is_gone_on_with_after_a_kill(tiny_model, tmp_path):
    folder = tmp_path / "road"
    how = pipeline(tiny_model, folder)
    first = subprocess.Popen(**how, stdout=subprocess.DEVNULL, start_new_session=True)
    until = time.monotonic() + DEADLINE
    while not (folder / "sft/checkpoints").is_dir():  # SFT is over, or nearly
        assert first.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    os.killpg(first.pid, 9)
    first.wait()
    done = subprocess.run(**how, capture_output=True, timeout=2 * DEADLINE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    record = json.loads((folder / "stages.json").read_text())
    assert len(record) == 10 and all(stage["complete"] for stage in record.values())
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary) == ["base", "sft", "ppo", "critic_free"]
    for name, stage in summary.items():
        rows = [json.loads(line) for line in (folder / f"answers/{name}_sampled_judged.jsonl").read_text().splitlines()]
        asked = [json.loads(line) for line in (folder / "data/held_out.jsonl").read_text().splitlines()]
        right = sum(row["text"].strip() == asked[row["index"]]["problem"]["answer"] for row in rows)
        assert (stage["n"], len(rows)) == (40, 4 * 40) and stage["seconds"] > 0
        assert stage["accuracy"] >= right / len(rows)  # the verifier also reads "7x"
        assert stage["ci95"][0] <= stage["accuracy"] <= stage["ci95"][1]
    assert all(row["score"] is not None for row in map(json.loads, (folder / "ppo/rollouts/step_2.jsonl").open()))
    assert "report.html" in done.stdout and (folder / "report.html").is_file()
    again = subprocess.run(**how, capture_output=True, timeout=DEADLINE)
    assert again.returncode == 0 and again.stdout.count(": complete (") == 10
