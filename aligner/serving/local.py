"""A critic in this process: the same backend without a server, for one rank."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any, Callable, Optional

from aligner.data.batch import CriticAnswer, CriticBatch, CriticRows
from aligner.runtime.errors import UserError
from aligner.serving import protocol
from aligner.serving.backend import CriticBackend, Refused
from aligner.serving.hello import Contract, problems
from aligner.serving.inference import SCORING_DEADLINE, check_finite, scores_of, whole_scores
from aligner.serving.parts import TrainLedger, check_batch, digest_of, encode_batch
from aligner.serving.protocol import ProtocolError


class LocalCritic:
    """data/interfaces.Critic by direct calls. Futures are done when they are returned; step ids obey the served critic's rules."""

    address = "in the actor's process"
    draining = False

    def __init__(self, backend: CriticBackend, *, scoring_deadline: float = SCORING_DEADLINE) -> None:
        """scoring_deadline: seconds that a verifier has after the values are there."""
        self._backend, self._scoring_deadline = backend, scoring_deadline
        status = backend.status()
        self._ledger = TrainLedger(step=status["step"], run_id=status["run_id"])

    @classmethod
    def fitting(cls, contract: Contract, backend: CriticBackend) -> "LocalCritic":
        """Raises UserError where the backend's configuration does not fit the actor's contract."""
        critic = cls(backend)
        if unfit := problems(contract, Contract.of(critic.status())):
            raise UserError(f"critic.local_config and critic.local_overrides do not fit: {'; '.join(unfit)}")
        return critic

    def infer(self, rows: CriticRows) -> "Future[CriticAnswer]":
        return _done(lambda: self._infer(rows))

    def _infer(self, rows: CriticRows) -> CriticAnswer:
        scoring = self._backend.start_scoring(rows)
        values, bootstrap, scores = self._backend.infer(rows)
        check_finite(rows, values, bootstrap)
        if scoring is not None:
            verified = scores_of(scoring, len(bootstrap), deadline=self._scoring_deadline)
            scores = whole_scores(verified, scores)
        return CriticAnswer(values, bootstrap, scores)

    def train(self, step: int, batch: CriticBatch) -> "Future[dict[str, float]]":
        return _done(lambda: self._train(step, batch))

    def _train(self, step: int, batch: CriticBatch) -> dict[str, float]:
        arrays = encode_batch(batch)
        digest = digest_of(arrays)
        stored = self._ledger.check(step, digest)
        if stored is not None:
            return stored.answer
        check_batch(arrays)
        try:
            metrics = self._backend.train(step, batch)
        except Refused:
            raise
        except Exception as error:
            self._ledger.failed(step, str(error))
            raise
        self._ledger.applied(step, metrics, digest=digest)
        return metrics

    def prepare_save(self, step: int, folder: Path, *, beside: bool = False) -> "Future[None]":
        """At once, whatever `beside` says."""
        return _done(lambda: self._prepare_save(step, folder))

    def _prepare_save(self, step: int, folder: Path) -> None:
        if self._ledger.undefined is not None:
            raise ProtocolError(f"cannot save the critic of step {step}: {self._ledger.undefined}")
        self._backend.prepare_save(step, folder, beside=False)

    def commit(self, step: int) -> None:
        self._backend.commit(step)

    def restore(self, step: int, folder: Optional[Path]) -> None:
        try:
            self._backend.restore(step, folder)
        except Refused:
            raise
        except Exception as error:
            self._ledger.failed(step, f"restore of step {step}: {error}")
            raise
        self._ledger.reset(step)

    def status(self) -> dict[str, Any]:
        return {**self._backend.status(), "protocol": protocol.VERSION}

    def stop(self) -> None:
        """Nothing: it ends with this process."""

    def close(self) -> None:
        close = getattr(self._backend, "close", None)
        if close is not None:
            close()


def _done(act: Callable[[], Any]) -> "Future[Any]":
    future: Future[Any] = Future()
    try:
        future.set_result(act())
    except Exception as error:
        future.set_exception(error)
    return future
