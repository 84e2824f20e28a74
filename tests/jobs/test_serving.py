"""The served critic with real PyTriton: a job of two gloo ranks with a small deterministic backend, driven through RemoteCritic.

Contract: every request is answered by exactly what the backend computes from it (recomputed here by a formula), one that fails
is answered with one sentence and the next one works, each train step is applied once, and the job ends in order.

This file is also the job's script: `python test_serving.py RUN_FOLDER OVERRIDES`, one process a rank."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from aligner.config.groups import CriticClientConfig, ServingConfig
from aligner.data.batch import CriticBatch, CriticRows, Score
from aligner.runtime.errors import ContractError
from aligner.serving import access, parts, protocol
from aligner.serving.backend import Refused
from aligner.serving.client import RemoteCritic
from aligner.serving.endpoint import read_endpoint
from aligner.serving.hello import Contract
from aligner.serving.kserve import Connection
from aligner.serving.protocol import INFER, TRAIN, ProtocolError, RequestFailed

REPO = Path(__file__).resolve().parents[2]
VOCAB, MAX_LENGTH, WORLD = 1000, 2048, 2
RAISE_ON_RANK_1, RAISE_ON_ALL, SLEEP, SCORE_FAILS, STUCK = 901, 902, 903, 904, 905
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

    def __init__(self, group) -> None:
        import torch.distributed as dist

        self.dist, self.group, self.rank = dist, group, dist.get_rank()
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
            time.sleep(2)
        values = torch.zeros(rows.tokens.shape)
        values[self.rank :: WORLD] = expected_values(mine, self.weight)
        self.dist.all_reduce(values, group=self.group)
        self.seen.append(len(rows.lengths))
        bootstrap = torch.where(rows.truncated, rows.lengths.float(), torch.zeros(len(rows.lengths)))
        return values, bootstrap, None

    def start_scoring(self, rows):
        from concurrent.futures import Future

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

    def prepare_save(self, step, folder):
        if self.rank == 0:
            folder.mkdir(parents=True)
            (folder / "critic.json").write_text(json.dumps({"step": step, "weight": self.weight}))

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
    backend = FakeCritic(dist.group.WORLD)
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
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.run_folder = run_folder
        self.endpoint_file = run_folder / "endpoints" / "critic.json"
        self.ranks = []
        for rank in range(WORLD):
            environ = {
                **os.environ,
                "PYTHONPATH": str(REPO),
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(WORLD),
                "http_proxy": "http://127.0.0.1:9",
            }
            command = [sys.executable, __file__, str(run_folder), json.dumps({"bind": "127.0.0.1", **settings})]
            log = (run_folder / f"stdout{rank}").open("w")
            self.ranks.append(subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT))

    def client(self, contract: Contract = CONTRACT, *, endpoint=None, trains=False, **settings) -> RemoteCritic:
        config = CriticClientConfig(
            endpoint=endpoint, **{"connect_timeout": 120.0, "request_timeout": 60.0, **settings}
        )
        return RemoteCritic(contract, config, endpoint_file=self.endpoint_file, trains=trains, say=lambda text: None)

    def output(self, rank: int = 0) -> str:
        return (self.run_folder / f"stdout{rank}").read_text()

    def wait(self, timeout: float = 60.0) -> list[int]:
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


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("run"), max_rows=64)
    yield job
    job.end()


@pytest.fixture(scope="module")
def critic(served):
    client = served.client(trains=True)
    yield client
    client.close()


@pytest.fixture
def fresh(critic):
    """The critic at step 0 with its initial weights."""
    critic.restore(0, None)
    return critic


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


def raw_infer(job: Job, arrays: dict) -> dict:
    info = read_endpoint(job.endpoint_file)
    return Connection(info.host, info.port, timeout=30).infer(INFER, arrays, {})


# ---- infer


def test_concurrent_mixed_requests(fresh):
    """Eight threads infer and one trains: each answer is the one of its own request."""
    train = [fresh.train(step, make_batch(0)) for step in range(1, 11)]  # returns of 0: the weight stays
    with ThreadPoolExecutor(8) as pool:
        requests = [make_rows(i, rows=1 + i % 5, length=10 + 17 * i) for i in range(60)]
        for rows, answer in zip(requests, pool.map(lambda r: fresh.infer(r).result(60), requests)):
            check_answer(rows, answer)
    assert [f.result(60)["rows"] for f in train] == [8.0] * 10
    assert fresh.status()["step"] == 10


def test_requests_of_one_bucket_are_merged(served, critic):
    before = critic.status()
    slow = critic.infer(make_rows(1, r0=SLEEP))
    time.sleep(0.5)
    with ThreadPoolExecutor(16) as pool:
        clients = [served.client() for _ in range(4)]
        requests = [make_rows(i, length=30 + i) for i in range(2, 18)]
        futures = [pool.submit(lambda i=i, r=r: clients[i % 4].infer(r).result(60)) for i, r in enumerate(requests)]
        for rows, future in zip(requests, futures):
            check_answer(rows, future.result())
        [c.close() for c in clients]
    slow.result(60)
    after = critic.status()
    assert after["infer_requests"] - before["infer_requests"] == 17
    assert after["infer_batches"] - before["infer_batches"] < 12


def test_scores_only(critic):
    rows = replace(make_rows(3), values=False)
    assert [s.value for s in critic.infer(rows).result(60).scores] == [f["answer"] * 2.0 for f in rows.fields]


FORBIDDEN = [
    (RAISE_ON_RANK_1, "ValueError: the token is forbidden on another rank"),
    (RAISE_ON_ALL, "ValueError: the token is forbidden"),
]


@pytest.mark.parametrize("token, sentence", FORBIDDEN)
def test_a_rank_that_raises_fails_its_request_alone(critic, token, sentence):
    slow = critic.infer(make_rows(1, r0=SLEEP))  # what waits behind it is merged
    time.sleep(0.5)
    good, bad = [make_rows(i) for i in range(5, 8)], make_rows(4, r1=token)
    futures = [critic.infer(rows) for rows in (good[0], bad, good[1])]
    with pytest.raises(RequestFailed) as error:
        futures[1].result(60)
    assert str(error.value) == sentence
    check_answer(good[0], futures[0].result(60))
    check_answer(good[1], futures[2].result(60))
    check_answer(good[2], critic.infer(good[2]).result(60))
    slow.result(60)


def test_a_failed_score_is_no_zero(critic):
    rows = make_rows(8, r1=SCORE_FAILS)
    answer = critic.infer(rows).result(60)
    assert [s.error for s in answer.scores] == [None, "the verifier died", None]
    assert np.isnan(answer.scores[1].value)
    assert torch.equal(answer.values[1, :5], expected_values(rows.tokens, 1.0)[1, :5])


WRONG = {
    "dtype": (lambda a: {**a, "tokens": a["tokens"].astype(np.int64)}, "tokens"),
    "rank": (lambda a: {**a, "tokens": a["tokens"][:, :, None]}, "tokens"),
    "shape": (lambda a: {**a, "length": np.repeat(a["length"], 2, 1)}, "length"),
    "missing": (lambda a: {k: v for k, v in a.items() if k != "meta"}, "meta"),
    "vocabulary": (lambda a: {**a, "tokens": a["tokens"] + np.int32(VOCAB)}, "token ids must be in [0, 1000)"),
    "length": (lambda a: {**a, "length": a["length"] + np.int32(64)}, "length <= S"),
    "json": (lambda a: {**a, "meta": np.array([[b"{"]] * 3, object)}, "meta is not JSON"),
    "utf-8": (lambda a: {**a, "meta": np.array([[b"\xff"]] * 3, object)}, "not UTF-8"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_are_refused_by_the_server(served, critic, name):
    """Sent past the client's own checks."""
    spoil, sentence = WRONG[name]
    arrays = spoil(protocol.encode_rows(make_rows(9)))
    fields = [f for f in INFER.inputs if f.name in arrays]
    if name == "dtype":
        fields = [replace(f, dtype=np.int64) if f.name == "tokens" else f for f in fields]
    endpoint = replace(INFER, inputs=tuple(fields))
    info = read_endpoint(served.endpoint_file)
    with pytest.raises(RequestFailed) as error:
        protocol.decode_answer(Connection(info.host, info.port, timeout=30).infer(endpoint, arrays, {}), width=64)
    assert sentence in str(error.value) and "Traceback" not in str(error.value) and "\n" not in str(error.value)
    check_answer(make_rows(10), critic.infer(make_rows(10)).result(60))


def test_too_many_rows(served, critic):
    with pytest.raises(ProtocolError, match="65 rows exceed .* serving.max_rows=64"):
        critic.infer(make_rows(1, rows=65))
    with pytest.raises(RequestFailed):
        raw_infer(served, protocol.encode_rows(make_rows(1, rows=65)))
    check_answer(make_rows(10), critic.infer(make_rows(10)).result(60))


# ---- train


def test_a_step_is_applied_once(fresh):
    first = fresh.train(1, make_batch(2)).result(60)
    assert first == {"loss": 3.0, "rows": 8.0}
    assert fresh.train(1, make_batch(2)).result(60) == first  # the stored answer, not another update
    assert fresh.train(2, make_batch(1)).result(60)["loss"] == 4.0
    rows = make_rows(11)
    check_answer(rows, fresh.infer(rows).result(60), weight=4.0)


def test_gaps_replays_and_other_batches_are_refused(fresh):
    fresh.train(1, make_batch(1)).result(60)
    fresh.train(2, make_batch(1)).result(60)
    for step, batch, sentence in (
        (4, make_batch(1), "train step 4 leaves a gap: the critic has applied step 2"),
        (1, make_batch(1), "train step 1 is from the past"),
        (2, make_batch(3), "step 2 was already trained with another batch"),
    ):
        with pytest.raises(RequestFailed, match=sentence):
            fresh.train(step, batch).result(60)
    assert fresh.status()["step"] == 2


def test_parts_out_of_order_and_repeated(served, fresh):
    batch = make_batch(2, rows=40)
    requests = parts.split(batch, step=1, run_id="r1", max_bytes=13 * 64 * 8 + 200)
    assert len(requests) >= 5
    info = read_endpoint(served.endpoint_file)

    def send(request):
        answer = Connection(info.host, info.port, timeout=30).infer(TRAIN, request, {})
        assert answer["error"][0] == b""
        return json.loads(answer["reply"][0])

    order = [*requests[::-1][:-1], requests[2]]
    assert {send(r)["state"] for r in order} == {"incomplete"}
    assert send(requests[0])["metrics"] == {"loss": 3.0, "rows": 40.0}
    assert send(requests[3])["metrics"] == {"loss": 3.0, "rows": 40.0}
    assert fresh.status()["train_steps"] >= 1 and fresh.status()["step"] == 1


def test_a_refused_batch_changes_nothing(fresh):
    with pytest.raises(RequestFailed, match="^step 1 holds the forbidden token$"):
        fresh.train(1, make_batch(1, token=RAISE_ON_ALL)).result(60)
    assert fresh.train(1, make_batch(1)).result(60)["loss"] == 2.0


def test_training_that_fails_half_way_is_refused_until_a_restore(fresh):
    with pytest.raises(RequestFailed, match="^rank 1: ValueError: rank 1 failed in training$"):
        fresh.train(1, make_batch(1, token=RAISE_ON_RANK_1)).result(60)
    with pytest.raises(RequestFailed, match="weights are undefined"):
        fresh.train(1, make_batch(1)).result(60)
    fresh.restore(0, None)
    assert fresh.train(1, make_batch(1)).result(60)["loss"] == 2.0


def test_nan_under_the_mask_is_refused_before_it_is_sent(critic):
    batch = make_batch(1)
    batch.returns[2, 1] = float("nan")
    with pytest.raises(ProtocolError, match="returns is nan at token 1 of sample 2"):
        critic.train(1, batch)


# ---- control


def test_save_and_restore(served, fresh):
    fresh.train(1, make_batch(2)).result(60)
    folder = served.run_folder / f"pair_{time.monotonic_ns()}"
    fresh.prepare_save(1, folder).result(60)
    fresh.commit(1)
    fresh.train(2, make_batch(5)).result(60)
    fresh.restore(1, folder)
    assert fresh.train(2, make_batch(1)).result(60)["loss"] == 4.0
    with pytest.raises(RequestFailed, match="cannot save the critic of step 1: the last step applied is 2"):
        fresh.prepare_save(1, folder).result(60)
    with pytest.raises(RequestFailed, match="is not inside this run's folder"):
        fresh.restore(1, Path("/tmp"))


def test_unknown_op(critic):
    with pytest.raises(RequestFailed, match="unknown control op 'reboot'; version 1 has hello, status"):
        critic._control({"op": "reboot"})


MISMATCHES = {
    "tokenizer": ({"tokenizer_fingerprint": "0" * 64}, "the tokenizers differ.*model.checkpoint"),
    "vocabulary": ({"vocab_size": 999}, "vocabularies differ .actor 999, critic 1000."),
    "length": ({"max_length": 4096}, "up to 4096 tokens a row, the critic takes 2048.*engine.max_input_len"),
    "reward": ({"reward_kind": "model"}, "reward.kind=model, it scores with task"),
    "run": ({"run_id": "r2"}, "run 'r2', the critic job serves run 'r1': set run.name"),
    "step": ({"step": 7}, "the actor is at step 7, the critic at step 0: restore the pair of step 7"),
    "version": ({"protocol": 2}, "the actor job speaks protocol version 2, the critic job version 1"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_hello_refuses_a_mismatch(served, fresh, name):
    change, sentence = MISMATCHES[name]
    with pytest.raises(ContractError, match=sentence):
        served.client(replace(CONTRACT, **change)).close()


def test_another_chat_template_is_a_warning(served, critic):
    said = []
    config = CriticClientConfig(connect_timeout=60.0)
    RemoteCritic(
        replace(CONTRACT, chat_template="x"), config, endpoint_file=served.endpoint_file, say=said.append
    ).close()
    assert len(said) == 1 and "chat templates" in said[0]


def test_status_for_people(served, critic):
    info = read_endpoint(served.endpoint_file)
    command = [sys.executable, "-m", "aligner.serving.status", info.address]
    out = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    lines = dict(line.split(maxsplit=1) for line in out.stdout.splitlines() if len(line.split()) > 1)
    assert lines["run_id"] == "r1" and lines["protocol"] == "1" and lines["pid"] == str(served.ranks[0].pid)


def test_nothing_of_triton_reaches_the_terminal(served, critic):
    assert served.output(0) == "" and served.output(1) == ""
    assert "infer" in (served.run_folder / "logs" / "critic_triton.log").read_text()


# ---- no critic


def test_absent_critic_at_an_explicit_endpoint(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    config = CriticClientConfig(endpoint=f"127.0.0.1:{port}", connect_timeout=2.0)
    said = []
    with pytest.raises(ContractError) as error:
        RemoteCritic(CONTRACT, config, endpoint_file=tmp_path / "critic.json", say=said.append)
    assert (
        f"127.0.0.1:{port}" in str(error.value)
        and "critic.endpoint" in str(error.value)
        and "connection refused" in str(error.value)
    )
    assert said and "giving up in 2 s" in said[0]


def test_absent_endpoint_file(tmp_path):
    said = []
    with pytest.raises(
        ContractError, match=f"{tmp_path}/critic.json is not there after 1 s.*run.name.*critic.connect_timeout"
    ):
        RemoteCritic(
            CONTRACT, CriticClientConfig(connect_timeout=1.0), endpoint_file=tmp_path / "critic.json", say=said.append
        )
    assert len(said) == 1


# ---- ends


def test_sigterm_during_a_request_then_token(tmp_path):
    """A job with a token; told to end while a request runs, it answers that one, refuses the next, and leaves nothing behind."""
    job = Job(tmp_path / "run", token_file=str(tmp_path / "token"), deterministic=True)
    try:
        client = job.client(trains=True)
        assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
        check_answer(make_rows(1), client.infer(make_rows(1)).result(60))
        _check_token_is_asked_for(job, (tmp_path / "token").read_text().strip())
        running = client.infer(make_rows(1, r0=SLEEP))
        time.sleep(0.7)
        for p in job.ranks:  # as torchrun does
            p.send_signal(signal.SIGTERM)
        assert running.result(60).values.shape == (3, 64)
        with pytest.raises(RequestFailed):
            client.infer(make_rows(2)).result(60)
        assert job.wait() == [0, 0]
        assert "ended: it was told to stop by a signal" in job.output(0)
        assert not job.endpoint_file.exists()
        client.close()
    finally:
        job.end()


def _check_token_is_asked_for(job: Job, token: str) -> None:
    info = read_endpoint(job.endpoint_file)
    arrays = protocol.encode_rows(make_rows(1))
    right = access.headers(token)
    for headers in (
        {},
        access.headers("x" * 43),
        {access.GATE_HEADER: right[access.GATE_HEADER]},
        {access.TOKEN_HEADER: token},
    ):
        with pytest.raises(RequestFailed, match="without the right token"):
            protocol.decode_answer(Connection(info.host, info.port, timeout=30).infer(INFER, arrays, headers), width=64)
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert token not in command.read_text(errors="replace")
        except OSError:
            pass  # it ended meanwhile


def test_ranks_stuck_in_a_collective_end_the_job(tmp_path):
    """One rank raised, the other waits for it inside a collective: the actor gets the sentence, and both processes end."""
    job = Job(tmp_path / "run")
    try:
        client = job.client()
        with pytest.raises(
            RequestFailed, match="rank 1: ValueError: rank 1 left alone; the other ranks did not come out"
        ):
            client.infer(make_rows(1, r0=STUCK)).result(60)
        assert all(code != 0 for code in job.wait())
        client.close()
    finally:
        job.end()


def test_sigterm_while_idle_in_the_shared_job(served, critic):
    """The last test of the shared job: it ends in order, and its leftovers are gone."""
    for p in served.ranks:
        p.send_signal(signal.SIGTERM)
    assert served.wait() == [0, 0]
    assert not served.endpoint_file.exists()
    pid = served.ranks[0].pid
    import tempfile

    assert not list(Path(tempfile.gettempdir()).glob(f"aligner-triton-{pid}-*"))
    assert not list(Path("/dev/shm").glob(f"pytrtion{pid}-*"))
    with pytest.raises(RequestFailed):
        critic.infer(make_rows(1)).result(60)


if __name__ == "__main__":
    job(*sys.argv[1:])
