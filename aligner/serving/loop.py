"""The critic job's loop. Threads that answer requests put calls on a queue; rank 0's main thread alone talks to the other ranks.

Every rank runs a call under try, and all learn of any error before the next collective that moves data: a rank that raises can
not strand the others. What cannot be agreed on (a dead peer, ranks left inside a collective) ends the job."""

import collections
import contextlib
import logging
import os
import re
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Callable, NoReturn, Optional

import torch.distributed as dist

from aligner.runtime.stacks import Stacks
from aligner.serving.backend import CriticBackend, Refused, run_call
from aligner.serving.frames import Call, Op, broadcast_call
from aligner.serving.protocol import JobLost, NotInStep, RequestFailed

log = logging.getLogger(__name__)

POLL = 0.2  # seconds between looks at the stop conditions while idle
HUNG = 0.9  # of the collectives' timeout
STUCK_GRACE = 60.0  # seconds that the other ranks have to end a call in which one has failed


class JobFailed(RuntimeError):
    """The critic job cannot go on; the message is one sentence."""

    kind = JobLost.kind


class LostRank(JobFailed):
    """A collective of the loop failed: the ranks cannot be brought back in step."""


class CallFailed(RequestFailed):
    """A call that raised on some rank. `clean`: it was refused everywhere before anything changed."""

    def __init__(self, text: str, *, clean: bool) -> None:
        super().__init__(text)
        self.clean = clean


@dataclass(eq=False)
class Work:
    """A call that waits for the main thread."""

    call: Call
    future: "Future[Any]" = field(default_factory=Future)


def one_line(error: BaseException, limit: int = 400) -> str:
    """The error as one short line; its class where the message alone says nothing."""
    text = " ".join(str(error).split())
    named = (
        text if isinstance(error, (Refused, RequestFailed, JobFailed)) and text else f"{type(error).__name__}: {text}"
    )
    return named if len(named) <= limit else named[: limit - 4] + " ..."


class FailureBoard:
    """Where a rank that failed says so while the others may still be inside a collective: the job's key-value store.

    Works where collectives do not: rank 0 learns from it that a call can never end."""

    def __init__(self) -> None:
        self._store = dist.PrefixStore("aligner-serving", dist.distributed_c10d._get_default_store())

    def post(self, number: int, text: str) -> None:
        self._store.set(str(number), text)

    def read(self, number: int) -> Optional[str]:
        return self._store.get(str(number)).decode() if self._store.check([str(number)]) else None


def lost_rank(error: Exception) -> LostRank:
    """What a failed collective says, without gloo's source line and advice."""
    text = re.sub(r"^\[\S+\] ", "", one_line(error).removeprefix("RuntimeError: "))
    return LostRank(f"the job lost a rank: {text.split('. ')[0]}")


def _own_group(group: Optional[dist.ProcessGroup], timeout: float) -> Optional[dist.ProcessGroup]:
    """A gloo group of the same ranks that nobody else uses: a rank that failed waits in it while the others are still inside a
    collective of the backend's, and the two must not be taken for each other."""
    if group is None or dist.get_world_size(group) == 1:
        return None
    return dist.new_group(dist.get_process_group_ranks(group), timeout=timedelta(seconds=timeout), backend="gloo")


class Loop:
    """Calls in, one at a time, on every rank. `group`: the job's ranks, None for one rank alone. timeout: of its collectives, in
    seconds; it must exceed the longest call. Made on all ranks at once: it makes a gloo group of its own.

    stacks: written where a call takes nearly as long as `timeout`, and before the process is cut short.
    deterministic: where several infer calls wait, the one with the smallest first sample id goes first."""

    def __init__(
        self,
        backend: CriticBackend,
        *,
        group: Optional[dist.ProcessGroup],
        heartbeat: float,
        deterministic: bool = False,
        stuck_grace: float = STUCK_GRACE,
        timeout: float = 1800.0,
        stacks: Optional[Stacks] = None,
    ) -> None:
        self._backend, self._group = backend, _own_group(group, timeout)
        self._heartbeat, self._deterministic = heartbeat, deterministic
        self._stuck_grace = stuck_grace
        self._stacks, self._hung = stacks, HUNG * timeout
        # What has to be put in order where the process must be cut short.
        self.before_exit: Callable[[], None] = lambda: None
        self._rank = 0 if self._group is None else dist.get_rank(self._group)
        self._board = None if self._group is None else FailureBoard()
        self._waiting: collections.deque[Work] = collections.deque()
        self._changed = threading.Condition()
        self._closed: Optional[str] = None
        self._calls = 0  # equal on every rank
        self._running: Optional[Work] = None
        self.last_call = time.monotonic()  # when a call ended last

    # ---- threads that answer requests

    def submit(self, call: Call) -> "Future[Any]":
        """Queue a call. Its future raises CallFailed where it failed, NotInStep where it asks for the values of another step.
        Raises JobLost where the job is ending."""
        with self._changed:
            if self._closed is not None:
                raise JobLost(f"the job is ending ({self._closed})")
            work = Work(call)
            self._waiting.append(work)
            self._changed.notify()
            return work.future

    @property
    def queued(self) -> int:
        """Calls waiting or running."""
        return len(self._waiting) + (self._running is not None)

    # ---- rank 0's main thread

    def run(self, why_end: Callable[[], Optional[str]]) -> str:
        """Serve until why_end() gives a reason, which is returned. A call that runs is finished first; those that wait are refused.

        Raises JobFailed where the ranks cannot be kept in step."""
        watcher = threading.Thread(target=self._watch_for_stuck_ranks, name="stuck ranks", daemon=True)
        if self._board is not None:
            watcher.start()
        beat = time.monotonic()
        try:
            while (reason := why_end()) is None:
                work = self._next(POLL)
                if work is not None:
                    self._serve(work)
                elif time.monotonic() - beat < self._heartbeat:
                    continue
                else:
                    self._broadcast(Call(Op.NOOP))
                beat = time.monotonic()
        except BaseException as error:
            self.close(one_line(error))
            raise
        self.close(reason)
        return reason

    def close(self, reason: str) -> None:
        """Refuse what waits and what will come."""
        with self._changed:
            self._closed = self._closed or reason
            refused = list(self._waiting)
            self._waiting.clear()
        for work in refused:
            work.future.set_exception(JobLost(f"the job is ending ({self._closed})"))

    def release(self) -> None:
        """Let the other ranks leave their loop."""
        self._broadcast(Call(Op.STOP))

    def leave_group(self) -> None:
        """At its end: threads that still know this loop must not keep the group's own threads running."""
        self._group = None

    def _next(self, timeout: float) -> Optional[Work]:
        with self._changed:
            if not self._waiting:
                self._changed.wait(timeout)
            if not self._waiting:
                return None
            self._running = self._first() if self._deterministic else self._waiting[0]
            self._waiting.remove(self._running)
            return self._running

    def _first(self) -> Work:
        """By first sample id among the infer calls that wait at the head; other calls keep their place."""
        head = []
        for work in self._waiting:
            if work.call.op is not Op.INFER:
                break
            head.append(work)
        return min(head, key=lambda w: int(w.call.rows.sample_ids[0])) if head else self._waiting[0]

    def _serve(self, work: Work) -> None:
        try:
            self._check_step(work.call)
            self._broadcast(work.call)
            work.future.set_result(self._execute(work.call))
        except (CallFailed, NotInStep) as error:
            work.future.set_exception(error)
        except JobFailed as error:
            work.future.set_exception(error)
            raise
        finally:
            self._running = None
            self.last_call = time.monotonic()

    def _check_step(self, call: Call) -> None:
        """Here, where calls have one order: values of a critic that was not yet brought back to its step would look like any other."""
        wanted = None if call.rows is None or not call.rows.values else call.rows.critic_step
        if wanted is not None and wanted != (at := self._backend.status()["step"]):
            raise NotInStep(f"values of the critic after step {wanted} were asked for, and it is at step {at}")

    def _watch_for_stuck_ranks(self) -> None:
        while self._closed is None:
            time.sleep(min(1.0, self._stuck_grace / 4))
            work, number = self._running, self._calls
            failure = self._board.read(number) if work is not None else None
            if failure is None:
                continue
            deadline = time.monotonic() + self._stuck_grace
            while time.monotonic() < deadline and self._running is work:
                time.sleep(0.1)
            if self._running is work:
                text = f"{failure}; the other ranks did not come out of the call in {self._stuck_grace:.0f} s, so the job ends"
                work.future.set_exception(JobFailed(text))
                self._exit_now(text)

    def _exit_now(self, text: str) -> NoReturn:
        """The main thread hangs in a collective that no peer will join: nothing but the end of the process gets it out."""
        log.critical("%s", text)
        if self._stacks is not None:
            self._stacks.dump(text)
        print(f"error: {text}", file=sys.stderr, flush=True)
        self.close(text)
        time.sleep(1.0)  # for answers to be sent
        try:
            self.before_exit()
        finally:
            logging.shutdown()
            os._exit(1)

    # ---- the other ranks

    def follow(self) -> None:
        """Run what rank 0 broadcasts until it says stop. Raises JobFailed where rank 0 is gone."""
        while True:
            call = self._broadcast(None)
            if call.op is Op.STOP:
                return
            if call.op is not Op.NOOP:
                with contextlib.suppress(CallFailed):  # rank 0 answers it
                    self._execute(call)

    # ---- every rank

    def _broadcast(self, call: Optional[Call]) -> Call:
        if self._stacks is not None:
            self._stacks.expect(self._hung)
        try:
            call = broadcast_call(call, group=self._group)
        except Exception as error:
            raise lost_rank(error) from error
        if call.op not in (Op.NOOP, Op.STOP):
            self._calls += 1
        return call

    def _execute(self, call: Call) -> Any:
        """Rank 0's result. Raises CallFailed, on every rank, where the call raised on any."""
        error: Optional[Exception] = None
        result = None
        try:
            result = run_call(self._backend, call)
        except Exception as raised:
            error = raised
            log.warning("%s failed on rank %d", call.op.name.lower(), self._rank, exc_info=raised)
            if self._board is not None:
                self._board.post(self._calls, f"rank {self._rank}: {one_line(raised)}")
        failure = self._agree(error)
        if failure is not None:
            raise failure
        return result

    def _agree(self, error: Optional[Exception]) -> Optional[CallFailed]:
        mine = None if error is None else (isinstance(error, Refused), one_line(error))
        every: list[Any] = [mine]
        if self._group is not None:
            every = [None] * dist.get_world_size(self._group)
            try:
                dist.all_gather_object(every, mine, group=self._group)
            except Exception as lost:
                raise lost_rank(lost) from lost
        failed = [(rank, *e) for rank, e in enumerate(every) if e is not None]
        if not failed:
            return None
        rank, _, text = failed[0]
        clean = len(failed) == len(every) and all(e[1] for e in failed)
        where = "" if len(failed) == len(every) else f"rank {rank}: "
        return CallFailed(f"{where}{text}", clean=clean)
