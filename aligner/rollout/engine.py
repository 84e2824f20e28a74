"""What every engine has in common: the limits of its build, the state of its weights, and when it refuses to act."""

import math
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Iterable, Iterator, Optional

from aligner.data.batch import Request

SHOWN = 5  # problems that an error spells out


@dataclass(frozen=True)
class BuildLimits:
    """The shapes that are fixed at build. Lengths in tokens, max_batch_size in sequences decoded at once."""

    max_batch_size: int
    max_input_len: int
    max_output_len: int
    vocab_size: int

    def __post_init__(self):
        for key in ("max_batch_size", "max_input_len", "max_output_len"):
            if getattr(self, key) < 1:
                raise ValueError(f"engine.{key}={getattr(self, key)} must be at least 1")

    def check_context(self, max_position_embeddings: int) -> None:
        """ValueError where the longest sequence of the build has positions that the model does not know."""
        longest = self.max_input_len + self.max_output_len
        if longest > max_position_embeddings:
            raise ValueError(
                f"engine.max_input_len={self.max_input_len} + engine.max_output_len={self.max_output_len} = {longest} exceeds "
                f"the model's max_position_embeddings={max_position_embeddings}; lower either"
            )

    def check(self, requests: list[Request]) -> None:
        """ValueError that lists what the build cannot serve; nothing was taken on then."""
        problems = [f"sample_id {r.sample_id}: {problem}" for r in requests for problem in self._problems(r)]
        if problems:
            more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise ValueError(f"{len(requests)} requests refused: " + "; ".join(problems[:SHOWN]) + more)

    def _problems(self, request: Request) -> Iterator[str]:
        prompt, limit = len(request.prompt_ids), request.max_output_len
        if not 1 <= prompt <= self.max_input_len:
            yield f"its prompt has {prompt} tokens, the engine was built for 1 to engine.max_input_len={self.max_input_len}"
        if not 1 <= limit <= self.max_output_len:
            yield f"max_output_len={limit}, the engine was built for 1 to engine.max_output_len={self.max_output_len}"
        for kind, ids in (("prompt", request.prompt_ids), ("stop", request.stop_token_ids)):
            foreign = [
                token for token in (min(ids, default=0), max(ids, default=0)) if not 0 <= token < self.vocab_size
            ]
            if foreign:
                yield f"{kind} token id {foreign[0]} is outside the vocabulary of {self.vocab_size}"
        yield from sampling_problems(request)
        if not 0 <= request.min_output_len <= limit:
            yield f"min_output_len={request.min_output_len} must be from 0 to max_output_len={limit}"
        for name, value, bits in (
            ("sample_id", request.sample_id, 63),
            ("seed", request.seed, 64),
            ("stream", request.stream, 32),
        ):
            if not 0 <= value < 2**bits:
                yield f"{name}={value} must be from 0 to 2**{bits} - 1"


def sampling_problems(request: Request) -> Iterator[str]:
    """What is wrong with the distribution that a request asks for, without regard to a build."""
    if not (request.temperature >= 0 and math.isfinite(request.temperature)):
        yield f"temperature={request.temperature} must be finite and at least 0 (0 is greedy)"
    if request.top_k < 0:
        yield f"top_k={request.top_k} must be at least 0 (0 keeps every token)"
    if not 0 < request.top_p <= 1:
        yield f"top_p={request.top_p} must be greater than 0 and at most 1 (1 keeps every token)"
    if not 0 <= request.min_p <= 1:
        yield f"min_p={request.min_p} must lie between 0 and 1 (0 keeps every token)"
    if not (request.repetition_penalty > 0 and math.isfinite(request.repetition_penalty)):
        yield f"repetition_penalty={request.repetition_penalty} must be finite and greater than 0 (1 is none)"
    if "" in request.stop_strings:
        yield "a stop string is empty"


class WeightState:
    """Which weights an engine holds, and whether it may be used: a refit that failed poisons it until a whole one succeeds."""

    def __init__(self):
        self.version = -1
        self.blocked: Optional[str] = "it holds no weights yet"

    def require_usable(self, action: str) -> None:
        """RuntimeError where the weights are not whole."""
        if self.blocked is not None:
            raise RuntimeError(f"the engine cannot {action}: {self.blocked}; refit it with every tensor first")

    def block(self, reason: str) -> None:
        self.blocked = reason

    @contextmanager
    def refitting(self, version: int) -> Iterator[None]:
        """Poisoned from the first byte; usable with `version` only where the block ends without an error."""
        self.blocked = f"the refit to weight version {version} did not finish"
        try:
            yield
        except Exception as error:
            self.blocked = f"the refit to weight version {version} failed ({error})"
            raise
        self.version, self.blocked = version, None


class Guarded(ABC):
    """An engine's `state` of its weights, and whether it is paused or closed; RuntimeError for what it cannot do now."""

    def __init__(self) -> None:
        self.state = WeightState()
        self.idle_reason: Optional[str] = None  # paused or closed

    @property
    @abstractmethod
    def running(self) -> int:
        """Requests under way."""

    @abstractmethod
    def _take_memory(self) -> None:
        """What pause() gave back."""

    def poison(self, reason: str) -> None:
        """Refuse requests, giving this reason, until a whole refit succeeds."""
        self.state.block(reason)

    def resume(self) -> None:
        """Take the memory again. The weights are gone: a refit must come before requests."""
        if self.idle_reason is None:
            return
        if self.idle_reason == "closed":
            raise RuntimeError("the engine cannot resume: it is closed")
        self._take_memory()
        self.idle_reason = None
        self.state.block("its weights were given back by pause()")

    def _paused(self) -> None:
        self.idle_reason = "paused; call resume() first"

    def _require_open(self, action: str) -> None:
        if self.idle_reason is not None:
            raise RuntimeError(f"the engine cannot {action}: it is {self.idle_reason}")

    def _require_no_requests(self, action: str) -> None:
        if self.running:
            raise RuntimeError(
                f"the engine cannot {action} while {self.running} requests run; await them with completed() first"
            )


def refuse_in_flight(requests: list[Request], running: Iterable[Request]) -> None:
    """ValueError for a sample_id that runs already, or comes twice."""
    flying = {request.sample_id for request in running}
    for request in requests:
        if request.sample_id in flying:
            raise ValueError(f"sample_id {request.sample_id} is already in flight; ids are unique in a run")
        flying.add(request.sample_id)
