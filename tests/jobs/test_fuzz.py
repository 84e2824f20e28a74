"""A served critic of two ranks under hostile requests: each is refused, it goes on serving right answers, and no rank gets out of step.

Oracle: what the backend computes is a formula (serving_job.py), half of it on each rank; the weight tells of any train step applied."""

import collections
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from aligner.serving.endpoint import read_endpoint
from aligner.serving.kserve import Connection
from tests.jobs.fuzzing import hostile, oversized, refusal
from tests.jobs.serving_job import Job, check_answer, make_batch, make_rows

THREADS = 8
EVERY = 20  # one request in so many is a good one


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("fuzzed"), max_rows=64)
    yield job
    job.end()


def fuzz(job: Job, count: int, seed: int) -> collections.Counter:
    """Send `count` requests from several threads at once. Returns how many of each kind were refused."""
    client, info = job.client(trains=True), read_endpoint(job.endpoint_file)

    def one(number: int) -> str:
        if number % EVERY == 0:
            rows = make_rows(number, rows=1 + number % 7, length=10 + number % 90)
            check_answer(rows, client.infer(rows).result(60))
            return "good"
        request = hostile(np.random.default_rng((seed, number)))
        said = refusal(Connection(info.host, info.port, timeout=60), request)
        assert said, f"seed {seed}, request {number}: {request.name} was served"
        assert "Traceback" not in said, f"seed {seed}, request {number}: {request.name}: {said}"
        return request.name

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            names = collections.Counter(pool.map(one, range(count)))
        _still_in_step(client)
    finally:
        client.close()
    assert [p.poll() for p in job.ranks] == [None, None]
    return names


def _still_in_step(client) -> None:
    assert client.status()["step"] == 0 and client.status()["weights_undefined"] is None
    for seed in range(10):
        check_answer(make_rows(seed, rows=5), client.infer(make_rows(seed, rows=5)).result(60))
    assert client.train(1, make_batch(2)).result(60)["loss"] == 3.0
    client.restore(0, None)


def test_smoke(served):
    names = fuzz(served, 400, seed=1)
    assert len(names) > 60


def test_oversized(served):
    """More than 32 MB: refused by ours; more than Triton itself takes: by it."""
    info = read_endpoint(served.endpoint_file)
    for rows in (33, 64):
        said = refusal(Connection(info.host, info.port, timeout=120), oversized(rows))
        assert said is not None and "Traceback" not in said
    client = served.client()
    check_answer(make_rows(1), client.infer(make_rows(1)).result(60))
    client.close()


@pytest.mark.faults
@pytest.mark.parametrize("seed", [2, 3])
def test_ten_thousand(served, seed):
    names = fuzz(served, 6000, seed=seed)
    print(f"\n{sum(names.values())} requests, {len(names)} kinds: {dict(names.most_common(8))}")
