"""Seconds of a GRPO step by phase, and peak memory of all processes: this toolkit against TRL's GRPO trainer, taking turns in one run.

    python benchmarks/grpo_step.py --shape tiny
    python benchmarks/grpo_step.py --shape short|long [--model DIR] [--rounds 2] [--steps 3]      (SmolLM2-135M)

Both sides: one process, no critic, the same model, prompts, lengths, groups, micro-batches and threads, one optimizer step a rollout, no
KL, a Python function as the reward. Each turn is a fresh process, whose first step is warm-up."""

import argparse
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ppo_step import Side, report
from trl_env import TRL_OF_GRPO, trl_python
from workload import CACHE, SMOLLM2, Shape, converted, machine, make_prompts, make_smollm2, make_tiny


@dataclass(frozen=True)
class GroupShape:
    """One step: `rows` responses, `group` to a prompt, both lengths exact, in tokens. micro_batch: rows of a forward pass."""

    rows: int
    group: int
    prompt: int
    response: int
    micro_batch: int


SHAPES = {
    "tiny": GroupShape(64, 8, 16, 64, 64),
    "short": GroupShape(32, 8, 32, 16, 16),
    "long": GroupShape(64, 8, 32, 128, 16),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="model, rows and lengths")
    parser.add_argument("--model", type=Path, help="Hugging Face folder instead of the shape's own model")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    parser.add_argument("--steps", type=int, default=3, help="steps a turn, the first of them warm-up")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    for name, value in asdict(SHAPES["tiny"]).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"over the shape's (tiny: {value})")
    return parser.parse_args()


def sides(policy: Path, shape: GroupShape, options: argparse.Namespace) -> dict[str, Side]:
    folder = CACHE / f"grpo-{policy.name}"
    folder.mkdir(parents=True, exist_ok=True)
    prompts = make_prompts(policy, folder, Shape(shape.rows, shape.prompt, shape.response, 0, 0))
    numbers = {**asdict(shape), "steps": options.steps, "threads": options.threads}
    common = [f"--{name.replace('_', '-')}={value}" for name, value in numbers.items()] + [f"--prompts={prompts}"]
    trl = [str(trl_python(TRL_OF_GRPO)), "benchmarks/trl_grpo.py", f"--policy={policy}", *common]
    own = [sys.executable, "benchmarks/aligner_grpo.py", f"--policy={converted(policy, folder / 'policy')}", *common]
    return {"aligner": Side(own), "trl": Side(trl), "trl, gc frozen": Side([*trl, "--freeze-gc"])}


def model_of(options: argparse.Namespace) -> Path:
    if options.model is not None:
        return options.model
    return make_tiny(CACHE / "tiny-grpo" / "hf") if options.shape == "tiny" else make_smollm2(SMOLLM2)


def main() -> None:
    options = arguments()
    given = {name: getattr(options, name) for name in asdict(SHAPES["tiny"]) if getattr(options, name) is not None}
    shape = replace(SHAPES[options.shape], **given)
    measured = sides(model_of(options).resolve(), shape, options)
    if options.shape != "tiny":
        del measured["trl, gc frozen"]  # a step of seconds does not notice
    print(f"{machine()}; {options.threads} threads; {options.shape}, float32, {shape}")
    for number in range(options.rounds):
        for name, side in measured.items():
            side.turn(options.threads)
            print(f"round {number + 1}, {name}: last step {side.steps[-1]['step']:.3f} s", file=sys.stderr, flush=True)
    print(report(measured))
    ours, theirs = (max(measured[name].peak_bytes) for name in ("aligner", "trl"))
    ratio = measured["trl"].median("step") / measured["aligner"].median("step")
    print(f"TRL's step over ours: {ratio:.2f}; our peak memory over TRL's: {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
