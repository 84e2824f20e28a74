"""Seconds of the demo's step on each of its grids and with each number of threads a rank: how the default was chosen.

    python benchmarks/grids.py [--model DIR] [--steps 4] [--rounds 1] [--grids one dp2 pp2 tp3] [--threads 1 2/1 2]

Both jobs run as in `make demo`, without validation and checkpoints; the first step is warm-up, and all steps train the policy. `2/1` is
two threads a rank and one while it trains, of both jobs. The alternatives take turns, `rounds` of them."""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
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
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--grids", nargs="+", choices=GRIDS, default=list(GRIDS))
    parser.add_argument(
        "--threads", nargs="+", default=["2/1"], help="a rank of either job: ALL, or OTHERWISE/TRAINING"
    )
    parser.add_argument("--both", nargs="*", default=[], metavar="OVERRIDE", help="further settings of both jobs")
    return parser.parse_args()


def command(grid: str, threads: str, folder: str, options: argparse.Namespace) -> list[str]:
    ranks, overrides = GRIDS[grid]
    general, _, training = threads.partition("/")
    actor = ["validation.every=0", "checkpoint.at_end=false", "ppo.critic_warmup_steps=0", *overrides]
    both = ["run.name=grid", f"run.dir={folder}", f"run.max_steps={options.steps}"]
    both += [f"model.checkpoint={options.model.resolve()}"]
    both += [f"parallel.threads={general}", f"parallel.training_threads={training or general}", *options.both]
    launch = [sys.executable, "launch/local/ppo.py", "--actor-config=demo_actor", "--critic-config=demo_critic"]
    launch += [f"--actor-ranks={ranks}", f"--critic-log={folder}/critic.out"]
    return [*launch, "--actor", *actor, "--both", *both]


def measure(grid: str, threads: str, options: argparse.Namespace) -> list[dict]:
    """metrics.jsonl of one run, without its first step."""
    busy = Busy()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command(grid, threads, folder, options), cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{grid} with {threads} threads ended with {done.returncode}:\n{done.stderr[-4000:]}")
        rows = (Path(folder) / "grid" / "metrics.jsonl").read_text().splitlines()
    others = busy.by_others()
    return [{**row, "others": others} for row in map(json.loads, rows) if row["step"] > 1]


class Busy:
    """Cores that other processes kept busy since this was made: a table is worth as much as the machine was idle."""

    def __init__(self) -> None:
        self.before = self._now()

    def _now(self) -> tuple[float, float, float]:
        """Seconds: of the clock, of all processes of the machine on its cores, of this one's ended children."""
        user, nice, system, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
        mine = resource.getrusage(resource.RUSAGE_CHILDREN)
        every = (user + nice + system) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), every, mine.ru_utime + mine.ru_stime

    def by_others(self) -> float:
        clock, every, mine = (now - then for now, then in zip(self._now(), self.before, strict=True))
        return max(0.0, every - mine) / clock


def main() -> None:
    options = arguments()
    measured = {(grid, threads): [] for grid in options.grids for threads in options.threads}
    for number in range(options.rounds):
        for (grid, threads), rows in measured.items():
            rows += measure(grid, threads, options)
            last = f"last step {rows[-1]['time/step']:.2f} s, {rows[-1]['others']:.2f} cores busy with other processes"
            print(f"round {number + 1}, {grid}, threads {threads}: {last}", file=sys.stderr, flush=True)
    count = options.rounds * (options.steps - 1)
    print(
        f"{machine()}; OMP_WAIT_POLICY {os.environ.get('OMP_WAIT_POLICY', 'passive')}; median seconds of {count} steps\n"
    )
    print("| grid | threads a rank | " + " | ".join(PHASES) + " | cores busy with other processes |")
    print("|" + "---|" * (len(PHASES) + 3))
    for (grid, threads), rows in measured.items():
        medians = [statistics.median(row[f"time/{phase}"] for row in rows) for phase in PHASES]
        medians.append(statistics.median(row["others"] for row in rows))
        print(f"| {grid} | {threads} | " + " | ".join(f"{m:.2f}" for m in medians) + " |")


if __name__ == "__main__":
    main()
