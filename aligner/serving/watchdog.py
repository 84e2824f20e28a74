"""What a client needs so that no wait of its can last for ever: worker threads that never hold the process, and a watchdog."""

import contextlib
import logging
import queue
import threading
import time
from concurrent.futures import Future
from typing import Any, Callable, Iterator, Optional

from aligner.serving.endpoint import EndpointInfo
from aligner.serving.kserve import Connection

log = logging.getLogger(__name__)

PROBE_EVERY = 2.0
PROBE_TIMEOUT = 10.0
PROBES = 3  # failures in a row after which the server counts as dead


class Workers:
    """Daemon threads that run work in order: a hung connection must not keep the process from ending."""

    def __init__(self, name: str, threads: int) -> None:
        self._work: "queue.SimpleQueue[Optional[tuple[Callable[[], Any], Future[Any]]]]" = queue.SimpleQueue()
        self._threads = threads
        for i in range(threads):
            threading.Thread(target=self._serve, name=f"{name} {i}", daemon=True).start()

    def run(self, act: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        self._work.put((act, future))
        return future

    def close(self) -> None:
        for _ in range(self._threads):
            self._work.put(None)

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            act, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(act())
            except BaseException as error:
                future.set_exception(error)


class Watchdog:
    """Probes the server while calls are in flight, and cuts them where it is dead: a socket alone may never tell."""

    def __init__(self, closed: threading.Event) -> None:
        self._closed = closed
        self.info: Optional[EndpointInfo] = None  # where the server is now
        self._lock = threading.Lock()
        self._calls: set[Connection] = set()
        self._ended: Optional[str] = None  # why no call is made any more
        self._busy = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._probe, name="critic watchdog", daemon=True).start()

    @contextlib.contextmanager
    def over(self, connection: Connection) -> Iterator[None]:
        """Watch a call while it is in flight."""
        with self._lock:
            self._calls.add(connection)
            self._busy.set()
            ended = self._ended
        try:
            if ended is not None:
                connection.cut(ended)
            yield
        finally:
            with self._lock:
                self._calls.discard(connection)
                if not self._calls:
                    self._busy.clear()

    def end(self, reason: str) -> None:
        """Cut what is in flight, and whatever a thread still begins."""
        with self._lock:
            self._ended = reason
        self.cut_all(reason)

    def cut_all(self, reason: str) -> None:
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.cut(reason)

    def _cut_overdue(self) -> None:
        """A server that sends a byte now and then never trips the socket's own timeout."""
        with self._lock:
            overdue = [c for c in self._calls if time.monotonic() > c.deadline]
        for call in overdue:
            call.cut("no whole answer before its deadline")

    def _probe(self) -> None:
        failures, info = 0, self.info
        while not self._closed.wait(PROBE_EVERY):
            self._cut_overdue()
            if not self._busy.is_set():
                failures = 0
                self._busy.wait(PROBE_EVERY)
                continue
            if info is not self.info:
                failures, info = 0, self.info
            started = time.monotonic()
            try:
                Connection(info.host, info.port, timeout=PROBE_TIMEOUT).ready()
                failures = 0  # not ready is an answer: it is starting or ending, and answers what is in flight
            except OSError as error:
                failures += 1
                log.info(
                    "readiness probe of %s failed after %.1f s: %s", info.address, time.monotonic() - started, error
                )
                if failures >= PROBES:
                    self.cut_all(f"the critic job is gone: {PROBES} readiness probes in a row failed ({error})")
