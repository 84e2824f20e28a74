"""train_reward_model.py, as users start it: what it leaves, and a PPO run that is rewarded by the model and whose critic begins with it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from aligner.runtime.exit_codes import ExitCode
from tests.jobs.harness import DEADLINE, REPO, Launcher, environment
from tests.jobs.test_a_run import byte_token
from tests.jobs.test_bad_input import assert_refused

TRAIN = "train_reward_model.py"
SETTINGS = (
    "data.chat=false",
    "data.holdout=0.3",
    "data.max_length=128",
    "model.dtype=float32",
    "parallel.threads=1",
    "optim.lr=3e-3",
    "preference.head_lr_multiplier=10",
    "train.mini_batch_size=8",
    "train.micro_batch_size=5",
    "validation.every=2",
    "logging.tensorboard=false",
)


def pairs(folder: Path) -> Path:
    """Sums: digits are chosen, letters are rejected; and a ranking a prompt."""
    lines = []
    for a in range(6):
        for b in range(6):
            prompt = f"{a} + {b}="
            lines.append({"prompt": prompt, "chosen": str(a + b), "rejected": "xyz"[: 1 + b % 3], "margin": 0.1})
            lines.append({"prompt": prompt, "responses": ["no", str(a + b), "a"], "ranks": [2, 1, 2]})
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def both(jobs: Launcher, name: str, file: Path) -> tuple[str, ...]:
    return (
        f"run.dir={jobs.runs}",
        f"run.name={name}",
        f"model.checkpoint={jobs.model}",
        f"data.train={file}",
        *SETTINGS,
    )


def test_a_model_is_trained_and_rewards(jobs: Launcher, tmp_path):
    """The letters are told from the digits; PPO is rewarded with what Hugging Face computes of the converted model, standardised."""
    jobs.start(TRAIN, *both(jobs, "reward", pairs(tmp_path)), "run.max_steps=6").finish()
    run = jobs.run("reward")
    assert run.steps == list(range(7)) and run.pairs == ["step_000006"]
    first, last = run.rows[0], run.rows[-1]
    assert first["val/accuracy"] == 0.5 and first["val/loss"] == pytest.approx(0.693147, abs=1e-5)  # a head of zeros
    assert last["val/accuracy"] > 0.9 and last["val/loss"] < 0.5 and last["val/margin"] > 0.5
    held = {row["prompt"] for row in run.validation(6)}
    assert last["val/prompts"] == len(held) and last["val/count"] == 2 * len(held) and 4 < len(held) < 20
    assert last["train/accuracy"] > 0.9 and {"train/loss", "train/margin", "epoch", "rows_consumed"} <= last.keys()
    scores = [row["score"] for row in run.validation(6)]
    mean = sum(scores) / len(scores)
    table = json.loads((run.path / "calibration.json").read_text())
    assert table["updates"] == 6 and sum(b["weight"] for b in table["bins"]) == pytest.approx(last["val/count"])
    assert table["expected_calibration_error"] == pytest.approx(last["val/calibration_error"])
    report = (run.path / "report.html").read_text()
    assert "Calibration on held-out comparisons" in report and "Held-out accuracy" in report
    model = run.path / "checkpoints" / "step_000006" / "reward_model"
    head = yaml.safe_load((model / "model_config.yaml").read_text())["reward"]
    assert (head["attributes"], head["weights"], head["count"]) == (["reward"], [1.0], len(scores))
    assert head["mean"] == pytest.approx(mean, abs=1e-5) == pytest.approx(last["val/score"], abs=1e-5)
    assert head["std"] == pytest.approx((sum((s - mean) ** 2 for s in scores) / len(scores)) ** 0.5, abs=1e-5)
    rewards_a_policy(jobs, model, head, tmp_path)


def rewards_a_policy(jobs: Launcher, model: Path, head: dict, folder: Path) -> None:
    scored = ("reward.format_credit=0", "reward.kind=model", f"reward.checkpoint={model}", "reward.standardise=true")
    critic = (*scored, f"model.checkpoint={model}")
    settings = ("run.max_steps=2", "validation.every=0", "checkpoint.at_end=false")
    jobs.alone("rewarded", *scored, *settings, critic=critic).finish()
    rewarded = jobs.run("rewarded")
    assert rewarded.steps == [1, 2]
    command = [sys.executable, str(REPO / "convert_nemo_to_hf.py"), "--nemo_checkpoint", str(model)]
    done = subprocess.run(
        [*command, "--output_dir", str(folder / "hf")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    values = hf_scores(folder / "hf", rewarded.samples(1))
    for sample, value in zip(rewarded.samples(1), values, strict=True):
        assert sample["score"] == pytest.approx((value - head["mean"]) / head["std"], abs=1e-4)


def hf_scores(folder: Path, samples: list[dict]) -> list[float]:
    import torch
    from transformers import LlamaForSequenceClassification

    model, found = LlamaForSequenceClassification.from_pretrained(folder).eval(), []
    for sample in samples:
        tokens = [byte_token(c) for c in sample["prompt"].encode()] + sample["response_ids"]
        with torch.no_grad():
            found.append(model.score(model.model(torch.tensor([tokens])).last_hidden_state[0, -1]).item())
    return found


@pytest.mark.faults
def test_a_run_that_died_goes_on_as_if_it_had_not(jobs: Launcher, tmp_path):
    """Killed in step 5, continued from step 4: the same numbers and the same files; a regression with two attributes."""
    file = tmp_path / "attributes.jsonl"
    lines = [
        {
            "prompt": f"{n} +",
            "response": "7" * (1 + n % 5),
            "attributes": {"length": n % 5, "odd": n % 2 if n % 3 else None},
        }
        for n in range(40)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = ("preference.objective=regression", "preference.attributes={length: 1.0, odd: -0.5}", "run.max_steps=6")
    settings += ("checkpoint.every=2", "train.epochs=2")
    jobs.start(TRAIN, *both(jobs, "whole", file), *settings).finish()
    job = jobs.start(TRAIN, *both(jobs, "broken", file), *settings, fault="trained:5")
    assert set(job.wait()) == {-9}
    jobs.start(TRAIN, *both(jobs, "broken", file), *settings).finish()
    whole, broken = jobs.run("whole"), jobs.run("broken")
    timed = ("time/", "memory/", "tokens_per_second")
    plain = [[{k: v for k, v in row.items() if not k.startswith(timed)} for row in run.rows] for run in (whole, broken)]
    assert plain[0] == plain[1] and whole.steps == list(range(7))
    assert {"val/rmse/length", "val/correlation/odd", "train/rmse/length"} <= plain[0][-1].keys()
    assert whole.validation(6) == broken.validation(6)
    configs = [(r.path / "checkpoints/step_000006/reward_model/model_config.yaml").read_text() for r in (whole, broken)]
    assert configs[0] == configs[1] and yaml.safe_load(configs[0])["reward"]["weights"] == [1.0, -0.5]


def test_what_is_refused(jobs: Launcher, tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": "a", "chosen": "b"}\n')
    refused = jobs.start(TRAIN, *both(jobs, "lines", file))
    assert_refused(refused, ExitCode.CONFIGURATION, f"{file}:2: lacks `rejected`")
    unfit = jobs.start(TRAIN, *both(jobs, "unfit", file), "preference.objective=regression", "train.mini_batch_sizes=2")
    assert_refused(unfit, ExitCode.CONFIGURATION, "needs preference.attributes", "did you mean train.mini_batch_size?")
