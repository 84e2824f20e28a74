"""Typed batches. Legend: B rows, S columns (a multiple of lcm(64, tensor-parallel degree)); rows are right-padded: prompt, response, pad.

Every [B, S] tensor is aligned with the token that it is about: logprobs[b, t] is log pi(tokens[b, t] | tokens[b, <t]); values[b, t]
is V of the state before tokens[b, t] is chosen; mask[b, t] is True exactly where the policy chose tokens[b, t]."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Optional

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One prompt of the data. `fields` holds what the verifier may need (answer, task, seed, index ...); plain JSON values."""

    prompt_ids: list[int]
    prompt: str
    origin: str  # file:line or task:index
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """One response asked of an engine.

    The distribution of a token, in this order: repetition_penalty divides positive logits of ids that the prompt or the response
    holds and multiplies negative ones; before min_output_len tokens stop_token_ids are impossible and stop_strings are not looked
    for; temperature (0 is greedy: the best id, log-probs at temperature 1); then the top_k likeliest ids (0: all), of those the
    fewest whose share reaches top_p, of those the ones of at least min_p times the likeliest's probability. Ids that tie with the
    last one kept are kept. sample_id: group_id * samples_per_prompt + k, unique in a run. stream: 0 trains, 1 validates."""

    sample_id: int
    prompt_ids: list[int]
    max_output_len: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    stream: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_output_len: int = 0
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completion:
    """One finished response. `finish_reason` is "stop" (the last of token_ids is a stop id, or completes a stop string) or
    "length"."""

    sample_id: int
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]  # of the distribution sampled from, one a token
    finish_reason: str
    weight_version: int


@dataclass
class Rollouts:
    """Prompts with their responses, in order of sample_id. Tensors live on the CPU until a micro-batch is moved."""

    tokens: Tensor  # [B, S] int64
    lengths: Tensor  # [B] int64, prompt and response
    prompt_lengths: Tensor  # [B] int64
    mask: Tensor  # [B, S] bool
    sample_ids: Tensor  # [B] int64
    truncated: Tensor  # [B] bool, cut at max_output_len: not terminated
    engine_logprobs: Tensor  # [B, S] float32, 0 outside the mask
    weight_version: int = 0
    certificate: Optional[str] = None  # of the weights that sampled them, where refit.certify is not off

    def __len__(self) -> int:
        return self.tokens.size(0)

    def select(self, rows: Tensor) -> "Rollouts":
        """The given rows (int64 indices), in the given order."""
        chosen = {
            f.name: getattr(self, f.name)[rows] for f in fields(self) if isinstance(getattr(self, f.name), Tensor)
        }
        return replace(self, **chosen)


def padded_length(longest: int, multiple: int = 64, tensor_parallel: int = 1) -> int:
    """The S of a batch whose longest row has `longest` tokens."""
    step = math.lcm(multiple, tensor_parallel)
    return -(-longest // step) * step


def response_mask(lengths: Tensor, prompt_lengths: Tensor, width: int) -> Tensor:
    """[B, S] bool, True at response positions."""
    at = torch.arange(width)
    return (at >= prompt_lengths[:, None]) & (at < lengths[:, None])


def collate(completions: list[Completion], *, pad_id: int, multiple: int = 64, tensor_parallel: int = 1) -> Rollouts:
    """Right-pad completions, sorted by sample_id, into a batch."""
    rows = sorted(completions, key=lambda c: c.sample_id)
    lengths = torch.tensor([len(c.prompt_ids) + len(c.token_ids) for c in rows])
    prompt_lengths = torch.tensor([len(c.prompt_ids) for c in rows])
    width = padded_length(int(lengths.max()), multiple, tensor_parallel)
    tokens = torch.full((len(rows), width), pad_id)
    engine_logprobs = torch.zeros(len(rows), width)
    for b, c in enumerate(rows):
        tokens[b, : lengths[b]] = torch.tensor(c.prompt_ids + c.token_ids)
        engine_logprobs[b, prompt_lengths[b] : lengths[b]] = torch.tensor(c.logprobs)
    versions = {c.weight_version for c in rows}
    if len(versions) != 1:
        raise ValueError(f"one rollout mixes weight versions {sorted(versions)}")
    return Rollouts(
        tokens=tokens,
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        mask=response_mask(lengths, prompt_lengths, width),
        sample_ids=torch.tensor([c.sample_id for c in rows]),
        truncated=torch.tensor([c.finish_reason == "length" for c in rows]),
        engine_logprobs=engine_logprobs,
        weight_version=versions.pop(),
    )


@dataclass
class ScoreRow:
    """What a reward source needs to know of one response: ids, text and the sample's own fields."""

    sample_id: int
    prompt_ids: list[int]
    response_ids: list[int]
    ended: bool  # by an end token, not by length
    fields: dict[str, Any]


@dataclass(frozen=True)
class Score:
    """A reward and its parts (accuracy, format ...). `error` not None = scoring failed: the value is not a reward."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    error: Optional[str] = None

    def plus(self, other: "Score") -> "Score":
        """The sum of two parts of one reward. An error of either is the sum's."""
        errors = [error for error in (self.error, other.error) if error is not None]
        return Score(self.value + other.value, {**self.parts, **other.parts}, "; ".join(errors) or None)


@dataclass
class CriticRows:
    """An inference request: rows of a chunk, [b, S'] right-padded."""

    tokens: Tensor  # [b, S'] int64
    lengths: Tensor  # [b] int64
    prompt_lengths: Tensor  # [b] int64
    sample_ids: Tensor  # [b] int64
    truncated: Tensor  # [b] bool
    fields: list[dict[str, Any]]  # per row, for the verifier
    values: bool = True  # False: only scores are wanted (validation); values and bootstrap come back as zeros
    critic_step: Optional[int] = None  # the values are those of the critic after this step; None: whichever it is at


@dataclass
class CriticAnswer:
    """The critic job's answer to CriticRows.

    values [b, S'] float32: values[:, 0] = 0, meaningful under the mask only. bootstrap [b] float32: V of the state after the last
    token, 0 where the response terminated. scores: one a row, or None where this job does not score."""

    values: Tensor
    bootstrap: Tensor
    scores: Optional[list[Score]]


@dataclass
class CriticBatch:
    """A train request: the whole rollout of one step, rows in order of sample_id."""

    tokens: Tensor  # [B, S] int64
    lengths: Tensor  # [B] int64
    mask: Tensor  # [B, S] bool
    values: Tensor  # [B, S] float32, as inferred
    returns: Tensor  # [B, S] float32
    sample_ids: Tensor  # [B] int64
