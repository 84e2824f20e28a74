"""A reward over HTTP against a real server on loopback that answers, refuses, stumbles, lies and hangs."""

import json
import math
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from aligner.config.groups import RewardConfig, RewardKind
from aligner.data.batch import ScoreRow
from aligner.rewards import remote
from aligner.rewards.remote import HttpReward, Limits
from aligner.rewards.source import build_reward

LIMITS = Limits(timeout=30.0, deadline=60.0, concurrency=2, batch_size=3)


class Tokenizer:
    def decode(self, ids):
        return " ".join(map(str, ids))


def rows(count, start=0):
    return [ScoreRow(i, [1, 2], [10 + i, i], i % 2 == 0, {"answer": i}) for i in range(start, start + count)]


class Service:
    """answer(samples, number of the request) -> (status, body, headers), or None: it closes the connection without a word."""

    def __init__(self, answer):
        service = self
        self.requests, self.at_once, self.most, self.lock = [], 0, 0, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
                with service.lock:
                    service.requests.append(samples)
                    number = len(service.requests)
                    service.at_once += 1
                    service.most = max(service.most, service.at_once)
                found = answer(samples, number)
                with service.lock:  # before the reply, at which the client may ask again
                    service.at_once -= 1
                self.reply(found)

            def reply(self, found):
                if found is None:
                    return
                status, body, headers = found
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/score"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody is there: a client that obeyed it would fail
    services = []

    def start(answer):
        services.append(Service(answer))
        return services[-1]

    yield start
    for service in services:
        service.server.shutdown()
        service.server.server_close()


def ask(service, count=1, limits=LIMITS, pauses=None):
    reward = HttpReward(service.url, Tokenizer(), limits, pause=lambda s: pauses is None or pauses.append(s))
    try:
        return reward.score(rows(count)).result(100)
    finally:
        reward.close()


def said(scores):
    return 200, json.dumps({"scores": scores}).encode(), {}


def test_scores_come_back_in_order_in_batches(serve):
    service = serve(
        lambda samples, _: said([{"reward": s["sample_id"] / 8, "length": len(s["response"])} for s in samples])
    )
    found = ask(service, 8)
    assert [s.value for s in found] == [i / 8 for i in range(8)]
    assert [s.parts for s in found] == [{"length": float(len(f"{10 + i} {i}"))} for i in range(8)]
    assert all(s.error is None for s in found)
    assert sorted(map(len, service.requests)) == [2, 3, 3]
    sample = next(s for batch in service.requests for s in batch if s["sample_id"] == 3)
    assert sample == {"sample_id": 3, "prompt": "1 2", "response": "13 3", "ended": False, "fields": {"answer": 3}}


def test_no_more_requests_at_once_than_allowed(serve):
    together = threading.Barrier(LIMITS.concurrency)

    def slow(samples, _):
        together.wait(30)  # for one more request, which is allowed
        time.sleep(0.1)  # in which one too many would come
        return said([0.5] * len(samples))

    service = serve(slow)
    assert [s.value for s in ask(service, 18)] == [0.5] * 18
    assert service.most == LIMITS.concurrency


@pytest.mark.parametrize("trouble", [None, (503, b"loading", {}), (429, b"", {"Retry-After": "7"})])
def test_a_service_that_stumbles_is_asked_again(serve, trouble):
    pauses = []
    service = serve(lambda samples, number: trouble if number < 4 else said([1.5]))
    (score,) = ask(service, pauses=pauses)
    assert score.value == 1.5 and len(service.requests) == 4
    if trouble and trouble[2]:
        assert pauses == [7.0, 7.0, 7.0]
    else:
        assert [0.25 * 2**i <= pause <= 0.5 * 2**i for i, pause in enumerate(pauses)] == [True] * 3


def test_giving_up_at_the_deadline_is_an_error_and_no_zero(serve, monkeypatch):
    """Its pauses, of which the longest are drawn, pass on its clock alone: 45.5 s, and another would end beyond the deadline."""
    pauses = []
    monkeypatch.setattr(remote, "random", SimpleNamespace(random=lambda: 1.0))
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + sum(pauses)))
    for score in ask(serve(lambda *_: (500, b"out of memory", {})), 2, pauses=pauses):
        assert math.isnan(score.value)
        assert "HTTP status 500: out of memory (reward.deadline=60 s)" in score.error
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]


REFUSED = {
    "a status of the client's fault": ((404, b"no such path", {}), "HTTP status 404: no such path"),
    "a redirect": ((302, b"", {"Location": "http://127.0.0.1:9/"}), "HTTP status 302"),
    "no JSON": ((200, b"<html>", {}), "its answer is not"),
    "another object": ((200, b'{"score": [1]}', {}), "its answer is not"),
    "too few": (said([]), "asked for 1 scores and gave 0"),
    "no list": (said({"a": 1}), "asked for 1 scores and gave dict"),
    "not a number": (said([None]), "must be a finite number"),
    "not finite": ((200, b'{"scores": [NaN]}', {}), "must be a finite number"),
    "too large for float32": (said([1e39]), "must be a finite number"),
    "no reward among the parts": (said([{"accuracy": 1.0}]), "with a reward"),
    "deep nesting": ((200, b"[" * 100000, {}), "its answer is not"),
    "its own error": (said([{"error": "the grader is out"}]), "the grader is out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_asking_again_would_not_change_is_an_error_at_once(serve, name):
    answer, sentence = REFUSED[name]
    service = serve(lambda *_: answer)
    (score,) = ask(service)
    assert math.isnan(score.value) and sentence in score.error and len(service.requests) == 1


def test_a_service_that_drips_or_is_not_there():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        drip = threading.Thread(target=_drip, args=(listening,), daemon=True)
        drip.start()
        for url, sentence in (
            (f"http://127.0.0.1:{listening.getsockname()[1]}/", "did not end in time"),
            ("http://127.0.0.1:9/", "refused"),
        ):
            reward = HttpReward(url, Tokenizer(), Limits(timeout=2.0, deadline=2.1, concurrency=1, batch_size=1))
            (score,) = reward.score(rows(1)).result(30)
            assert math.isnan(score.value) and sentence in score.error
            reward.close()


def _drip(listening):
    connection, _ = listening.accept()
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(200):
        time.sleep(0.1)
        try:
            connection.sendall(b" ")
        except OSError:
            return


def test_from_settings(serve):
    service = serve(lambda samples, _: said([2.0] * len(samples)))
    reward = build_reward(RewardConfig(kind=RewardKind.http, url=service.url, batch_size=4, concurrency=1), Tokenizer())
    assert [s.value for s in reward.score(rows(5)).result(30)] == [2.0] * 5
    assert reward.score([]).result(0) == []
    assert [len(batch) for batch in service.requests] == [4, 1]
    reward.close()
