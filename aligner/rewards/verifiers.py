"""What a verifier process does with one response. Standard library only at import: a worker must start at once, without torch.

A verifier has prepare(sample), which may be slow (imports, building a dataset), and score(prepared, response, sample), which has
reward.timeout seconds. Both raise for what cannot be scored: a failure is never a reward of 0."""

import contextlib
import importlib.util
import inspect
import math
import struct
import sys
from pathlib import Path
from typing import Any, Callable, Optional

from aligner.rewards.answers import first_integer, integer, numbers
from aligner.rewards.problems import Problems
from aligner.rewards.text_evaluation import evaluating_call

NONSENSE = "no answer: qzx"


class TaskVerifier:
    """accuracy + format_credit * format, where format is half for exactly one number in the response and half for ending by itself.

    answer "first_integer": accuracy is 1 where the first number of the response is the task's answer, else 0.
    answer "task": accuracy is reasoning-gym's own score of the whole response, in [0, 1]. Some scorers raise where a response is not of
    the form that they read: that is 0, with the part `unreadable` 1, unless the scorer raises at its own answer (or none) too."""

    def __init__(self, *, answer: str, format_credit: float, allow_eval: bool) -> None:
        if answer not in ("first_integer", "task"):
            raise ValueError(f"reward.answer={answer} is neither first_integer nor task")
        self.answer, self.format_credit, self.allow_eval = answer, format_credit, allow_eval
        self._problems = Problems()
        self._checked: set[type] = set()

    def preload(self) -> None:
        with contextlib.suppress(ImportError):  # each request says it again, by name
            import reasoning_gym  # noqa: F401  3 s that pass while the first responses are generated

    def prepare(self, sample: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "task" not in sample:
            raise ValueError(
                f"reward.kind=task needs prompts of a task (data.task); this sample has the fields {sorted(sample)}"
            )
        dataset, entry = self._problems(sample)
        if self.answer == "first_integer":
            if integer(str(entry["answer"])) is None:
                raise ValueError(
                    f"the answer of {sample['task']} is {entry['answer']!r}, not an integer: set reward.answer=task"
                )
        else:
            self._check_scorer(sample["task"], dataset, entry)
        return dataset, entry

    def _check_scorer(self, task: str, dataset: Any, entry: dict[str, Any]) -> None:
        """Raises ValueError for a scorer that evaluates text without permission, or tells nothing. Takes milliseconds, once a class."""
        if type(dataset) in self._checked:
            return
        if not self.allow_eval and (call := evaluating_call(type(dataset))):
            raise ValueError(f"the scorer of {task} evaluates text ({call}): it needs reward.allow_eval=true")
        if _task_score(dataset, entry, NONSENSE)[0] == 1:  # game_of_life_halting of reasoning-gym 0.1.25
            raise ValueError(
                f"the scorer of {task} in this reasoning-gym accepts any text: reward.kind=exact or maths compares with its answer"
            )
        self._checked.add(type(dataset))

    def score(self, prepared: tuple[Any, dict[str, Any]], response: str, sample: dict[str, Any]) -> dict[str, float]:
        (dataset, entry), unreadable = prepared, False
        if self.answer == "first_integer":
            accuracy = float(first_integer(response) == integer(str(entry["answer"])))
        else:
            accuracy, unreadable = _task_score(dataset, entry, response.strip())
        one, ended = len(numbers(response)) == 1, sample["ended"]
        form = 0.5 * one + 0.5 * ended
        parts = {"accuracy": accuracy, "well_formed": float(one and ended), "format": form}
        if unreadable:
            parts["unreadable"] = 1.0
        return {"reward": accuracy + self.format_credit * form, **parts}


def _task_score(dataset: Any, entry: dict[str, Any], response: str) -> tuple[float, bool]:
    """(score, whether the scorer could not read the response)."""
    try:
        return float(dataset.score_answer(answer=response, entry=entry)), False
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, SyntaxError):
        own = "" if entry["answer"] is None else str(entry["answer"])
        dataset.score_answer(answer=own, entry=entry)  # raises where the scorer is at fault
        return 0.0, True


class FunctionVerifier:
    """A Python function of the user's, `file.py:name`, called as name(response, sample).

    sample: the fields of the prompt, and `prompt` (text), `ended` (bool); for a task also its `question` and `answer`. The function
    returns a number, or a dict of numbers: its "reward", or their sum where it has none; the others are parts to be recorded."""

    def __init__(self, function: str) -> None:
        self.name = function
        self._function = load_function(function)
        self._problems = Problems()

    def prepare(self, sample: dict[str, Any]) -> dict[str, Any]:
        return self._problems.fields(sample)

    def score(self, prepared: dict[str, Any], response: str, sample: dict[str, Any]) -> dict[str, float]:
        result = self._function(response, prepared)
        parts = result if isinstance(result, dict) else {"reward": result}
        for name, value in parts.items():
            if not isinstance(name, str) or finite_number(value) is None:
                raise TypeError(
                    f"{self.name} returned {name!r}: {value!r}; it must return a number that is finite in float32, "
                    "or a dict of them by name"
                )
        if not parts:
            raise TypeError(f"{self.name} returned an empty dict")
        numbers_ = {name: finite_number(value) for name, value in parts.items()}
        if "reward" in numbers_:
            return numbers_
        total = sum(numbers_.values())
        if finite_number(total) is None:
            raise TypeError(f"{self.name} returned parts whose sum {total!r} is not finite in float32: {parts!r}")
        return {"reward": total, **numbers_}


def finite_number(value: Any) -> Optional[float]:
    """A float, finite in float32 too, of what a user may return, numpy and torch scalars included; None of all else."""
    if value is None or isinstance(value, (str, bytes, dict, list, tuple)):
        return None
    try:
        number = float(value)
        struct.pack("<f", number)  # raises OverflowError where it would be an infinity in float32, as rewards are
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def load_function(function: str) -> Callable[[str, dict], Any]:
    """The function of `file.py:name`. Raises ValueError that says what is missing: file, name, or the two arguments."""
    path, _, name = function.rpartition(":")
    if not path or not name:
        raise ValueError(f"reward.function={function} is not of the form file.py:name")
    if not Path(path).is_file():
        raise ValueError(f"reward.function={function}: there is no file {Path(path).absolute()}")
    spec = importlib.util.spec_from_file_location("aligner_user_reward", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"reward.function={function}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling in the user's file look it up
    sys.path.insert(0, str(Path(path).resolve().parent))  # what lies beside the file can be imported by it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(
            f"reward.function={function}: {path} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    chosen = getattr(module, name, None)
    if not callable(chosen):
        known = [n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_")]
        raise ValueError(
            f"reward.function={function}: {path} has no function {name}; it has {', '.join(known) or 'none'}"
        )
    try:
        inspect.signature(chosen).bind("response", {})
    except TypeError as error:
        raise ValueError(
            f"reward.function={function} must take (response, sample), takes {inspect.signature(chosen)}"
        ) from error
    return chosen
