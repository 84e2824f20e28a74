"""Verifier processes: spawned, limited, each with a deadline per sample, and replaced when they hang or die.

One thread a process starts it, feeds it and kills it. That thread must live as long as its process: the kernel's signal at a
parent's death is sent when the thread that started the child ends."""

import contextlib
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Optional

from aligner.data.batch import Score
from aligner.data.tasks import HASH_SEED
from aligner.rewards.replies import WorkerFailed, failure, read_error, read_reply, read_score
from aligner.runtime.signals import kept_from_children

log = logging.getLogger(__name__)

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
# Nothing else of the environment reaches a verifier: a token in it would be at the mercy of the user's function.
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH", "TZ")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX"), "1")
REASONS = {
    signal.SIGXCPU: " (out of CPU time)",
    signal.SIGKILL: " (perhaps for memory)",
    signal.SIGXFSZ: " (file too large)",
}
MAX_REPLY = 1 << 20
MAX_FAILED_STARTS = 3
CLOSED = "the verifier pool was closed"


class ScoringFailed(WorkerFailed):
    """It failed while it scored a response."""


class WorkerProcess:
    """One verifier process and its pipes, used by one thread."""

    def __init__(self, spec: dict[str, Any]) -> None:
        passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), passed.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "aligner.rewards.worker", json.dumps({**spec, "parent": os.getpid()})]
        with kept_from_children():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**passed, **ONE_THREAD, **HASH_SEED, "PYTHONPATH": path},
                bufsize=0,
                start_new_session=True,  # a Ctrl-C is the parent's affair, and what a function starts can be killed with it
            )
        os.set_blocking(self._process.stdin.fileno(), False)
        os.set_blocking(self._process.stdout.fileno(), False)
        self._received, self._number = b"", 0  # request 0 is the start

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, request: dict[str, Any], deadline: float) -> None:
        """Give the request the next number, which each reply to it must carry."""
        self._number += 1
        rest = memoryview(json.dumps({**request, "number": self._number}).encode() + b"\n")
        while rest:
            self._wait(self._process.stdin, select.POLLOUT, deadline)
            try:
                rest = rest[os.write(self._process.stdin.fileno(), rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise WorkerFailed(self._how_it_died()) from error

    def receive(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._received:
            self._wait(self._process.stdout, select.POLLIN, deadline)
            try:
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                continue
            if not chunk:
                raise WorkerFailed(self._how_it_died())
            self._received += chunk
            if len(self._received) > MAX_REPLY:
                raise WorkerFailed(f"its reply is longer than {MAX_REPLY} bytes")
        line, _, self._received = self._received.partition(b"\n")
        return read_reply(line, self._number)

    def _wait(self, pipe: Any, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
            raise WorkerFailed("it did not answer before its deadline")

    def _how_it_died(self) -> str:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        if code >= 0:
            return f"its process ended with exit code {code}"
        return f"its process died of {signal.Signals(-code).name}{REASONS.get(-code, '')}"

    def kill(self) -> None:
        """End the process and what it started; returns when it is reaped."""
        with contextlib.suppress(ProcessLookupError):  # not yet the leader of its group, or gone with all of it
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


class Batch:
    """Scores of one call, filled in by whichever worker; the future is set with the last."""

    def __init__(self, size: int) -> None:
        self.future: "Future[list[Score]]" = Future()
        self.future.set_running_or_notify_cancel()  # a running future cannot be cancelled under the workers
        self._scores: list[Optional[Score]] = [None] * size
        self._missing, self._lock = size, threading.Lock()
        if not size:
            self.future.set_result([])

    def put(self, at: int, score: Score) -> None:
        with self._lock:
            self._scores[at] = score
            self._missing -= 1
            last = not self._missing
        if last:
            self.future.set_result(self._scores)


class Job(NamedTuple):
    batch: Batch
    at: int
    request: dict[str, Any]


class WorkerPool:
    """`workers` verifier processes that score requests {"response": text, "sample": fields with `ended`}.

    timeout: seconds of one score. failed_score: what a response earns where scoring it raised, hung or ended its process (absent: an
    error); what goes wrong before it is scored stays an error. start_timeout: seconds of a start, and of preparing a sample (imports,
    building a dataset).
    Raises ValueError where the verifier cannot be built (the user's file, say), RuntimeError where no process comes up in time."""

    def __init__(
        self,
        spec: dict[str, Any],
        *,
        workers: int,
        timeout: float,
        memory_mb: int,
        failed_score: Optional[float] = None,
        start_timeout: float = 120.0,
        max_queued: int = 1 << 16,
    ) -> None:
        self._spec = {**spec, "timeout": timeout, "memory_mb": memory_mb, "start_timeout": start_timeout}
        self._timeout, self._start_timeout, self._max_queued = timeout, start_timeout, max_queued
        self._failed_score = failed_score
        self._jobs: "queue.SimpleQueue[Optional[Job]]" = queue.SimpleQueue()
        self._submitting, self._closed = threading.Lock(), threading.Event()
        self._slots = [Slot(self, at) for at in range(workers)]
        try:
            for slot in self._slots:
                slot.first_start.result()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are up."""
        return [slot.worker.pid for slot in self._slots if slot.worker is not None]

    def submit(self, requests: list[dict[str, Any]]) -> "Future[list[Score]]":
        """One score a request, in order. Raises RuntimeError where the pool is closed or its queue would grow beyond its bound."""
        batch = Batch(len(requests))
        with self._submitting:
            if self._closed.is_set():
                raise RuntimeError("the verifier pool is closed")
            if self._jobs.qsize() + len(requests) > self._max_queued:
                raise RuntimeError(
                    f"{self._jobs.qsize()} responses wait for {len(self._slots)} verifier processes, and {len(requests)} more would "
                    f"exceed {self._max_queued}: raise reward.workers"
                )
            for at, request in enumerate(requests):
                self._jobs.put(Job(batch, at, request))
        return batch.future

    def start_worker(self) -> WorkerProcess:
        """A process that said it is ready. Raises ValueError with its own words, or WorkerFailed."""
        worker = WorkerProcess(self._spec)
        try:
            reply = worker.receive(time.monotonic() + self._start_timeout)
            if "ready" not in reply:
                raise ValueError(read_error(reply))
        except BaseException:
            worker.kill()
            raise
        return worker

    def ask(self, worker: WorkerProcess, request: dict[str, Any]) -> Score:
        """A score, or an error of the verifier's own. Raises WorkerFailed."""
        prepared_by = time.monotonic() + self._start_timeout
        worker.send(request, prepared_by)
        reply = worker.receive(prepared_by)
        if "started" not in reply:
            return read_score(reply)
        try:
            score = read_score(worker.receive(time.monotonic() + self._timeout))
        except WorkerFailed as error:
            raise ScoringFailed(f"{error} (reward.timeout={self._timeout:g} s)") from error
        return score if score.error is None else self.failed(score.error)

    def failed(self, why: str) -> Score:
        """The score of a response that could not be scored."""
        if self._failed_score is None:
            return failure(why)
        log.warning("a response could not be scored and earns reward.failed_score=%g: %s", self._failed_score, why)
        return Score(self._failed_score, {"failed": 1.0})

    def close(self) -> None:
        """End all processes; responses that still wait get an error. Safe to call twice."""
        with self._submitting:
            self._closed.set()
            for _ in self._slots:
                self._jobs.put(None)
        for slot in self._slots:
            slot.stop()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def next_job(self) -> Optional[Job]:
        return self._jobs.get()


class Slot:
    """The place of one worker: a thread, and the process that it has at the moment."""

    def __init__(self, pool: WorkerPool, number: int) -> None:
        self.worker: Optional[WorkerProcess] = None
        self.first_start: "Future[None]" = Future()
        self._pool, self._failed_starts, self._last_failure = pool, 0, ""
        self._thread = threading.Thread(target=self._run, name=f"verifier-{number}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        worker = self.worker
        if worker is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)  # a busy thread sees the pipe's end at once
        self._thread.join()

    def _run(self) -> None:
        try:
            self.worker = self._pool.start_worker()
            self.first_start.set_result(None)
        except ValueError as error:
            self.first_start.set_exception(error)
        except BaseException as error:
            self.first_start.set_exception(RuntimeError(f"a verifier process did not start: {error}"))
        while (job := self._pool.next_job()) is not None:
            job.batch.put(job.at, self._score(job))
        self._drop()

    def _score(self, job: Job) -> Score:
        """A score or an error, and never an exception: without this thread the batch would be waited for without end."""
        try:
            if not self._pool.closed:
                if self.worker is None:
                    self._restart()
                return self._pool.ask(self.worker, job.request)
            return failure(CLOSED)
        except BaseException as error:
            scoring = isinstance(error, ScoringFailed) and not self._pool.closed
            why = CLOSED if self._pool.closed else f"the verifier failed: {str(error) or type(error).__name__}"
            try:
                self._drop()
            except BaseException as left:
                why += f"; its process could not be ended: {left}"
            return self._pool.failed(why) if scoring else failure(why)

    def _restart(self) -> None:
        # A verifier that cannot come up any more must not cost each of the waiting responses a start's deadline.
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise WorkerFailed(f"it did not start again {self._failed_starts} times: {self._last_failure}")
        try:
            self.worker = self._pool.start_worker()
            self._failed_starts = 0
        except Exception as error:
            self._failed_starts, self._last_failure = self._failed_starts + 1, str(error)
            raise

    def _drop(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.kill()
