"""Is a response's final answer the right one? Numbers are compared exactly here, everything else by math-verify in a forked child: it
evaluates what the policy wrote, and some expressions have no end. Standard library only at import."""

import importlib.util
import logging
import warnings
from fractions import Fraction
from typing import Any, NamedTuple, Optional

from aligner.rewards.child import in_child
from aligner.rewards.final_answer import Extraction, after_hashes, final_answer, last_boxed, right_final_answer
from aligner.rewards.problems import Problems, right_answer
from aligner.rewards.quantities import equal, plain, quantity

LONGEST = 2000  # characters of an expression that is compared symbolically
SHARE = 0.5  # of reward.timeout, for one symbolic comparison


class Right(NamedTuple):
    """The right answer: its text, and its value where it is a number."""

    text: str
    value: Optional[tuple[Fraction, bool]]


class MathsVerifier:
    """Reward 1 where the final answer equals the right one, else 0. Parts: accuracy; answered, 1 where there was a final answer;
    undecided, 1 where the comparison did not end within its limits (such an answer is not accepted)."""

    def __init__(self, *, answer_field: str, extract: Optional[str], final: str, timeout: float) -> None:
        self._field, self._extract, self._final = answer_field, Extraction(extract), final
        self._timeout, self._problems, self._ready = timeout * SHARE, Problems(), False
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("reward.kind=maths needs the package math-verify: pip install 'math-verify[antlr4_9_3]'")

    def preload(self) -> None:
        if self._ready:
            return
        logging.getLogger("math_verify").setLevel(logging.CRITICAL)
        warnings.simplefilter("ignore")
        # imports and tables that are made at the first use: seconds, once, which no forked child has to spend again
        symbolically_equal("$\\frac{x}{2}$", "$\\frac{1}{2}x$")
        self._ready = True

    def prepare(self, sample: dict[str, Any]) -> Right:
        text = right_final_answer(right_answer(self._problems.fields(sample), self._field))
        return Right(text, quantity(text))

    def score(self, right: Right, response: str, sample: dict[str, Any]) -> dict[str, float]:
        text = self._extract(response)
        answer = None if text is None else self._answer(right, text)
        same = False if answer is None else self._same(right, answer)
        accuracy = float(bool(same))
        return {
            "reward": accuracy,
            "accuracy": accuracy,
            "answered": float(answer is not None),
            "undecided": float(same is None),
        }

    def _answer(self, right: Right, text: str) -> Optional[str]:
        """By reward.final_answer; but an expression in a sentence is looked for by math-verify: the last number is only a piece of it."""
        if self._final == "any" and right.value is None:
            found = last_boxed(text) or after_hashes(text)
            return (text.strip() or None) if found is None else marked(found)
        found = final_answer(text, self._final)
        return found and marked(found)

    def _same(self, right: Right, answer: str) -> Optional[bool]:
        """None where it could not be decided."""
        if plain(right.text) == plain(answer):
            return True
        value = quantity(answer)
        if value is not None and right.value is not None:
            return equal(right.value, value)
        if max(len(right.text), len(answer)) > LONGEST:
            return None
        self.preload()
        return in_child(lambda: symbolically_equal(marked(right.text), answer), self._timeout)


def symbolically_equal(right: str, answer: str) -> bool:
    """By math-verify, without limits of its own: run it in a child."""
    from math_verify import verify

    right_parsed, parsed = _parsed(right), _parsed(answer)
    return bool(right_parsed and parsed) and verify(right_parsed, parsed, timeout_seconds=None)


def _parsed(text: str) -> list[Any]:
    """What math-verify reads; empty where it reads nothing. Raises MemoryError and RecursionError, which say nothing of the text."""
    from math_verify import parse

    try:
        return parse(text, parsing_timeout=None, raise_on_error=True)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # its grammar and sympy raise many kinds for text that is no expression
        return []


def marked(text: str) -> str:
    """One expression as math-verify takes it for LaTeX: between dollar signs, where it has none. `plain` takes them off again."""
    return text if "$" in text else f"${text}$"
