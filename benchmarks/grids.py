"""Seconds of the demo's step on each of its grids and with each number of threads a rank: how the default was chosen.

    python benchmarks/grids.py [--model DIR] [--steps 4] [--grids one dp2 pp2 tp3] [--threads 1 2]

Both jobs run as in `make demo`, without validation and checkpoints; the first step is warm-up, and all steps train the policy."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from workload import ROOT, machine

GRIDS = {
    "one": (1, []),
    "dp2": (2, []),
    "pp2": (2, ["parallel.pipeline=2"]),
    "tp3": (3, ["parallel.tensor=3"]),
}
PHASES = ("step", "refit", "generate", "logprobs", "critic_wait", "train")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=ROOT / ".cache" / "SmolLM2-135M-Instruct", help="converted checkpoint"
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--grids", nargs="+", choices=GRIDS, default=list(GRIDS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="threads a rank, of both jobs")
    return parser.parse_args()


def measure(grid: str, threads: int, *, model: Path, steps: int) -> list[dict]:
    """metrics.jsonl of one run, without its first step."""
    ranks, overrides = GRIDS[grid]
    with tempfile.TemporaryDirectory() as folder:
        actor = ["validation.every=0", "checkpoint.at_end=false", "ppo.critic_warmup_steps=0", *overrides]
        both = ["run.name=grid", f"run.dir={folder}", f"run.max_steps={steps}"]
        both += [f"model.checkpoint={model.resolve()}", f"parallel.threads={threads}"]
        command = [sys.executable, "launch/local/ppo.py", "--actor-config=demo_actor", "--critic-config=demo_critic"]
        command += [f"--actor-ranks={ranks}", f"--critic-log={folder}/critic.out"]
        command += ["--actor", *actor, "--both", *both]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{grid} with {threads} threads ended with {done.returncode}:\n{done.stderr[-4000:]}")
        rows = (Path(folder) / "grid" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, rows) if row["step"] > 1]


def main() -> None:
    options = arguments()
    print(f"{machine()}; median seconds of {options.steps - 1} steps\n")
    print("| grid | threads a rank | " + " | ".join(PHASES) + " |")
    print("|" + "---|" * (len(PHASES) + 2))
    for grid in options.grids:
        for threads in options.threads:
            rows = measure(grid, threads, model=options.model, steps=options.steps)
            medians = [statistics.median(row[f"time/{phase}"] for row in rows) for phase in PHASES]
            print(f"| {grid} | {threads} | " + " | ".join(f"{m:.2f}" for m in medians) + " |", flush=True)


if __name__ == "__main__":
    main()
