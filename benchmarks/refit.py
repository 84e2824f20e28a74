"""Seconds of a refit against a memcpy of the same bytes, on each grid.

    python benchmarks/refit.py [--shape smollm2|tiny|tiny_bias] [--grids one tp2 pp2] [--rounds 7] [--dtype float32|bfloat16] [--threads 1]

Every rank has an engine with all weights, as in a run. In each round the cases take turns: `memcpy`, one copy between two flat tensors
of the engine's bytes, on every rank at once; `off`, `sampled` and `full`, a refit with that certificate, from Megatron's shards to the
engine and both sides' checksums; `gather`, the same tensors gathered and thrown away. A case takes as long as its slowest rank; the
first round is warm-up, medians are over the others. Weights are random; their values do not matter."""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from workload import machine

from aligner.config.groups import Certify, ParallelConfig
from aligner.models.build import build_model
from aligner.models.hf import export_hf
from aligner.models.model_config import ModelShape, padded
from aligner.parallel.device import DEVICE, synchronise
from aligner.parallel.startup import shutdown, start
from aligner.rollout.refit import certified_refit
from aligner.rollout.torch_engine import TorchEngine

GRIDS = {
    "one": ParallelConfig(),
    "tp2": ParallelConfig(tensor=2),
    "pp2": ParallelConfig(pipeline=2),
    "tp2_pp2": ParallelConfig(tensor=2, pipeline=2),
}
CASES = ("memcpy", "off", "sampled", "full", "gather")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--grids", nargs="+", choices=GRIDS, default=["one", "tp2", "pp2"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of policy and engine")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    # A rank of this grid, started by this script.
    parser.add_argument("--rank-of", choices=GRIDS, help=argparse.SUPPRESS)
    return parser.parse_args()


def llama(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int, *, bias: bool = False) -> ModelShape:
    return ModelShape(
        family="qwen2" if bias else "llama",
        head="lm",
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=hidden // heads,
        vocab_size=vocab,
        padded_vocab_size=padded(vocab),
        max_position_embeddings=2048,
        layernorm_epsilon=1e-5,
        rotary_base=10000.0,
        rope_scaling=None,
        qkv_bias=bias,
        qk_norm=False,
        tied=True,
    )


# smollm2: with 8 heads in 4 groups for 9 in 3, which TP2 could not divide; the same bytes within 3 %
SHAPES = {
    "smollm2": llama(30, 576, 1536, 8, 4, 49152),
    "tiny": llama(4, 64, 192, 8, 4, 512),
    "tiny_bias": llama(4, 64, 192, 8, 4, 512, bias=True),
}


class Rank:
    """One rank's model and engine, and the cases on them."""

    def __init__(self, options: argparse.Namespace) -> None:
        dtype, self.shape = getattr(torch, options.dtype), SHAPES[options.shape]
        config = GRIDS[options.rank_of]
        config.threads = options.threads
        self.topology = start(config, seed=1)
        self.chunks = build_model(self.shape, self.topology, head="lm", dtype=dtype)
        limits = {"max_batch_size": 1, "max_input_len": 16, "max_output_len": 16}
        self.engine = TorchEngine(self.shape, **limits, dtype=dtype, device=DEVICE)
        self.source, self.target = (
            torch.ones(self.engine.weight_nbytes // 8, dtype=torch.int64, device=DEVICE) for _ in "ab"
        )
        self.version = 0

    def do(self, case: str) -> None:
        if case == "memcpy":
            self.target.copy_(self.source)
        elif case == "gather":
            for _ in export_hf(self.chunks, self.shape, self.topology):
                pass
        else:
            self.engine.certify = Certify[case]
            self.version += 1
            certified_refit(self.engine, export_hf(self.chunks, self.shape, self.topology), version=self.version)
        synchronise()

    def seconds(self, case: str) -> float:
        """Of the slowest rank, all beginning together."""
        dist.barrier()
        began = time.perf_counter()
        self.do(case)
        taken = torch.tensor([time.perf_counter() - began], device=DEVICE)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return float(taken)


def rank_main(options: argparse.Namespace) -> None:
    """What each rank of a grid runs; rank 0 prints one line of JSON."""
    rank = Rank(options)
    found = [{case: rank.seconds(case) for case in CASES} for _ in range(options.rounds + 1)][1:]
    medians = {case: statistics.median(each[case] for each in found) for case in CASES}
    if rank.topology.is_reporter:
        print(json.dumps({"bytes": rank.engine.weight_nbytes, **medians}), flush=True)
    shutdown()


def measure(grid: str, options: argparse.Namespace) -> dict[str, float]:
    config = GRIDS[grid]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={config.tensor * config.pipeline}",
    ]
    settings = [f"--{name}={getattr(options, name)}" for name in ("shape", "rounds", "dtype", "threads")]
    done = subprocess.run(
        [*launch, __file__, "--rank-of", grid, *settings], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    if done.returncode:
        raise SystemExit(f"grid {grid} ended with code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    options = arguments()
    if options.rank_of:
        rank_main(options)
        return
    print(f"{machine()}; {options.shape}, {options.dtype}, {options.threads} threads a rank, {options.rounds} rounds\n")
    head = ["grid", "MB", "memcpy (s)", "refit, off (s)", "sampled (s)", "full (s)", "gather alone (s)"]
    head += [f"{case} / memcpy" for case in ("off", "sampled", "full")] + ["gather / off"]
    print(f"| {' | '.join(head)} |")
    print("|" + "---|" * len(head))
    for grid in options.grids:
        found = measure(grid, options)
        seconds = " | ".join(f"{found[case]:.3f}" for case in CASES)
        ratios = " | ".join(f"{found[case] / found['memcpy']:.2f}" for case in ("off", "sampled", "full"))
        print(
            f"| {grid} | {found['bytes'] / 1e6:.0f} | {seconds} | {ratios} | {found['gather'] / found['off']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
