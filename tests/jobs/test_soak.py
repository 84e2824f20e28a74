"""Many clients at one critic job for minutes: every answer is right, and memory does not grow. Run by `make test-soak`.

ALIGNER_SOAK_SECONDS (480) is how long. Latencies are printed, not judged: they are the machine's."""

import contextlib
import itertools
import os
import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from aligner.config.groups import CriticClientConfig
from aligner.data.batch import CriticBatch, CriticRows
from aligner.data.tasks import draw_problems
from aligner.serving import access
from aligner.serving.client import RemoteCritic
from aligner.serving.endpoint import read_endpoint
from aligner.serving.hello import Contract
from aligner.serving.status import fetch_status
from tests.jobs.harness import Job, Launcher

CLIENTS, TRAIN_EVERY, SAMPLE_EVERY = 64, 2.0, 1.0
SECONDS = float(os.environ.get("ALIGNER_SOAK_SECONDS", "480"))
GROWTH, SLACK_MB = 1.05, 24.0
TASK = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def connect(file: Path, *, trains: bool = False) -> RemoteCritic:
    until = time.monotonic() + 120
    while (info := read_endpoint(file)) is None:
        assert time.monotonic() < until, f"{file} did not come"
        time.sleep(0.1)
    token = access.read_token(Path(info.token_file)) if info.token_file else None
    theirs = Contract.of(fetch_status(info.host, info.port, token=token))
    known_here = (
        "step",
        "train_rows",
        "infer_rows",
        "mini_batch_size",
        "max_rows",
    )  # infer_rows of a status counts rows served
    ours = replace(theirs, **dict.fromkeys(known_here))
    return RemoteCritic(ours, CriticClientConfig(), endpoint_file=file, trains=trains, say=lambda text: None)


def draw_rows(rng: np.random.Generator, fields: list[dict]) -> CriticRows:
    """1 to 16 rows of 8 to 200 tokens, one in three of them cut."""
    count = int(rng.integers(1, 17))
    lengths = torch.tensor(rng.integers(8, 201, count))
    return CriticRows(
        tokens=torch.tensor(rng.integers(3, 250, (count, 256))),
        lengths=lengths,
        prompt_lengths=lengths // 2,
        sample_ids=torch.tensor(rng.integers(0, 2**40, count)),
        truncated=torch.tensor(rng.random(count) < 1 / 3),
        fields=[fields[int(rng.integers(len(fields)))] for _ in range(count)],
    )


def check(rows: CriticRows, answer) -> None:
    """What can be known of an answer whose critic trains meanwhile."""
    assert answer.values.shape == rows.tokens.shape and torch.isfinite(answer.values).all()
    assert (answer.bootstrap[~rows.truncated] == 0).all() and torch.isfinite(answer.bootstrap).all()
    assert len(answer.scores) == len(rows.lengths) and all(s.error is None for s in answer.scores)
    assert all(0.0 <= s.value <= 1.3 for s in answer.scores)


def batch(step: int) -> CriticBatch:
    rng = np.random.default_rng(step)
    lengths = torch.tensor(rng.integers(8, 100, 16))
    mask = (torch.arange(128) >= lengths[:, None] // 2) & (torch.arange(128) < lengths[:, None])
    tokens = torch.tensor(rng.integers(3, 250, (16, 128)))
    returns = torch.where(mask, torch.tensor(rng.standard_normal((16, 128)), dtype=torch.float32), 0.0)
    return CriticBatch(tokens, lengths, mask, torch.zeros(16, 128), returns, torch.arange(16))


class Load:
    """The clients' threads, what they measured and what failed."""

    def __init__(self, file: Path, fields: list[dict]) -> None:
        self.file, self.fields = file, fields
        self.latencies: list[float] = []
        self.failures: list[str] = []
        self.steps = 0
        self.ending = threading.Event()
        self.threads = [threading.Thread(target=self.guarded, args=(self.infer, i)) for i in range(CLIENTS)]
        self.threads.append(threading.Thread(target=self.guarded, args=(self.train, 0)))

    def guarded(self, act, number: int) -> None:
        try:
            act(number)
        except Exception as error:
            self.failures.append(f"client {number}: {type(error).__name__}: {error}")

    def infer(self, number: int) -> None:
        client = connect(self.file)
        rng = np.random.default_rng(number)
        while not self.ending.is_set():
            rows = draw_rows(rng, self.fields)
            began = time.perf_counter()
            answer = client.infer(rows).result(300)
            self.latencies.append(time.perf_counter() - began)
            check(rows, answer)
        client.close()

    def train(self, _: int) -> None:
        client = connect(self.file, trains=True)
        client.restore(0, None)
        for step in itertools.count(1):
            if self.ending.wait(TRAIN_EVERY):
                break
            assert np.isfinite(list(client.train(step, batch(step)).result(300).values())).all()
            self.steps = step
        client.close()


def memory_mb(job: Job) -> dict[str, float]:
    """Resident memory of the job's ranks and of what they started, and of its shared memory."""
    found = {"ranks": 0.0, "helpers": 0.0, "shared": 0.0}
    for pid in job.pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found["ranks"] += process.memory_info().rss / 2**20
            for child in process.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found["helpers"] += child.memory_info().rss / 2**20
        for file in Path("/dev/shm").glob(f"*{pid}*"):
            with contextlib.suppress(OSError):
                found["shared"] += file.stat().st_blocks * 512 / 2**20
    return found


@pytest.mark.soak
def test_sixty_four_clients(jobs: Launcher):
    serving = jobs.critic("soak", "serving.deterministic=false", "reward.workers=2", ranks=2)
    file = jobs.run("soak").path / "endpoints" / "critic.json"
    fields = [p.fields for p in draw_problems("chain_sum", TASK, size=50, seed=3, key="question")]
    load, samples, began = Load(file, fields), [], time.monotonic()
    for thread in load.threads:
        thread.start()
    while time.monotonic() - began < SECONDS and not load.failures:
        time.sleep(SAMPLE_EVERY)
        samples.append(memory_mb(serving))
    load.ending.set()
    for thread in load.threads:
        thread.join(300)
    assert load.failures == []
    report(load, samples, time.monotonic() - began)
    for part in samples[0]:
        second, last = (statistics.median(s[part] for s in quarter) for quarter in quarters(samples))
        assert last <= GROWTH * second + SLACK_MB, (
            f"{part}: {second:.0f} MB in the second quarter, {last:.0f} in the last"
        )
    client = connect(file, trains=True)
    assert client.status()["step"] == load.steps
    client.stop(), client.close()
    serving.finish(60)
    assert serving.leftovers() == []


def quarters(samples: list) -> tuple[list, list]:
    """The second and the last of four: the first one is warm-up."""
    n = len(samples)
    assert n >= 8, f"{n} samples of memory are too few: raise ALIGNER_SOAK_SECONDS"
    return samples[n // 4 : n // 2], samples[3 * n // 4 :]


def report(load: Load, samples: list[dict[str, float]], seconds: float) -> None:
    p50, p95, p99 = (1000 * x for x in np.percentile(load.latencies, (50, 95, 99)))
    print(f"\n{CLIENTS} clients, {seconds:.0f} s: {len(load.latencies)} requests, {load.steps} train steps")
    print(f"latency p50 {p50:.0f} ms, p95 {p95:.0f} ms, p99 {p99:.0f} ms, most {1000 * max(load.latencies):.0f} ms")
    for part in samples[0]:
        at = [f"{samples[int(q * (len(samples) - 1))][part]:.0f}" for q in (0, 0.25, 0.5, 0.75, 1)]
        print(f"memory of {part} (MB) at each quarter: {', '.join(at)}")
