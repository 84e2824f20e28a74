"""A served critic for tests: the job's script (`python serving_job.py RUN_FOLDER SETTINGS`, one process a rank), how it is launched,
and requests whose answers a formula gives."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch

from aligner.config.groups import CriticClientConfig, ServingConfig
from aligner.data.batch import CriticAnswer, CriticBatch, CriticRows, Score
from aligner.runtime.errors import end_threads_of_groups
from aligner.serving.backend import Refused
from aligner.serving.client import RemoteCritic
from aligner.serving.hello import Contract
from tests.jobs.harness import free_port
from tests.jobs.threads import thread_names

REPO = Path(__file__).resolve().parents[2]
VOCAB, MAX_LENGTH, WORLD = 1000, 2048, 2
RAISE_ON_RANK_1, RAISE_ON_ALL, SLEEP, SCORE_FAILS, STUCK = 901, 902, 903, 904, 905
ASLEEP = "asleep"  # a file that is there once a rank sleeps
CONTRACT = Contract(
    tokenizer_fingerprint="f" * 64,
    chat_template="c" * 64,
    vocab_size=VOCAB,
    max_length=MAX_LENGTH,
    reward_kind="task",
    run_id="r1",
)


def expected_values(tokens: torch.Tensor, weight: float) -> torch.Tensor:
    return tokens.float() * weight + torch.arange(tokens.size(1))


# ---- the job


class FakeCritic:
    """values = weight * token + position, computed half on each rank; training adds the mean masked return to the weight."""

    def __init__(self, group, asleep: Path) -> None:
        import torch.distributed as dist

        self.dist, self.group, self.rank, self.asleep = dist, group, dist.get_rank(), asleep
        self.weight, self.step, self.seen = 1.0, 0, []

    def infer(self, rows):
        mine = rows.tokens[self.rank :: WORLD]
        if (rows.tokens == STUCK).any() and self.rank == 1:
            raise ValueError("rank 1 left alone")  # rank 0 waits in all_reduce for ever
        forbidden = [None] * WORLD
        self.dist.all_gather_object(
            forbidden, self.rank == 1 and bool((rows.tokens == RAISE_ON_RANK_1).any()), group=self.group
        )
        if forbidden[self.rank]:
            raise ValueError("the token is forbidden here")
        if any(forbidden):
            raise ValueError("the token is forbidden on another rank")
        if (rows.tokens == RAISE_ON_ALL).any():
            raise ValueError("the token is forbidden")
        if (rows.tokens == SLEEP).any():
            self.asleep.touch()
            time.sleep(2)
        values = torch.zeros(rows.tokens.shape)
        values[self.rank :: WORLD] = expected_values(mine, self.weight)
        self.dist.all_reduce(values, group=self.group)
        self.seen.append(len(rows.lengths))
        bootstrap = torch.where(rows.truncated, rows.lengths.float(), torch.zeros(len(rows.lengths)))
        return values, bootstrap, None

    def start_scoring(self, rows):
        scores = Future()
        failed = (rows.tokens == SCORE_FAILS).any(1)
        scores.set_result(
            [
                Score(float("nan"), {}, "the verifier died") if f else Score(d["answer"] * 2.0, {"accuracy": 1.0})
                for f, d in zip(failed, rows.fields)
            ]
        )
        return scores

    def train(self, step, batch):
        if (batch.tokens == RAISE_ON_ALL).any():
            raise Refused(f"step {step} holds the forbidden token")
        if (batch.tokens == RAISE_ON_RANK_1).any() and self.rank == 1:
            raise ValueError("rank 1 failed in training")
        self.weight += float(batch.returns[batch.mask].mean())
        self.step = step
        return {"loss": self.weight, "rows": float(len(batch.lengths))}

    def prepare_save(self, step, folder, *, beside):
        self.writing = 2 if beside else 0
        if self.rank == 0:
            folder.mkdir(parents=True)
            (folder / "critic.json").write_text(json.dumps({"step": step, "weight": self.weight}))

    def saved(self):
        """A save beside training takes until it was asked after twice."""
        self.writing -= 1
        return self.writing < 0

    def commit(self, step):
        pass

    def restore(self, step, folder):
        saved = {"step": 0, "weight": 1.0} if folder is None else json.loads((folder / "critic.json").read_text())
        self.step, self.weight = saved["step"], saved["weight"]

    def status(self):
        return {**CONTRACT.as_dict(), "step": self.step, "model": "fake", "batches": list(self.seen[-100:])}


def job(run_folder: str, settings: str) -> None:
    from aligner.runtime.signals import StopSignals

    flags = StopSignals.install()
    import logging

    import torch.distributed as dist

    from aligner.serving.server import Place, serve

    logging.basicConfig(level=logging.INFO, filename=Path(run_folder) / f"rank{os.environ['RANK']}.log")
    dist.init_process_group("gloo")
    backend = FakeCritic(dist.group.WORLD, Path(run_folder) / ASLEEP)
    reason = serve(
        backend,
        ServingConfig(**json.loads(settings)),
        place=Place(Path(run_folder)),
        group=dist.group.WORLD,
        should_stop=lambda: flags.stopping,
        stuck_grace=2.0,
    )
    print(f"ended: {reason}", flush=True)
    dist.destroy_process_group()


# ---- launching it


class Job:
    """Two processes, one a rank, as torchrun would start them."""

    def __init__(self, run_folder: Path, **settings) -> None:
        run_folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.run_folder = run_folder
        self.endpoint_file = run_folder / "endpoints" / "critic.json"
        self.ranks = []
        for rank in range(WORLD):
            environ = {
                **os.environ,
                "PYTHONPATH": str(REPO),
                "OMP_NUM_THREADS": "1",
                "PYTHONFAULTHANDLER": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(WORLD),
                "http_proxy": "http://127.0.0.1:9",
            }
            command = [
                sys.executable,
                __file__,
                str(run_folder),
                json.dumps({"bind": "127.0.0.1", "drain_timeout": 0.0, **settings}),
            ]
            log = (run_folder / f"stdout{rank}").open("w")
            self.ranks.append(subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT))

    def client(self, contract: Contract = CONTRACT, *, endpoint=None, trains=False, **settings) -> RemoteCritic:
        config = CriticClientConfig(
            endpoint=endpoint,
            **{"connect_timeout": 120.0, "request_timeout": 60.0, "reconnect_timeout": 2.0, **settings},
        )
        return RemoteCritic(contract, config, endpoint_file=self.endpoint_file, trains=trains, say=lambda text: None)

    def sleeping(self, client: RemoteCritic) -> "Future[CriticAnswer]":
        """A request that takes two seconds, once it runs."""
        file, until = self.run_folder / ASLEEP, time.monotonic() + 60
        file.unlink(missing_ok=True)
        future = client.infer(make_rows(1, r0=SLEEP))
        while not file.exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        return future

    def output(self, rank: int = 0) -> str:
        return (self.run_folder / f"stdout{rank}").read_text()

    def wait(self, timeout: float = 120.0) -> list[int]:
        return [p.wait(timeout) for p in self.ranks]

    def end(self) -> None:
        """Ask, then insist: no process is left behind."""
        for p in self.ranks:
            if p.poll() is None:
                p.terminate()
        for p in self.ranks:
            try:
                p.wait(30)
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()


# ---- requests


def make_rows(seed: int, rows: int = 3, length: int = 20, **special) -> CriticRows:
    rng = np.random.default_rng(seed)
    lengths = torch.tensor(rng.integers(length // 2, length + 1, rows))
    tokens = torch.tensor(rng.integers(0, 900, (rows, 64 * (-(-length // 64)))))
    for row, token in special.items():
        tokens[int(row[1:]), 0] = token
    return CriticRows(
        tokens=tokens,
        lengths=lengths,
        prompt_lengths=lengths // 2,
        sample_ids=torch.arange(rows) + 1000 * seed,
        truncated=torch.tensor(rng.integers(0, 2, rows)).bool(),
        fields=[{"answer": int(a), "text": "é\n"} for a in rng.integers(0, 100, rows)],
    )


def check_answer(rows: CriticRows, answer, weight: float = 1.0) -> None:
    expected = expected_values(rows.tokens, weight)
    for b, length in enumerate(rows.lengths.tolist()):
        assert torch.equal(answer.values[b, :length], expected[b, :length])
    assert torch.equal(answer.bootstrap, rows.lengths.float() * rows.truncated)
    assert [s.value for s in answer.scores] == [f["answer"] * 2.0 for f in rows.fields]
    assert all(s.error is None and s.parts == {"accuracy": 1.0} for s in answer.scores)


def make_batch(seed: int, rows: int = 8, width: int = 64, token: int = 5) -> CriticBatch:
    rng = np.random.default_rng(seed)
    lengths = torch.tensor(rng.integers(2, width + 1, rows))
    mask = (torch.arange(width) < lengths[:, None]) & (torch.arange(width) > 0)
    junk = torch.where(mask, 0.0, float("nan"))  # what lies under a False mask may be anything
    return CriticBatch(
        tokens=torch.full((rows, width), token),
        lengths=lengths,
        mask=mask,
        values=torch.zeros(rows, width) + junk,
        returns=torch.full((rows, width), float(seed)) + junk,
        sample_ids=torch.arange(rows),
    )


if __name__ == "__main__":
    job(*sys.argv[1:])
    end_threads_of_groups()
    print("threads left:", thread_names())
