"""Where a response says its final answer: the last \\boxed{}, the last "#### ...", or the last number. Standard library only."""

import re
from typing import Optional

from aligner.rewards.answers import NUMBER

# the start of a box, a brace, or a sign that is no brace: \{, \}, \\
BRACES = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
# a fraction of whole numbers is one answer, also a mixed one (2 1/2), and so is a number with its percent sign
LAST = re.compile(rf"{NUMBER.pattern}(?:(?: [0-9]+)?\s*/\s*[0-9]+(?![0-9.]))?(?:\s*\\?%)?")


def last_boxed(text: str) -> Optional[str]:
    """What the last \\boxed{...} (or \\fbox) whose braces are balanced holds, other braces inside included; None where there is none."""
    open_: list[Optional[int]] = []  # where each brace that is open starts its box; None for a group of another kind
    best: Optional[tuple[int, int]] = None
    for sign in BRACES.finditer(text):
        if sign.group(1) or sign.group() == "{":
            open_.append(sign.end() if sign.group(1) else None)
        elif sign.group() == "}" and open_ and (start := open_.pop()) is not None and (best is None or start > best[0]):
            best = start, sign.start()
    return None if best is None else text[best[0] : best[1]].strip()


def after_hashes(text: str) -> Optional[str]:
    """The rest of the line behind the last "####", as GSM8K ends its solutions; None where there is none or it is blank."""
    _, hashes, rest = text.rpartition("####")
    line = rest.split("\n", 1)[0].strip() if hashes else ""
    return line or None


def last_number(text: str) -> Optional[str]:
    """The last number, with a simple denominator or a percent sign; None where there is none."""
    found = None
    for found in LAST.finditer(text):  # noqa: B007  the last one is what is wanted
        pass
    return None if found is None else found.group()


def whole(text: str) -> Optional[str]:
    return text.strip() or None


WAYS = {
    "boxed": (last_boxed,),
    "hashes": (after_hashes,),
    "last_number": (last_number,),
    "whole": (whole,),
    "any": (last_boxed, after_hashes, last_number),
}


def final_answer(text: str, way: str) -> Optional[str]:
    """The final answer of a response by one of WAYS; None where it has none."""
    return next((found for find in WAYS[way] if (found := find(text)) is not None), None)


def right_final_answer(text: str) -> str:
    """Of a reference solution: what is boxed, else what follows ####, else all of it."""
    return last_boxed(text) or after_hashes(text) or text.strip()


class Extraction:
    """The last match of a regular expression in a text: its first group where it has one. Without an expression, the whole text."""

    def __init__(self, pattern: Optional[str]) -> None:
        self._pattern = None if pattern is None else re.compile(pattern, re.DOTALL)

    def __call__(self, text: str) -> Optional[str]:
        if self._pattern is None:
            return text
        found = None
        for found in self._pattern.finditer(text):  # noqa: B007
            pass
        if found is None:
            return None
        return found.group(1 if self._pattern.groups else 0)
