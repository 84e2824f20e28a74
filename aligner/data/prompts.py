"""Prompt files: one JSON object a line, checked whole before anything starts; every problem is told by file and line."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from aligner.data.jsonl import messages_of, parse_jsonl, read_jsonl, text_of


@dataclass(frozen=True)
class PromptRecord:
    """One line: a text or a conversation, and the further keys for the verifier. `origin` is file:line."""

    origin: str
    prompt: Optional[str]
    messages: Optional[list[dict[str, str]]]
    fields: dict[str, Any] = field(default_factory=dict)


NEEDS = "`prompt` or `messages`"


def read_prompts(path: str | Path) -> list[PromptRecord]:
    """All prompts of a JSONL file. Raises one ValueError with every malformed line (the first 10 shown)."""
    return read_jsonl(path, _record, what="prompts", needs=NEEDS)


def parse_prompts(content: bytes, name: str) -> list[PromptRecord]:
    """The same of a file's content. name: what problems call it."""
    return parse_jsonl(content, name, _record, needs=NEEDS)


def prompt_record(text: str, origin: str) -> PromptRecord:
    """A record of one text that came from elsewhere. Raises ValueError where it is empty or no text."""
    try:
        return PromptRecord(origin, text_of(text, "prompt"), None)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error


def _record(value: dict[str, Any], origin: str) -> PromptRecord:
    given = [key for key in ("prompt", "messages") if key in value]
    if len(given) != 1:
        keys = ", ".join(value) or "none"
        raise ValueError(
            f"needs exactly one of `prompt` and `messages`, has {' and '.join(given) or 'neither'} (keys: {keys})"
        )
    if "task" in value:
        raise ValueError("the key `task` is reserved for reasoning-gym problems (data.task); name it otherwise")
    prompt = messages = None
    if given == ["prompt"]:
        prompt = text_of(value["prompt"], "prompt")
    else:
        messages = _asking(messages_of(value["messages"]))
    return PromptRecord(origin, prompt, messages, {k: v for k, v in value.items() if k not in given})


def _asking(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    roles = [m["role"] for m in messages]
    if roles[-1] != "user":
        raise ValueError(f"`messages` must end with the user's turn, ends with {roles[-1]} (roles: {', '.join(roles)})")
    return messages
