"""A reward model that tells right from wrong solutions of school maths, from SmolLM2: accuracy on held-out prompts.

    python benchmarks/gsm8k_reward.py --pairs DIR/preference_pairs.jsonl

The file's pairs (right, wrong) of one prompt become one ranking of its solutions; each is then computed once a step, not once a pair."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / ".cache" / "SmolLM2-135M-Instruct"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="further settings of train_reward_model.py")
    return parser.parse_args()


def rankings(pairs: list[dict]) -> list[dict]:
    """One line a prompt: every solution once, right ones of rank 0 and wrong ones of rank 1."""
    found: dict[str, dict[str, int]] = {}
    for pair in pairs:
        solutions = found.setdefault(pair["prompt"], {})
        solutions[pair["chosen"]] = 0
        solutions.setdefault(pair["rejected"], 1)
    return [
        {"prompt": p, "responses": list(s), "ranks": list(s.values())}
        for p, s in found.items()
        if set(s.values()) == {0, 1}
    ]


def overrides(options: argparse.Namespace, folder: Path) -> list[str]:
    """The command line of train_reward_model.py; runs lie under `folder`."""
    return [
        f"run.dir={folder}",
        "run.name=gsm8k",
        f"model.checkpoint={options.model}",
        "model.dtype=float32",
        f"parallel.threads={options.threads}",
        f"data.train={folder}/rankings.jsonl",
        "model.num_layers=10",
        "data.chat=false",
        "data.holdout=0.3",
        "data.max_length=272",
        "train.mini_batch_size=4",
        "train.micro_batch_tokens=4096",
        "optim.lr=1e-4",
        "optim.warmup_steps=5",
        "optim.schedule=linear",
        "optim.decay_steps=106",  # one epoch of the file
        "run.max_steps=106",
        "validation.every=106",
        "preference.centre=0.01",
        "preference.head_lr_multiplier=10",
        "checkpoint.at_end=false",
        "checkpoint.every=0",
        "logging.tensorboard=false",
        *options.overrides,
    ]


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = rankings([json.loads(line) for line in options.pairs.read_text().splitlines()])
        (folder / "rankings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = [sys.executable, str(ROOT / "train_reward_model.py"), *overrides(options, folder)]
        subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr)
        rows = [json.loads(line) for line in (folder / "gsm8k" / "metrics.jsonl").read_text().splitlines()]
    shown = ("accuracy", "accuracy_ci95", "margin", "loss", "calibration_error", "prompts")
    for row in (row for row in rows if "val/accuracy" in row):
        told = ", ".join(f"{key} {row[f'val/{key}']:.3f}" for key in shown)
        print(f"step {row['step']} (epoch {row['epoch']:.2f}): {told}")
    print(f"{sum(row['time/step'] for row in rows):.0f} s")


if __name__ == "__main__":
    main()
