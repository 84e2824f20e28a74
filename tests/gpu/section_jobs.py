"""PPO by the real entry script, with the critic in its process (critic.place=local) and a Python function as the reward."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_models import ROOT, half_billion_checkpoint, tiny_checkpoint

REWARD = '''
def vowels(response: str, sample: dict) -> dict:
    """The share of vowels."""
    return {"reward": sum(c in "aeiou" for c in response) / max(1, len(response)) + sample["bonus"]}
'''
EXPECTED_VERSIONS = [0, 1, 2, 3]  # after each step; the first is critic warm-up
OFFLOADS = ("optim.offload_during_generation=true", "engine.offload_during_training=true")
SHOWN = (
    "memory/peak_bytes",
    "tokens_per_second",
    "drift/mean",
    "drift/max",
    "policy/grad_norm",
    "critic/loss",
    "reward/mean",
)


def ppo(section) -> None:
    """Four steps of a tiny model in float32, everything given back between the phases; then from the checkpoint of step 2 again."""
    _, model = tiny_checkpoint(section.work, "llama")
    runs = section.work / "runs"
    settings = (
        *small_steps(rows=16, mini=8, prompt=64, response=16),
        "run.max_steps=4",
        "checkpoint.every=2",
        "ppo.critic_warmup_steps=1",
        *OFFLOADS,
    )
    critic = ("critic.mini_batch_size=8", "optim.lr=1e-3")
    train(section.work, "tiny", model, "float32", settings, critic)
    straight = rows_of(runs / "tiny")
    check_rows(section, straight, steps=[1, 2, 3, 4])
    section.at_most("drift", max(row["drift/max"] for row in straight), 1e-3)
    versions = [row["weight_version"] for row in straight]
    section.expect(versions == EXPECTED_VERSIONS, f"weight versions are {versions}, not {EXPECTED_VERSIONS}")
    section.facts["last_step"] = shown(straight[-1])
    shutil.rmtree(runs / "tiny" / "checkpoints" / "step_000004")
    train(section.work, "tiny", model, "float32", (*settings, "run.resume=must"), critic)
    resumed = rows_of(runs / "tiny")
    check_rows(section, resumed, steps=[1, 2, 3, 4])
    for key in ("reward/mean", "response/length", "kl/mean", "policy/loss", "critic/loss"):
        gap = max(abs(a[key] - b[key]) for a, b in zip(straight[2:], resumed[2:]))
        section.at_most(f"resumed/{key}", gap, 1e-3)


def ppo_half_billion(section) -> None:
    """Three steps of policy, reference and critic of half a billion parameters each, in the device's own dtype."""
    model = half_billion_checkpoint(section.work, on_gpu=section.on_gpu)
    rows, response = (64, 128) if section.on_gpu else (4, 8)
    mini = rows // 2
    settings = (
        *small_steps(rows=rows, mini=mini, prompt=64, response=response),
        "run.max_steps=3",
        "checkpoint.at_end=false",
        "ppo.micro_batch_size=16",
        *OFFLOADS,
    )
    critic = (f"critic.mini_batch_size={mini}", "critic.micro_batch_size=16", "optim.lr=1e-5")
    train(section.work, "half", model, "auto", (*settings, "optim.lr=1e-6"), critic)
    found = rows_of(section.work / "runs" / "half")
    check_rows(section, found, steps=[1, 2, 3])
    section.at_most("drift", max(row["drift/mean"] for row in found), 0.1)
    section.facts["steps"] = [{**shown(row), **phases(row)} for row in found]


def small_steps(*, rows: int, mini: int, prompt: int, response: int) -> tuple[str, ...]:
    return (
        f"ppo.rollout_batch_size={rows}",
        f"ppo.mini_batch_size={mini}",
        f"engine.max_batch_size={rows}",
        f"engine.max_input_len={prompt}",
        f"engine.max_output_len={response}",
        "optim.lr=1e-3",
        "validation.every=0",
        "logging.tensorboard=false",
    )


def train(work: Path, name: str, model: Path, dtype: str, settings: tuple[str, ...], critic: tuple[str, ...]) -> None:
    """train_ppo_actor.py as a process of its own; raises RuntimeError where it fails."""
    data = work / "data"
    if not data.exists():
        data.mkdir()
        lines = [json.dumps({"prompt": f"Say {n}", "bonus": n % 3 / 10}) + "\n" for n in range(200)]
        (data / "train.jsonl").write_text("".join(lines))
        (data / "reward.py").write_text(REWARD)
    both = (
        f"run.dir={work / 'runs'}",
        f"run.name={name}",
        f"model.checkpoint={model}",
        f"model.dtype={dtype}",
        "parallel.timeout=120",
        "reward.kind=function",
        f"reward.function={data / 'reward.py'}:vowels",
    )
    inner = ",".join(f"'{override}'" for override in (*both, *critic))
    local = ("critic.place=local", f"critic.local_overrides=[{inner}]", f"data.prompts={data / 'train.jsonl'}")
    command = [sys.executable, str(ROOT / "train_ppo_actor.py"), *both, *local, *settings]
    code = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
    if code != 0:
        raise RuntimeError(f"train_ppo_actor.py ended with exit code {code}; see the log")


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def check_rows(section, rows: list[dict[str, Any]], *, steps: list[int]) -> None:
    section.expect([row["step"] for row in rows] == steps, f"metrics.jsonl has steps {[row['step'] for row in rows]}")
    wrong = {key for row in rows for key, value in row.items() if not math.isfinite(value)}
    section.expect(not wrong, f"not finite: {sorted(wrong)}")
    for row in rows:
        total = sum(phases(row).values())
        section.expect(
            abs(total - row["time/step"]) < 0.05 * row["time/step"] + 0.01,
            f"phases sum to {total:.2f} of {row['time/step']:.2f} s",
        )
        section.expect(not row.get("policy/skipped"), f"step {row['step']} skipped an update")


def phases(row: dict[str, Any]) -> dict[str, float]:
    """Seconds of each phase."""
    return {k: round(v, 3) for k, v in row.items() if k.startswith("time/") and k != "time/step"}


def shown(row: dict[str, Any]) -> dict[str, float]:
    return {key: float(f"{row[key]:.4g}") for key in (*SHOWN, "time/step") if key in row}
