"""Triton's HTTP interface as far as the protocol needs it: one inference call with binary tensors, and the readiness probe.

Open standard: the KServe predict protocol, version 2, with Triton's binary tensor data extension. Written on http.client
because a watchdog must be able to cut a connection from another thread, proxies must be ignored, and a client start-up must
ask the server nothing. One connection a call: a server that came back needs no reconnect logic."""

import contextlib
import http.client
import json
import re
import socket
import struct
import threading
import time
from typing import Mapping, Optional

import numpy as np

from aligner.serving.protocol import Endpoint, Field, RequestFailed

CONNECT_TIMEOUT = 10.0
DATATYPES = {np.int32: "INT32", np.int64: "INT64", np.float32: "FP32", np.bool_: "BOOL", bytes: "BYTES"}
NOT_THERE = re.compile("unknown model|not ready|not found")  # it is starting: models are bound one after another
HEADER_LENGTH = "Inference-Header-Content-Length"


def pack(field: Field, array: np.ndarray) -> bytes:
    """The tensor's bytes; strings each with a 4-byte little-endian length before."""
    if field.dtype is not bytes:
        return np.ascontiguousarray(array).tobytes()
    return b"".join(struct.pack("<I", len(x)) + bytes(x) for x in array.ravel())


def unpack(field: Field, data: bytes, shape: list[int]) -> np.ndarray:
    """The array of a tensor's bytes. Raises ValueError where they are too few or too many."""
    if field.dtype is not bytes:
        return np.frombuffer(data, dtype=field.dtype).reshape(shape)
    texts, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        texts.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    if at != len(data):
        raise ValueError("a string is cut")
    array = np.empty(len(texts), dtype=object)
    array[:] = texts
    return array.reshape(shape)


def request_body(endpoint: Endpoint, arrays: Mapping[str, np.ndarray]) -> tuple[bytes, int]:
    """The body of an inference request, and the length of the JSON at its head."""
    blobs = [pack(f, arrays[f.name]) for f in endpoint.inputs]
    inputs = [
        {
            "name": f.name,
            "shape": list(arrays[f.name].shape),
            "datatype": DATATYPES[f.dtype],
            "parameters": {"binary_data_size": len(blob)},
        }
        for f, blob in zip(endpoint.inputs, blobs)
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return b"".join([head, *blobs]), len(head)


def response_arrays(endpoint: Endpoint, body: bytes, head_length: int) -> dict[str, np.ndarray]:
    """The outputs in a response's body. Raises ValueError where the body is not what the endpoint answers."""
    head = json.loads(body[:head_length])
    fields = {f.name: f for f in endpoint.outputs}
    arrays, at = {}, head_length
    for output in head["outputs"]:
        size = output["parameters"]["binary_data_size"]
        arrays[output["name"]] = unpack(fields[output["name"]], body[at : at + size], output["shape"])
        at += size
    if set(arrays) != set(fields) or at != len(body):
        raise ValueError(f"outputs {sorted(arrays)}, {len(body) - at} bytes left over")
    return arrays


def short_reason(body: bytes) -> str:
    """One sentence out of an error response; of a traceback only its last line."""
    try:
        text = str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        text = body[:400].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "no reason given"
    return (lines[-1] if "Traceback" in text else " ".join(lines))[:400]


class Connection:
    """One call's connection, which another thread may cut."""

    def __init__(self, host: str, port: int, *, timeout: float) -> None:
        self.host, self.port, self._timeout = host, port, timeout
        self.deadline = time.monotonic() + timeout
        self._http: Optional[http.client.HTTPConnection] = None
        self._lock = threading.Lock()
        self.cut_reason: Optional[str] = None

    def cut(self, reason: str) -> None:
        """End the call: its thread gets an error at once."""
        with self._lock:
            self.cut_reason = self.cut_reason or reason
            if self._http is not None and self._http.sock is not None:
                with contextlib.suppress(OSError):  # closed already
                    self._http.sock.shutdown(socket.SHUT_RDWR)

    def exchange(
        self, method: str, path: str, body: Optional[bytes], headers: Mapping[str, str]
    ) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers (names in lower case). Raises OSError where the connection fails; a cut one says why."""
        try:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=min(CONNECT_TIMEOUT, self._timeout))
            connection.connect()
            connection.sock.settimeout(self._timeout)
            with self._lock:
                self._http = connection
                if self.cut_reason is not None:
                    raise ConnectionError(self.cut_reason)
            connection.request(method, path, body=body, headers=dict(headers))
            response = connection.getresponse()
            data = response.read()
            return response.status, data, {k.lower(): v for k, v in response.getheaders()}
        except TimeoutError:
            raise TimeoutError(self.cut_reason or f"no answer within {self._timeout:.0f} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionError(self.cut_reason or _reason(error)) from error
        finally:
            connection.close()

    def infer(
        self, endpoint: Endpoint, arrays: Mapping[str, np.ndarray], headers: Mapping[str, str]
    ) -> dict[str, np.ndarray]:
        """One call of a served endpoint. Raises RequestFailed where the server refuses it, OSError where it is not reached, starting
        or broken."""
        body, head_length = request_body(endpoint, arrays)
        sent = {**headers, HEADER_LENGTH: str(head_length), "Content-Type": "application/octet-stream"}
        status, data, received = self.exchange("POST", f"/v2/models/{endpoint.name}/infer", body, sent)
        if status in (401, 403):
            raise RequestFailed(f"refused without the right token (HTTP status {status})")
        if status != 200:
            text = f"Triton answers with HTTP status {status}: {short_reason(data)}"
            raise ConnectionError(text) if status >= 500 or NOT_THERE.search(text) else RequestFailed(text)
        try:
            return response_arrays(endpoint, data, int(received[HEADER_LENGTH.lower()]))
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise ConnectionError(
                f"the answer is not one of an aligner {endpoint.name} endpoint ({error!r:.100})"
            ) from None

    def ready(self) -> bool:
        """Whether the server says that it is ready. Raises OSError where it is not reached."""
        return self.exchange("GET", "/v2/health/ready", None, {})[0] == 200


def _reason(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(
        error, (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError, http.client.IncompleteRead)
    ):
        return "the server closed the connection"
    return " ".join(str(error).split())[:200] or type(error).__name__
