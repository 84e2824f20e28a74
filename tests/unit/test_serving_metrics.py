"""Prometheus' page against its own parser, and the numbers behind it by hand."""

import urllib.request
from types import SimpleNamespace

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from aligner.serving import observed
from aligner.serving.metrics import MetricsServer
from aligner.serving.observed import Latency, ServedValues
from aligner.serving.triton_server import free_port


def page(port):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    text = opener.open(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_the_page(monkeypatch):
    clock = iter([0.0, 0.02, 1.0, 401.0])
    monkeypatch.setattr(observed, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    latency = Latency()
    assert latency.around(lambda requests: len(requests))([1, 2]) == 2
    with pytest.raises(ValueError):
        latency.around(int)("x")
    monkeypatch.undo()
    numbers = {"infer_requests": 3, "queue": 1, "step": 7}
    about = {"job": "critic", "run": "r1"}
    server = MetricsServer("127.0.0.1", 0, **about, numbers=lambda: numbers, latencies={"infer": latency})
    try:
        found = page(server.port)
        assert {name: f.type for name, f in found.items()} == {
            "aligner_infer_requests": "counter",
            "aligner_queue": "gauge",
            "aligner_step": "gauge",
            "aligner_answer_seconds": "histogram",
        }
        (sample,) = found["aligner_infer_requests"].samples
        assert (sample.name, sample.labels, sample.value) == ("aligner_infer_requests_total", about, 3.0)
        numbers["step"] = 8  # read when asked for
        assert page(server.port)["aligner_step"].samples[0].value == 8.0
        seconds = {
            (s.name.rpartition("_")[2], s.labels.get("le")): s.value for s in found["aligner_answer_seconds"].samples
        }
        assert seconds["bucket", "0.01"] == 0 and seconds["bucket", "0.025"] == 1 and seconds["bucket", "300.0"] == 1
        assert seconds["bucket", "+Inf"] == seconds["count", None] == 2 and seconds["sum", None] == pytest.approx(
            400.02
        )
        with pytest.raises(ValueError, match=f"serving.metrics_port={server.port} cannot be bound"):
            MetricsServer("127.0.0.1", server.port, **about, numbers=dict, latencies={})
    finally:
        server.stop()


def test_a_port_of_ones_choice_is_free_again_after_the_stop():
    port = free_port("127.0.0.1")
    for _ in range(2):
        server = MetricsServer("127.0.0.1", port, job="critic", run="r1", numbers=dict, latencies={})
        assert server.port == port and "aligner_answer_seconds" in page(port)
        server.stop()


def test_drift_is_the_change_of_the_mean_from_one_step_to_the_next():
    served = ServedValues()
    assert served.summary() == {}
    served.add(0, torch.tensor([1.0, 2.0]))
    served.add(0, torch.tensor([6.0]))
    assert served.summary() == {"values_mean": 3.0, "values_std": pytest.approx((14 / 3) ** 0.5)}
    served.add(1, torch.tensor([2.5, 2.5]))
    assert served.summary() == {"values_mean": 2.5, "values_std": 0.0, "values_drift": -0.5}
