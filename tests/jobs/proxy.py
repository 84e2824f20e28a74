"""A proxy on loopback that does to requests and answers what networks do: delays them, cuts them, loses them, delivers them twice."""

import contextlib
import itertools
import re
import socket
import threading
import time
from collections import Counter
from pathlib import Path

from aligner.serving.endpoint import read_endpoint

# What happens to every other request of an endpoint, in turn; those between pass.
HARM = ("truncated", "lost", "twice", "late", "refused", "unanswered")
LATE = 0.5


class Proxy:
    """Forwards to whatever the endpoint file names at the time. `done` counts (endpoint, harm)."""

    def __init__(self, endpoint_file: Path) -> None:
        self.endpoint_file, self.done = endpoint_file, Counter()
        self._turns: dict[str, itertools.cycle] = {}
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            request = read_message(client)
            path = re.match(rb"\S+ (\S+)", request)[1].decode()
            found = re.fullmatch(r"/v2/models/(\w+)/infer", path)
            harm = self._next(found[1]) if found else "none"
            self._do(harm, client, request)

    def _next(self, endpoint: str) -> str:
        with self._lock:
            plan = itertools.cycle([x for harm in HARM for x in ("none", harm)])
            harm = next(self._turns.setdefault(endpoint, plan))
            self.done[endpoint, harm] += 1
            return harm

    def _do(self, harm: str, client: socket.socket, request: bytes) -> None:
        if harm == "refused":
            return
        if harm == "late":
            time.sleep(LATE)
        answer = self._forward(request)
        if harm == "twice":
            answer = self._forward(request)
        if harm == "late":
            time.sleep(LATE)
        if harm == "unanswered":
            self._ended.wait(60)
        elif harm != "lost":
            client.sendall(answer[: len(answer) * 2 // 3] if harm == "truncated" else answer)

    def _forward(self, request: bytes) -> bytes:
        info = read_endpoint(self.endpoint_file)
        with socket.create_connection((info.host, info.port), timeout=120) as server:
            server.sendall(request)
            return read_message(server)


def read_message(connection: socket.socket) -> bytes:
    """One HTTP message with its body."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(1 << 16)
        if not more:
            raise ConnectionError("closed")
        data += more
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", data.partition(b"\r\n\r\n")[0])
    whole = data.index(b"\r\n\r\n") + 4 + (int(length[1]) if length else 0)
    while len(data) < whole:
        more = connection.recv(1 << 16)
        if not more:
            raise ConnectionError("closed")
        data += more
    return data
