"""The train and control endpoints: what writes the critic, in one order, each step once."""

import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

import numpy as np

from aligner.runtime.checkpoint_folder import MARKER
from aligner.serving import hello, protocol
from aligner.serving.backend import CriticBackend
from aligner.serving.frames import Call, Op
from aligner.serving.hello import Contract
from aligner.serving.loop import CallFailed, Loop
from aligner.serving.parts import Incomplete, Stored, TrainLedger, Whole
from aligner.serving.protocol import Arrays, ProtocolError, RequestFailed, SaveLost
from aligner.serving.reception import Reception, WireRequest

NONCE_PATIENCE = 5.0  # seconds that a network file system may take to show a file


class Control:
    """Two endpoints, each called in one thread of its own. `run_folder` is the only place that save and restore may name."""

    def __init__(
        self,
        backend: CriticBackend,
        loop: Loop,
        reception: Reception,
        *,
        contract: Contract,
        run_folder: Path,
        max_rows: int,
    ) -> None:
        self._backend, self._loop, self._reception = backend, loop, reception
        self._run_folder, self._max_rows = run_folder.resolve(), max_rows
        self._ledger = TrainLedger(
            step=contract.step, run_id=contract.run_id, vocab_size=contract.vocab_size, max_length=contract.max_length
        )
        self._writing = threading.Lock()  # train, save, commit and restore follow one another, answers included
        self._started = time.time()
        self.stop_requested = False
        self._stated: Optional[str] = None  # how the actor scales scores, as it says
        self._trained_on: Optional[str] = None  # how those were that made the returns of the last train request
        self._begun: Optional[tuple[int, Path]] = None  # step and folder of the half that is being written
        self._saved: Optional[tuple[int, Path]] = None  # of the one that is written
        self.commits = 0  # pairs that the actor has committed

    # ---- train

    def train(self, requests: Sequence[WireRequest]) -> list[dict[str, np.ndarray]]:
        return [self._reception.reply("train", request, self._train) for request in requests]

    def _train(self, arrays: Arrays) -> dict[str, Any]:
        with self._writing:
            self._reception.spoken()
            self._reception.counts["train_parts"] += 1
            received = self._ledger.receive(arrays)
            if isinstance(received, Incomplete):
                return {"state": "incomplete", "received": received.received, "parts": received.parts}
            if isinstance(received, Stored):
                return received.answer
            return self._apply(received)

    def _apply(self, whole: Whole) -> dict[str, Any]:
        try:
            metrics = self._loop.submit(Call(Op.TRAIN, step=whole.step, batch=whole.batch)).result()
            answer = {"state": "applied", "step": whole.step, "metrics": {k: float(v) for k, v in metrics.items()}}
        except Exception as error:
            untouched = error.clean if isinstance(error, CallFailed) else isinstance(error, RequestFailed)  # never ran
            if not untouched:
                self._ledger.failed(whole.step, str(error))
            raise
        self._ledger.applied(whole.step, answer, digest=whole.digest)
        self._reception.counts["train_steps"] += 1
        self._trained_on = self._stated
        return answer

    # ---- control

    def control(self, requests: Sequence[WireRequest]) -> list[dict[str, np.ndarray]]:
        return [self._reception.reply("control", request, self._control) for request in requests]

    def _control(self, arrays: Arrays) -> dict[str, Any]:
        protocol.check_arrays(protocol.CONTROL, arrays)
        request = protocol.json_of(arrays["request"][0], "control request")
        ops: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "hello": self._hello,
            "status": self._status,
            "prepare_save": self._prepare_save,
            "saved": self._is_saved,
            "commit": self._commit,
            "restore": self._restore,
            "leave": self._leave,
            "stop": self._stop,
        }
        op = request.get("op")
        if not isinstance(op, str) or op not in ops:
            raise ProtocolError(f"unknown control op {op!r}; version {protocol.VERSION} has {', '.join(ops)}")
        if op != "status" or request.get("run_id") == self._ledger.run_id:  # people who look on do not keep a job alive
            self._reception.spoken()
        return ops[op](request)

    def _hello(self, request: dict[str, Any]) -> dict[str, Any]:
        theirs = request.get("contract")
        if not isinstance(theirs, dict):
            raise ProtocolError("hello lacks its contract")
        status = hello.Contract.of(self._backend.status())
        critic = replace(status, max_rows=self._max_rows, reward_normalisation=self._trained_on)
        version = hello.version_problem(actor=hello.version_of(theirs), critic=critic.protocol)
        actor = None if version else hello.Contract.of(theirs)
        problems = [version] if actor is None else [*hello.problems(actor, critic), *self._folder_problems(request)]
        if problems:
            raise ProtocolError("the two jobs do not fit together: " + "; ".join(problems))
        self._reception.actor_present = True
        self._stated = actor.reward_normalisation
        about = {"max_rows": self._max_rows, "weights_undefined": self._ledger.undefined}
        return {"contract": critic.as_dict(), "warnings": hello.warnings(actor, critic), **about}

    def _folder_problems(self, request: dict[str, Any]) -> list[str]:
        """The actor wrote a file where it has the endpoints: one that this job cannot read there is in another folder."""
        nonce = request.get("nonce")
        if nonce is None:
            return []
        if not isinstance(nonce, dict) or not re.fullmatch("[0-9a-f]{32}", str(nonce.get("name"))):
            raise ProtocolError("hello: nonce must be an object with a name of 32 hexadecimal digits")
        here = self._run_folder / "endpoints"
        deadline = time.monotonic() + NONCE_PATIENCE
        while (found := _text_of_file(here / f"{nonce['name']}.nonce")) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if found == nonce.get("text"):
            return []
        return [
            f"the actor's run folder ({nonce.get('folder')}) is not the critic job's ({here}): set run.dir to one folder on a file "
            "system that both see"
        ]

    def _status(self, _: dict[str, Any]) -> dict[str, Any]:
        """The backend's status, and the server's own counts."""
        return {
            **self._backend.status(),
            "protocol": protocol.VERSION,
            "pid": os.getpid(),
            "uptime": time.time() - self._started,
            "queued": self._loop.queued,
            "weights_undefined": self._ledger.undefined,
            "reward_normalisation": self._trained_on,
            "draining": self._reception.draining,
            "actor_present": self._reception.actor_present,
            "actor_silent_for": time.monotonic() - self._reception.last_spoken,
            "max_rows": self._max_rows,
            **self._reception.counts,
        }

    def _prepare_save(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._writing:
            step, folder = _step_of(request), self._folder_of(request)
            if self._ledger.undefined is not None or step != self._ledger.step:
                state = self._ledger.undefined or f"the last step applied is {self._ledger.step}"
                raise ProtocolError(f"cannot save the critic of step {step}: {state}")
            if self._saved != (step, folder):  # else its answer was lost, or the request came twice
                if (folder.parent / MARKER).exists():
                    raise ProtocolError(f"{folder.parent} is committed already: it is not written again")
                beside = bool(request.get("beside"))
                self._saved = self._begun = None
                self._loop.submit(Call(Op.PREPARE_SAVE, step=step, folder=folder, beside=beside)).result()
                if beside:
                    self._begun = (step, folder)
                else:
                    self._saved = (step, folder)
            return {"step": step}

    def _is_saved(self, request: dict[str, Any]) -> dict[str, Any]:
        """Whether the half that was begun is written; training goes on meanwhile."""
        half = (_step_of(request), self._folder_of(request))
        if half == self._begun and self._loop.submit(Call(Op.SAVED)).result():
            self._saved, self._begun = half, None
        if half not in (self._saved, self._begun):
            raise SaveLost(f"the critic of step {half[0]} is not being written to {half[1]}")
        return {"saved": half == self._saved}

    def _commit(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._writing:
            step = _step_of(request)
            self._loop.submit(Call(Op.COMMIT, step=step)).result()
            self.commits += 1
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
            self._saved = self._begun = None
            return {"step": step}

    def _leave(self, request: dict[str, Any]) -> dict[str, Any]:
        """The actor ends; another one may come."""
        self._reception.actor_present = False
        return {}

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


def _text_of_file(file: Path) -> Optional[str]:
    try:
        return file.read_text()
    except OSError:
        return None


def _step_of(request: dict[str, Any]) -> int:
    step = request.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ProtocolError(f"step must be an integer of at least 0, not {step!r}")
    return step
