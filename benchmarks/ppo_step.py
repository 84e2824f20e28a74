"""Seconds of a PPO step by phase, and peak memory of all processes: this toolkit against TRL's PPO trainer, taking turns in one run.

    python benchmarks/ppo_step.py --shape tiny
    python benchmarks/ppo_step.py --shape smollm2 [--model DIR] [--dtype float32|bfloat16] [--rounds 3] [--steps 3]

Both sides: the same model, prompts, lengths, mini-batches and threads; a critic that starts from the reward model's backbone; a reward
model that scores every response; one process. TRL runs as it is, and with its garbage collection frozen (gc.freeze() before training).
Each turn is a fresh process, whose first step is warm-up."""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from trl_env import trl_python
from workload import ROOT, SHAPES, Shape, Workload, converted, machine, prepare

PHASES = ("generate", "score", "train", "other", "step", "cpu")  # cpu: seconds of all cores in a step
WARM_UP = 1


@dataclass
class Side:
    """What was measured of one contender, over its turns."""

    command: list[str]
    steps: list[dict[str, float]] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)

    def median(self, phase: str) -> float:
        return statistics.median(step[phase] for step in self.steps)

    def turn(self, threads: int) -> None:
        """One process from start to end."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        process = subprocess.Popen(
            self.command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        memory = TreeMemory(process.pid)
        output, errors = process.communicate()
        if process.returncode:
            raise SystemExit(f"{' '.join(self.command)}\nended with {process.returncode}:\n{errors[-4000:]}")
        told = [json.loads(line.removeprefix("STEP ")) for line in output.splitlines() if line.startswith("STEP ")]
        self.steps += told[WARM_UP:]
        self.peak_bytes.append(memory.peak())


class TreeMemory:
    """The sum of the peak resident sets of a process and its descendants, as the kernel keeps them; read five times a second."""

    def __init__(self, pid: int) -> None:
        self._pid, self._peaks, self._stop = pid, {}, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            self._read(self._pid)

    def _read(self, pid: int) -> None:
        place = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError, StopIteration):  # it ended while it was read
            lines = (place / "status").read_text().splitlines()
            peak = next(line for line in lines if line.startswith("VmHWM:"))
            self._peaks[pid] = int(peak.split()[1]) * 1024
            for children in (place / "task").glob("*/children"):
                for child in children.read_text().split():
                    self._read(int(child))

    def peak(self) -> int:
        """Bytes."""
        self._stop.set()
        self._thread.join()
        return sum(self._peaks.values())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="model, rows and lengths")
    parser.add_argument("--model", type=Path, help="Hugging Face folder instead of the shape's own model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--steps", type=int, default=4, help=f"steps a turn, the first {WARM_UP} of them warm-up")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="also write every step's seconds here")
    for name, value in asdict(SHAPES["tiny"]).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"over the shape's (tiny: {value})")
    return parser.parse_args()


def sides(work: Workload, shape: Shape, options: argparse.Namespace) -> dict[str, Side]:
    numbers = {**asdict(shape), "steps": options.steps, "threads": options.threads}
    common = [f"--{name.replace('_', '-')}={value}" for name, value in numbers.items()]
    common += [f"--dtype={options.dtype}", f"--prompts={work.prompts}"]
    ours = {
        "policy": converted(work.policy, work.folder / "policy"),
        "reward": converted(work.reward, work.folder / "reward"),
    }
    trl = [str(trl_python()), "benchmarks/trl_ppo.py", f"--policy={work.policy}", f"--reward={work.reward}", *common]
    own = [sys.executable, "benchmarks/aligner_ppo.py", *(f"--{k}={v}" for k, v in ours.items()), *common]
    return {"aligner": Side(own), "trl": Side(trl), "trl, gc frozen": Side([*trl, "--freeze-gc"])}


def report(measured: dict[str, Side]) -> str:
    """Medians over all turns, as a markdown table; `ratio`: that side's step over ours."""
    ours = measured["aligner"]
    lines = [
        "| side | " + " | ".join(f"{p} (s)" for p in PHASES) + " | step, lowest to highest | peak MiB | step ratio |"
    ]
    lines.append("|---|" + "---|" * (len(PHASES) + 3))
    for name, side in measured.items():
        steps = [s["step"] for s in side.steps]
        cells = [f"{side.median(p):.3f}" for p in PHASES] + [f"{min(steps):.3f} to {max(steps):.3f}"]
        cells += [f"{max(side.peak_bytes) / 2**20:.0f}", f"{side.median('step') / ours.median('step'):.2f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    options = arguments()
    own = {name: getattr(options, name) for name in asdict(SHAPES["tiny"]) if getattr(options, name) is not None}
    shape = replace(SHAPES[options.shape], **own)
    measured = sides(prepare(options.shape, shape, options.model), shape, options)
    print(f"{machine()}; {options.threads} threads; {options.shape}, {options.dtype}, {shape}")
    for number in range(options.rounds):
        for name, side in measured.items():
            side.turn(options.threads)
            print(f"round {number + 1}, {name}: last step {side.steps[-1]['step']:.3f} s", file=sys.stderr, flush=True)
    print(report(measured))
    details = {key for step in measured["aligner"].steps for key in step} - set(PHASES)
    print("aligner in detail:", ", ".join(f"{key} {measured['aligner'].median(key):.3f}" for key in sorted(details)))
    if options.json:
        options.json.write_text(json.dumps({name: asdict(side) for name, side in measured.items()}, indent=1))


if __name__ == "__main__":
    main()
