"""What crosses the wire between the two jobs, version 2: three endpoints, their arrays, and typed batches to and from them.

Legend: b rows of a request, S columns. Bytes are UTF-8; structured ones are JSON. Nothing is pickled, nothing is evaluated.
This module needs numpy and torch only: no server, no client."""

import json
import math
from dataclasses import dataclass
from typing import Any, Mapping, Optional

import numpy as np
import torch

from aligner.data.batch import CriticAnswer, CriticRows, Score

VERSION = 2  # 2: critic_step, and the kind of a failure
MAX_PART_BYTES = 16 * 1000 * 1000  # HTTP throughput into Triton peaks near 16 MB a request
MAX_REQUEST_BYTES = 2 * MAX_PART_BYTES
MAX_PARTS = 4096
MAX_DEPTH = 64  # of JSON
BUCKET = 64
ANY_STEP = -1

Arrays = Mapping[str, np.ndarray]


class ProtocolError(ValueError):
    """Arrays that are not what the protocol says; the message is one sentence."""


class RequestFailed(RuntimeError):
    """A request that the critic job answered with an error; the message is its one sentence."""

    kind = "request"
    """On the wire: what may be done about it. request: nothing, it fails each time."""


class JobLost(RequestFailed):
    """The critic job is ending, cannot be reached, or did not answer: whoever comes back at its place may be asked again."""

    kind = "job"


class NotInStep(RequestFailed):
    """The critic is not at the step that the request is about: it may be asked again once it has been brought there."""

    kind = "step"


class SaveLost(RequestFailed):
    """What was being written is no longer: another process than began it answers, and the critic may have trained on."""

    kind = "save"


FAILURES = {failure.kind: failure for failure in (RequestFailed, JobLost, NotInStep, SaveLost)}


def failure(kind: str, text: str) -> RequestFailed:
    """The exception for a failure that was answered. A kind of a later release is the plain one."""
    return FAILURES.get(kind, RequestFailed)(text)


@dataclass(frozen=True)
class Field:
    """One array of an endpoint. `shape` is of one row where the endpoint is batched; -1 is any size; dtype bytes is a string."""

    name: str
    dtype: type
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Endpoint:
    """One model as the server binds it. batched: arrays have a leading row dimension, and requests of one S may be merged."""

    name: str
    batched: bool
    inputs: tuple[Field, ...]
    outputs: tuple[Field, ...]


INFER = Endpoint(
    name="infer",
    batched=True,
    inputs=(
        Field("tokens", np.int32, (-1,)),
        Field("length", np.int32, (1,)),
        Field("prompt_length", np.int32, (1,)),
        Field("sample_id", np.int64, (1,)),
        Field("truncated", np.bool_, (1,)),
        Field("want_values", np.bool_, (1,)),
        Field("critic_step", np.int64, (1,)),  # the values are wanted of the critic after this step; -1: of any
        Field("meta", bytes, (1,)),
    ),
    outputs=(
        Field("values", np.float32, (-1,)),
        Field("bootstrap", np.float32, (1,)),
        Field("score", np.float32, (1,)),  # NaN where nothing was scored or scoring failed: never a score of 0
        Field("parts", bytes, (1,)),  # JSON object; empty where this job does not score
        Field("error", bytes, (1,)),  # empty, or JSON {"where": "score" | a RequestFailed's kind, "text": sentence}
    ),
)
TRAIN = Endpoint(
    name="train",
    batched=False,
    inputs=(
        Field("step", np.int64, (1,)),
        Field("part", np.int32, (1,)),
        Field("parts", np.int32, (1,)),
        Field("run_id", bytes, (1,)),
        Field(
            "digest", bytes, (1,)
        ),  # sha256 of the whole batch: parts of two different batches are never put together
        Field("tokens", np.int32, (-1, -1)),
        Field("lengths", np.int32, (-1,)),
        Field("mask", np.bool_, (-1, -1)),
        Field("values", np.float32, (-1, -1)),
        Field("returns", np.float32, (-1, -1)),
        Field("sample_ids", np.int64, (-1,)),
    ),
    outputs=(Field("reply", bytes, (1,)), Field("error", bytes, (1,))),
)
CONTROL = Endpoint(
    name="control",
    batched=False,
    inputs=(Field("request", bytes, (1,)),),
    outputs=(Field("reply", bytes, (1,)), Field("error", bytes, (1,))),
)
ENDPOINTS = (INFER, TRAIN, CONTROL)


def text_array(*texts: str) -> np.ndarray:
    """[n] array of UTF-8 byte strings."""
    array = np.empty(len(texts), dtype=object)
    array[:] = [t.encode() for t in texts]
    return array


def text_of(item: Any) -> str:
    """The string in one element of a bytes array. Raises ProtocolError where it is not UTF-8."""
    try:
        return bytes(item).decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a byte string is not UTF-8: {error}") from None


def json_of(item: Any, what: str) -> dict[str, Any]:
    """The JSON object in one element of a bytes array. Raises ProtocolError where it is none."""
    text = text_of(item)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, or a number of too many digits
        raise ProtocolError(f"{what} is not JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise ProtocolError(f"{what} must be a JSON object, not {type(value).__name__}")
    if text.count("{") + text.count("[") > MAX_DEPTH and _deeper(value, MAX_DEPTH):
        # what can just be read here could not be written again, to the other ranks or to a verifier
        raise ProtocolError(f"{what} is nested deeper than {MAX_DEPTH} levels")
    return value


def _deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return any(isinstance(inner, (dict, list)) for inner in level)


def check_arrays(endpoint: Endpoint, arrays: Arrays) -> None:
    """Names, dtypes, ranks, fixed sizes, rows and total size of a request. Raises ProtocolError."""
    wanted = {f.name: f for f in endpoint.inputs}
    if set(arrays) != set(wanted):
        missing, unknown = sorted(set(wanted) - set(arrays)), sorted(set(arrays) - set(wanted))
        raise ProtocolError(f"{endpoint.name}: inputs missing {missing}, unknown {unknown}")
    rows = {a.shape[0] for a in arrays.values() if endpoint.batched and a.ndim}
    if endpoint.batched and (len(rows) != 1 or min(rows) < 1):
        raise ProtocolError(f"{endpoint.name}: inputs must share one number of rows, at least 1, not {sorted(rows)}")
    for name, array in arrays.items():
        _check_field(endpoint, wanted[name], array)
    size = sum(_nbytes(a) for a in arrays.values())
    if size > MAX_REQUEST_BYTES:
        raise ProtocolError(
            f"{endpoint.name}: a request of {size} bytes exceeds the limit of {MAX_REQUEST_BYTES}; "
            "send fewer rows a request (critic.infer_batch_size)"
        )


def _check_field(endpoint: Endpoint, field: Field, array: np.ndarray) -> None:
    is_text = array.dtype == object or array.dtype.kind == "S"
    if is_text != (field.dtype is bytes) or (field.dtype is not bytes and array.dtype != np.dtype(field.dtype)):
        raise ProtocolError(f"{endpoint.name}: {field.name} must have dtype {field.dtype.__name__}, not {array.dtype}")
    shape = array.shape[1:] if endpoint.batched else array.shape
    fits = len(shape) == len(field.shape) and all(w in (-1, n) and n > 0 for n, w in zip(shape, field.shape))
    if not fits:
        raise ProtocolError(
            f"{endpoint.name}: {field.name} must have shape {field.shape} with no empty dimension, not {shape}"
        )


def _nbytes(array: np.ndarray) -> int:
    return sum(len(x) for x in array.ravel()) if array.dtype == object else array.nbytes


def length_bucket(longest: int) -> int:
    """Columns that rows are padded to on the wire: a power of two times 64, so that requests of similar length merge in one batch.

    The server trims to the longest row before it computes: padding costs bytes, not arithmetic."""
    return BUCKET * 2 ** max(0, math.ceil(math.log2(longest / BUCKET)))


# ---- infer


def encode_rows(rows: CriticRows) -> dict[str, np.ndarray]:
    """CriticRows [b, S'] -> arrays of INFER with S = length_bucket(longest row). Raises ProtocolError where rows break the protocol."""
    longest = int(rows.lengths.max()) if len(rows.lengths) else 0
    if not longest:
        raise ProtocolError("an inference request needs at least one row with at least one token")
    tokens = np.zeros((len(rows.lengths), length_bucket(longest)), np.int32)
    tokens[:, :longest] = int32_array(rows.tokens[:, :longest], "tokens")
    arrays = {
        "tokens": tokens,
        "length": int32_array(rows.lengths, "length")[:, None],
        "prompt_length": int32_array(rows.prompt_lengths, "prompt_length")[:, None],
        "sample_id": rows.sample_ids.numpy().astype(np.int64)[:, None],
        "truncated": rows.truncated.numpy().astype(np.bool_)[:, None],
        "want_values": np.full((len(rows.lengths), 1), rows.values, np.bool_),
        "critic_step": np.full((len(rows.lengths), 1), ANY_STEP if rows.critic_step is None else rows.critic_step),
        "meta": text_array(*(json.dumps(f) for f in rows.fields))[:, None],
    }
    check_arrays(INFER, arrays)
    check_rows(arrays)
    return arrays


def int32_array(x: torch.Tensor, what: str) -> np.ndarray:
    """Raises ProtocolError where `x`, called `what`, holds what int32 cannot or what is negative."""
    if x.numel() and (int(x.min()) < 0 or int(x.max()) > np.iinfo(np.int32).max):
        raise ProtocolError(f"{what} must be within int32 and not negative, but spans {int(x.min())} to {int(x.max())}")
    return x.numpy().astype(np.int32)


def check_rows(arrays: Arrays, *, vocab_size: Optional[int] = None, max_length: Optional[int] = None) -> None:
    """Values of infer's arrays, beyond their shapes. Raises ProtocolError naming the first sample at fault."""
    tokens, lengths, prompts = arrays["tokens"], arrays["length"][:, 0], arrays["prompt_length"][:, 0]
    for b, sample in enumerate(arrays["sample_id"][:, 0]):
        length, prompt = int(lengths[b]), int(prompts[b])
        if not 1 <= prompt <= length <= tokens.shape[1]:
            raise ProtocolError(
                f"sample {sample}: 1 <= prompt_length <= length <= S must hold, but prompt_length={prompt}, "
                f"length={length}, S={tokens.shape[1]}"
            )
        if max_length is not None and length > max_length:
            raise ProtocolError(f"sample {sample}: {length} tokens exceed the critic's maximum of {max_length}")
    for name in ("want_values", "critic_step"):
        if len(np.unique(arrays[name])) != 1:
            raise ProtocolError(f"the rows of one request must share one {name}")
    if vocab_size is not None:
        check_tokens(tokens, vocab_size)


def check_tokens(tokens: np.ndarray, vocab_size: int) -> None:
    """Token ids index the embedding: one outside the vocabulary would fail on some ranks only."""
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ProtocolError(f"token ids must be in [0, {vocab_size}), but span {tokens.min()} to {tokens.max()}")


def decode_rows(arrays: Arrays) -> CriticRows:
    """Arrays of INFER -> CriticRows [b, S], int64 tokens."""
    step = int(arrays["critic_step"][0, 0])
    return CriticRows(
        tokens=torch.from_numpy(arrays["tokens"].astype(np.int64)),
        lengths=torch.from_numpy(arrays["length"][:, 0].astype(np.int64)),
        prompt_lengths=torch.from_numpy(arrays["prompt_length"][:, 0].astype(np.int64)),
        sample_ids=torch.from_numpy(arrays["sample_id"][:, 0].astype(np.int64)),
        truncated=torch.from_numpy(arrays["truncated"][:, 0].astype(np.bool_)),
        fields=[json_of(m, "meta") for m in arrays["meta"][:, 0]],
        values=bool(arrays["want_values"][0, 0]),
        critic_step=None if step == ANY_STEP else step,
    )


def encode_answer(answer: CriticAnswer) -> dict[str, np.ndarray]:
    """CriticAnswer of b rows -> outputs of INFER."""
    scores: list[Optional[Score]] = answer.scores if answer.scores is not None else [None] * len(answer.bootstrap)
    errors = [json.dumps({"where": "score", "text": s.error}) if s and s.error is not None else "" for s in scores]
    return {
        "values": np.ascontiguousarray(answer.values.numpy(), np.float32),
        "bootstrap": answer.bootstrap.numpy().astype(np.float32)[:, None],
        "score": np.array([[s.value if s and s.error is None else np.nan] for s in scores], np.float32),
        "parts": text_array(*(json.dumps(s.parts) if s else "" for s in scores))[:, None],
        "error": text_array(*errors)[:, None],
    }


def failed_answer(rows: int, width: int, text: str, *, kind: str = RequestFailed.kind) -> dict[str, np.ndarray]:
    """Outputs of INFER that say that the request failed, and how (RequestFailed.kind)."""
    nan = np.full((rows, 1), np.nan, np.float32)
    return {
        "values": np.full((rows, width), np.nan, np.float32),
        "bootstrap": nan,
        "score": nan,
        "parts": text_array(*[""] * rows)[:, None],
        "error": text_array(*[json.dumps({"where": kind, "text": text})] * rows)[:, None],
    }


def decode_answer(arrays: Arrays, *, width: int) -> CriticAnswer:
    """Outputs of INFER -> CriticAnswer with values [b, width]. Raises RequestFailed where the request as a whole failed."""
    errors = [json_of(e, "error") if len(e) else None for e in arrays["error"][:, 0]]
    for said in errors:
        if said is not None and said["where"] != "score":
            raise failure(said["where"], said["text"])
    values = torch.zeros(len(errors), width)
    kept = min(width, arrays["values"].shape[1])
    values[:, :kept] = torch.from_numpy(arrays["values"][:, :kept].copy())
    scored = [len(p) > 0 for p in arrays["parts"][:, 0]]
    scores = None
    if any(scored):
        scores = [
            Score(float(v), json_of(p, "parts"), said["text"] if said else None)
            for v, p, said in zip(arrays["score"][:, 0], arrays["parts"][:, 0], errors)
        ]
    return CriticAnswer(values, torch.from_numpy(arrays["bootstrap"][:, 0].copy()), scores)
