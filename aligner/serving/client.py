"""The actor's end of the wire: a Critic whose work is done by another job."""

import json
import logging
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Callable, Mapping, Optional

import numpy as np

from aligner.config.groups import CriticClientConfig
from aligner.data.batch import CriticAnswer, CriticBatch, CriticRows
from aligner.runtime.errors import ContractError
from aligner.serving import access, protocol
from aligner.serving.endpoint import EndpointInfo, parse_address, read_endpoint, wait_for
from aligner.serving.hello import Contract, version_problem
from aligner.serving.kserve import Connection
from aligner.serving.parts import split
from aligner.serving.protocol import CONTROL, INFER, TRAIN, Arrays, ProtocolError, RequestFailed
from aligner.serving.watchdog import PROBE_TIMEOUT, Watchdog, Workers

log = logging.getLogger(__name__)

EXPLICIT_TIMEOUT = 10.0
CONTROL_TIMEOUT = 60.0  # of hello and status, which start no collective
KEEPALIVE = 60.0
CONNECTIONS = 4


class RemoteCritic:
    """data/interfaces.Critic over HTTP. Any rank may infer; one (the world's rank 0, `trains=True`) trains and controls.

    Futures raise RequestFailed (a RuntimeError) with one sentence: the job's own where it answered, otherwise what happened to the
    connection. Every wait ends at critic.request_timeout, or seconds after the server stopped answering its readiness probe."""

    def __init__(
        self,
        contract: Contract,
        config: CriticClientConfig,
        *,
        endpoint_file: Path,
        token_file: Optional[Path] = None,
        trains: bool = False,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        """Connect, and compare contracts. token_file: where critic.endpoint is given, and so no endpoint file names it; absent: the
        .token beside endpoint_file, where there is one.

        Raises ContractError where no critic answers in time or the jobs do not fit."""
        self._contract, self._config, self._say = contract, config, say
        self._endpoint_file, self._token_file = endpoint_file, token_file
        self._headers: Mapping[str, str] = {}
        self.draining = False  # the critic job was told to end: save a pair at the next step's end
        self._closed = threading.Event()
        self._watch = Watchdog(self._closed)
        self._info = self._connect()
        self._watch.start(self._info)
        self._infer_work = Workers("critic infer", CONNECTIONS)
        self._train_work = Workers("critic train", 1)
        if trains:
            threading.Thread(target=self._keep_alive, name="critic keepalive", daemon=True).start()

    # ---- Critic

    def infer(self, rows: CriticRows) -> "Future[CriticAnswer]":
        """Raises ProtocolError at once where the rows break the protocol."""
        arrays = protocol.encode_rows(rows)
        if len(rows.lengths) > self.max_rows:
            raise ProtocolError(
                f"{len(rows.lengths)} rows exceed the critic job's serving.max_rows={self.max_rows}; lower critic.infer_batch_size"
            )
        width = rows.tokens.size(1)
        return self._infer_work.run(lambda: protocol.decode_answer(self._call(INFER, arrays), width=width))

    def train(self, step: int, batch: CriticBatch) -> "Future[dict[str, float]]":
        """Raises ProtocolError at once where the batch breaks the protocol."""
        requests = split(batch, step=step, run_id=self._contract.run_id)

        def send() -> dict[str, float]:
            for request in requests:
                reply = self._reply(TRAIN, request)
            if reply["state"] != "applied":
                raise RequestFailed(
                    f"train step {step}: all {len(requests)} parts were sent, but the critic job says {reply}"
                )
            return reply["metrics"]

        return self._train_work.run(send)

    def prepare_save(self, step: int, folder: Path) -> "Future[None]":
        path = str(Path(folder).resolve())

        def prepare() -> None:
            self._control({"op": "prepare_save", "step": step, "folder": path})

        return self._train_work.run(prepare)

    def commit(self, step: int) -> None:
        self._train_work.run(lambda: self._control({"op": "commit", "step": step})).result()

    def restore(self, step: int, folder: Optional[Path]) -> None:
        path = None if folder is None else str(Path(folder).resolve())
        self._train_work.run(lambda: self._control({"op": "restore", "step": step, "folder": path})).result()

    def status(self) -> dict[str, Any]:
        return self._control({"op": "status", "run_id": self._contract.run_id}, timeout=CONTROL_TIMEOUT)

    def stop(self) -> None:
        """Tell the critic job to end."""
        self._control({"op": "stop"}, timeout=CONTROL_TIMEOUT)

    def close(self) -> None:
        """Leave. What is still in flight fails."""
        self._closed.set()
        self._watch.cut_all("the actor closed the connection")
        self._infer_work.close()
        self._train_work.close()

    # ---- connecting

    def _connect(self) -> EndpointInfo:
        config = self._config
        explicit = None
        if config.endpoint is not None:
            host, port = parse_address(config.endpoint, key="critic.endpoint")
            beside = Path(self._endpoint_file).with_suffix(".token")  # where a job of this run folder puts it
            file = self._token_file or (beside if beside.exists() else None)
            token = None if file is None else str(file)
            explicit = EndpointInfo(
                host, port, pid=0, run_id=self._contract.run_id, grid="", started=0.0, token_file=token
            )
        timeout = config.connect_timeout if explicit is None else min(EXPLICIT_TIMEOUT, config.connect_timeout)
        what = f"the critic job's endpoint file {self._endpoint_file}" if explicit is None else "the critic job"
        advice = (
            "start serve_ppo_critic.py with the same run.dir and run.name, or set critic.endpoint=host:port "
            "(deadline: critic.connect_timeout)"
            if explicit is None
            else f"start serve_ppo_critic.py there, or correct critic.endpoint={config.endpoint}"
        )
        try:
            return wait_for(
                lambda: explicit or read_endpoint(self._endpoint_file),
                self._attempt,
                timeout=timeout,
                say=self._say,
                what=what,
                advice=advice,
            )
        except (TimeoutError, ProtocolError, RequestFailed) as error:
            raise ContractError(str(error)) from None

    def _attempt(self, info: EndpointInfo) -> None:
        """One hello. Raises OSError where nobody answers yet, ContractError where the jobs do not fit."""
        token = None if info.token_file is None else access.read_token(Path(info.token_file))
        self._headers = access.headers(token)
        if not Connection(info.host, info.port, timeout=PROBE_TIMEOUT).ready():
            raise ConnectionError("it is starting")
        self._info = info
        connection = Connection(info.host, info.port, timeout=CONTROL_TIMEOUT)
        request = {"request": protocol.text_array(json.dumps({"op": "hello", "contract": self._contract.as_dict()}))}
        try:
            reply = _reply_of(connection.infer(CONTROL, request, self._headers))
        except RequestFailed as error:
            raise ContractError(f"the critic job at {info.address} refuses: {error}") from None
        version = version_problem(actor=protocol.VERSION, critic=int(reply["contract"]["protocol"]))
        if version is not None:
            raise ContractError(f"the critic job at {info.address} does not fit: {version}")
        for warning in reply["warnings"]:
            self._say(warning)
        self.critic_contract = Contract.of(reply["contract"])
        self.max_rows = int(reply["max_rows"])

    @property
    def address(self) -> str:
        return self._info.address

    # ---- calls

    def _call(
        self, endpoint: protocol.Endpoint, arrays: Arrays, *, timeout: Optional[float] = None
    ) -> dict[str, np.ndarray]:
        """Send one request and wait for it, watched. Raises RequestFailed."""
        timeout = timeout or self._config.request_timeout
        connection = Connection(self._info.host, self._info.port, timeout=timeout)
        try:
            with self._watch.over(connection):
                return connection.infer(endpoint, arrays, self._headers)
        except TimeoutError as error:
            key = "critic.request_timeout" if timeout == self._config.request_timeout else "a fixed limit"
            raise RequestFailed(f"{endpoint.name} at {self.address}: {error} ({key})") from None
        except OSError as error:
            raise RequestFailed(f"{endpoint.name} at {self.address}: {error}") from None

    def _reply(self, endpoint: protocol.Endpoint, arrays: Arrays, *, timeout: Optional[float] = None) -> dict[str, Any]:
        try:
            reply = _reply_of(self._call(endpoint, arrays, timeout=timeout))
            self.draining = bool(reply["draining"])
            return reply
        except ProtocolError as error:
            raise RequestFailed(f"{endpoint.name} at {self.address}: {error}") from None

    def _control(self, request: dict[str, Any], *, timeout: Optional[float] = None) -> dict[str, Any]:
        return self._reply(CONTROL, {"request": protocol.text_array(json.dumps(request))}, timeout=timeout)

    def _keep_alive(self) -> None:
        """Tell the critic job that its actor lives, however long a step takes (serving.idle_timeout)."""
        while not self._closed.wait(KEEPALIVE):
            try:
                self.status()
            except RequestFailed as error:
                log.info("keepalive: %s", error)  # the requests that matter say it aloud


def _reply_of(answer: Arrays) -> dict[str, Any]:
    """The JSON reply of control and train. Raises RequestFailed with the job's sentence where it is an error."""
    if len(answer["error"][0]):
        raise RequestFailed(protocol.text_of(answer["error"][0]))
    return protocol.json_of(answer["reply"][0], "reply")
