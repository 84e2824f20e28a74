"""Verifiers of text: exact match, regular expression, form. Standard library only at import."""

import re
import unicodedata
from typing import Any, Optional

from aligner.config.reward import HOLE, template_tokens
from aligner.rewards.final_answer import Extraction
from aligner.rewards.problems import Problems, right_answer


class ExactVerifier:
    """Reward 1 where the response (or what `extract` finds in it) is the right answer, else 0. Space at the ends does not count, runs of
    space inside are one, and Unicode's forms of a letter are alike (NFKC). Parts: accuracy; answered, 1 where `extract` found something."""

    def __init__(self, *, answer_field: str, extract: Optional[str], ignore_case: bool) -> None:
        self._field, self._extract, self._ignore_case = answer_field, Extraction(extract), ignore_case
        self._problems = Problems()

    def prepare(self, sample: dict[str, Any]) -> str:
        return self._plain(right_answer(self._problems.fields(sample), self._field))

    def score(self, right: str, response: str, sample: dict[str, Any]) -> dict[str, float]:
        given = self._extract(response)
        accuracy = float(given is not None and self._plain(given) == right)
        return {"reward": accuracy, "accuracy": accuracy, "answered": float(given is not None)}

    def _plain(self, text: str) -> str:
        text = " ".join(unicodedata.normalize("NFKC", text).split())
        return text.casefold() if self._ignore_case else text


class RegexVerifier:
    """Reward 1 where the pattern matches somewhere in the response, else 0. A pattern that backtracks without end is ended with its
    process at reward.timeout."""

    def __init__(self, *, pattern: str) -> None:
        self._pattern = re.compile(pattern, re.DOTALL)

    def prepare(self, sample: dict[str, Any]) -> None:
        return None

    def score(self, prepared: None, response: str, sample: dict[str, Any]) -> dict[str, float]:
        return {"reward": float(self._pattern.search(response) is not None)}


class FormatVerifier:
    """Reward 1 where the whole response, space at its ends aside, matches the pattern or has the form of the template, else 0."""

    def __init__(self, *, pattern: Optional[str] = None, template: Optional[str] = None) -> None:
        self._pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        self._tokens = [] if template is None else template_tokens(template)

    def prepare(self, sample: dict[str, Any]) -> None:
        return None

    def score(self, prepared: None, response: str, sample: dict[str, Any]) -> dict[str, float]:
        if self._pattern is not None:
            return {"reward": float(self._pattern.fullmatch(response.strip()) is not None)}
        return {"reward": float(has_form(response, self._tokens))}


def has_form(text: str, tokens: list[str]) -> bool:
    """Whether `text` has the form of a template's tokens: each but {} occurs in it exactly once, in this order; between two of them
    there is space alone or, where {} stands, some text that is not blank. Linear in the text: nothing is tried twice."""
    at, hole = 0, False
    for token in tokens:
        if token == HOLE:
            hole = True
            continue
        found = text.find(token, at)
        if found < 0 or text.count(token) != 1 or bool(text[at:found].strip()) != hole:
            return False
        at, hole = found + len(token), False
    return bool(text[at:].strip()) == hole
