"""The actor's end of the wire: a Critic whose work is done by another job, which may die and come back."""

import atexit
import contextlib
import logging
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, TypeVar

import numpy as np

from aligner.config.groups import CriticClientConfig
from aligner.data.batch import CriticAnswer, CriticBatch, CriticRows
from aligner.runtime.errors import ContractError
from aligner.runtime.journal import Journal, JournalError
from aligner.runtime.signals import StopSignals
from aligner.runtime.stacks import Stacks
from aligner.serving import protocol
from aligner.serving.hello import Contract
from aligner.serving.link import CRITIC, Link, NoAnswer, Peer, remaining
from aligner.serving.parts import encode_batch, split
from aligner.serving.protocol import INFER, TRAIN, JobLost, NotInStep, ProtocolError, RequestFailed
from aligner.serving.recovery import IN_STEP, Plan, plan
from aligner.serving.watchdog import Watchdog, Workers

log = logging.getLogger(__name__)
T = TypeVar("T")

CONNECTIONS = 4
LEAVE_TIMEOUT = 2.0
STOP_ATTEMPTS = 3
SAVED_POLL = 0.5
PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between tries


class RemoteCritic:
    """data/interfaces.Critic over HTTP. Any rank may infer; one (the world's rank 0, `trains=True`) trains and controls.

    Where the critic job is lost, what was asked waits for one to come back (critic.reconnect_timeout) and is asked again: values of
    the critic at the step that they name only, train requests by their id. The rank that trains brings the critic back in step:
    it restores the pair and sends what the journal holds since.

    Futures raise RequestFailed (a RuntimeError) with one sentence: the job's own where it answered, otherwise what happened to the
    connection; ContractError where the job that came back does not fit. `patience`: seconds after which they have failed."""

    def __init__(
        self,
        contract: Contract,
        config: CriticClientConfig,
        *,
        endpoint_file: Path,
        token_file: Optional[Path] = None,
        trains: bool = False,
        journal: Optional[Journal] = None,
        stacks: Optional[Stacks] = None,
        peer: Peer = CRITIC,
        keeps_alive: bool = False,
        stop: Optional[StopSignals] = None,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        """Connect, and compare contracts. token_file: where critic.endpoint is given, and so no endpoint file names it; absent: the
        .token beside endpoint_file, where there is one. journal: without it a critic job that died can be brought back to a pair only.
        stacks: written before a wait is given up. peer: which job this is a client of. keeps_alive: tell it that its actor lives (the rank
        that trains does in any case). stop: what a signal asked for; no wait for a job that is not there outlasts it.

        Raises ContractError where no critic answers in time or the jobs do not fit."""
        self._contract, self._config, self._say = contract, config, say
        self._trains, self._journal, self._stacks, self._peer = trains, journal, stacks, peer
        self._closed = threading.Event()
        watch = Watchdog(self._closed)
        self._watch, self.patience = watch, config.patience
        self._link = Link(
            contract,
            config,
            endpoint_file=endpoint_file,
            token_file=token_file,
            watch=watch,
            say=say,
            proves_folder=trains,
            peer=peer,
            stop=stop,
        )
        self._link.connect()
        watch.start()
        self._recovering = threading.Lock()
        self._step: Optional[int] = None  # the last one acknowledged; None until the trainer has said where it begins
        self._pair: tuple[int, Optional[Path]] = (0, None)  # the newest committed pair
        self._prepared: tuple[int, Optional[Path]] = (0, None)
        self._asked: set[int] = set()  # train steps under way
        self._infer_work = Workers("critic infer", CONNECTIONS)
        self._train_work = Workers("critic train", 1)
        self._save_work = Workers("critic save", 1)
        if trains or keeps_alive:
            threading.Thread(target=self._show_life, name=f"{peer.name} heartbeat", daemon=True).start()
        if trains:
            atexit.register(self.close)  # an actor that ends by an error says so too

    @property
    def address(self) -> str:
        return self._link.address

    @property
    def draining(self) -> bool:
        """The critic job was told to end: save a pair at the next step's end."""
        return self._link.draining

    @property
    def critic_contract(self) -> Contract:
        return self._link.critic_contract

    @property
    def max_rows(self) -> int:
        return self._link.max_rows

    # ---- Critic

    def infer(self, rows: CriticRows) -> "Future[CriticAnswer]":
        """Raises ProtocolError at once where the rows break the protocol."""
        arrays = protocol.encode_rows(rows)
        if len(rows.lengths) > self.max_rows:
            raise ProtocolError(
                f"{len(rows.lengths)} rows exceed the {self._peer.name} job's serving.max_rows={self.max_rows}; "
                "lower critic.infer_batch_size"
            )
        width = rows.tokens.size(1)

        def ask(timeout: float) -> CriticAnswer:
            return protocol.decode_answer(self._link.call(INFER, arrays, timeout=timeout), width=width)

        return self._infer_work.run(lambda: self._persist(ask))

    def train(self, step: int, batch: CriticBatch) -> "Future[dict[str, float]]":
        """Raises ProtocolError at once where the batch breaks the protocol."""
        arrays = encode_batch(batch)
        requests = split(arrays, step=step, run_id=self._contract.run_id)

        def send() -> dict[str, float]:
            if self._journal is not None:
                self._journal.write(step, arrays)
            self._asked.add(step)
            try:
                metrics = self._persist(lambda timeout: self._send(step, requests, timeout=timeout))
                self._step = step
                return metrics
            finally:
                self._asked.discard(step)

        return self._train_work.run(send)

    def prepare_save(self, step: int, folder: Path, *, beside: bool = False) -> "Future[None]":
        """Raises SaveLost in its Future where the critic job died while it wrote beside training."""
        path = Path(folder).resolve()
        half = {"step": step, "folder": str(path)}
        begun = self._train_work.run(lambda: self._tell({"op": "prepare_save", "beside": beside, **half}))

        def wait_for_it() -> None:
            begun.result()
            until = time.monotonic() + self._config.request_timeout
            while beside and not self._tell({"op": "saved", **half})["saved"]:
                if not remaining(until) or self._closed.wait(SAVED_POLL):
                    raise RequestFailed(
                        f"the critic's half of the pair of step {step} was not written in time (critic.request_timeout)"
                    )
            self._prepared = (step, path)

        return self._save_work.run(wait_for_it)

    def commit(self, step: int) -> None:
        """From here on the pair is what a critic job that comes back restores, and the journal before it is not needed."""

        def commit() -> None:
            if self._prepared[0] == step:
                self._pair = self._prepared
            if self._journal is not None:
                self._journal.forget(through=step)
            self._tell({"op": "commit", "step": step})

        self._train_work.run(commit).result()

    def restore(self, step: int, folder: Optional[Path]) -> None:
        path = None if folder is None else Path(folder).resolve()

        def restore() -> None:
            self._tell(_restore_request(step, path))
            self._step, self._pair = step, (step, path)

        self._train_work.run(restore).result()

    def status(self) -> dict[str, Any]:
        return self._link.control({"op": "status", "run_id": self._contract.run_id}, timeout=self._link.control_timeout)

    def stop(self) -> None:
        """Tell the critic job to end."""
        self._closed.set()  # its end is no loss
        for attempt in range(STOP_ATTEMPTS):
            try:
                self._link.control({"op": "stop"}, timeout=self._link.control_timeout)
                return
            except JobLost:
                if attempt == STOP_ATTEMPTS - 1:
                    raise
                time.sleep(PAUSE * 2**attempt)

    def close(self) -> None:
        """Leave. What is still in flight fails."""
        atexit.unregister(self.close)
        told = self._closed.is_set()
        self._closed.set()
        if self._trains and not told:
            with contextlib.suppress(RequestFailed):
                self._link.control({"op": "leave"}, timeout=LEAVE_TIMEOUT)
        self._watch.end("the actor closed the connection")
        self._infer_work.close()
        self._train_work.close()
        self._save_work.close()

    # ---- asking until it is answered

    def _persist(self, ask: Callable[[float], T]) -> T:
        """ask(timeout), again and again while the critic job is lost or not in step, until `patience` ends."""
        until = time.monotonic() + self.patience
        pause, first = PAUSE, ""
        while True:
            epoch = self._link.epoch
            try:
                return ask(min(self._config.request_timeout, remaining(until)))
            except (JobLost, NotInStep) as latest:
                error = type(latest)(f"{first}; then {latest}") if first else latest
                first = first or str(latest)  # why it was lost, which a later "connection refused" does not tell
                if self._closed.is_set():
                    raise
                try:
                    self._recover(epoch, error, until)
                except RequestFailed as given_up:
                    if self._stacks is not None:
                        self._stacks.dump(str(given_up))
                    raise
            self._closed.wait(min(pause, remaining(until)))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _recover(self, epoch: int, error: RequestFailed, until: float) -> None:
        """Find the critic job again and bring it back in step, unless another thread has since `epoch`.

        Raises `error`, or JobLost with it, where that does not help."""
        if not remaining(until) or not self._recovering.acquire(timeout=remaining(until)):
            raise error
        try:
            if self._link.epoch != epoch or self._closed.is_set():
                return
            if isinstance(error, NotInStep) and not self._trains:
                return  # the rank that trains brings it there
            before = self._link.instance
            decided: list[Plan] = []
            timeout = min(self._config.reconnect_timeout, remaining(until))
            self._link.reconnect(error, timeout=timeout, then=lambda reply: decided.append(self._resync(before, reply)))
            if isinstance(error, NotInStep) and decided[-1] == IN_STEP:
                raise error  # it is where it should be: what was asked is wrong
        finally:
            self._recovering.release()

    def _resync(self, before: Optional[str], reply: Mapping[str, Any]) -> Plan:
        """Bring the critic that answered hello with `reply` to the step that it has acknowledged."""
        if not self._trains or self._step is None:
            return IN_STEP
        trusted = reply["instance"] == before and reply["weights_undefined"] is None
        pair_step, folder = self._pair
        decided = plan(
            actor_step=self._step,
            critic_step=reply["contract"]["step"],
            trusted=trusted,
            pair_step=pair_step,
            journalled=self._journal.steps() if self._journal is not None else (),
            asked=self._asked,
        )
        if decided.restore:
            self._link.control(_restore_request(pair_step, folder))
            for step in decided.replay:
                arrays = self._journalled(step)
                self._send(step, split(arrays, step=step, run_id=self._contract.run_id))
            replayed = (
                f", then replayed {', '.join(map(str, decided.replay))} from the journal" if decided.replay else ""
            )
            origin = f"the pair of step {pair_step}" if folder else "its initial weights"
            self._say(f"the critic job at {self.address} is at step {self._step} again: it took {origin}{replayed}")
        return decided

    def _journalled(self, step: int) -> dict[str, np.ndarray]:
        try:
            return self._journal.read(step)
        except JournalError as error:
            raise ContractError(f"the critic cannot be brought back to step {self._step}: {error}") from None

    def _send(
        self, step: int, requests: list[dict[str, np.ndarray]], *, timeout: Optional[float] = None
    ) -> dict[str, float]:
        """All parts of a train request; the metrics that the critic answers."""
        for request in requests:
            reply = self._link.reply(TRAIN, request, timeout=timeout)
        if reply["state"] != "applied":  # another process took the last parts than the first
            raise JobLost(f"train step {step}: {len(requests)} parts were sent, but the critic job says {reply}")
        return reply["metrics"]

    def _tell(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._persist(lambda timeout: self._link.control(request, timeout=timeout))

    def _show_life(self) -> None:
        """Tell the other job that its actor lives, however long a step takes (serving.idle_timeout), and see whether it does."""
        while not self._closed.wait(self._config.heartbeat):
            epoch = self._link.epoch
            try:
                self.status()
            except NoAnswer as error:
                log.info("heartbeat: %s", error)  # it may save; requests have deadlines of their own
            except RequestFailed as error:
                self._find_again(epoch, error)

    def _find_again(self, epoch: int, error: RequestFailed) -> None:
        """At once, so that it is in step when the next request comes. A failure is told by the request that needs it."""
        try:
            self._recover(epoch, error, time.monotonic() + self._config.reconnect_timeout)
        except Exception as failed:
            log.warning("heartbeat: %s", failed)


def _restore_request(step: int, folder: Optional[Path]) -> dict[str, Any]:
    return {"op": "restore", "step": step, "folder": None if folder is None else str(folder)}
