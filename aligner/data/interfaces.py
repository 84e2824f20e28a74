"""The Protocols between parts. Algorithms know these and never an engine class or a server."""

import hashlib
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Optional, Protocol

import torch
from torch import Tensor

from aligner.config.groups import Certify
from aligner.data.batch import Completion, CriticAnswer, CriticBatch, CriticRows, Request, Score, ScoreRow


@dataclass
class WeightUpdate:
    """A refit: every tensor of the model under its Hugging Face name, full and unsharded."""

    version: int
    tensors: Iterator[tuple[str, Tensor]]
    kind: str = "full"


@dataclass(frozen=True)
class RefitCertificate:
    """What an engine was last refitted with. `checksums`: name -> checksum of the tensors that were certified."""

    version: int
    tensors: int
    checksums: dict[str, str]

    @property
    def digest(self) -> str:
        """32 hexadecimal digits of all names and checksums: equal for the same weights in the same dtype, whatever grid they came from."""
        lines = "".join(f"{name} {value}\n" for name, value in sorted(self.checksums.items()))
        return hashlib.sha256(lines.encode()).hexdigest()[:32]


class RolloutEngine(Protocol):
    """Built once with fixed shapes; refitted in place; token ids in, token ids out.

    Raises ValueError for a request beyond the build, RuntimeError for a refit while requests run or a use while poisoned."""

    dtype: torch.dtype
    certify: Certify
    nbytes: int
    """Weights and cache, while in use."""
    ranks: int
    """Consecutive ranks that share the engine: all call refit, pause, resume and close, the first alone takes requests."""

    def refit(self, update: WeightUpdate) -> RefitCertificate: ...

    def submit(self, requests: list[Request]) -> None: ...

    def completed(self, timeout: float) -> list[Completion]:
        """Advance, and return what has finished since the last call; empty only where nothing runs or `timeout` seconds passed."""

    def poison(self, reason: str) -> None:
        """Refuse requests, giving this reason, until a whole refit succeeds."""

    def generate(self, requests: list[Request]) -> list[Completion]:
        """submit, then completed until all are there; in the order of the requests."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


class Critic(Protocol):
    """The critic job, or a critic in this process. Futures raise RuntimeError with one clear sentence where the job failed."""

    address: str
    """Where it is, for people."""
    draining: bool
    """The critic job was told to end: save a pair at the next step's end, and it goes."""

    def infer(self, rows: CriticRows) -> "Future[CriticAnswer]": ...

    def train(self, step: int, batch: CriticBatch) -> "Future[dict[str, float]]":
        """One logical train request a step; applied once, whatever is repeated. Returns the critic's metrics."""

    def prepare_save(self, step: int, folder: Path, *, beside: bool = False) -> "Future[None]":
        """First phase: write everything under `folder` (which both jobs see), not yet valid. beside: training goes on meanwhile; the
        Future is done when all is written."""

    def commit(self, step: int) -> None:
        """Second phase: the actor has written COMMITTED; older pairs may go."""

    def restore(self, step: int, folder: Optional[Path]) -> None:
        """Load the critic of a committed pair; folder None: back to the initial weights."""

    def status(self) -> dict[str, Any]: ...

    def stop(self) -> None:
        """The run is complete: the critic job may end."""

    def close(self) -> None: ...


class RewardSource(Protocol):
    """Scores responses. One Score a row, in order; a failure is Score.error, never a value of 0."""

    def score(self, rows: list[ScoreRow]) -> "Future[list[Score]]": ...

    def close(self) -> None: ...
