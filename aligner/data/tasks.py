"""reasoning-gym tasks as prompts: distinct problems, split into train and held-out by the hash of their key.

A problem is known by (task, config, seed, index): a scorer regenerates it from those. Some tasks walk over sets, so that what they
generate depends on Python's hash seed: they are drawn, as they are scored, in a process whose hash seed is fixed. reasoning_gym takes
3 s to import, so it is imported inside functions."""

import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

STOP_STRINGS = "_stop_strings"  # of the request: a scorer cuts the response's text behind the one that ended it
WIRE_FIELDS = ("task", "config", "seed", "index", "digest", STOP_STRINGS)
HASH_SEED = {"PYTHONHASHSEED": "0"}
PACKAGE_ROOT = Path(__file__).resolve().parents[2]
DRAW_TIMEOUT = 900.0


@dataclass(frozen=True)
class Problem:
    """One drawn problem. `expression` is empty where the task has none; `fields` is what a Sample carries for the verifier."""

    question: str
    expression: str
    key: str
    fields: dict[str, Any]

    @property
    def origin(self) -> str:
        return f"{self.fields['task']}:{self.fields['index']}"

    def placeholders(self) -> dict[str, str]:
        """What a data.template may name."""
        named = {"prompt": self.question, "question": self.question}
        return named | ({"expression": self.expression} if self.expression else {})


def wire_fields(fields_: dict[str, Any]) -> dict[str, Any]:
    """What of a sample's fields has to travel to a scorer: a task's problem is regenerated there, all else goes whole."""
    return {name: fields_[name] for name in WIRE_FIELDS if name in fields_} if "task" in fields_ else fields_


def digest(entry: dict[str, Any]) -> str:
    """Short hash of question and answer: two hosts with different versions of reasoning-gym must not score different problems."""
    return hashlib.sha256(f"{entry['question']}\n{entry['answer']}".encode()).hexdigest()[:16]


def create_dataset(task: str, config: dict[str, Any], seed: int):
    """The reasoning-gym dataset; config holds its settings, size included. Raises ValueError that names the setting at fault."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, 3)
        raise ValueError(
            f"data.task={task} is no reasoning-gym task; the nearest names are {', '.join(near) or 'none'}"
        )
    known = [f.name for f in fields(DATASETS[task][1]) if f.name not in ("seed", "size")]
    if unknown := sorted(set(config) - {*known, "size"}):
        raise ValueError(f"data.task_config: {task} has no setting {', '.join(unknown)}; it has {', '.join(known)}")
    try:
        return reasoning_gym.create_dataset(task, **config, seed=seed)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"data.task_config: {task} refuses {config}: {error}") from error


def operands(question: str) -> str:
    """The unordered numbers of a problem, without signs: a + b, b + a and a - b share one key, for they teach each other."""
    numbers = re.findall(r"[0-9]+(?:\.[0-9]+)?", question)
    if not numbers:
        raise ValueError(
            f"data.task_key=operands needs numbers in the question, but there are none in {question!r}; use question"
        )
    return " ".join(sorted(numbers))


def held_out(key: str, holdout: float) -> bool:
    """Whether a key is held out: its hash as a number in [0, 1) is below the share. More draws never move a key."""
    number = int.from_bytes(hashlib.sha256(f"aligner:{key}".encode()).digest()[:8], "big")
    return number < holdout * 2**64


def draw_problems(task: str, config: dict[str, Any], *, size: int, seed: int, key: str) -> list[Problem]:
    """The distinct problems among `size` draws, in the order in which they first come up; the same in every process and on every rank.

    key: "question" or "operands" (of the expression where the task has one). Raises ValueError for settings that the task refuses."""
    asked = json.dumps({"task": task, "config": config, "size": size, "seed": seed, "key": key})
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    try:
        drawn = subprocess.run(
            [sys.executable, "-m", "aligner.data.tasks"],
            input=asked,
            stdout=subprocess.PIPE,
            text=True,
            timeout=DRAW_TIMEOUT,
            env={**os.environ, **HASH_SEED, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{size} draws of {task} took longer than {DRAW_TIMEOUT:g} s: lower data.task_size") from error
    if drawn.returncode:
        raise RuntimeError(f"drawing {task} ended with exit code {drawn.returncode}; its traceback is above")
    answer = json.loads(drawn.stdout.splitlines()[-1])
    if "error" in answer:
        raise ValueError(answer["error"])
    return [Problem(**problem) for problem in answer["problems"]]


def draw_here(task: str, config: dict[str, Any], *, size: int, seed: int, key: str) -> list[Problem]:
    """What draw_problems does, in this process and with its hash seed."""
    if key not in ("question", "operands"):
        raise ValueError(f"data.task_key={key} is neither question nor operands")
    if reserved := sorted({"seed", "size"} & set(config)):
        raise ValueError(f"data.task_config sets {', '.join(reserved)}: use run.seed and data.task_size")
    config = {**config, "size": size}
    dataset = create_dataset(task, config, seed)
    problems: dict[str, Problem] = {}
    for index in range(size):
        entry = dataset[index]
        question = entry["question"]
        if question in problems:
            continue
        expression = entry.get("metadata", {}).get("expression", "")
        expression = expression if isinstance(expression, str) else ""
        known_by = operands(expression or question) if key == "operands" else question
        sample_fields = {"task": task, "config": config, "seed": seed, "index": index, "digest": digest(entry)}
        sample_fields |= {"question": question, "answer": str(entry["answer"])}
        problems[question] = Problem(question, expression, known_by, sample_fields)
    return list(problems.values())


def split_problems(problems: list[Problem], holdout: float) -> tuple[list[Problem], list[Problem]]:
    """(train, held-out): problems of one key are all on one side. Raises ValueError where a side that is asked for stays empty."""
    if not 0 <= holdout < 1:
        raise ValueError(f"data.holdout must be at least 0 and below 1, is {holdout}")
    train = [p for p in problems if not held_out(p.key, holdout)]
    held = [p for p in problems if held_out(p.key, holdout)]
    keys = len({p.key for p in problems})
    if not train or (holdout > 0 and not held):
        raise ValueError(
            f"data.holdout={holdout} leaves {len(train)} problems to train on and {len(held)} held out, of {keys} distinct keys: "
            "raise data.task_size, or change data.task_key or data.holdout"
        )
    return train, held


def main() -> None:
    """Settings of draw_here as JSON on stdin; on the last line of stdout {"problems"} or {"error"}."""
    try:
        answer: dict[str, Any] = {"problems": [asdict(p) for p in draw_here(**json.load(sys.stdin))]}
    except ValueError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
