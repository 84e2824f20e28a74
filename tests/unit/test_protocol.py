"""The wire without a server: arrays, parts, the ledger of train steps, hello, and one rank's loop and local critic.

Oracles: round trips, byte strings written by hand from the KServe specification, and a dictionary that models the ledger."""

import ast
import itertools
import json
import math
import random
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from aligner.data.batch import CriticAnswer, CriticBatch, CriticRows, Score
from aligner.serving import hello, kserve, parts, protocol
from aligner.serving.backend import Refused
from aligner.serving.frames import Call, Op
from aligner.serving.inference import Inference, whole_scores
from aligner.serving.local import LocalCritic
from aligner.serving.loop import CallFailed, Loop
from aligner.serving.protocol import INFER, TRAIN, JobLost, NotInStep, ProtocolError, RequestFailed
from aligner.serving.reception import Reception

CONTRACT = hello.Contract("f" * 64, "c" * 64, vocab_size=100, max_length=256, reward_kind="task", run_id="r")


def make_rows(lengths=(5, 9, 3), width=64) -> CriticRows:
    lengths = torch.tensor(lengths)
    rng = torch.Generator().manual_seed(1)
    return CriticRows(
        tokens=torch.randint(0, 100, (len(lengths), width), generator=rng),
        lengths=lengths,
        prompt_lengths=torch.ones(len(lengths), dtype=torch.int64),
        sample_ids=torch.arange(len(lengths)) + 2**40,
        truncated=torch.tensor([b % 2 == 0 for b in range(len(lengths))]),
        fields=[{"answer": "ü\n", "n": [1, {"x": None}]} for _ in lengths],
    )


def make_batch(rows=10, width=64, seed=0) -> CriticBatch:
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, width + 1, (rows,), generator=rng)
    mask = (torch.arange(width) < lengths[:, None]) & (torch.arange(width) > 0)
    junk = torch.where(mask, 0.0, float("nan"))
    return CriticBatch(
        tokens=torch.randint(0, 100, (rows, width), generator=rng),
        lengths=lengths,
        mask=mask,
        values=torch.randn(rows, width, generator=rng) + junk,
        returns=torch.randn(rows, width, generator=rng) + junk,
        sample_ids=torch.arange(rows),
    )


# ---- infer


def test_rows_survive_the_wire():
    rows = make_rows()
    arrays = protocol.encode_rows(rows)
    assert {n: (a.dtype.name, a.shape) for n, a in arrays.items() if n != "meta"} == {
        "tokens": ("int32", (3, 64)),
        "length": ("int32", (3, 1)),
        "prompt_length": ("int32", (3, 1)),
        "sample_id": ("int64", (3, 1)),
        "truncated": ("bool", (3, 1)),
        "want_values": ("bool", (3, 1)),
        "critic_step": ("int64", (3, 1)),
    }
    back = protocol.decode_rows(arrays)
    for b, length in enumerate(rows.lengths):
        assert torch.equal(back.tokens[b, :length], rows.tokens[b, :length])
    for name in ("lengths", "prompt_lengths", "sample_ids", "truncated"):
        assert torch.equal(getattr(back, name), getattr(rows, name))
    assert back.fields == rows.fields and back.values is True and back.critic_step is None
    assert protocol.decode_rows(protocol.encode_rows(replace(rows, critic_step=0))).critic_step == 0


@pytest.mark.parametrize(
    "longest, bucket", [(1, 64), (64, 64), (65, 128), (128, 128), (129, 256), (1000, 1024), (4097, 8192)]
)
def test_length_bucket(longest, bucket):
    assert protocol.length_bucket(longest) == bucket


@pytest.mark.parametrize(
    "scores", [None, [Score(0.0, {}), Score(1.5, {"accuracy": 1.0}), Score(7.0, {}, error="it hung")]]
)
def test_answers_survive_the_wire(scores):
    answer = CriticAnswer(torch.randn(3, 128), torch.randn(3), scores)
    back = protocol.decode_answer(protocol.encode_answer(answer), width=100)
    assert torch.equal(back.values, answer.values[:, :100]) and torch.equal(back.bootstrap, answer.bootstrap)
    if scores is None:
        assert back.scores is None
        return
    assert back.scores[:2] == scores[:2]
    assert back.scores[2].error == "it hung" and np.isnan(back.scores[2].value)


def test_a_narrower_bucket_than_the_batch_is_filled_up():
    answer = CriticAnswer(torch.ones(1, 64), torch.ones(1), None)
    back = protocol.decode_answer(protocol.encode_answer(answer), width=192)
    assert back.values.sum() == 64 and back.values.shape == (1, 192)


@pytest.mark.parametrize(
    "kind, raised", [("request", RequestFailed), ("job", JobLost), ("step", NotInStep), ("later", RequestFailed)]
)
def test_a_failed_request_says_what_may_be_done_about_it(kind, raised):
    with pytest.raises(RequestFailed, match="^why$") as error:
        protocol.decode_answer(protocol.failed_answer(2, 64, "why", kind=kind), width=64)
    assert type(error.value) is raised


def test_a_failed_request_is_an_error_and_no_score():
    outputs = protocol.failed_answer(2, 64, "rank 1: out of memory")
    assert np.isnan(outputs["score"]).all() and np.isnan(outputs["values"]).all()
    with pytest.raises(RequestFailed, match="^rank 1: out of memory$"):
        protocol.decode_answer(outputs, width=64)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"lengths": torch.tensor([0, 0, 0])}, "at least one row with at least one token"),
        ({"prompt_lengths": torch.tensor([1, 10, 1])}, "prompt_length=10, length=9"),
        ({"tokens": torch.full((3, 64), -1)}, "not negative"),
        ({"tokens": torch.full((3, 64), 2**31)}, "within int32"),
    ],
)
def test_bad_rows_are_refused_before_sending(change, sentence):
    with pytest.raises(ProtocolError, match=sentence):
        protocol.encode_rows(replace(make_rows(), **change))


def test_oversized_requests_are_refused_before_sending():
    with pytest.raises(ProtocolError, match="exceeds the limit of 32000000"):
        protocol.encode_rows(make_rows(lengths=(8000,) * 1024, width=8000))


def test_random_spoilt_arrays_raise_protocol_errors_only():
    rng, said = random.Random(0), []
    good = {INFER.name: protocol.encode_rows(make_rows()), TRAIN.name: split(make_batch(), step=1, run_id="r")[0]}
    for _ in range(2000):
        endpoint = rng.choice([INFER, TRAIN])
        arrays = dict(good[endpoint.name])
        for _ in range(rng.randint(1, 2)):
            _spoil(rng, arrays)
        try:
            if endpoint is INFER:
                protocol.check_arrays(INFER, arrays)
                protocol.check_rows(arrays, vocab_size=100, max_length=64)
                protocol.decode_rows(arrays)
            else:
                parts.TrainLedger(step=0, run_id="r", vocab_size=100, max_length=64).receive(arrays)
        except ProtocolError as error:
            said.append(str(error))
    assert len(said) > 1000 and all(text and "\n" not in text for text in said)


def _spoil(rng, arrays):
    name = rng.choice(sorted(arrays)) if arrays else "x"
    a = arrays.get(name, np.zeros(1))
    flat = np.array(a)
    if flat.dtype != object and flat.size:
        flat.ravel()[rng.randrange(flat.size)] = rng.choice([0, 1, -1, 2**30])
    arrays[name] = rng.choice(
        [
            flat,
            a[:0],
            a[..., None],
            a.reshape(-1),
            a.astype(object),
            np.array([b"\xff{["] * max(1, a.shape[0] if a.ndim else 1), dtype=object).reshape(-1, *[1] * (a.ndim - 1)),
            np.zeros(a.shape, rng.choice([np.int32, np.int64, np.float32, np.float64, np.bool_])),
        ]
    )
    if rng.random() < 0.2:
        arrays.pop(name)


# ---- HTTP bodies, written out by hand


def test_tensor_bytes():
    ints, text = protocol.Field("a", np.int32, (-1,)), protocol.Field("b", bytes, (1,))
    assert kserve.pack(ints, np.array([1, -2], np.int32)) == struct.pack("<ii", 1, -2)
    packed = kserve.pack(text, protocol.text_array("ü", ""))
    assert packed == b"\x02\0\0\0\xc3\xbc" + b"\0\0\0\0"
    assert kserve.unpack(text, packed, [2]).tolist() == ["ü".encode(), b""]
    with pytest.raises(ValueError, match="cut"):
        kserve.unpack(text, packed[:-5], [2])
    with pytest.raises(ValueError):
        kserve.unpack(ints, b"\0" * 7, [2])


def test_request_body():
    body, head_length = kserve.request_body(protocol.CONTROL, {"request": protocol.text_array("{}")})
    assert json.loads(body[:head_length]) == {
        "inputs": [{"name": "request", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 6}}],
        "parameters": {"binary_data_output": True},
    }
    assert body[head_length:] == b"\x02\0\0\0{}"


def test_error_bodies_become_one_sentence():
    traceback = 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: no such thing\n'
    assert kserve.short_reason(json.dumps({"error": traceback}).encode()) == "ValueError: no such thing"
    assert kserve.short_reason(b"<html>\nBad gateway\n") == "<html> Bad gateway"
    assert kserve.short_reason(b"") == "no reason given"


# ---- train


def split(batch, **how):
    return parts.split(parts.encode_batch(batch), **how)


def whole_of(ledger, requests):
    return [ledger.receive(r) for r in requests]


@pytest.mark.parametrize("max_bytes", [900, 1700, 3000, 100_000])
def test_parts_hold_the_batch_and_keep_to_their_size(max_bytes):
    batch = make_batch()
    requests = split(batch, step=1, run_id="r", max_bytes=max_bytes)
    assert all(sum(r[n].nbytes for n in parts.BATCH_FIELDS) <= max_bytes for r in requests)
    random.Random(max_bytes).shuffle(requests)
    *early, last = whole_of(parts.TrainLedger(step=0, run_id="r"), requests)
    assert all(isinstance(e, parts.Incomplete) for e in early)
    for name in parts.BATCH_FIELDS:
        assert torch.equal(*(torch.nan_to_num(getattr(b, name).double(), 7.0) for b in (last.batch, batch))), name


def test_a_row_that_fits_in_no_part():
    with pytest.raises(ProtocolError, match="one row of .* bytes does not fit in a part of 100 bytes"):
        split(make_batch(), step=1, run_id="r", max_bytes=100)


def test_parts_are_copied():
    requests = split(make_batch(), step=1, run_id="r", max_bytes=3000)
    ledger = parts.TrainLedger(step=0, run_id="r")
    for request in requests[:-1]:
        ledger.receive(request)
        for name in parts.BATCH_FIELDS:
            request[name][:] = 0  # as the server's shared memory is used again
    assert isinstance(ledger.receive(requests[-1]), parts.Whole)


def test_parts_of_two_batches_are_never_put_together():
    first, second = (split(make_batch(seed=s), step=1, run_id="r", max_bytes=5000) for s in (0, 1))
    assert len(first) == len(second) == 2
    ledger = parts.TrainLedger(step=0, run_id="r")
    assert isinstance(ledger.receive(first[0]), parts.Incomplete)
    assert isinstance(ledger.receive(second[1]), parts.Incomplete)
    assert isinstance(ledger.receive(second[0]), parts.Whole)


def test_damaged_parts_are_refused():
    requests = split(make_batch(), step=1, run_id="r", max_bytes=3000)
    requests[1]["returns"] = requests[1]["returns"] + np.float32(1)
    with pytest.raises(ProtocolError, match="sha256 differs"):
        whole_of(parts.TrainLedger(step=0, run_id="r"), requests)


def test_the_ledger_applies_each_step_once():
    """Against a model: any sequence of sends of three steps' batches, with and without failures."""
    batches = {step: split(make_batch(seed=step), step=step, run_id="r") for step in (1, 2, 3)}
    for order in itertools.product((1, 2, 3), repeat=5):
        ledger, applied = parts.TrainLedger(step=0, run_id="r"), []
        for step in order:
            last = applied[-1] if applied else 0
            if step == last + 1:
                whole = ledger.receive(batches[step][0])
                ledger.applied(step, {"step": step}, digest=whole.digest)
                applied.append(step)
            elif step == last:
                assert ledger.receive(batches[step][0]) == parts.Stored({"step": step})
            else:
                with pytest.raises(ProtocolError, match="leaves a gap" if step > last else "is from the past"):
                    ledger.receive(batches[step][0])
        assert applied == sorted(set(applied))


def test_the_ledger_after_a_failure_and_a_restore():
    request = split(make_batch(), step=1, run_id="r")[0]
    ledger = parts.TrainLedger(step=0, run_id="r")
    ledger.receive(request)
    ledger.failed(1, "rank 3: out of memory")
    with pytest.raises(ProtocolError, match=r"failed half-way \(rank 3: out of memory\)"):
        ledger.receive(request)
    ledger.reset(0)
    assert isinstance(ledger.receive(request), parts.Whole)
    ledger.reset(1)
    with pytest.raises(ProtocolError, match="is from the past"):  # its answer is not known here
        ledger.receive(request)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"run_id": protocol.text_array("other")}, "run 'other', but this critic job serves run 'r'"),
        ({"part": np.array([1], np.int32)}, "part 1 of 1"),
        ({"parts": np.array([5000], np.int32)}, "part 0 of 5000"),
        ({"step": np.array([1.0], np.float32)}, "step must have dtype int64"),
    ],
)
def test_bad_train_requests(change, sentence):
    request = {**split(make_batch(), step=1, run_id="r")[0], **change}
    with pytest.raises(ProtocolError, match=sentence):
        parts.TrainLedger(step=0, run_id="r").receive(request)


# ---- hello


def test_contracts_that_fit():
    assert hello.problems(replace(CONTRACT, max_length=100, step=3), replace(CONTRACT, step=3)) == []
    assert hello.problems(CONTRACT, replace(CONTRACT, step=3)) == []  # an actor that restores next compares no step


def test_every_problem_is_named_at_once():
    actor = replace(
        CONTRACT, tokenizer_fingerprint="0" * 64, vocab_size=7, max_length=999, reward_kind="model", run_id="s", step=1
    )
    found = hello.problems(actor, replace(CONTRACT, step=2))
    assert len(found) == 6
    for text, key in zip(
        found, ["model.checkpoint", "model.checkpoint", "engine.max_input_len", "reward.kind", "run.name", "step 1"]
    ):
        assert key in text


def test_rows_that_do_not_fit_are_refused_at_connect():
    actor, critic = replace(CONTRACT, train_rows=24, infer_rows=8), replace(CONTRACT, mini_batch_size=12, max_rows=8)
    assert hello.problems(actor, critic) == hello.problems(CONTRACT, critic) == hello.problems(actor, CONTRACT) == []
    rows, request = hello.problems(actor, replace(critic, mini_batch_size=16, max_rows=7))
    for key in ("ppo.rollout_batch_size", "ppo.samples_per_prompt", "critic.mini_batch_size=16", "24 rows"):
        assert key in rows
    for key in ("8 rows", "critic.infer_batch_size", "7 (serving.max_rows)"):
        assert key in request


@pytest.mark.parametrize("version, older", [(protocol.VERSION + 1, "critic"), (1, "actor")])
def test_version_skew_in_both_directions(version, older):
    (problem,) = hello.problems(replace(CONTRACT, protocol=version, vocab_size=7), CONTRACT)
    assert f"the {older} job is older" in problem


@pytest.mark.parametrize("change", [{"vocab_size": "7"}, {"step": True}, {"run_id": None}])
def test_a_malformed_contract_is_refused(change):
    with pytest.raises(ProtocolError, match=f"hello: {next(iter(change))} must be"):
        hello.Contract.of({**CONTRACT.as_dict(), **change})


def test_another_scale_of_rewards_is_a_warning():
    actor, critic = replace(CONTRACT, reward_normalisation="running"), replace(CONTRACT, reward_normalisation="none")
    (warning,) = hello.warnings(actor, critic)
    assert "ppo.reward_scale=running" in warning and "ppo.reward_scale=none" in warning
    assert hello.problems(actor, critic) == hello.warnings(actor, CONTRACT) == hello.warnings(CONTRACT, critic) == []


def test_later_fields_of_a_contract_are_ignored():
    assert hello.Contract.of({**CONTRACT.as_dict(), "later": 1}) == CONTRACT


# ---- one rank


class Backend:
    def __init__(self):
        self.calls = []

    def infer(self, rows):
        self.calls.append(int(rows.sample_ids[0]))
        if rows.sample_ids[0] == 666:
            raise ValueError("bad\nsample")
        return rows.tokens.float(), torch.zeros(len(rows.lengths)), None

    def start_scoring(self, rows):
        scores = Future()
        scores.set_result([Score(1.0)] * len(rows.lengths))
        return scores

    def train(self, step, batch):
        if step == 3:
            raise Refused("not this one")
        if step == 2:
            raise RuntimeError("half-way")
        self.calls.append(("train", step))
        return {"loss": float(step)}

    def restore(self, step, folder):
        self.calls.append(("restore", step))

    def status(self):
        return {**CONTRACT.as_dict(), "step": 0}


def test_a_verifier_and_a_reward_model_add_up():
    verified, modelled = (
        [Score(1.0, {"format": 1.0}), Score(float("nan"), error="it hung")],
        [Score(-0.5, {"model": -1.0})] * 2,
    )
    added, failed = whole_scores(verified, modelled)
    assert added == Score(0.5, {"format": 1.0, "model": -1.0})
    assert failed.error == "it hung" and math.isnan(failed.value)
    assert whole_scores(verified, None) is verified and whole_scores(None, modelled) is modelled
    assert whole_scores(None, None) is None


class BothScore(Backend):
    def infer(self, rows):
        values, bootstrap, _ = super().infer(rows)
        return values, bootstrap, [Score(-0.5, {"model": -1.0})] * len(rows.lengths)


def test_both_are_in_the_answer_of_a_local_and_of_a_served_critic():
    backend, rows = BothScore(), infer_call(1).rows
    loop = Loop(backend, group=None, heartbeat=1.0)
    served = Inference(backend, loop, Reception(None), contract=CONTRACT, max_rows=9, deterministic=False)
    done = ThreadPoolExecutor(1).submit(
        served.infer, [SimpleNamespace(data=protocol.encode_rows(rows), parameters=None)]
    )
    loop.run(lambda: "done" if done.done() else None)
    for answer in (
        LocalCritic(backend).infer(rows).result(0),
        protocol.decode_answer(done.result(0)[0], width=rows.tokens.size(1)),
    ):
        assert answer.scores == [Score(0.5, {"model": -1.0})]


def infer_call(sample: int) -> Call:
    return Call(Op.INFER, rows=replace(make_rows(lengths=(3,)), sample_ids=torch.tensor([sample])))


def test_the_loop_answers_and_survives_errors():
    loop = Loop(Backend(), group=None, heartbeat=1.0)
    futures = [loop.submit(infer_call(s)) for s in (1, 666, 2)]
    loop.run(lambda: "done" if futures[-1].done() else None)
    with pytest.raises(CallFailed, match="^ValueError: bad sample$"):
        futures[1].result(0)
    assert futures[2].result(0)[0].shape == (1, 64)
    with pytest.raises(RequestFailed, match=r"is ending \(done\)"):
        loop.submit(infer_call(3))


def test_values_of_another_step_are_refused_in_the_order_of_calls():
    """A critic that came back gives no values before it is at the step that they are about; scores do not depend on it."""
    backend = Backend()
    loop = Loop(backend, group=None, heartbeat=1.0)
    backend.status = lambda: {"step": 4}
    asked = [(3, True), (4, True), (None, True), (3, False)]
    calls = [Call(Op.INFER, rows=replace(make_rows(), critic_step=step, values=values)) for step, values in asked]
    futures = [loop.submit(call) for call in calls]
    loop.run(lambda: "done" if all(f.done() for f in futures) else None)
    with pytest.raises(NotInStep, match="after step 3 were asked for, and it is at step 4"):
        futures[0].result(0)
    assert [f.exception() for f in futures[1:]] == [None] * 3


def test_what_waits_when_the_loop_ends_is_refused():
    loop = Loop(Backend(), group=None, heartbeat=1.0)
    future = loop.submit(infer_call(1))
    assert loop.run(lambda: "signal") == "signal"
    with pytest.raises(RequestFailed, match=r"is ending \(signal\)"):
        future.result(0)


def test_deterministic_order_is_that_of_samples():
    backend = Backend()
    loop = Loop(backend, group=None, heartbeat=1.0, deterministic=True)
    calls = [infer_call(5), infer_call(3), Call(Op.TRAIN, step=1, batch=make_batch()), infer_call(1), infer_call(4)]
    futures = [loop.submit(c) for c in calls]
    loop.run(lambda: "done" if all(f.done() for f in futures) else None)
    assert backend.calls == [3, 5, ("train", 1), 1, 4]  # train is not overtaken


def test_local_critic_obeys_the_same_rules():
    critic, batch = LocalCritic(Backend()), make_batch()
    answer = critic.infer(make_rows()).result(0)
    assert [s.value for s in answer.scores] == [1.0] * 3
    assert critic.train(1, batch).result(0) == critic.train(1, batch).result(0) == {"loss": 1.0}
    with pytest.raises(ProtocolError, match="leaves a gap"):
        critic.train(3, batch).result(0)
    with pytest.raises(RuntimeError, match="half-way"):
        critic.train(2, batch).result(0)
    with pytest.raises(ProtocolError, match="undefined"):
        critic.train(2, batch).result(0)
    critic.restore(2, None)
    for _ in range(2):
        with pytest.raises(Refused):
            critic.train(3, batch).result(0)


def test_a_local_critic_whose_restore_failed_trains_and_saves_nothing():
    backend = Backend()
    critic, works = LocalCritic(backend), backend.restore
    backend.restore = lambda step, folder: works(None, 1 / 0)
    with pytest.raises(ZeroDivisionError):
        critic.restore(4, Path("pair"))
    with pytest.raises(ProtocolError, match="restore of step 4.*undefined"):
        critic.train(1, make_batch()).result(0)
    with pytest.raises(ProtocolError, match="cannot save the critic of step 0: .*restore of step 4"):
        critic.prepare_save(0, Path("pair")).result(0)
    backend.restore = works
    critic.restore(0, None)
    assert critic.train(1, make_batch()).result(0) == {"loss": 1.0}


def test_a_local_critic_answers_as_the_served_one_does():
    backend, rows = Backend(), make_rows()
    backend.start_scoring = lambda rows: Future()  # never done
    scores = LocalCritic(backend, scoring_deadline=0.01).infer(rows).result(0).scores
    assert [s.error for s in scores] == ["scoring failed: TimeoutError: "] * 3
    backend.infer = lambda rows: (torch.full(rows.tokens.shape, torch.nan), torch.zeros(3), None)
    with pytest.raises(RequestFailed, match=f"the critic's values of sample {2**40} are not finite"):
        LocalCritic(backend).infer(rows).result(0)


def test_nothing_is_pickled_or_evaluated_on_the_wire():
    """Of the serving folder, only the loop's agreement inside the job may pickle (all_gather_object of its own errors)."""
    folder = Path(protocol.__file__).parent
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            name = getattr(node, "id", getattr(node, "attr", None))
            assert not {"pickle", "dill", "marshal"} & {*names, name}, file
            assert name not in ("eval", "exec", "allow_pickle"), file
            assert name != "all_gather_object" or file.name == "loop.py", file


def test_json_that_could_not_be_written_again_is_refused():
    """Python reads deeper JSON than it writes, and the payload is written again on its way to the other ranks."""

    def nested(levels, inner=b"1"):
        return b'{"a":' * levels + inner + b"}" * levels

    def width(levels):
        return b'{"a": [' + b"[" * (levels - 2) + b"]" * (levels - 2) + b"]}"

    for text in (nested(64), width(64), b'{"a": [' + b"{}," * 500 + b'{}], "b": "[[[{{{"}'):
        assert protocol.json_of(text, "meta") == json.loads(text)
    for text in (nested(65), width(65), nested(900)):
        with pytest.raises(ProtocolError, match="meta is nested deeper than 64 levels"):
            protocol.json_of(text, "meta")
    for text in (nested(100_000), b'{"a": ' + b"9" * 5000 + b"}", b"{", b"1"):
        with pytest.raises(ProtocolError, match="meta (is not JSON|must be a JSON object)"):
            protocol.json_of(text, "meta")
