"""The served critic with real PyTriton: a job of two gloo ranks with a small deterministic backend, driven through RemoteCritic.

Contract: every request is answered by exactly what the backend computes from it (recomputed here by a formula), one that fails
is answered with one sentence and the next one works, each train step is applied once, and the job ends in order."""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from aligner.config.groups import CriticClientConfig
from aligner.runtime.errors import ContractError
from aligner.serving import parts, protocol
from aligner.serving.client import RemoteCritic
from aligner.serving.endpoint import read_endpoint
from aligner.serving.kserve import Connection
from aligner.serving.protocol import CONTROL, INFER, TRAIN, ProtocolError, RequestFailed, SaveLost
from tests.jobs.fuzzing import fuzz, oversized, refusal
from tests.jobs.serving_job import (
    CONTRACT,
    RAISE_ON_ALL,
    RAISE_ON_RANK_1,
    REPO,
    SCORE_FAILS,
    Job,
    check_answer,
    expected_values,
    make_batch,
    make_rows,
)

VOCAB = CONTRACT.vocab_size


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("run"), max_rows=64, metrics_port=0)
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
    clients = [served.client() for _ in range(4)]
    before = critic.status()
    slow = served.sleeping(critic)
    with ThreadPoolExecutor(16) as pool:
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
def test_a_rank_that_raises_fails_its_request_alone(served, critic, token, sentence):
    slow = served.sleeping(critic)  # what waits behind it is merged
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


def test_hostile_requests(served, fresh):
    """Each is refused in a sentence and changes nothing, while good ones are answered. More of them: test_fuzz.py."""
    assert len(fuzz(served, 400, seed=1)) > 60


def test_oversized_requests(served, critic):
    """More than 32 MB are refused by our check, more than 64 MB by Triton's."""
    info = read_endpoint(served.endpoint_file)
    for rows, sentence in ((33, "exceeds the limit of 32000000"), (64, "")):
        said = refusal(Connection(info.host, info.port, timeout=120), oversized(rows))
        assert said is not None and sentence in said
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
    requests = parts.split(parts.encode_batch(batch), step=1, run_id="r1", max_bytes=13 * 64 * 8 + 200)
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


def test_a_save_beside_training(served, fresh):
    """Train requests go on while it is written; the future is done once it is."""
    fresh.train(1, make_batch(2)).result(60)
    folder = served.run_folder / f"pair_{time.monotonic_ns()}" / "critic"
    half = fresh.prepare_save(1, folder, beside=True)
    assert fresh.train(2, make_batch(1)).result(60)["loss"] == 4.0
    half.result(60)
    fresh.restore(1, folder)
    assert fresh.status()["step"] == 1
    other = served.run_folder / "another" / "critic"
    with pytest.raises(
        SaveLost, match="critic of step 1 is not being written"
    ):  # what a critic that came back would say
        fresh._tell({"op": "saved", "step": 1, "folder": str(other)})


def test_unknown_op(critic):
    with pytest.raises(RequestFailed, match="unknown control op 'reboot'; version 2 has hello, status"):
        critic._tell({"op": "reboot"})


MISMATCHES = {
    "tokenizer": ({"tokenizer_fingerprint": "0" * 64}, "the tokenizers differ.*model.checkpoint"),
    "vocabulary": ({"vocab_size": 999}, "vocabularies differ .actor 999, the other job 1000."),
    "length": ({"max_length": 4096}, "up to 4096 tokens a row, the other job takes 2048.*engine.max_input_len"),
    "reward": ({"reward_kind": "model"}, "reward.kind=model, it scores with task"),
    "run": ({"run_id": "r2"}, "run 'r2', the other job serves run 'r1': set run.name"),
    "step": ({"step": 7}, "the actor is at step 7, the critic at step 0: restore the pair of step 7"),
    "version": ({"protocol": 1}, "the actor job speaks protocol version 1, the critic job version 2"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_hello_refuses_a_mismatch(served, fresh, name):
    change, sentence = MISMATCHES[name]
    with pytest.raises(ContractError, match=sentence):
        served.client(replace(CONTRACT, **change)).close()


def test_an_actor_of_version_1_is_refused_in_its_own_words(served, critic):
    """The request as version 1 sent it, and the sentence where version 1 looks for it."""
    names = ("tokenizer_fingerprint", "chat_template", "vocab_size", "max_length", "reward_kind", "run_id", "step")
    contract = {name: getattr(CONTRACT, name) for name in names} | {"train_rows": 8, "infer_rows": 4, "protocol": 1}
    request = {"request": protocol.text_array(json.dumps({"op": "hello", "contract": contract}))}
    info = read_endpoint(served.endpoint_file)
    answer = Connection(info.host, info.port, timeout=30).infer(CONTROL, request, {})
    sentence = "the actor job speaks protocol version 1, the critic job version 2: run both from one release"
    assert sentence in answer["error"][0].decode() and "the actor job is older" in answer["error"][0].decode()


def test_the_run_folder_is_proved(served, critic):
    """Whoever cannot make the critic job read a file of its run folder is refused, and nothing else is read."""
    info = read_endpoint(served.endpoint_file)
    for nonce, sentence in (
        ({"name": "0" * 32, "text": "x", "folder": "/elsewhere"}, "run folder (/elsewhere) is not the critic job's"),
        ({"name": "../critic", "text": "x"}, "a name of 32 hexadecimal digits"),
    ):
        request = {"op": "hello", "contract": CONTRACT.as_dict(), "nonce": nonce}
        arrays = {"request": protocol.text_array(json.dumps(request))}
        answer = Connection(info.host, info.port, timeout=30).infer(CONTROL, arrays, {})
        assert sentence in answer["error"][0].decode()
    assert not list(served.endpoint_file.parent.glob("*.nonce"))  # those of clients are gone


def test_a_half_that_is_written_is_not_written_again(served, fresh):
    """The answer was lost, or the request comes twice; and a pair that was committed since is never touched."""
    fresh.train(1, make_batch(2)).result(60)
    folder = served.run_folder / f"pair_{time.monotonic_ns()}" / "critic"
    fresh.prepare_save(1, folder).result(60)
    (folder / "critic.json").write_text("untouched")
    fresh.prepare_save(1, folder).result(60)
    assert (folder / "critic.json").read_text() == "untouched"
    (folder.parent / "COMMITTED").write_text("{}")
    fresh.restore(0, None)
    fresh.train(1, make_batch(2)).result(60)
    with pytest.raises(RequestFailed, match="is committed already"):
        fresh.prepare_save(1, folder).result(60)
    assert (folder / "critic.json").read_text() == "untouched"


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
    assert (
        lines["run_id"] == "r1"
        and lines["protocol"] == str(protocol.VERSION)
        and lines["pid"] == str(served.ranks[0].pid)
    )


def test_metrics(served, fresh):
    """Prometheus' page, by what was asked since: counts, the step, and the drift of the mean of formula values."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def page() -> dict[str, float]:
        url = f"http://127.0.0.1:{read_endpoint(served.endpoint_file).metrics_port}/metrics"
        text = opener.open(url, timeout=30).read().decode()
        families = text_string_to_metric_families(text)
        return {s.name: s.value for f in families for s in f.samples if s.labels.get("endpoint") in (None, "infer")}

    def mean(rows, weight: float) -> float:
        used = (torch.arange(rows.tokens.size(1)) >= rows.prompt_lengths[:, None]) & (
            torch.arange(rows.tokens.size(1)) < rows.lengths[:, None]
        )
        return float(expected_values(rows.tokens, weight)[used].mean())

    rows, before = make_rows(31), page()
    fresh.train(1, make_batch(2)).result(60)  # weight 3
    fresh.infer(rows).result(60)
    fresh.train(2, make_batch(1)).result(60)  # weight 4
    fresh.infer(rows).result(60)
    after, until = page(), time.monotonic() + 10
    while after["aligner_queue"] and time.monotonic() < until:  # an answer may be here before its call is off the list
        after = page()
    grown = {name: after[name] - before[name] for name in before if name.endswith("_total")}
    assert grown["aligner_infer_requests_total"] == 2 and grown["aligner_infer_rows_total"] == 6
    assert grown["aligner_train_steps_total"] == 2 and after["aligner_step"] == 2 and after["aligner_queue"] == 0
    assert after["aligner_answer_seconds_count"] - before["aligner_answer_seconds_count"] == 2
    assert after["aligner_values_mean"] == pytest.approx(mean(rows, 4.0))
    assert after["aligner_values_drift"] == pytest.approx(mean(rows, 4.0) - mean(rows, 3.0))


def test_nothing_of_triton_reaches_the_terminal(served, critic):
    assert served.output(0) == "" and served.output(1) == ""
    assert "infer" in (served.run_folder / "logs" / "critic_triton.log").read_text()


# ---- its end


def test_sigterm_while_idle_in_the_shared_job(served, critic):
    """The last test of the shared job: it ends in order, and its leftovers are gone."""
    for p in served.ranks:
        p.send_signal(signal.SIGTERM)
    assert served.wait() == [0, 0], served.output(0) + served.output(1)
    for rank in range(2):  # although calls have failed, whose tracebacks refer to the groups
        assert "threads left: " in served.output(rank) and "gloo" not in served.output(rank)
    assert not served.endpoint_file.exists()
    pid = served.ranks[0].pid
    import tempfile

    assert not list(Path(tempfile.gettempdir()).glob(f"aligner-triton-{pid}-*"))
    assert not list(Path("/dev/shm").glob(f"pytrtion{pid}-*"))
    with pytest.raises(RequestFailed):
        critic.infer(make_rows(1)).result(60)
