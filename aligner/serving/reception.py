"""What all endpoints do with a request: ask for the token, note that the actor lives, count, and turn errors into one sentence.

Every failure is an answer: nothing is raised into Triton, whose error replies carry tracebacks."""

import json
import logging
import time
import uuid
from typing import Any, Callable, Mapping, Optional, Protocol

import numpy as np

from aligner.serving import access, protocol
from aligner.serving.loop import one_line
from aligner.serving.protocol import Arrays, ProtocolError, RequestFailed

log = logging.getLogger(__name__)

COUNTS = ("infer_requests", "infer_rows", "infer_batches", "train_parts", "train_steps", "failed")


class WireRequest(Protocol):
    """PyTriton's request: named arrays, and the forwarded headers as parameters. The arrays lie in shared memory that is used
    again once the request is answered: copy what is kept."""

    data: dict[str, np.ndarray]
    parameters: Optional[Mapping[str, Any]]


def kind_of(error: Exception) -> str:
    """RequestFailed.kind of what was raised while a request was answered."""
    return getattr(error, "kind", RequestFailed.kind)


class Reception:
    """Shared by the endpoints' threads. `last_spoken`: when the actor said something last (time.monotonic). `instance` names this
    process: a client that sees another one knows that what it told the critic is forgotten."""

    def __init__(self, token: Optional[str]) -> None:
        self._token = token
        self.instance = uuid.uuid4().hex
        self.last_spoken = time.monotonic()
        self.counts = dict.fromkeys(COUNTS, 0)
        self.actor_present = False
        """An actor said hello, and has not said that it leaves."""
        self.draining = False
        """In every reply of train and control: the job was told to end, and waits for the actor to save."""

    def admit(self, request: WireRequest) -> None:
        """Raises ProtocolError for a request without the token, where one is asked for."""
        if not access.allowed(self._token, request.parameters):
            raise ProtocolError("refused without the right token")

    def spoken(self) -> None:
        self.last_spoken = time.monotonic()

    def failure(self, endpoint: str, error: Exception) -> str:
        """Log and count; returns the sentence for the client."""
        self.counts["failed"] += 1
        if isinstance(error, (ProtocolError, RequestFailed)):
            log.warning("%s request failed: %s", endpoint, error)
            return " ".join(str(error).split())
        log.error("%s request failed", endpoint, exc_info=error)
        return one_line(error)

    def reply(
        self, endpoint: str, request: WireRequest, act: Callable[[Arrays], dict[str, Any]]
    ) -> dict[str, np.ndarray]:
        """The outputs of train and control: act's JSON, or the kind and the sentence of what it raised."""
        try:
            self.admit(request)
            reply, text = act(request.data), ""
        except Exception as error:
            reply, text = {"kind": kind_of(error)}, self.failure(endpoint, error)
        about = {"draining": self.draining, "instance": self.instance}
        return {"reply": protocol.text_array(json.dumps({**reply, **about})), "error": protocol.text_array(text)}
