"""One script for one GPU: what cannot be tested without one, in less than eight minutes.

    python tests/gpu/check.py [--out DIR] [--deadline 480] [--sections NAME,NAME] [--allow_cpu]

Needs torch and transformers; megatron-core, hydra-core, omegaconf and antlr4-python3-runtime are installed into a temporary folder
from tests/gpu/wheels (filled by fetch_wheels.sh) where they are missing. Every section runs in a process of its own with a time limit, so
that a CUDA error or a hang costs that section alone. One JSON line a section on stdout and in OUT/results.json, all output in
OUT/log.txt. Exits 1 where a section failed; says SKIP and exits 0 where there is no CUDA device and no --allow_cpu (tiny sizes)."""

import argparse
import contextlib
import faulthandler
import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WHEELS = {
    "megatron.core": "megatron-core",
    "hydra": "hydra-core",
    "omegaconf": "omegaconf",
    "antlr4": "antlr4-python3-runtime",
}
# name -> (module of this folder, most seconds on a GPU); the first ones matter most, should the deadline come
SECTIONS = {
    "startup": ("section_startup", 60),
    "training": ("section_training", 120),
    "engine": ("section_engine", 90),
    "throughput": ("section_engine", 90),
    "checkpoint": ("section_training", 90),
    "ppo": ("section_jobs", 150),
    "ppo_half_billion": ("section_jobs", 150),
    "profile": ("section_profile", 90),
}
CPU_LIMIT = 600  # seconds of a section with --allow_cpu
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID")


@dataclass
class Section:
    """What a section measured (`facts`, plain JSON values) and what it found wrong. work: scratch, shared by all; out: what is kept."""

    work: Path
    out: Path
    on_gpu: bool
    facts: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def expect(self, condition: bool, said: str) -> None:
        """Go on whatever is wrong: later numbers tell as much as the first failure."""
        if not condition:
            self.failures.append(said)

    def at_most(self, name: str, value: float, limit: float) -> None:
        """Note a difference, and expect it to be small (NaN is not)."""
        self.facts[name] = float(f"{value:.4g}")
        self.expect(value <= limit, f"{name} is {value:.4g}, more than {limit:g}")


def main() -> int:
    args = arguments()
    if args.section:
        return run_section(args)
    import torch

    if not torch.cuda.is_available() and not args.allow_cpu:
        print(f"SKIP (77): no CUDA device: torch {torch.__version__} sees none; --allow_cpu runs tiny sizes on the CPU")
        return 0
    # The section has a session of its own, which ends with this process only where it is told to.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "log.txt").write_text("")
    work = Path(tempfile.mkdtemp(prefix="aligner-gpu-"))
    try:
        results = run_all(args, work, on_gpu=torch.cuda.is_available())
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(table(results), flush=True)
    return 0 if all(result["ok"] for result in results) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "gpu_check", help="folder for results.json, log.txt, profile.txt"
    )
    parser.add_argument("--deadline", type=float, default=480.0, help="seconds for everything")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="which, by name, in this order")
    parser.add_argument("--allow_cpu", action="store_true", help="without CUDA: run on the CPU, tiny sizes")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := [name for name in args.sections.split(",") if name not in SECTIONS]:
        parser.error(f"--sections: {', '.join(unknown)} is none of {', '.join(SECTIONS)}")
    return args


def run_all(args: argparse.Namespace, work: Path, *, on_gpu: bool) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    environment = child_environment(install_wheels(work))
    for name in args.sections.split(","):
        left = args.deadline - (time.monotonic() - BEGAN) - 5
        limit = min(left, SECTIONS[name][1]) if on_gpu else CPU_LIMIT
        result = start_section(name, args, work, environment, limit)
        results.append(result)
        (args.out / "results.json").write_text(json.dumps(results, indent=1))
        print(json.dumps(result), flush=True)
    return results


def install_wheels(work: Path) -> Path | None:
    """Put what is missing into a folder of its own, so that the machine's packages stay as they are. None: nothing is missing."""
    missing = [package for module, package in WHEELS.items() if not importable(module)]
    if not missing:
        return None
    wheels, target = HERE / "wheels", work / "site"
    if not wheels.is_dir():
        sys.exit(f"{', '.join(missing)} missing, and there is no {wheels}: run tests/gpu/fetch_wheels.sh first")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*command, "--find-links", str(wheels), "--target", str(target), *missing], check=True)
    return target


def importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package
        return False


def child_environment(site: Path | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    path = os.pathsep.join(str(p) for p in (ROOT, site, os.environ.get("PYTHONPATH")) if p)
    return {
        **kept,
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def start_section(
    name: str, args: argparse.Namespace, work: Path, environment: dict[str, str], limit: float
) -> dict[str, Any]:
    """Run a section in a process of its own and return what it wrote, or what became of it."""
    if limit < 15:
        return {"section": name, "ok": False, "seconds": 0.0, "failures": ["not run: the deadline had come"]}
    command = [sys.executable, str(HERE / "check.py"), "--section", name, "--work", str(work), "--out", str(args.out)]
    began, result_file = time.monotonic(), work / f"{name}.json"
    with (args.out / "log.txt").open("ab+") as log:
        first = log.seek(0, os.SEEK_END)
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            code: int | None = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = None  # its stacks, where it is Python that waits, are in the log
            child.send_signal(signal.SIGUSR1)
            time.sleep(2)
        finally:
            stop(child)
        log.seek(first)
        said = log.read().decode(errors="replace")
    seconds = round(time.monotonic() - began, 1)
    result = json.loads(result_file.read_text()) if result_file.exists() else {"ok": False, "failures": []}
    if not result_file.exists():
        result["failures"] = [f"still ran after {limit:.0f} s" if code is None else f"ended with exit code {code}"]
    if not result["ok"]:
        print("\n".join([f"--- {name}: end of its output", *said.splitlines()[-40:], "---"]), flush=True)
    return {"section": name, **result, "seconds": seconds}


def stop(child: subprocess.Popen) -> None:
    """End what the section started; all of it is in its session, or (verifiers) dies with its parent."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def run_section(args: argparse.Namespace) -> int:
    """In the section's process."""
    import torch

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    section = Section(args.work, args.out, torch.cuda.is_available())
    print(f"=== {args.section}", flush=True)
    try:
        getattr(importlib.import_module(SECTIONS[args.section][0]), args.section)(section)
    except Exception as error:
        traceback.print_exc()
        section.failures.append(f"{type(error).__name__}: {error}"[:600])
    result = {"ok": not section.failures, "failures": section.failures, **section.facts}
    (args.work / f"{args.section}.json").write_text(json.dumps(result))
    return 0 if result["ok"] else 1


def table(results: list[dict[str, Any]]) -> str:
    lines = [f"{'section':<18} {'result':<7} {'seconds':>7}"]
    for result in results:
        lines.append(f"{result['section']:<18} {'ok' if result['ok'] else 'FAILED':<7} {result['seconds']:>7.1f}")
        lines += [f"    {failure}" for failure in result["failures"]]
    return "\n".join(lines)


if __name__ == "__main__":  # saving a checkpoint may start processes that import this file again
    sys.exit(main())
