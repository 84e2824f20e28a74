"""Requests to TensorRT-LLM's sampling settings, and its answers to completions."""

import math
from typing import Any

import numpy as np

from aligner.config.validate_rollout import BIASED_IN_TRAINING, NOT_IN_TRTLLM
from aligner.data.batch import Completion, Request
from aligner.rollout.philox import LOW_WORD, WORD_BITS, philox4x32

# A position that no token has: the seed's words are not those behind any of the torch engine's uniforms.
SEED_POSITION = 2**32 - 1
NO_END = -1  # end_id that no token has: an end token would be cut off, a stop token is kept


def request_seed(request: Request) -> int:
    """63 bits from (seed, sample_id, stream) alone: a sample does not depend on the layout as far as TensorRT-LLM keeps its word."""
    seed, sample_id = np.uint64(request.seed), np.uint64(request.sample_id)
    counter = [sample_id & LOW_WORD, sample_id >> WORD_BITS, np.uint64(SEED_POSITION), np.uint64(request.stream)]
    low, high, _, _ = philox4x32(
        [np.atleast_1d(word) for word in counter], [np.atleast_1d(w) for w in (seed & LOW_WORD, seed >> WORD_BITS)]
    )
    return (int(high[0]) << 32 | int(low[0])) >> 1


def refuse_unsupported(requests: list[Request]) -> None:
    """ValueError for a setting that this engine does not have."""
    for request in requests:
        asked = {name: getattr(request, name) for name in NOT_IN_TRTLLM}
        given = [f"{name}={value}" for name, value in asked.items() if value != BIASED_IN_TRAINING[name]]
        if given:
            raise ValueError(
                f"sample_id {request.sample_id}: engine.kind=trtllm does not take {', '.join(given)}; leave it out, or use "
                "engine.kind=torch"
            )


def sampling_settings(request: Request, *, pad_id: int) -> dict[str, Any]:
    """Keywords of SamplingParams. Log-probs are asked for as the single best ones: the sampled token's comes with them."""
    greedy = request.temperature == 0
    return {
        "end_id": NO_END,
        "pad_id": pad_id,
        "max_tokens": request.max_output_len,
        "temperature": float(request.temperature),
        **({} if greedy else {"top_k": request.top_k, "top_p": request.top_p, "seed": request_seed(request)}),
        "stop_token_ids": list(request.stop_token_ids) or None,
        "stop": list(request.stop_strings) or None,
        "include_stop_str_in_output": True,
        "detokenize": False,
        "logprobs": 1,
    }


def to_completion(request: Request, output: Any, *, weight_version: int) -> Completion:
    """The completion in a RequestOutput. RuntimeError where it is not what was asked for."""
    result = output.outputs[0]
    tokens, reason = [int(token) for token in result.token_ids], result.finish_reason
    problem = None
    if reason not in ("stop", "length"):
        problem = f"it ended with finish_reason={reason!r}"
    elif not 1 <= len(tokens) <= request.max_output_len:
        problem = f"it has {len(tokens)} tokens, of 1 to {request.max_output_len}"
    elif reason == "stop" and not request.stop_strings and tokens[-1] not in request.stop_token_ids:
        problem = f"it stopped, yet its last token {tokens[-1]} is no stop token: the end token was cut off"
    elif result.logprobs is None or len(result.logprobs) != len(tokens):
        problem = f"it has {len(result.logprobs or [])} log-probs for {len(tokens)} tokens"
    if problem is not None:
        raise RuntimeError(f"TensorRT-LLM's response to sample_id {request.sample_id} is not usable: {problem}")
    logprobs = [_logprob_of(token, entry, request) for token, entry in zip(tokens, result.logprobs)]
    return Completion(
        sample_id=request.sample_id,
        prompt_ids=request.prompt_ids,
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason=reason,
        weight_version=weight_version,
    )


def _logprob_of(token: int, entry: Any, request: Request) -> float:
    """By token id: the first entry of the dict is the best token's, which need not be the sampled one's."""
    if isinstance(entry, dict):
        if token not in entry:
            raise RuntimeError(
                f"TensorRT-LLM gave no log-prob for token {token} of sample_id {request.sample_id}, only for {sorted(entry)[:5]}"
            )
        entry = entry[token]
    value = float(getattr(entry, "logprob", entry))
    if not math.isfinite(value):
        raise RuntimeError(f"TensorRT-LLM's log-prob of token {token} of sample_id {request.sample_id} is {value}")
    return value
