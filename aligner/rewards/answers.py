"""Numbers in a response. Standard library only: the verifier processes import it."""

import re
from typing import Optional

# A sign counts only where no word, digit or bracket stands before it: "5-3" holds 5 and 3. Commas are taken as thousands where
# they group by three, and a decimal is one number, so that 3.5 is never read as 3, nor .5 as 5.
DIGITS = r"(?<![0-9])(?<![0-9]\.)(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
NUMBER = re.compile(rf"(?:(?<![\w).])[-+\u2212])?(?:{DIGITS}|(?<![.\w])\.[0-9]+)")

# Python refuses to convert longer ones, and no answer is that long.
MAX_DIGITS = 4000


def numbers(text: str) -> list[str]:
    """The numbers in a text, as written, in order."""
    return NUMBER.findall(text)


def first_integer(text: str) -> Optional[int]:
    """The first number of the text; None where there is none or where it is not an integer (8.0 is, 8.5 is not)."""
    found = NUMBER.search(text)
    if found is None:
        return None
    whole, _, decimals = found.group().replace(",", "").replace("\u2212", "-").partition(".")
    if decimals.strip("0") or len(whole) > MAX_DIGITS or not whole.strip("+-"):
        return None
    return int(whole)


def integer(text: str) -> Optional[int]:
    """The integer that the whole text is; None where it is anything else."""
    return int(text) if re.fullmatch(r"\s*[-+]?[0-9]{1,4000}\s*", text) else None
