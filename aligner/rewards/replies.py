"""What a verifier process may say, read by the pool: a user's function runs beside the pipe, so nothing on it is taken on trust."""

import json
from typing import Any

from aligner.data.batch import Score
from aligner.rewards.verifiers import finite_number


class WorkerFailed(Exception):
    """The process hung, died or spoke nonsense; it must be replaced. The message says which."""


def read_reply(line: bytes, number: int) -> dict[str, Any]:
    """The object of one line. Raises WorkerFailed where it is no object, or answers another request than `number`."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WorkerFailed(f"its reply is not JSON: {line[:80]!r}") from error
    if not isinstance(reply, dict):
        raise WorkerFailed(f"its reply is not an object: {line[:80]!r}")
    if type(reply.get("number")) is not int or reply["number"] != number:
        raise WorkerFailed(f"its reply is not to request {number}: {line[:80]!r}")
    return reply


def read_error(reply: dict[str, Any]) -> str:
    """The error that a reply tells of. Raises WorkerFailed where it is none."""
    if not isinstance(reply.get("error"), str):
        raise WorkerFailed(f"its reply makes no sense: {str(reply)[:200]}")
    return reply["error"]


def failure(why: str) -> Score:
    # NaN: whoever overlooks the error and trains on the value is stopped by the first mask that covers it
    return Score(float("nan"), error=why)


def read_score(reply: dict[str, Any]) -> Score:
    """The score, or the error, of the last reply to a request. Raises WorkerFailed where it is neither."""
    if "parts" not in reply:
        return failure(read_error(reply))
    parts = reply["parts"]
    if not isinstance(parts, dict) or "reward" not in parts or None in map(finite_number, parts.values()):
        raise WorkerFailed(f"its reply is not finite numbers with a reward: {str(parts)[:200]}")
    numbers = {name: float(value) for name, value in parts.items()}
    return Score(numbers.pop("reward"), numbers)
