"""Forward and backward pass of the policy through Megatron's schedule against Hugging Face's model, on the same rows.

    python benchmarks/forward_backward.py [--shape tiny|smollm2] [--model DIR] [--dtype float32|bfloat16] [--rows 16]

Both compute the mean negative log-prob of the tokens under the mask, in one process, taking turns; the first turn checks that losses
and gradient norms agree. Two masks: `every token`, and `response`, what PPO trains on. Hugging Face too is asked for no more logits
than it can leave out (its logits_to_keep)."""

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from workload import SHAPES, machine, prepare

from aligner.config.groups import Dtype, OptimConfig, ParallelConfig
from aligner.models import pipeline
from aligner.models.build import build_model
from aligner.models.hf import load_hf
from aligner.models.hf_config import shape_of
from aligner.models.optimizer import wrap_for_training
from aligner.models.policy import chosen_positions, predicting_positions
from aligner.parallel.device import resolve_dtype
from aligner.parallel.startup import shutdown, start
from aligner.parallel.vocab import vocab_parallel_logprobs

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--model", type=Path, help="Hugging Face folder")
    parser.add_argument("--dtype", choices=[d.value for d in Dtype], default="auto")
    parser.add_argument("--rows", type=int, help="rows of the batch, one micro-batch (default: the shape's mini-batch)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0)
    return parser.parse_args()


class Megatron:
    """The policy's chunks under DDP, without an optimizer."""

    def __init__(self, model, shape, topology, dtype: torch.dtype) -> None:
        chunks = build_model(shape, topology, head="lm", dtype=dtype)
        load_hf(chunks, shape, topology, model.state_dict())
        self.chunks, self.shape, self.topology = wrap_for_training(chunks, OptimConfig()), shape, topology

    def __call__(self, tokens, mask) -> tuple[float, float]:
        """Loss and gradient norm."""
        lengths = torch.full((len(tokens),), tokens.size(1))
        micro = pipeline.micro_batches(
            tokens, lengths, {"mask": mask}, micro_batch_size=len(tokens), topology=self.topology
        )
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        loss = partial(self._loss, int(mask.sum()))
        sums = pipeline.forward_backward(self.chunks, micro, self.topology, loss=loss, positions=predicting_positions)
        return sums["loss"], norm_of([p.main_grad for p in self.chunks[0].parameters()])

    def _loss(self, count, micro, logits):
        targets = micro.tokens[chosen_positions(micro)]
        group, size = self.topology.tensor_group, self.shape.vocab_size
        return -vocab_parallel_logprobs(logits[0], targets, group=group, vocab_size=size).sum() / count, {}


class HuggingFace:
    def __init__(self, model) -> None:
        self.model = model.train()

    def __call__(self, tokens, mask) -> tuple[float, float]:
        self.model.zero_grad(set_to_none=False)
        first = int(mask.any(0).nonzero()[0])
        logits = self.model(tokens, logits_to_keep=tokens.size(1) - first + 1, use_cache=False).logits[:, :-1]
        kept = mask[:, first:]
        loss = F.cross_entropy(logits[kept].float(), tokens[:, first:][kept])
        loss.backward()
        return loss.item(), norm_of([p.grad for p in self.model.parameters()])


def norm_of(gradients: list[torch.Tensor]) -> float:
    """In float64: a float32 sum over a hundred million squares is off by half a percent."""
    return sum(float(g.double().square().sum()) for g in gradients) ** 0.5


def measure(sides: dict, tokens, mask, *, repeats: int, tolerance: float) -> dict[str, list[float]]:
    """Seconds of each turn; one turn of each is warm-up, and shows that both compute the same."""
    (loss, norm), (loss_hf, norm_hf) = (side(tokens, mask) for side in sides.values())
    if abs(loss / loss_hf - 1) > tolerance or abs(norm / norm_hf - 1) > tolerance:
        raise SystemExit(f"not the same function: losses {loss} and {loss_hf}, gradient norms {norm} and {norm_hf}")
    seconds = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            began = time.perf_counter()
            side(tokens, mask)
            seconds[name].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    options = arguments()
    work = SHAPES[options.shape]
    folder = prepare(options.shape, work, options.model).policy
    topology, dtype = start(ParallelConfig(threads=options.threads), seed=0), resolve_dtype(Dtype(options.dtype))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    shape = shape_of(json.loads((folder / "config.json").read_text()))
    sides = {"megatron": Megatron(model, shape, topology, dtype), "huggingface": HuggingFace(model)}
    rows, columns = options.rows or work.mini_batch, work.prompt + work.response
    tokens = torch.randint(4, model.config.vocab_size, (rows, columns))
    print(f"{machine()}, {torch.get_num_threads()} threads, {options.shape}, {dtype}, {rows} rows of {columns} tokens")
    for name, first in (("every token", 1), ("response", work.prompt)):
        mask = (torch.arange(columns) >= first).expand(rows, columns)
        seconds = measure(sides, tokens, mask, repeats=options.repeats, tolerance=TOLERANCE[dtype])
        middle = {side: statistics.median(s) for side, s in seconds.items()}
        for side, s in seconds.items():
            print(f"{name:12} {side:12} {middle[side]:8.4f} s ({min(s):.4f} to {max(s):.4f})")
        print(f"{name:12} speed against Hugging Face: {middle['huggingface'] / middle['megatron']:.2f}")
    shutdown()


if __name__ == "__main__":
    main()
