"""Prompt files: one JSON object a line, checked whole before anything starts; every problem is told by file and line."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

SHOWN = 10
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class PromptRecord:
    """One line: a text or a conversation, and the further keys for the verifier. `origin` is file:line."""

    origin: str
    prompt: Optional[str]
    messages: Optional[list[dict[str, str]]]
    fields: dict[str, Any] = field(default_factory=dict)


def read_prompts(path: str | Path) -> list[PromptRecord]:
    """All prompts of a JSONL file. Raises one ValueError with every malformed line (the first 10 shown)."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the prompts {path}: {error.strerror}") from error
    return parse_prompts(content, str(path))


def parse_prompts(content: bytes, name: str) -> list[PromptRecord]:
    """The same of a file's content. name: what problems call it."""
    lines = content.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    if not lines:
        raise ValueError(f"{name} is empty: it needs one JSON object a line, with `prompt` or `messages`")
    records, problems = [], []
    for number, line in enumerate(lines, 1):
        try:
            records.append(_record(line, f"{name}:{number}"))
        except ValueError as error:
            problems.append(f"{name}:{number}: {error}")
    if problems:
        more = f"\n... and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ValueError(f"{len(problems)} of {len(lines)} lines are malformed:\n" + "\n".join(problems[:SHOWN]) + more)
    return records


def prompt_record(text: str, origin: str) -> PromptRecord:
    """A record of one text that came from elsewhere. Raises ValueError where it is empty or no text."""
    try:
        return PromptRecord(origin, _text(text, "prompt"), None)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error


def _record(line: bytes, origin: str) -> PromptRecord:
    value = _json_object(line)
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
        prompt = _text(value["prompt"], "prompt")
    else:
        messages = _messages(value["messages"])
    return PromptRecord(origin, prompt, messages, {k: v for k, v in value.items() if k not in given})


def _json_object(line: bytes) -> dict[str, Any]:
    if line.startswith(b"\xef\xbb\xbf"):
        raise ValueError("starts with a byte-order mark: save the file as UTF-8 without one")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start})") from error
    if not text.strip():
        raise ValueError("is blank: remove the line")
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_repeats)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"is not JSON ({error.msg} at column {error.colno}); each line must hold one whole object, not pretty-printed"
        ) from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"is a JSON {_kind(value)}, not an object")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"holds {name}, which is not JSON")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if repeated:
        raise ValueError(f"has the key `{repeated[0]}` more than once")
    return dict(pairs)


def _kind(value: Any) -> str:
    names = {
        dict: "object",
        list: "array",
        str: "string",
        bool: "boolean",
        int: "number",
        float: "number",
        type(None): "null",
    }
    return names[type(value)]


def _text(value: Any, name: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise ValueError(f"`{name}` is a JSON {_kind(value)}, not a string")
    if not value.strip() and not may_be_empty:
        raise ValueError(f"`{name}` is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"`{name}` holds half of a surrogate pair at character {error.start}") from error
    return value


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"`messages` is {'empty' if value == [] else 'a JSON ' + _kind(value)}, not a list of messages"
        )
    messages = [_message(item, f"messages[{at}]") for at, item in enumerate(value)]
    roles = [m["role"] for m in messages]
    if "system" in roles[1:]:
        raise ValueError(f"`messages` has a system message that is not the first (roles: {', '.join(roles)})")
    if roles[-1] != "user":
        raise ValueError(f"`messages` must end with the user's turn, ends with {roles[-1]} (roles: {', '.join(roles)})")
    return messages


def _message(item: Any, name: str) -> dict[str, str]:
    if not isinstance(item, dict):
        raise ValueError(f"`{name}` is a JSON {_kind(item)}, not an object")
    if set(item) != {"role", "content"}:
        raise ValueError(f"`{name}` must have the keys role and content, has {', '.join(item) or 'none'}")
    if item["role"] not in ROLES:
        raise ValueError(f"`{name}` has the role {json.dumps(item['role'])}, not one of {', '.join(ROLES)}")
    content = _text(item["content"], f"{name}.content", may_be_empty=item["role"] == "system")
    return {"role": item["role"], "content": content}
