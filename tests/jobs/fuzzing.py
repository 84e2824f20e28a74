"""Hostile requests to a served critic: each is wrong in one way that the protocol names, so each must be refused, and change nothing.

Drawn from a seeded generator, so a failure can be repeated. Arrays are spoilt past the client's checks; raw requests also lie to Triton."""

import collections
import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, NamedTuple, Optional

import numpy as np

from aligner.serving import protocol
from aligner.serving.client import RemoteCritic
from aligner.serving.endpoint import read_endpoint
from aligner.serving.kserve import DATATYPES, HEADER_LENGTH, Connection, request_body, response_arrays, short_reason
from aligner.serving.parts import digest_of, encode_batch, split
from aligner.serving.protocol import CONTROL, INFER, TRAIN, Endpoint, Field
from tests.jobs.serving_job import CONTRACT, MAX_LENGTH, VOCAB, Job, check_answer, make_batch, make_rows

INTS = (-(2**31), -1, 2**31 - 1)


THREADS = 8
EVERY = 20  # one request in so many is a good one


def fuzz(job: Job, count: int, *, seed: int) -> collections.Counter:
    """Send `count` requests to a job at step 0, from several threads at once: hostile ones must be refused, good ones be answered by
    what the backend computes (a formula, half of it on each rank), and nothing must have been trained. Returns how many of each kind."""
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
        _check_in_step(client)
    finally:
        client.close()
    assert [p.poll() for p in job.ranks] == [None, None]
    return names


def _check_in_step(client: RemoteCritic) -> None:
    assert client.status()["step"] == 0 and client.status()["weights_undefined"] is None
    for seed in range(10):
        check_answer(make_rows(seed, rows=5), client.infer(make_rows(seed, rows=5)).result(60))
    assert client.train(1, make_batch(2)).result(60)["loss"] == 3.0
    client.restore(0, None)


class Hostile(NamedTuple):
    """A request to send, and what is wrong with it."""

    name: str
    path: str
    body: bytes
    headers: dict[str, str]
    method: str = "POST"


def refusal(server: Connection, request: Hostile) -> Optional[str]:
    """Send it. What the refusal says; None where it was served as if it were right."""
    try:
        status, body, headers = server.exchange(request.method, request.path, request.body, request.headers)
    except OSError as error:  # Triton closes the connection on what is not HTTP
        return f"closed: {error}"
    if status != 200:
        return f"HTTP status {status}: {short_reason(body)}"  # as a client tells it: Triton's own have tracebacks
    endpoint = next(e for e in protocol.ENDPOINTS if f"/{e.name}/" in request.path)
    answer = response_arrays(endpoint, body, int(headers[HEADER_LENGTH.lower()]))
    texts = [bytes(x).decode() for x in answer["error"].ravel()]
    return texts[0] if all(texts) else None


def hostile(rng: np.random.Generator) -> Hostile:
    """One request, of a kind chosen by chance."""
    kinds = [_infer_arrays, _infer_values, _train_arrays, _train_values, _control, _raw]
    return kinds[rng.choice(len(kinds), p=(0.25, 0.25, 0.15, 0.15, 0.1, 0.1))](rng)


def oversized(rows: int) -> Hostile:
    """A request of more bytes than protocol.MAX_REQUEST_BYTES: text of 1 MB a row."""
    arrays = protocol.encode_rows(make_rows(0, rows=rows))
    arrays["meta"] = protocol.text_array(*[json.dumps({"text": "x" * 1_000_000})] * rows)[:, None]
    return _request("oversized", INFER, arrays)


def _request(name: str, endpoint: Endpoint, arrays: dict[str, np.ndarray]) -> Hostile:
    """An inference call with these arrays, whatever they are."""
    names = {np.dtype(kind): kind for kind in DATATYPES if kind is not bytes}
    fields = tuple(Field(n, names.get(a.dtype, bytes), a.shape) for n, a in arrays.items())
    body, head = request_body(dataclasses.replace(endpoint, inputs=fields), arrays)
    return Hostile(f"{endpoint.name}: {name}", f"/v2/models/{endpoint.name}/infer", body, {HEADER_LENGTH: str(head)})


def _pick(rng: np.random.Generator, choices: Any) -> Any:
    choices = list(choices)
    return choices[int(rng.integers(len(choices)))]


# ---- arrays of another kind than the endpoint's


def _infer_arrays(rng: np.random.Generator) -> Hostile:
    rows = make_rows(int(rng.integers(1000)), rows=int(rng.integers(1, 5)))
    return _other_arrays(rng, INFER, protocol.encode_rows(rows))


def _train_arrays(rng: np.random.Generator) -> Hostile:
    return _other_arrays(rng, TRAIN, _train_request())


def _other_arrays(rng: np.random.Generator, endpoint: Endpoint, arrays: dict[str, np.ndarray]) -> Hostile:
    name = _pick(rng, arrays)
    array = arrays[name]
    spoils: dict[str, Callable[[], dict[str, np.ndarray]]] = {
        "missing": lambda: {k: v for k, v in arrays.items() if k != name},
        "unknown": lambda: {**arrays, "surprise": array},
        "dtype": lambda: {**arrays, name: _other_dtype(rng, array)},
        "rank": lambda: {**arrays, name: array[0] if array.ndim > 1 and rng.random() < 0.5 else array[..., None]},
        "rows": lambda: {**arrays, name: np.concatenate([array, array])},
        "empty": lambda: {**arrays, name: array[:0]},
        "no columns": lambda: {**arrays, name: array[..., :0]},
    }
    spoil = _pick(rng, spoils)
    return _request(f"{spoil} {name}", endpoint, spoils[spoil]())


def _other_dtype(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    if array.dtype == object:
        return np.zeros(array.shape, np.float32)
    others = [k for k in DATATYPES if k is not bytes and np.dtype(k) != array.dtype]
    return (
        np.nan_to_num(array).astype(_pick(rng, others)) if array.dtype.kind == "f" else array.astype(_pick(rng, others))
    )


# ---- arrays of the right kind with values that cannot be


def _infer_values(rng: np.random.Generator) -> Hostile:
    count = int(rng.integers(1, 5))
    arrays = protocol.encode_rows(make_rows(int(rng.integers(1000)), rows=count))
    row, columns = int(rng.integers(count)), arrays["tokens"].shape[1]

    def put(name: str, value: Any) -> dict[str, np.ndarray]:
        changed = arrays[name].copy()
        changed[row, int(rng.integers(changed.shape[1]))] = value
        return {**arrays, name: changed}

    spoils = {
        "length": lambda: put("length", _pick(rng, (*INTS, 0, columns + 1))),
        "prompt_length": lambda: put("prompt_length", _pick(rng, (*INTS, 0, columns + 1))),
        "tokens": lambda: put("tokens", _pick(rng, (*INTS, VOCAB))),
        "critic_step": lambda: put("critic_step", _pick(rng, (-(2**63), -2, 1, 2**63 - 1))),
        "meta": lambda: put("meta", _pick(rng, _not_an_object(rng))),
        "too long": lambda: _too_long(count),
        "too many rows": lambda: protocol.encode_rows(make_rows(1, rows=65)),
    }
    spoil = _pick(rng, spoils)
    return _request(f"value of {spoil}", INFER, spoils[spoil]())


def _not_an_object(rng: np.random.Generator) -> tuple[bytes, ...]:
    depth = int(rng.integers(65, 1500))
    nested = b'{"a":' * depth + b"1" + b"}" * depth
    return (b"", b"{", b"\xff\xfe", b"[1, 2]", b"null", b'"text"', b"{'a': 1}", b'{"a": ' + b"9" * 5000 + b"}", nested)


def _too_long(count: int) -> dict[str, np.ndarray]:
    rows = make_rows(2, rows=count, length=2 * MAX_LENGTH)
    rows.lengths[0] = MAX_LENGTH + 1
    return protocol.encode_rows(rows)


def _train_request(step: int = 1, **changes: Any) -> dict[str, np.ndarray]:
    batch = make_batch(1, rows=4)
    for name, value in changes.items():
        setattr(batch, name, value)
    return dict(_parts(batch, step)[0])


def _parts(batch: Any, step: int) -> list[dict[str, np.ndarray]]:
    return split(encode_batch(batch), step=step, run_id=CONTRACT.run_id)


def _train_values(rng: np.random.Generator) -> Hostile:
    arrays = _train_request(step=int(_pick(rng, (-1, 0, 2, 7, 2**62))))
    good = _train_request()

    def put(name: str, at: Any, value: Any) -> dict[str, np.ndarray]:
        changed = good[name].copy()
        changed[at] = value
        return {**good, name: changed}

    spoils = {
        "step": lambda: arrays,
        "part": lambda: put("part", 0, _pick(rng, (*INTS, 1))),
        "parts": lambda: put("parts", 0, _pick(rng, (-(2**31), -1, 0, 2**31 - 1))),
        "run_id": lambda: {**good, "run_id": _pick(rng, (protocol.text_array("r2"), np.array([b"\xff"], object)))},
        "digest": lambda: {**good, "digest": protocol.text_array("0" * 64)},
        "nan": lambda: _signed(put("returns", _masked(good), _pick(rng, (np.nan, np.inf, -np.inf)))),
        "lengths": lambda: _signed(put("lengths", 0, _pick(rng, (*INTS, 0, 65)))),
        "tokens": lambda: _signed(put("tokens", (1, 1), _pick(rng, (*INTS, VOCAB)))),
    }
    spoil = _pick(rng, spoils)
    return _request(f"value of {spoil}", TRAIN, spoils[spoil]())


def _signed(request: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With the digest of what it holds, so that nothing but the values is wrong."""
    return {**request, "digest": protocol.text_array(digest_of(request))}


def _masked(request: dict[str, np.ndarray]) -> tuple[int, int]:
    return tuple(np.argwhere(request["mask"])[0])


# ---- control


def _control(rng: np.random.Generator) -> Hostile:
    contract = CONTRACT.as_dict()
    hello = {"op": "hello", "contract": {**contract, _pick(rng, contract): _pick(rng, ([], {}, 1.5, True))}}
    lacks = {k: v for k, v in contract.items() if k != "vocab_size"}
    nonce = _pick(rng, (7, "x", [], {}, {"name": "../../etc/passwd"}, {"name": "0" * 31}, {"name": ["0" * 32]}))
    folder = _pick(rng, ("/etc", "..", "\0", "x" * 5000, 7, None, ["a"]))
    requests = (
        *_not_an_object(rng),
        b"{}",
        b'{"op": "reboot"}',
        b'{"op": ["status"]}',
        b'{"op": {"status": 1}}',
        json.dumps(hello).encode(),
        json.dumps({"op": "hello", "contract": lacks}).encode(),
        b'{"op": "hello"}',
        b'{"op": "hello", "contract": []}',
        json.dumps({"op": "hello", "contract": contract, "nonce": nonce}).encode(),
        json.dumps({"op": "saved", "step": 0, "folder": folder}).encode(),
        json.dumps({"op": "prepare_save", "step": 0, "folder": folder}).encode(),
        json.dumps({"op": "prepare_save", "step": 9, "folder": "x"}).encode(),
        json.dumps({"op": "restore", "step": 0, "folder": folder or 7}).encode(),
        json.dumps({"op": "commit", "step": _pick(rng, (-1, 1.5, "1", None, True))}).encode(),
        json.dumps({"op": "restore", "step": _pick(rng, (-1, 1.5, "1", None, True)), "folder": None}).encode(),
    )
    return _request("request", CONTROL, {"request": np.array([_pick(rng, requests)], object)})


# ---- bytes that lie to Triton


def _raw(rng: np.random.Generator) -> Hostile:
    arrays = protocol.encode_rows(make_rows(3))
    body, head = request_body(INFER, arrays)
    path = "/v2/models/infer/infer"
    inputs = json.loads(body[:head])

    def lying(where: int, **lies: Any) -> tuple[bytes, str]:
        changed = json.loads(body[:head])
        changed["inputs"][where].update(lies)
        text = json.dumps(changed).encode()
        return text + body[head:], str(len(text))

    which = int(rng.integers(len(inputs["inputs"])))
    sizes = [{"binary_data_size": _pick(rng, (-1, 0, 1, 2**31, 2**63 - 1, 2**64, "8", None))}]
    shapes = ([], [0, 0], [-1, -1], [2**31, 2**32], [2**62, 4], [3, 2**40], "x", [3.5, 1], [[3], 64])
    shared = {"shared_memory_region": "all", "shared_memory_byte_size": 64}
    kinds: dict[str, Callable[[], Hostile]] = {
        "cut": lambda: Hostile("cut", path, body[: int(rng.integers(1, len(body)))], {HEADER_LENGTH: str(head)}),
        "random bytes": lambda: Hostile("random bytes", path, rng.bytes(300), {HEADER_LENGTH: "100"}),
        "head": lambda: Hostile(
            "head", path, body, {HEADER_LENGTH: _pick(rng, ("0", "-1", "x", str(2**63), "7", str(len(body) + 1)))}
        ),
        "size": lambda: _headed("size", path, *lying(which, parameters=_pick(rng, sizes))),
        "shape": lambda: _headed("shape", path, *lying(which, shape=_pick(rng, shapes))),
        "datatype": lambda: _headed(
            "datatype", path, *lying(which, datatype=_pick(rng, ("FP64", "UINT8", "", "NONE", 7)))
        ),
        "shared memory": lambda: _headed("shared memory", path, *lying(which, parameters=shared)),
        "name": lambda: _headed("name", path, *lying(which, name=_pick(rng, ("", "other\0", "../x", 7)))),
        "string length": lambda: Hostile(
            "string length", path, body[:-8] + b"\xff\xff\xff\x7f" + body[-4:], {HEADER_LENGTH: str(head)}
        ),
        "no such model": lambda: Hostile("no such model", "/v2/models/other/infer", body, {HEADER_LENGTH: str(head)}),
        "no such version": lambda: Hostile(
            "no such version", "/v2/models/infer/versions/9/infer", body, {HEADER_LENGTH: str(head)}
        ),
        "method": lambda: Hostile("method", path, b"", {}, method=_pick(rng, ("GET", "PUT", "DELETE"))),
        "repository": lambda: Hostile("repository", "/v2/repository/models/infer/unload", b"{}", {}),
        "json only": lambda: Hostile("json only", path, b'{"inputs": []}', {}),
    }
    return kinds[_pick(rng, kinds)]()


def _headed(name: str, path: str, body: bytes, head: str) -> Hostile:
    return Hostile(name, path, body, {HEADER_LENGTH: head})
