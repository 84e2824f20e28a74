"""Prometheus metrics of a served job, on a port of their own: read when they are asked for, so that a request costs nothing."""

from typing import Any, Callable, Iterator, Mapping

from aligner.serving.observed import Latency
from aligner.serving.triton_server import check_port_free

TEXTS = {
    "infer_requests": "Inference requests that were taken",
    "infer_rows": "Rows of inference requests",
    "infer_batches": "Forward passes for inference requests; fewer than requests where they were merged",
    "train_parts": "Parts of train requests received",
    "train_steps": "Train steps applied",
    "failed": "Requests of any endpoint answered with an error",
    "queue": "Calls that wait for the ranks or run on them",
    "step": "The last train step applied",
    "draining": "1 where the job was told to end and waits for the actor to save",
    "values_mean": "Mean of the values served since the last train step",
    "values_std": "Deviation of the values served since the last train step",
    "values_drift": "Their mean less that of the values served in the step before",
}
GAUGES = ("queue", "step", "draining", "values_mean", "values_std", "values_drift")


class MetricsServer:
    """GET /metrics. `numbers` gives the present values by name of TEXTS, `latencies` those of each endpoint, both from any thread."""

    def __init__(
        self,
        address: str,
        port: int,
        *,
        job: str,
        run: str,
        numbers: Callable[[], Mapping[str, float]],
        latencies: Mapping[str, Latency],
    ) -> None:
        """port 0 takes a free one. Raises ValueError where it cannot be bound."""
        from prometheus_client import start_http_server
        from prometheus_client.registry import CollectorRegistry

        if port:
            check_port_free(address, port, key="serving.metrics_port")
        self._labels, self._numbers, self._latencies = {"job": job, "run": run}, numbers, latencies
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._server, self._thread = start_http_server(port, address, registry)
        self.port: int = self._server.server_port

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        names = list(self._labels)
        values = list(self._labels.values())
        for name, number in self._numbers().items():
            family = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            metric = family(f"aligner_{name}", TEXTS[name], labels=names)
            metric.add_metric(values, number)
            yield metric
        seconds = HistogramMetricFamily("aligner_answer_seconds", "Time to an answer", labels=[*names, "endpoint"])
        for endpoint, latency in self._latencies.items():
            seconds.add_metric([*values, endpoint], latency.cumulative(), latency.total)
        yield seconds

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
