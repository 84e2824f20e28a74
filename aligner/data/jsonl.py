"""Files of one JSON object a line, checked whole before anything starts; every problem is told by file and line."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, Callable, TypeVar

SHOWN = 10
ROLES = ("system", "user", "assistant")
Record = TypeVar("Record")


def read_jsonl(
    path: str | Path, record: Callable[[dict[str, Any], str], Record], *, what: str, needs: str
) -> list[Record]:
    """record(object, file:line) of every line of a file. what: the rows, in the plural, for messages; needs: what a line has to hold.

    Raises one ValueError with every line that is malformed or that `record` refuses with a ValueError (the first 10 shown)."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the {what} {path}: {error.strerror}") from error
    return parse_jsonl(content, str(path), record, needs=needs)


def parse_jsonl(
    content: bytes, name: str, record: Callable[[dict[str, Any], str], Record], *, needs: str
) -> list[Record]:
    """The same of a file's content. name: what problems call it."""
    lines = content.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    if not lines:
        raise ValueError(f"{name} is empty: it needs one JSON object a line, with {needs}")
    records, problems = [], []
    for number, line in enumerate(lines, 1):
        try:
            records.append(record(json_object(line), f"{name}:{number}"))
        except ValueError as error:
            problems.append(f"{name}:{number}: {error}")
    if problems:
        raise ValueError(f"{len(problems)} of {len(lines)} lines are malformed:\n" + listed(problems))
    return records


def listed(problems: list[str]) -> str:
    """The first 10, one a line, and how many more there are."""
    more = f"\n... and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return "\n".join(problems[:SHOWN]) + more


def json_object(line: bytes) -> dict[str, Any]:
    """The object that a line holds; raises ValueError with the reason where it is no plain JSON object in UTF-8."""
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
        raise ValueError(f"is a JSON {kind(value)}, not an object")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"holds {name}, which is not JSON")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if repeated:
        raise ValueError(f"has the key `{repeated[0]}` more than once")
    return dict(pairs)


def kind(value: Any) -> str:
    """What JSON calls a value of this type."""
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


def text_of(value: Any, name: str, *, may_be_empty: bool = False) -> str:
    """A value that has to be a text, and not a blank one. name: what problems call it."""
    if not isinstance(value, str):
        raise ValueError(f"`{name}` is a JSON {kind(value)}, not a string")
    if not value.strip() and not may_be_empty:
        raise ValueError(f"`{name}` is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"`{name}` holds half of a surrogate pair at character {error.start}") from error
    return value


def messages_of(value: Any) -> list[dict[str, str]]:
    """A conversation: role and content of each message, the system's alone first. How turns follow is the caller's to check."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"`messages` is {'empty' if value == [] else 'a JSON ' + kind(value)}, not a list of messages")
    messages = [_message(item, f"messages[{at}]") for at, item in enumerate(value)]
    roles = [m["role"] for m in messages]
    if "system" in roles[1:]:
        raise ValueError(f"`messages` has a system message that is not the first (roles: {', '.join(roles)})")
    return messages


def _message(item: Any, name: str) -> dict[str, str]:
    if not isinstance(item, dict):
        raise ValueError(f"`{name}` is a JSON {kind(item)}, not an object")
    if set(item) != {"role", "content"}:
        raise ValueError(f"`{name}` must have the keys role and content, has {', '.join(item) or 'none'}")
    if item["role"] not in ROLES:
        raise ValueError(f"`{name}` has the role {json.dumps(item['role'])}, not one of {', '.join(ROLES)}")
    content = text_of(item["content"], f"{name}.content", may_be_empty=item["role"] == "system")
    return {"role": item["role"], "content": content}
