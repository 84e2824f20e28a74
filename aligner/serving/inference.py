"""The infer endpoint: requests that Triton merged become one forward pass, and each gets its own answer."""

from concurrent.futures import Future
from typing import Any, Mapping, Optional, Sequence

import numpy as np
import torch

from aligner.data.batch import CriticAnswer, CriticRows, Score
from aligner.serving import protocol
from aligner.serving.backend import CriticBackend
from aligner.serving.frames import Call, Op
from aligner.serving.hello import Contract
from aligner.serving.loop import CallFailed, Loop, one_line
from aligner.serving.observed import ServedValues
from aligner.serving.protocol import ProtocolError, RequestFailed
from aligner.serving.reception import Reception, WireRequest, kind_of

SCORING_DEADLINE = 1800.0


class Inference:
    """Called in one thread, with requests of one S. contract: the critic job's own."""

    def __init__(
        self,
        backend: CriticBackend,
        loop: Loop,
        reception: Reception,
        *,
        contract: Contract,
        max_rows: int,
        deterministic: bool,
    ) -> None:
        self._backend, self._loop, self._reception = backend, loop, reception
        self._vocab_size, self._max_length = contract.vocab_size, contract.max_length
        self._max_rows, self._deterministic = max_rows, deterministic
        self.served = ServedValues()

    def infer(self, requests: Sequence[WireRequest]) -> list[dict[str, np.ndarray]]:
        """Requests of one S, merged by Triton; each answered by itself."""
        answers: list[Optional[dict[str, np.ndarray]]] = [None] * len(requests)
        rows: dict[int, CriticRows] = {}
        for i, request in enumerate(requests):
            try:
                rows[i] = self._decode_rows(request)
            except Exception as error:
                answers[i] = self._failed_infer(request, error)
        scoring = {i: self._start_scoring(r) for i, r in rows.items()}
        for i, outcome in self._values(rows).items():
            try:
                answers[i] = protocol.encode_answer(self._answer(rows[i], outcome, scoring[i]))
            except Exception as error:
                answers[i] = self._failed_infer(requests[i], error)
        return answers

    def _decode_rows(self, request: WireRequest) -> CriticRows:
        self._reception.admit(request)
        self._reception.spoken()
        protocol.check_arrays(protocol.INFER, request.data)
        count = len(request.data["tokens"])
        if count > self._max_rows:
            raise ProtocolError(
                f"{count} rows exceed this job's serving.max_rows={self._max_rows}; lower critic.infer_batch_size"
            )
        protocol.check_rows(request.data, vocab_size=self._vocab_size, max_length=self._max_length)
        self._reception.counts["infer_requests"] += 1
        self._reception.counts["infer_rows"] += count
        return protocol.decode_rows(request.data)

    def _start_scoring(self, rows: CriticRows) -> "Future[Optional[list[Score]]]":
        scores: Future[Any] = Future()
        try:
            started = self._backend.start_scoring(rows)
        except Exception as error:
            scores.set_exception(error)
            return scores
        if started is None:
            scores.set_result(None)
            return scores
        return started

    def _values(self, rows: Mapping[int, CriticRows]) -> "dict[int, Future[Any]]":
        """One forward pass for all requests that want the same; where it fails, each request by itself, so that one bad
        request fails alone. deterministic: always each by itself."""
        alike: dict[Any, list[int]] = {}
        for i, r in rows.items():
            alike.setdefault(i if self._deterministic else (r.values, r.critic_step, r.tokens.size(1)), []).append(i)
        calls = {tuple(g): self._call_rows(_merge([rows[i] for i in g])) for g in alike.values()}
        outcomes: dict[int, Future[Any]] = {}
        for group, call in calls.items():
            if len(group) > 1 and isinstance(call.exception(), CallFailed):
                outcomes |= {i: self._call_rows(rows[i]) for i in group}
            else:
                outcomes |= _split(call, {i: len(rows[i].lengths) for i in group})
        return outcomes

    def _call_rows(self, rows: CriticRows) -> "Future[Any]":
        self._reception.counts["infer_batches"] += 1
        try:
            return self._loop.submit(Call(Op.INFER, rows=rows))
        except RequestFailed as error:
            refused: Future[Any] = Future()
            refused.set_exception(error)
            return refused

    def _answer(
        self, rows: CriticRows, outcome: "Future[Any]", scoring: "Future[Optional[list[Score]]]"
    ) -> CriticAnswer:
        values, bootstrap, modelled = outcome.result()
        scores = whole_scores(scores_of(scoring, len(bootstrap)), modelled)
        used = check_finite(rows, values, bootstrap)
        if rows.values:
            self.served.add(self._backend.status()["step"], values[used])
        return CriticAnswer(values, bootstrap, scores)

    def _failed_infer(self, request: WireRequest, error: Exception) -> dict[str, np.ndarray]:
        tokens = request.data.get("tokens")
        rows, width = tokens.shape if tokens is not None and tokens.ndim == 2 else (1, 1)
        return protocol.failed_answer(rows, width, self._reception.failure("infer", error), kind=kind_of(error))


def _merge(rows: Sequence[CriticRows]) -> CriticRows:
    """Rows of requests of one S, one after the other."""
    if len(rows) == 1:
        return rows[0]
    names = ("tokens", "lengths", "prompt_lengths", "sample_ids", "truncated")
    joined = {n: torch.cat([getattr(r, n) for r in rows]) for n in names}
    shared = {"values": rows[0].values, "critic_step": rows[0].critic_step}
    return CriticRows(**joined, fields=[f for r in rows for f in r.fields], **shared)


def _split(call: "Future[Any]", counts: Mapping[int, int]) -> "dict[int, Future[Any]]":
    """A finished call's (values, bootstrap, scores), cut into those of its requests."""
    if call.exception() is not None:
        return dict.fromkeys(counts, call)
    values, bootstrap, scores = call.result()
    pieces: dict[int, Future[Any]] = {}
    start = 0
    for i, count in counts.items():
        part = slice(start, start + count)
        pieces[i] = Future()
        pieces[i].set_result((values[part], bootstrap[part], None if scores is None else scores[part]))
        start += count
    return pieces


def scores_of(
    scoring: "Future[Optional[list[Score]]]", rows: int, *, deadline: float = SCORING_DEADLINE
) -> Optional[list[Score]]:
    """What the verifier said, None where none scores; a Score with an error for each row where it failed or took too long."""
    try:
        return scoring.result(deadline)
    except Exception as error:
        return [Score(float("nan"), {}, f"scoring failed: {one_line(error)}")] * rows


def whole_scores(verified: Optional[list[Score]], modelled: Optional[list[Score]]) -> Optional[list[Score]]:
    """What the verifier said and what the reward model said, added where both score."""
    if verified is None or modelled is None:
        return verified if modelled is None else modelled
    return [said.plus(added) for said, added in zip(verified, modelled, strict=True)]


def check_finite(rows: CriticRows, values: torch.Tensor, bootstrap: torch.Tensor) -> torch.Tensor:
    """[b, S] bool: the values that will be used. Raises RequestFailed where one of them is not finite."""
    at = torch.arange(values.size(1))
    used = (at >= rows.prompt_lengths[:, None]) & (at < rows.lengths[:, None])
    bad = (used & ~torch.isfinite(values)).any(1) | ~torch.isfinite(bootstrap)
    if bad.any():
        raise RequestFailed(f"the critic's values of sample {int(rows.sample_ids[bad][0])} are not finite")
    return used
