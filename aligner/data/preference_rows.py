"""Preferences as token ids: exactly those that a rollout of the same response has when it is scored (prompt, response, end of turn)."""

import json
import logging
from dataclasses import dataclass
from typing import Optional

import torch

from aligner.config.preference import PreferenceConfig
from aligner.config.supervised import SupervisedDataConfig
from aligner.data.batch import padded_length
from aligner.data.preferences import Responses, read_preferences
from aligner.data.rows import Rows, limit_rows, load_rows
from aligner.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)
FEW = 32  # held-out rows below which what is measured on them is told to be rough


@dataclass(frozen=True)
class PreferenceRow:
    """A line of a file: responses to one prompt, each with the prompt before it. asked: what makes two prompts the same."""

    origin: str
    asked: str
    prompt: str
    texts: list[str]
    ids: list[list[int]]
    ranks: list[int]
    margins: list[float]
    attributes: Optional[dict[str, Optional[float]]]

    @property
    def longest(self) -> int:
        return max(map(len, self.ids))

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


def preference_row(responses: Responses, tokenizer: Tokenizer, data: SupervisedDataConfig) -> PreferenceRow:
    """The ids of a line. Raises ValueError, by file and line, where a response holds an end token."""
    messages = responses.messages
    if messages is not None and not data.chat:
        raise ValueError(f"{responses.origin} is a conversation, which needs data.chat=true")
    messages = messages or [{"role": "user", "content": responses.prompt}]
    text = messages[-1]["content"]
    prompt = tokenizer.chat(messages, data.system) if data.chat else tokenizer.encode(text)
    end = tokenizer.response_end(chat=data.chat)
    ids = []
    for answer in responses.texts:
        own = tokenizer.encode_continuation(answer)
        if found := sorted(set(own) & set(tokenizer.end_token_ids)):
            named = tokenizer.decode(found[:1], skip_special=False)
            raise ValueError(
                f"{responses.origin}: a response holds the end token {named!r}: remove it, one is put after each"
            )
        ids.append([*prompt, *own, end])
    return PreferenceRow(
        responses.origin,
        json.dumps(messages),
        text,
        responses.texts,
        ids,
        responses.ranks,
        responses.margins,
        responses.attributes,
    )


def load_preferences(
    data: SupervisedDataConfig, preference: PreferenceConfig, *, tokenizer: Tokenizer, max_held_out: int
) -> Rows[PreferenceRow]:
    """Lines to train on and held-out ones, none of whose prompts is trained on where data.holdout takes them from data.train."""

    def read(path: str) -> list[PreferenceRow]:
        lines = read_preferences(path, preference.objective, list(preference.attributes))
        return [preference_row(line, tokenizer, data) for line in lines]

    def limit(rows: list[PreferenceRow]) -> Rows[PreferenceRow]:
        return limit_rows(
            rows,
            overlong=data.overlong,
            max_length=data.max_length,
            length=lambda row: row.longest,
            origin=lambda row: row.origin,
            cut=None,
        )

    rows = load_rows(data, read=read, key=lambda row: row.asked, limit=limit, max_held_out=max_held_out)
    asked = {row.asked for row in rows.train}
    if seen := sum(row.asked in asked for row in rows.held_out):
        log.warning(
            "%d of %d held-out rows have prompts that are trained on too: accuracy flatters", seen, len(rows.held_out)
        )
    if not rows.held_out:
        log.warning(
            "no row is held out: there will be no accuracy and no size of the scores; set data.holdout or data.validation"
        )
    elif len(rows.held_out) < FEW:
        log.warning(
            "%d rows are held out, too few to tell accuracy and the size of the scores (reward.standardise) well: "
            "raise data.holdout, or give data.validation",
            len(rows.held_out),
        )
    return rows


def padded_rows(ids: list[list[int]], *, pad_id: int, tensor_parallel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [B, S] int64, lengths [B] int64) of rows of ids."""
    lengths = torch.tensor([len(row) for row in ids])
    tokens = torch.full((len(ids), padded_length(int(lengths.max()), tensor_parallel=tensor_parallel)), pad_id)
    for b, row in enumerate(ids):
        tokens[b, : len(row)] = torch.tensor(row)
    return tokens, lengths
