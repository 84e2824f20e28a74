"""What becomes of a Triton that does not start: its binary is played here, the real one runs in tests/jobs."""

import pytest

from aligner.serving import triton_server
from aligner.serving.triton_server import ATTEMPTS, TritonServer


@pytest.fixture
def start(monkeypatch, tmp_path):
    """start(n): a server whose first n starts fail; the ports that were tried."""
    monkeypatch.setattr(triton_server, "check_python", lambda: None)

    def started(failures: int) -> tuple[TritonServer, list[int]]:
        ports = []

        def play(self):
            ports.append(self.port)
            if len(ports) <= failures:
                raise ConnectionError("connection closed")

        monkeypatch.setattr(TritonServer, "_start", play)
        where = {"address": "127.0.0.1", "port": 0, "log_file": tmp_path / "logs" / "triton.log", "run": str(tmp_path)}
        return TritonServer({}, token=None, max_rows=1, queue_delay_us=1, **where), ports

    return started


def test_it_is_started_again(start, caplog):
    server, ports = start(ATTEMPTS - 1)
    server.stop()
    assert len(ports) == ATTEMPTS and server.port == ports[-1]
    assert caplog.text.count("(connection closed); its log is") == ATTEMPTS - 1 and "trying again" in caplog.text


def test_not_for_ever(start, monkeypatch):
    with pytest.raises(RuntimeError, match=r"Triton did not start on 127.0.0.1:\d+ \(connection closed\); its log is"):
        start(ATTEMPTS)
    monkeypatch.setattr(triton_server, "PATIENCE", -1.0)
    with pytest.raises(RuntimeError, match="did not start"):
        start(1)
