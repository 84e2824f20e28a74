"""What happens to a request before and after the loop: one method an endpoint, each called in a thread of its own by PyTriton.

Every failure is an answer: nothing here raises into Triton, whose error replies carry tracebacks."""

import json
import logging
import os
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Protocol, Sequence

import numpy as np
import torch

from aligner.data.batch import CriticAnswer, CriticRows, Score
from aligner.serving import access, hello, protocol
from aligner.serving.backend import CriticBackend
from aligner.serving.frames import Call, Op
from aligner.serving.loop import CallFailed, Loop, one_line
from aligner.serving.parts import Incomplete, Stored, TrainLedger
from aligner.serving.protocol import Arrays, ProtocolError, RequestFailed

log = logging.getLogger(__name__)

SCORING_DEADLINE = 1800.0


class WireRequest(Protocol):
    """PyTriton's request: named arrays, and the forwarded headers as parameters."""

    data: dict[str, np.ndarray]
    parameters: Optional[Mapping[str, Any]]


class Handlers:
    """The three endpoints over one loop. `run_folder` is the only place that save and restore may name."""

    def __init__(
        self,
        backend: CriticBackend,
        loop: Loop,
        *,
        run_folder: Path,
        token: Optional[str],
        max_rows: int,
        deterministic: bool,
    ) -> None:
        self._backend, self._loop, self._token = backend, loop, token
        self._run_folder, self._max_rows, self._deterministic = run_folder.resolve(), max_rows, deterministic
        status = backend.status()
        contract = hello.Contract.of(status)
        if contract.step is None:
            raise ValueError("the backend's status lacks its step")
        self._vocab_size, self._max_length = contract.vocab_size, contract.max_length
        self._ledger = TrainLedger(
            step=contract.step, run_id=contract.run_id, vocab_size=contract.vocab_size, max_length=contract.max_length
        )
        self._writing = threading.Lock()  # train, save, commit and restore follow one another, answers included
        self._started = time.time()
        self.last_spoken = time.monotonic()
        self.stop_requested = False
        self.draining = False
        self.counts = dict.fromkeys(
            ("infer_requests", "infer_rows", "infer_batches", "train_parts", "train_steps", "failed"), 0
        )

    # ---- infer

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
        self._admit(request)
        self._spoken()
        protocol.check_arrays(protocol.INFER, request.data)
        count = len(request.data["tokens"])
        if count > self._max_rows:
            raise ProtocolError(
                f"{count} rows exceed the critic job's serving.max_rows={self._max_rows}; lower critic.infer_batch_size"
            )
        protocol.check_rows(request.data, vocab_size=self._vocab_size, max_length=self._max_length)
        self.counts["infer_requests"] += 1
        self.counts["infer_rows"] += count
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
        if not self._deterministic:
            groups = [[i for i, r in rows.items() if r.values is wanted] for wanted in (True, False)]
        else:
            groups = [[i] for i in rows]
        calls = {tuple(g): self._call_rows(_merge([rows[i] for i in g])) for g in groups if g}
        outcomes: dict[int, Future[Any]] = {}
        for group, call in calls.items():
            if len(group) > 1 and isinstance(call.exception(), CallFailed):
                outcomes |= {i: self._call_rows(rows[i]) for i in group}
            else:
                outcomes |= _split(call, {i: len(rows[i].lengths) for i in group})
        return outcomes

    def _call_rows(self, rows: CriticRows) -> "Future[Any]":
        self.counts["infer_batches"] += 1
        try:
            return self._loop.submit(Call(Op.INFER, rows=rows))
        except RequestFailed as error:
            refused: Future[Any] = Future()
            refused.set_exception(error)
            return refused

    def _answer(
        self, rows: CriticRows, outcome: "Future[Any]", scoring: "Future[Optional[list[Score]]]"
    ) -> CriticAnswer:
        values, bootstrap, scores = outcome.result()
        try:
            verified = scoring.result(SCORING_DEADLINE)
        except Exception as error:
            verified = [Score(float("nan"), {}, f"scoring failed: {one_line(error)}")] * len(bootstrap)
        _check_finite(rows, values, bootstrap)
        return CriticAnswer(values, bootstrap, verified if verified is not None else scores)

    def _failed_infer(self, request: WireRequest, error: Exception) -> dict[str, np.ndarray]:
        tokens = request.data.get("tokens")
        rows, width = tokens.shape if tokens is not None and tokens.ndim == 2 else (1, 1)
        return protocol.failed_answer(rows, width, self._failure("infer", error))

    # ---- train

    def train(self, requests: Sequence[WireRequest]) -> list[dict[str, np.ndarray]]:
        return [self._reply("train", request, self._train) for request in requests]

    def _train(self, arrays: Arrays) -> dict[str, Any]:
        with self._writing:
            self._spoken()
            self.counts["train_parts"] += 1
            received = self._ledger.receive(arrays)
            if isinstance(received, Incomplete):
                return {"state": "incomplete", "received": received.received, "parts": received.parts}
            if isinstance(received, Stored):
                return received.answer
            try:
                metrics = self._loop.submit(Call(Op.TRAIN, step=received.step, batch=received.batch)).result()
            except CallFailed as error:
                if not error.clean:
                    self._ledger.failed(received.step, str(error))
                raise
            answer = {"state": "applied", "step": received.step, "metrics": {k: float(v) for k, v in metrics.items()}}
            self._ledger.applied(received.step, answer, digest=received.digest)
            self.counts["train_steps"] += 1
            return answer

    # ---- control

    def control(self, requests: Sequence[WireRequest]) -> list[dict[str, np.ndarray]]:
        return [self._reply("control", request, self._control) for request in requests]

    def _control(self, arrays: Arrays) -> dict[str, Any]:
        protocol.check_arrays(protocol.CONTROL, arrays)
        request = protocol.json_of(arrays["request"][0], "control request")
        ops: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "hello": self._hello,
            "status": self._status,
            "prepare_save": self._prepare_save,
            "commit": self._commit,
            "restore": self._restore,
            "stop": self._stop,
        }
        op = request.get("op")
        if not isinstance(op, str) or op not in ops:
            raise ProtocolError(f"unknown control op {op!r}; version {protocol.VERSION} has {', '.join(ops)}")
        if op != "status" or request.get("run_id") == self._ledger.run_id:  # people who look on do not keep a job alive
            self._spoken()
        return ops[op](request)

    def _hello(self, request: dict[str, Any]) -> dict[str, Any]:
        theirs = request.get("contract")
        if not isinstance(theirs, dict):
            raise ProtocolError("hello lacks its contract")
        critic = hello.Contract.of(self._backend.status())
        version = hello.version_problem(actor=theirs.get("protocol", 0), critic=critic.protocol)
        actor = None if version else hello.Contract.of(theirs)
        problems = [version] if actor is None else hello.problems(actor, critic)
        if problems:
            raise ProtocolError("the two jobs do not fit together: " + "; ".join(problems))
        return {"contract": critic.as_dict(), "warnings": hello.warnings(actor, critic), "max_rows": self._max_rows}

    def _status(self, _: dict[str, Any]) -> dict[str, Any]:
        return self.status()

    def status(self) -> dict[str, Any]:
        """The backend's status, and the server's own counts."""
        return {
            **self._backend.status(),
            "protocol": protocol.VERSION,
            "pid": os.getpid(),
            "uptime": time.time() - self._started,
            "queued": self._loop.queued,
            "draining": self.draining,
            "weights_undefined": self._ledger.undefined,
            "max_rows": self._max_rows,
            **self.counts,
        }

    def _prepare_save(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._writing:
            step, folder = _step_of(request), self._folder_of(request)
            if self._ledger.undefined is not None or step != self._ledger.step:
                state = self._ledger.undefined or f"the last step applied is {self._ledger.step}"
                raise ProtocolError(f"cannot save the critic of step {step}: {state}")
            self._loop.submit(Call(Op.PREPARE_SAVE, step=step, folder=folder)).result()
            return {"step": step}

    def _commit(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._writing:
            step = _step_of(request)
            self._loop.submit(Call(Op.COMMIT, step=step)).result()
            return {"step": step}

    def _restore(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._writing:
            step = _step_of(request)
            folder = None if request.get("folder") is None else self._folder_of(request)
            try:
                self._loop.submit(Call(Op.RESTORE, step=step, folder=folder)).result()
            except CallFailed as error:
                if not error.clean:
                    self._ledger.failed(step, f"restore of step {step}: {error}")
                raise
            self._ledger.reset(step)
            return {"step": step}

    def _stop(self, request: dict[str, Any]) -> dict[str, Any]:
        self.stop_requested = True
        return {}

    def _folder_of(self, request: dict[str, Any]) -> Path:
        """Only folders of this run: checkpoints hold pickled parts, so a path from elsewhere would run what it holds."""
        folder = request.get("folder")
        if not isinstance(folder, str):
            raise ProtocolError(f"folder must be a path, not {folder!r}")
        path = Path(folder).resolve()
        if not path.is_relative_to(self._run_folder):
            raise ProtocolError(
                f"{path} is not inside this run's folder {self._run_folder} (run.dir, run.name must be equal in both jobs)"
            )
        return path

    # ---- common

    def _spoken(self) -> None:
        self.last_spoken = time.monotonic()

    def _admit(self, request: WireRequest) -> None:
        if not access.allowed(self._token, request.parameters):
            raise ProtocolError("refused without the right token")

    def _reply(self, name: str, request: WireRequest, act: Callable[[Arrays], dict[str, Any]]) -> dict[str, np.ndarray]:
        try:
            self._admit(request)
            reply = json.dumps({**act(request.data), "draining": self.draining})
            return {"reply": protocol.text_array(reply), "error": protocol.text_array("")}
        except Exception as error:
            return {"reply": protocol.text_array(""), "error": protocol.text_array(self._failure(name, error))}

    def _failure(self, name: str, error: Exception) -> str:
        self.counts["failed"] += 1
        if isinstance(error, (ProtocolError, RequestFailed)):
            log.warning("%s request failed: %s", name, error)
            return " ".join(str(error).split())
        log.error("%s request failed", name, exc_info=error)
        return one_line(error)


def _step_of(request: dict[str, Any]) -> int:
    step = request.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ProtocolError(f"step must be an integer of at least 0, not {step!r}")
    return step


def _merge(rows: Sequence[CriticRows]) -> CriticRows:
    """Rows of requests of one S, one after the other."""
    if len(rows) == 1:
        return rows[0]
    names = ("tokens", "lengths", "prompt_lengths", "sample_ids", "truncated")
    joined = {n: torch.cat([getattr(r, n) for r in rows]) for n in names}
    return CriticRows(**joined, fields=[f for r in rows for f in r.fields], values=rows[0].values)


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


def _check_finite(rows: CriticRows, values: torch.Tensor, bootstrap: torch.Tensor) -> None:
    """Raises RequestFailed where a value that will be used is not finite."""
    at = torch.arange(values.size(1))
    used = (at >= rows.prompt_lengths[:, None]) & (at < rows.lengths[:, None])
    bad = (used & ~torch.isfinite(values)).any(1) | ~torch.isfinite(bootstrap)
    if bad.any():
        raise RequestFailed(f"the critic's values of sample {int(rows.sample_ids[bad][0])} are not finite")
