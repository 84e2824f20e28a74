"""The actor's connection: finding the critic job, comparing contracts, single requests, and finding it again where it was lost."""

import contextlib
import json
import logging
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Optional

import numpy as np

from aligner.config.groups import CriticClientConfig
from aligner.runtime.errors import ContractError
from aligner.runtime.signals import StopSignals
from aligner.serving import access, protocol
from aligner.serving.endpoint import EndpointInfo, parse_address, read_endpoint, wait_for
from aligner.serving.hello import Contract, version_problem
from aligner.serving.kserve import Connection
from aligner.serving.protocol import CONTROL, Arrays, JobLost, NotInStep, ProtocolError, RequestFailed
from aligner.serving.watchdog import PROBE_TIMEOUT, Watchdog

log = logging.getLogger(__name__)

EXPLICIT_TIMEOUT = 10.0
CONTROL_TIMEOUT = 60.0  # of hello and status, which start no collective


@dataclass(frozen=True)
class Peer:
    """The job at the other end, as it is spoken of. Deadlines are the same settings for both."""

    name: str = "critic"
    script: str = "serve_ppo_critic.py"


CRITIC, REWARD = Peer(), Peer("reward", "serve_reward_model.py")


class NoAnswer(JobLost):
    """The server is there, but did not answer in time."""


class Link:
    """Not aware of steps or of what is asked. `epoch` counts connections: a thread whose request failed sees from it whether another
    has found the critic job again meanwhile. `instance` names the process that answered last."""

    def __init__(
        self,
        contract: Contract,
        config: CriticClientConfig,
        *,
        endpoint_file: Path,
        token_file: Optional[Path],
        watch: Watchdog,
        say: Callable[[str], None],
        proves_folder: bool,
        peer: Peer = CRITIC,
        stop: Optional[StopSignals] = None,
    ) -> None:
        """proves_folder: let the critic job read a file of the run folder back, so that both are known to see the same one. stop: a wait
        for the job ends with it."""
        self._peer, self._stop = peer, stop or StopSignals()
        self._contract, self._config, self._watch, self._say = contract, config, watch, say
        self._endpoint_file, self._token_file = Path(endpoint_file), token_file
        self._proves_folder = proves_folder
        self._headers: Mapping[str, str] = {}
        self.epoch = 0
        self.draining = False
        self.instance: Optional[str] = None
        self.critic_contract: Optional[Contract] = None
        self.info, self.max_rows = EndpointInfo("", 0, 0, "", "", 0.0), 0
        self.control_timeout = min(CONTROL_TIMEOUT, config.request_timeout)

    @property
    def address(self) -> str:
        return self.info.address

    # ---- finding it

    def connect(self) -> None:
        """Raises ContractError where no critic job answers in time, or the jobs do not fit."""
        explicit = self._config.endpoint is not None
        timeout = min(EXPLICIT_TIMEOUT, self._config.connect_timeout) if explicit else self._config.connect_timeout
        advice = (
            f"start {self._peer.script} there, or correct {self._peer.name}.endpoint={self._config.endpoint}"
            if explicit
            else f"start {self._peer.script} with the same run.dir and run.name, or set {self._peer.name}.endpoint=host:port "
            "(deadline: critic.connect_timeout)"
        )
        try:
            self._find(lambda reply: None, timeout=timeout, advice=advice)
        except (TimeoutError, ProtocolError, RequestFailed) as error:
            raise ContractError(str(error)) from None

    def reconnect(self, cause: Exception, *, timeout: float, then: Callable[[Mapping[str, Any]], None]) -> None:
        """Find the critic job again, at the same place or another; `then` gets its answer to hello and brings it back in step.

        Raises JobLost with the cause where none came back within `timeout` seconds, ContractError where it does not fit."""
        advice = (
            f"start {self._peer.script} again with the same run.dir and run.name (deadline: critic.reconnect_timeout)"
        )
        first = self.critic_contract
        self._say(f"the {self._peer.name} job is lost ({cause}): waiting up to {timeout:.0f} s for one to answer")
        try:
            self._find(then, timeout=timeout, advice=advice)
        except TimeoutError as error:
            raise JobLost(f"{cause}; {error}") from None
        except ProtocolError as error:
            raise ContractError(str(error)) from None
        for difference in differences(first, self.critic_contract):
            self._say(f"the {self._peer.name} job that came back is another than before: {difference}")

    def _find(self, then: Callable[[Mapping[str, Any]], None], *, timeout: float, advice: str) -> None:
        explicit = self._explicit()

        def attempt(info: EndpointInfo) -> None:
            try:
                then(self._hello(info))
            except (JobLost, NotInStep) as lost:  # again, or another one took its place half-way
                raise ConnectionError(str(lost)) from None

        wait_for(
            lambda: explicit or read_endpoint(self._endpoint_file),
            attempt,
            timeout=timeout,
            say=self._say,
            what=(what := f"the {self._peer.name} job")
            + ("" if explicit else f"'s endpoint file {self._endpoint_file}"),
            advice=advice,
            leave=lambda: self._stop.end_wait(f"waiting for {what}"),
        )
        self.epoch += 1

    def _explicit(self) -> Optional[EndpointInfo]:
        """The place that critic.endpoint names."""
        if self._config.endpoint is None:
            return None
        host, port = parse_address(self._config.endpoint, key=f"{self._peer.name}.endpoint")
        beside = self._endpoint_file.with_suffix(".token")  # where a job of this run folder puts it
        file = self._token_file or (beside if beside.exists() else None)
        token = None if file is None else str(file)
        return EndpointInfo(host, port, pid=0, run_id=self._contract.run_id, grid="", started=0.0, token_file=token)

    def _hello(self, info: EndpointInfo) -> Mapping[str, Any]:
        """One hello. Raises OSError where nobody answers yet, ContractError where the jobs do not fit."""
        token = None if info.token_file is None else access.read_token(Path(info.token_file))
        self._headers = access.headers(token)
        if not Connection(info.host, info.port, timeout=PROBE_TIMEOUT).ready():
            raise ConnectionError("it is starting")
        self.info, self.instance = info, None
        self._watch.info = info
        with self._nonce() as nonce:
            request = {"op": "hello", "contract": self._contract.as_dict(), **nonce}
            try:
                reply = self.control(request, timeout=self.control_timeout)
            except JobLost:
                raise
            except RequestFailed as error:
                raise ContractError(f"the {self._peer.name} job at {info.address} refuses: {error}") from None
        version = version_problem(
            actor=protocol.VERSION, critic=int(reply["contract"]["protocol"]), job=self._peer.name
        )
        if version is not None:
            raise ContractError(f"the {self._peer.name} job at {info.address} does not fit: {version}")
        for warning in reply["warnings"]:
            self._say(warning)
        self.critic_contract = Contract.of(reply["contract"])
        self.max_rows, self.instance = int(reply["max_rows"]), reply["instance"]
        return reply

    @contextlib.contextmanager
    def _nonce(self) -> Iterator[dict[str, Any]]:
        """A file in the run folder that the critic job reads back."""
        if not self._proves_folder:
            yield {}
            return
        name, text = secrets.token_hex(16), secrets.token_hex(16)
        file = self._endpoint_file.with_name(f"{name}.nonce")
        file.parent.mkdir(parents=True, exist_ok=True)
        for left in file.parent.glob("*.nonce"):  # of an actor that was killed meanwhile
            left.unlink(missing_ok=True)
        file.write_text(text)
        try:
            yield {"nonce": {"name": name, "text": text, "folder": str(file.parent.resolve())}}
        finally:
            file.unlink(missing_ok=True)

    # ---- single requests

    def call(
        self, endpoint: protocol.Endpoint, arrays: Arrays, *, timeout: Optional[float] = None
    ) -> dict[str, np.ndarray]:
        """Send one request and wait for it, watched. Raises JobLost where the connection failed or no answer came in time (NoAnswer),
        RequestFailed where Triton refuses it."""
        timeout = self._config.request_timeout if timeout is None else timeout
        info = self.info
        connection = Connection(info.host, info.port, timeout=timeout)
        try:
            with self._watch.over(connection):
                return connection.infer(endpoint, arrays, self._headers)
        except TimeoutError as error:
            key = "a fixed limit" if timeout == CONTROL_TIMEOUT else "critic.request_timeout"
            raise NoAnswer(f"{endpoint.name} at {info.address}: {error} ({key})") from None
        except OSError as error:
            raise JobLost(f"{endpoint.name} at {info.address}: {error}") from None

    def reply(self, endpoint: protocol.Endpoint, arrays: Arrays, *, timeout: Optional[float] = None) -> dict[str, Any]:
        """The JSON reply of train or control. Raises RequestFailed with the job's sentence where it is an error."""
        answer = self.call(endpoint, arrays, timeout=timeout)
        try:
            said = protocol.json_of(answer["reply"][0], "reply") if len(answer["reply"][0]) else {}
            if len(answer["error"][0]):
                text = protocol.text_of(answer["error"][0])
                raise protocol.failure(said.get("kind", RequestFailed.kind), text)
        except ProtocolError as error:
            raise RequestFailed(f"{endpoint.name} at {self.address}: {error}") from None
        self.draining = bool(said["draining"])
        if self.instance is not None and said["instance"] != self.instance:
            raise JobLost(f"another {self._peer.name} job than before answers at {self.address}")
        return said

    def control(self, request: Mapping[str, Any], *, timeout: Optional[float] = None) -> dict[str, Any]:
        return self.reply(CONTROL, {"request": protocol.text_array(json.dumps(request))}, timeout=timeout)


def differences(first: Optional[Contract], now: Optional[Contract]) -> list[str]:
    """What a critic job that came back may do otherwise: allowed, but the numbers of the run will show it."""
    if first is None or now is None:
        return []
    names = ("dtype", "head", "mini_batch_size", "reward_normalisation")
    changed = [(n, getattr(first, n), getattr(now, n)) for n in names if getattr(first, n) != getattr(now, n)]
    return [f"{name} was {before} and is {after}" for name, before, after in changed]


def remaining(until: float) -> float:
    """Seconds left until a deadline (time.monotonic), at least 0."""
    return max(0.0, until - time.monotonic())
