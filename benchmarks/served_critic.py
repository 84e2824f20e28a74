"""The critic behind its server against the same calls in one process, in turns, and how long an actor waits for it.

    python benchmarks/served_critic.py [--model DIR] [--rounds 5] [--rows 32] [--prompt 13] [--response 6] [--chunk 16]
    python benchmarks/served_critic.py --waiting runs/demo

A round is what a PPO step of the demo asks: values and scores of its rows in chunks (all asked at once, as an actor does), then one
train request. Both critics start from the same weights and are given the same rows, and the values must agree; the first round is
warm-up. The server is `serve_ppo_critic.py`; while one side works, the other one is idle."""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
from workload import ROOT, machine

from aligner.data.batch import CriticBatch, CriticRows

NAME = "served"
DEADLINE = 600.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / ".cache" / "SmolLM2-135M-Instruct", help="a checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    for name, default in (("rows", 32), ("prompt", 13), ("response", 6), ("chunk", 16), ("mini-batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=1, help="of either side")
    parser.add_argument("--waiting", type=Path, help="folder of a run: tell its waiting time, and end")
    return parser.parse_args()


def waiting(run: Path) -> None:
    """Median share of a step that the actor waited for the critic, over the steps in which the policy trained."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "policy/loss" in row]
    shares = [row["time/critic_wait"] / row["time/step"] for row in rows]
    seconds = statistics.median(row["time/critic_wait"] for row in rows)
    print(f"{len(rows)} steps: {seconds:.2f} s waiting a step, {100 * statistics.median(shares):.1f} % of it (medians)")


def overrides(options: argparse.Namespace, folder: str) -> list[str]:
    return [
        f"run.dir={folder}",
        f"run.name={NAME}",
        f"model.checkpoint={options.model.resolve()}",
        "model.dtype=float32",
        f"parallel.threads={options.threads}",
        f"critic.mini_batch_size={options.mini_batch}",
        f"critic.micro_batch_size={options.mini_batch}",
        "critic.value_clip=null",
        "optim.lr=1e-4",
        "optim.beta2=0.999",
        "tasks=chain_sum",
        "reward.format_credit=0.3",
    ]


@contextlib.contextmanager
def server(options: argparse.Namespace, folder: str) -> Iterator[None]:
    """serve_ppo_critic.py, until the block ends."""
    log = Path(folder) / "server.out"
    command = [sys.executable, str(ROOT / "serve_ppo_critic.py"), *overrides(options, folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "passive"}
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + DEADLINE
        while not (Path(folder) / NAME / "endpoints" / "critic.json").exists():
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the server did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(60)


def critics(options: argparse.Namespace, folder: str) -> tuple[Any, Any, dict[str, Any]]:
    """The critic in this process, and the client of the other. Fields of a sample that the verifier knows."""
    from aligner.algorithms.assemble import start_job
    from aligner.algorithms.critic_job import build_critic_job
    from aligner.config.groups import CriticClientConfig
    from aligner.config.jobs import CriticConfig
    from aligner.config.load import load
    from aligner.data.tasks import draw_problems
    from aligner.serving.client import RemoteCritic
    from aligner.serving.hello import Contract
    from aligner.serving.local import LocalCritic

    here = [*overrides(options, folder), f"run.dir={folder}/here"]
    config = load(CriticConfig, here, "ppo_critic")
    local = LocalCritic(build_critic_job(config, start_job(config, "critic")))
    file = Path(folder) / NAME / "endpoints" / "critic.json"
    contract = replace(Contract.of(local.status()), step=None, mini_batch_size=None, max_rows=None)
    remote = RemoteCritic(contract, CriticClientConfig(), endpoint_file=file, trains=True)
    task = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    return local, remote, draw_problems("chain_sum", task, size=1, seed=1, key="question")[0].fields


def chunks(options: argparse.Namespace, fields: dict[str, Any], seed: int) -> list[CriticRows]:
    generator = torch.Generator().manual_seed(seed)
    length, size = options.prompt + options.response, options.chunk
    tokens = torch.randint(20, 40_000, (options.rows, 64), generator=generator)
    tokens[:, length:] = 0
    return [
        CriticRows(
            tokens=tokens[start : start + size],
            lengths=torch.full((size,), length),
            prompt_lengths=torch.full((size,), options.prompt),
            sample_ids=torch.arange(start, start + size),
            truncated=torch.zeros(size, dtype=torch.bool),
            fields=[fields] * size,
        )
        for start in range(0, options.rows, size)
    ]


def batch_of(rows: list[CriticRows], options: argparse.Namespace) -> CriticBatch:
    tokens = torch.cat([r.tokens for r in rows])
    at = torch.arange(tokens.size(1)).expand_as(tokens)
    mask = (at >= options.prompt) & (at < options.prompt + options.response)
    zeros = torch.zeros(tokens.shape)
    ids = torch.cat([r.sample_ids for r in rows])
    return CriticBatch(tokens, torch.cat([r.lengths for r in rows]), mask, zeros, zeros + mask.float(), ids)


def infer(critic: Any, rows: list[CriticRows]) -> torch.Tensor:
    futures = [critic.infer(r) for r in rows]
    answers = [future.result(DEADLINE) for future in futures]
    assert all(score.error is None for answer in answers for score in answer.scores), answers[0].scores[0].error
    return torch.cat([answer.values for answer in answers])


def train(critic: Any, step: int, batch: CriticBatch) -> dict[str, float]:
    return critic.train(step, batch).result(DEADLINE)


def in_turns(
    found: dict[str, list[float]], sides: list[tuple[str, Any]], act: Callable[..., Any], *how: Any
) -> list[Any]:
    """Results of act(critic, *how) on each side, the seconds added to `found`."""
    results = []
    for side, critic in sides:
        began = time.perf_counter()
        results.append(act(critic, *how))
        found[side].append(time.perf_counter() - began)
    return results


def measure(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """{infer | train: {in-process | served: seconds of each round}}"""
    found: dict[str, dict[str, list[float]]] = {kind: {"in-process": [], "served": []} for kind in ("infer", "train")}
    with tempfile.TemporaryDirectory() as folder, server(options, folder):
        local, remote, fields = critics(options, folder)
        for step in range(1, options.rounds + 2):
            rows = chunks(options, fields, step)
            sides = [("in-process", local), ("served", remote)][:: 1 if step % 2 else -1]
            values = in_turns(found["infer"], sides, infer, rows)
            torch.testing.assert_close(*values, rtol=1e-3, atol=1e-4)
            in_turns(found["train"], sides, train, step, batch_of(rows, options))
        remote.stop(), remote.close(), local.close()
    return found


def main() -> None:
    options = arguments()
    if options.waiting:
        waiting(options.waiting)
        return
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    found = measure(options)
    shape = f"{options.rows} x ({options.prompt} + {options.response}) tokens in chunks of {options.chunk}"
    print(f"{machine()}; {shape}, {options.threads} thread a side; medians of {options.rounds} rounds\n")
    print("| | in-process (s) | served (s) | served over in-process |\n|---|---|---|---|")
    for kind, sides in found.items():
        here, there = (statistics.median(sides[side][1:]) for side in ("in-process", "served"))
        print(f"| {kind} | {here:.3f} | {there:.3f} | {there / here:.2f} |")


if __name__ == "__main__":
    main()
