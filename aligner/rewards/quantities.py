"""Numbers as people and models write them, read exactly: thousands, decimals, fractions, percent, currency and units. Standard library
only."""

import re
from fractions import Fraction
from typing import Optional

DIGITS_LIMIT = 2000  # longer numbers are no answers, and conversion takes quadratic time
UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
INTEGER = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+"
CURRENCY = r"[$\u20ac\u00a3\u00a5]?"
FORMS = re.compile(
    rf"(?P<sign>[-+]?){CURRENCY}(?P<inner>[-+]?)"
    rf"(?:(?:(?P<mixed>{INTEGER})\s*)?\\frac\{{(?P<over>{UNSIGNED})\}}\{{(?P<under>{UNSIGNED})\}}"
    rf"|(?:(?P<count>{INTEGER})\s+)?(?P<above>{INTEGER})\s*/\s*(?P<below>{INTEGER})"
    rf"|(?P<plain>{UNSIGNED}))"
    r"(?:\s*(?P<percent>%|percent\b))?(?P<unit>.*)",
    re.DOTALL,
)
# Words that may stand behind a number without changing it, apart from it: "18 dollars", but not "18xy". NO_UNITS do change it.
LENGTH = r"(?:[kcm]?m|ft|feet|yd|mi|miles?|inch|inches|units?)"
UNIT = re.compile(rf"(?:\u00b0[CF]?|(?: ?(?:[A-Za-z]{{2,}}|{LENGTH}\^?\{{?[23]\}}?)(?:[ /.]|$))+)")
NO_UNITS = re.compile(
    r"\b(?:pi|sqrt|sin|cos|tan|log|ln|exp|inf|infinity|or|and|to|over|by|plus|minus|times|mod|is|from|million|billion|trillion|thousand|"
    r"hundred|dozen|half|third|thirds|quarter|quarters|percent|in)\b",
    re.IGNORECASE,
)
REPLACED = (
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\frac\s*([0-9])\s*([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[,!;: ]|~"), ""),
    (re.compile(r"\\([$%#])"), r"\1"),
    (re.compile(r"\^\s*\\circ|\^\s*\{\\circ\}|\\degree"), "\u00b0"),
    (re.compile("[\u2212\u2013]"), "-"),
    (re.compile(r"\*\*|\\left|\\right|\\[()\[\]]"), ""),
)


def plain(text: str) -> str:
    """The text without LaTeX's spacing and markup around numbers, Markdown's bold and final full stop."""
    for pattern, by in REPLACED:
        text = pattern.sub(by, text)
    text = " ".join(text.split())
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1]
    return text.strip().rstrip(".").strip()


def quantity(text: str) -> Optional[tuple[Fraction, bool]]:
    """(value, whether a percent sign follows) of a text that is one number; None where it is anything else.

    The value of "50%" is 50: what it equals is said by `equal`."""
    text = plain(text)
    if len(text) > DIGITS_LIMIT:
        return None
    found = FORMS.fullmatch(text)
    if found is None or (found["sign"] and found["inner"]) or not _is_unit(found["unit"]):
        return None
    value = _value(found)
    if value is None:
        return None
    return (-value if "-" in (found["sign"], found["inner"]) else value), found["percent"] is not None


def _is_unit(text: str) -> bool:
    apart = text.startswith((" ", "\u00b0"))
    return not text or (apart and UNIT.fullmatch(text.strip()) is not None and NO_UNITS.search(text) is None)


def _value(found: "re.Match[str]") -> Optional[Fraction]:
    if found["plain"] is not None:
        return _number(found["plain"])
    names = ("mixed", "over", "under") if found["over"] is not None else ("count", "above", "below")
    count, above, below = (_number(found[name] or "0") for name in names)
    return None if below == 0 else count + above / below


def _number(text: str) -> Fraction:
    digits = text.replace(",", "")
    return Fraction(digits.rstrip(".") if not digits.startswith(".") else f"0{digits}")


def equal(right: tuple[Fraction, bool], given: tuple[Fraction, bool]) -> bool:
    """Exact equality. Where only one of the two has a percent sign, p% equals both p / 100 and p: datasets leave the sign out."""
    if right[0] == given[0]:
        return True
    if right[1] == given[1]:
        return False
    return right[0] / (100 if right[1] else 1) == given[0] / (100 if given[1] else 1)
