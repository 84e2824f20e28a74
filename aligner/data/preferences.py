"""Preference files: one JSON object a line, checked whole before anything starts; every problem is told by file and line.

A line is one of

    pair        prompt or messages, chosen, rejected, and margin where there is one
    ranking     prompt or messages, responses, and their ranks (0 or 1 is best); without ranks they stand best first
    attributes  prompt or messages, response, attributes {name: number}; null for one that was not given

A prompt is a text (`prompt`) or a conversation (`messages`) that ends with the user's turn. A response is a text, or a list of messages:
the assistant's alone, or a whole conversation, whose turns before the last are the prompt then (and are the same in all responses)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from aligner.config.preference import Objective
from aligner.data.jsonl import kind, messages_of, read_jsonl, text_of

LARGEST = 3.4e38
Messages = list[dict[str, str]]
KINDS = {"pair": ("chosen", "rejected"), "ranking": ("responses",), "attributes": ("attributes",)}
FITS = {Objective.regression: ("attributes",)}  # objective -> kinds of lines, where not those of comparisons
COMPARISONS = ("pair", "ranking")
NEEDS = "a pair (`chosen`, `rejected`), a ranking (`responses`) or `attributes`, and `prompt` or `messages`"


@dataclass(frozen=True)
class Responses:
    """One line: a prompt (a text, or a conversation) and responses to it.

    ranks: 0 is best, equal where two are as good. margins: by which a response is to be better than those below it. attributes: of the
    one response of such a line; None for a value that was not given."""

    origin: str
    prompt: Optional[str]
    messages: Optional[Messages]
    texts: list[str]
    ranks: list[int]
    margins: list[float]
    attributes: Optional[dict[str, Optional[float]]] = None


def read_preferences(path: str | Path, objective: Objective, attributes: list[str]) -> list[Responses]:
    """All lines of a JSONL file. Raises one ValueError with every malformed line, and every line that is not for the objective."""

    def record(value: dict[str, Any], origin: str) -> Responses:
        return _fitting(_record(value, origin), value, objective, attributes)

    return read_jsonl(path, record, what="preferences", needs=NEEDS)


def _fitting(row: Responses, value: dict[str, Any], objective: Objective, attributes: list[str]) -> Responses:
    found, wanted = _kind(value), FITS.get(objective, COMPARISONS)
    if found not in wanted:
        raise ValueError(
            f"is a line of {found}, and preference.objective={objective.value} is trained on {' and '.join(wanted)} lines"
        )
    if objective is Objective.plackett_luce:
        if len(set(row.ranks)) < len(row.ranks):
            raise ValueError(
                "has two responses of equal rank, which preference.objective=plackett_luce has no place for"
            )
        if any(row.margins):
            raise ValueError("has a `margin`, which preference.objective=plackett_luce has no place for")
    if row.attributes is not None and not any(row.attributes.get(name) is not None for name in attributes):
        raise ValueError(
            f"gives none of preference.attributes ({', '.join(attributes)}), but {', '.join(row.attributes) or 'nothing'}"
        )
    return row


def _kind(value: dict[str, Any]) -> str:
    found = [name for name, keys in KINDS.items() if any(key in value for key in keys)]
    if len(found) != 1:
        keys = ", ".join(value) or "none"
        raise ValueError(f"needs {NEEDS}; it is {' and '.join(found) or 'neither'} (keys: {keys})")
    return found[0]


def _record(value: dict[str, Any], origin: str) -> Responses:
    prompt, messages = _prompt(value)
    read = {"pair": _pair, "ranking": _ranking, "attributes": _attributes}[_kind(value)]
    given, ranks, margins, attributes = read(value)
    asked, texts = _responses(given, alone=prompt is None and messages is None)
    messages = asked if asked is not None else messages
    if messages is not None and messages[-1]["role"] != "user":
        raise ValueError(f"the prompt must end with the user's turn, ends with {messages[-1]['role']}")
    return Responses(origin, prompt, messages, texts, ranks, margins, attributes)


def _prompt(value: dict[str, Any]) -> tuple[Optional[str], Optional[Messages]]:
    """Both are None where the responses are whole conversations."""
    if "prompt" in value and "messages" in value:
        raise ValueError("has both `prompt` and `messages`: leave one out")
    if "prompt" in value:
        return text_of(value["prompt"], "prompt"), None
    if "messages" not in value:
        return None, None
    messages = messages_of(value["messages"])
    if "attributes" in value and "response" not in value:  # the response is the last turn
        return None, None
    return None, messages


def _pair(value: dict[str, Any]):
    if missing := [key for key in KINDS["pair"] if key not in value]:
        raise ValueError(f"lacks `{missing[0]}`, and has {', '.join(value)}")
    _refuse_others(value, "pair", ("ranks", "response"))
    margin = 0.0 if value.get("margin") is None else _number(value["margin"], "margin")
    if margin < 0:
        raise ValueError(
            f"`margin` is {margin:g}: it must not be negative, and says by how much chosen is the better one"
        )
    return {key: value[key] for key in KINDS["pair"]}, [0, 1], [margin, 0.0], None


def _ranking(value: dict[str, Any]):
    responses = value["responses"]
    if not isinstance(responses, list) or len(responses) < 2:
        raise ValueError("`responses` must be a list of two responses or more")
    _refuse_others(value, "ranking", ("margin", "response"))
    ranks = value.get("ranks", list(range(len(responses))))
    if not isinstance(ranks, list) or len(ranks) != len(responses) or not all(type(rank) is int for rank in ranks):
        raise ValueError(f"`ranks` must be {len(responses)} whole numbers, one a response, got {ranks!r}")
    if len(set(ranks)) == 1:
        raise ValueError(f"`ranks` are all {ranks[0]}: no response is better than another")
    places = {rank: place for place, rank in enumerate(sorted(set(ranks)))}
    texts = {f"responses[{i}]": response for i, response in enumerate(responses)}
    return texts, [places[rank] for rank in ranks], [0.0] * len(ranks), None


def _attributes(value: dict[str, Any]):
    attributes = value["attributes"]
    if not isinstance(attributes, dict) or not attributes:
        raise ValueError("`attributes` must be an object of numbers, by name")
    _refuse_others(value, "attributes", ("margin", "ranks"))
    numbers = {name: None if v is None else _number(v, f"attributes.{name}") for name, v in attributes.items()}
    if "response" not in value and "messages" not in value:
        raise ValueError("lacks `response` (or `messages` that end with it)")
    name = "response" if "response" in value else "messages"
    return {name: value[name]}, [0], [0.0], numbers


def _refuse_others(value: dict[str, Any], name: str, others: tuple[str, ...]) -> None:
    if found := [key for key in others if key in value]:
        raise ValueError(f"is a line of {name}, which has no `{found[0]}`")


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"`{name}` is a JSON {kind(value)}, not a number")
    if not -LARGEST <= value <= LARGEST:
        raise ValueError(f"`{name}` is no number that float32 holds")
    return float(value)


def _responses(given: dict[str, Any], *, alone: bool) -> tuple[Optional[Messages], list[str]]:
    """(the turns before the responses where they are whole conversations, else None; the responses' texts)."""
    turns = {name: _turns(value, name, alone=alone) for name, value in given.items()}
    texts = [messages[-1]["content"] for messages in turns.values()]
    if not alone:
        return None, texts
    first = next(iter(turns))
    for name, messages in turns.items():
        if messages[:-1] != turns[first][:-1]:
            raise ValueError(
                f"`{first}` and `{name}` answer different conversations: all turns but the last must be equal"
            )
    return turns[first][:-1], texts


def _turns(value: Any, name: str, *, alone: bool) -> Messages:
    """The messages of a response, the last of which is the assistant's. alone: there is no prompt beside it."""
    if isinstance(value, str) or not isinstance(value, list):
        text = text_of(value, name)
        if alone:
            raise ValueError(f"`{name}` is a text, and there is no `prompt` or `messages` that it answers")
        return [{"role": "assistant", "content": text}]
    try:
        messages = messages_of(value)
    except ValueError as error:
        raise ValueError(str(error).replace("`messages", f"`{name}")) from error
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"`{name}` must end with the assistant's turn, ends with {messages[-1]['role']}")
    if alone and len(messages) == 1:
        raise ValueError(
            f"`{name}` is the assistant's turn alone, and there is no `prompt` or `messages` that it answers"
        )
    if not alone and len(messages) > 1:
        raise ValueError(f"`{name}` is a whole conversation beside a prompt: leave one out")
    return messages
