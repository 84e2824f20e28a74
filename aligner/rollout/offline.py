"""Sampling outside of training: prompts in, JSON lines out in the order of the prompts."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Iterator, Optional

from aligner.config.groups import Dtype, ParallelConfig
from aligner.data.batch import Completion, Request
from aligner.data.interfaces import RolloutEngine
from aligner.data.prompts import PromptRecord
from aligner.parallel.device import DEVICE, resolve_dtype
from aligner.parallel.startup import start
from aligner.rollout.engine import BuildLimits
from aligner.rollout.refit import weight_update
from aligner.rollout.source import find_source
from aligner.rollout.torch_engine import TorchEngine
from aligner.runtime.errors import UserError
from aligner.runtime.metrics import one_line
from aligner.runtime.progress import duration

DEFAULT_OUTPUT = 256  # tokens of a response where --max_output_len is not given
LIVE_EVERY, PLAIN_EVERY = 1.0, 10.0  # seconds between lines of progress, on a terminal and elsewhere


@dataclass(frozen=True)
class Prompt:
    """What was asked, and the ids that the model sees."""

    record: PromptRecord
    ids: list[int]


class Sampler:
    """`samples` responses to each prompt from the model at `checkpoint` (see source.find_source), through the torch engine.

    raw: no chat template; system: put before conversations without a system message; sampling: fields of Request, of which
    max_output_len may be None."""

    def __init__(
        self, checkpoint: Path, *, raw: bool, system: Optional[str], samples: int, sampling: dict[str, Any]
    ) -> None:
        self.source = find_source(checkpoint)
        self.topology = start(ParallelConfig(), seed=0)
        self.tokenizer = self.source.tokenizer(self.topology)
        self.raw, self.system, self.samples, self.sampling = raw, system, samples, sampling

    def run(self, records: list[PromptRecord], *, max_batch_size: int, dtype: str, out: BinaryIO) -> None:
        """Answer all records. Raises UserError or ValueError for what cannot be served before the weights are read."""
        prompts = self.encoded(records)
        requests = self.requests(prompts)
        limits = BuildLimits(
            max_batch_size=min(max_batch_size, len(requests)),
            max_input_len=max(len(prompt.ids) for prompt in prompts),
            max_output_len=requests[0].max_output_len,
            vocab_size=self.source.shape.vocab_size,
        )
        limits.check(requests)
        engine = self.engine(limits, resolve_dtype(Dtype(dtype)))
        meter = Meter(len(requests))
        try:
            for completion in in_order(engine, requests, meter):
                out.write(self.line(completion, prompts))
                out.flush()
        finally:
            meter.close()
            engine.close()

    def encoded(self, records: list[PromptRecord]) -> list[Prompt]:
        """The records as token ids. Raises UserError that names the record."""
        positions, output = self.source.shape.max_position_embeddings, self.sampling["max_output_len"]
        longest = positions - (output or 1)
        if not self.raw and not self.tokenizer.chat_template_hash:
            raise UserError(f"{self.source.path} has no chat template: pass --raw")
        prompts = [Prompt(record, self._ids(record)) for record in records]
        for prompt in prompts:
            if not 1 <= len(prompt.ids) <= longest:
                raise UserError(
                    f"{prompt.record.origin}: the prompt has {len(prompt.ids)} tokens, and of the model's {positions} positions "
                    f"--max_output_len={output or 1} leaves {max(0, longest)}: shorten the prompt{' or lower it' if output else ''}"
                )
        return prompts

    def _ids(self, record: PromptRecord) -> list[int]:
        if not self.raw:
            messages = record.messages or [{"role": "user", "content": record.prompt}]
            return self.tokenizer.chat(messages, system=self.system)
        if record.messages is not None:
            raise UserError(f"{record.origin}: `messages` need the chat template; --raw takes `prompt`")
        return self.tokenizer.encode(record.prompt)

    def requests(self, prompts: list[Prompt]) -> list[Request]:
        """sample_id = index of the prompt * samples + k: what a response depends on, beside seed and weights."""
        room = self.source.shape.max_position_embeddings - max(len(prompt.ids) for prompt in prompts)
        given = self.sampling["max_output_len"]
        sampling = self.sampling | {"max_output_len": min(DEFAULT_OUTPUT, room) if given is None else given}
        # Some tokenizers name end tokens that the model has no row for: it cannot choose them.
        ends = tuple(token for token in self.tokenizer.end_token_ids if token < self.source.shape.vocab_size)
        return [
            Request(
                sample_id=index * self.samples + k,
                prompt_ids=prompt.ids,
                stop_token_ids=ends,
                **sampling,
            )
            for index, prompt in enumerate(prompts)
            for k in range(self.samples)
        ]

    def engine(self, limits: BuildLimits, dtype) -> TorchEngine:
        """An engine that holds the weights."""
        sizes = {name: getattr(limits, name) for name in ("max_batch_size", "max_input_len", "max_output_len")}
        token_bytes = self.tokenizer.token_bytes() if self.sampling["stop_strings"] else None
        try:
            engine = TorchEngine(self.source.shape, **sizes, dtype=dtype, device=DEVICE, token_bytes=token_bytes)
        except ValueError as error:  # it names settings of a job
            raise UserError(f"{error} (here: --max_batch_size, --max_output_len, --dtype)") from error
        engine.refit(weight_update(self.source.tensors(self.topology, dtype), version=0))
        return engine

    def line(self, completion: Completion, prompts: list[Prompt]) -> bytes:
        """One JSON object and a line end: which prompt (from 0) and which sample of it, what was asked and what was answered."""
        index, sample = divmod(completion.sample_id, self.samples)
        record = prompts[index].record
        value = {
            "index": index,
            "sample": sample,
            "prompt": record.prompt if record.messages is None else record.messages,
            "text": self.tokenizer.response_text(completion.token_ids, self.sampling["stop_strings"]),
            "token_ids": completion.token_ids,
            "logprobs": completion.logprobs,
            "finish_reason": completion.finish_reason,
        }
        return one_line(value).encode() + b"\n"


def in_order(engine: RolloutEngine, requests: list[Request], meter: "Meter") -> Iterator[Completion]:
    """Completions in the order of the requests, each as soon as it and all before it have finished."""
    engine.submit(requests)
    early: dict[int, Completion] = {}
    for request in requests:
        while request.sample_id not in early:
            done = engine.completed(timeout=meter.every)
            early |= {completion.sample_id: completion for completion in done}
            meter.add(done)
        yield early.pop(request.sample_id)


class Meter:
    """Responses done and tokens per second, on standard error."""

    def __init__(self, total: int):
        self.total, self.done, self.tokens = total, 0, 0
        self.live = sys.stderr.isatty()
        self.every = LIVE_EVERY if self.live else PLAIN_EVERY
        self.began = self.said = time.monotonic()

    def add(self, completions: list[Completion]) -> None:
        self.done += len(completions)
        self.tokens += sum(len(completion.token_ids) for completion in completions)
        if time.monotonic() - self.said >= self.every:
            self.said = time.monotonic()
            left = (self.said - self.began) / max(1, self.done) * (self.total - self.done)
            self._say(f"{self._line()}, {duration(left)} left")

    def close(self) -> None:
        """Say what came out in all."""
        self._say(self._line())
        if self.live:
            print(file=sys.stderr)

    def _line(self) -> str:
        seconds = time.monotonic() - self.began
        return (
            f"{self.done}/{self.total} responses, {self.tokens} tokens in {seconds:.1f} s: "
            f"{self.tokens / max(seconds, 1e-9):.0f} tokens/s"
        )

    def _say(self, line: str) -> None:
        print(f"\r\x1b[K{line}" if self.live else line, end="" if self.live else "\n", file=sys.stderr, flush=True)
