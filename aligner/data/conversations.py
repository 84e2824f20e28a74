"""What supervised fine-tuning trains on: JSONL rows of `messages`, or of `prompt` and `completion`, as token ids with a mask."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

import torch
from torch import Tensor

from aligner.config.supervised import SFTDataConfig
from aligner.data.jsonl import listed, messages_of, read_jsonl, text_of
from aligner.data.rows import Rows, limit_rows, load_rows
from aligner.data.tokenizer import Tokenizer, with_system
from aligner.data.turns import learned_turns

NEEDS = "`messages`, or `prompt` and `completion`"


@dataclass(frozen=True)
class Conversation:
    """One line: a conversation that ends with the assistant's turn, or (raw) a text and what follows it."""

    origin: str
    messages: Optional[list[dict[str, str]]] = None
    prompt: Optional[str] = None
    completion: Optional[str] = None


@dataclass(frozen=True)
class Example:
    """One row. mask: True at the learned tokens, of which column 0 is never one. Before `answer_at` lies what is asked, from there on the
    last thing that is learned."""

    ids: Tensor  # [n] int32
    mask: Tensor  # [n] bool
    answer_at: int
    origin: str
    prompt: str  # the turns before that, as text

    def __len__(self) -> int:
        return self.ids.numel()


def read_conversations(path: str | Path) -> list[Conversation]:
    """All rows of a JSONL file. Raises one ValueError with every malformed line (the first 10 shown)."""
    return read_jsonl(path, conversation, what="conversations", needs=NEEDS)


def conversation(value: dict[str, Any], origin: str) -> Conversation:
    """The row that a line's object says. Raises ValueError with the reason."""
    given = [key for key in ("messages", "prompt", "completion") if key in value]
    if given == ["messages"]:
        return Conversation(origin, messages=in_turn(messages_of(value["messages"])))
    if given != ["prompt", "completion"]:
        has = " and ".join(f"`{key}`" for key in given) or "neither"
        raise ValueError(f"needs {NEEDS}, has {has} (keys: {', '.join(value) or 'none'})")
    prompt, completion = (text_of(value[key], key) for key in given)
    return Conversation(origin, prompt=prompt, completion=completion)


def in_turn(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The messages, where user and assistant follow each other and the assistant is last. Raises ValueError where they do not."""
    roles = [message["role"] for message in messages]
    turns = [role for role in roles if role != "system"]
    said = f"(roles: {', '.join(roles)})"
    if "assistant" not in turns:
        raise ValueError(f"`messages` has no turn of the assistant, so there is nothing to learn {said}")
    if turns[-1] != "assistant":
        raise ValueError(f"`messages` must end with the assistant's turn, ends with {turns[-1]} {said}")
    if turns != ["user", "assistant"] * (len(turns) // 2):
        raise ValueError(f"`messages` must have user and assistant in turn, the user first {said}")
    return messages


def encode(record: Conversation, tokenizer: Tokenizer, data: SFTDataConfig) -> Example:
    """The row as ids and mask. Raises ValueError with its origin and the reason."""
    try:
        return _encoded(record, tokenizer, data)
    except ValueError as error:
        raise ValueError(f"{record.origin}: {error}") from error


def _encoded(record: Conversation, tokenizer: Tokenizer, data: SFTDataConfig) -> Example:
    if record.messages is None and not data.chat:
        return _raw(record, tokenizer)
    if not data.chat:
        raise ValueError("has `messages`, which need data.chat=true")
    messages = record.messages or [
        {"role": "user", "content": record.prompt},
        {"role": "assistant", "content": record.completion},
    ]
    turns = learned_turns(tokenizer, with_system(messages, data.system), data.loss_on)
    asked = [message["content"] for message in messages[:-1] if message["role"] != "system"]
    return _example(turns.ids, turns.spans, record.origin, "\n\n".join(asked))


def _raw(record: Conversation, tokenizer: Tokenizer) -> Example:
    """The prompt's ids are those that an engine is given for it; the completion ends with the end-of-sequence token."""
    asked, both = tokenizer.encode(record.prompt), tokenizer.encode(record.prompt + record.completion)
    if both[: len(asked)] == asked:
        answer = both[len(asked) :]
    else:
        answer = tokenizer.encode_continuation(record.completion)
        if tokenizer.decode(asked + answer, skip_special=False) != tokenizer.decode(both, skip_special=False):
            raise ValueError(
                "`prompt` and `completion` share a token, and apart they are another text: move the space or character between them to "
                "the other one"
            )
    end = tokenizer.end_token_ids[0] if tokenizer.eos_id is None else tokenizer.eos_id
    ids = [*asked, *answer, end]
    return _example(ids, [(len(asked), len(ids))], record.origin, record.prompt)


def _example(ids: list[int], spans: list[tuple[int, int]], origin: str, prompt: str) -> Example:
    mask = torch.zeros(len(ids), dtype=torch.bool)
    for start, end in spans:
        if start == 0:
            raise ValueError(
                "the first token would be learned, and nothing predicts it: the template opens with the assistant's turn"
            )
        mask[start:end] = True
    return Example(torch.tensor(ids, dtype=torch.int32), mask, spans[-1][0], origin, prompt)


def cut_example(example: Example, length: int) -> Optional[Example]:
    """Its first `length` tokens; None where no learned token is among them."""
    mask = example.mask[:length]
    if not mask.any():
        return None
    return replace(example, ids=example.ids[:length], mask=mask, answer_at=min(example.answer_at, length))


def encode_all(records: Sequence[Conversation], tokenizer: Tokenizer, data: SFTDataConfig) -> list[Example]:
    """All rows. Raises one ValueError with every row that cannot be encoded (the first 10 shown)."""
    examples, problems = [], []
    for record in records:
        try:
            examples.append(encode(record, tokenizer, data))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError(f"{len(problems)} of {len(records)} rows cannot be trained on:\n" + listed(problems))
    return examples


def load_examples(data: SFTDataConfig, tokenizer: Tokenizer, *, max_held_out: int) -> Rows[Example]:
    """The rows of the data settings. Raises ValueError for a malformed file, and where nothing is left to train on."""

    def limit(examples: list[Example]) -> Rows[Example]:
        return limit_rows(
            examples,
            overlong=data.overlong,
            max_length=data.max_length,
            length=len,
            origin=lambda example: example.origin,
            cut=lambda example: cut_example(example, data.max_length),
        )

    read: Callable[[str], list[Example]] = lambda path: encode_all(read_conversations(path), tokenizer, data)  # noqa: E731
    return load_rows(data, read=read, key=lambda e: e.prompt, limit=limit, max_held_out=max_held_out)
