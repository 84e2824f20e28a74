"""Numbers as people write them, and where a response says its answer: each case written down."""

from fractions import Fraction

import pytest

from aligner.rewards.final_answer import (
    Extraction,
    after_hashes,
    final_answer,
    last_boxed,
    last_number,
    right_final_answer,
)
from aligner.rewards.quantities import equal, quantity


@pytest.mark.parametrize(
    "text,value",
    [
        ("18", 18),
        (" 18. ", 18),
        ("-18", -18),
        ("\u22123", -3),
        ("**18**", 18),
        ("$18$", 18),
        ("$1,234.50", Fraction("1234.5")),
        ("\\$18", 18),
        ("-$5", -5),
        ("1{,}000", 1000),
        (".5", Fraction(1, 2)),
        ("0.50", Fraction(1, 2)),
        ("3/4", Fraction(3, 4)),
        ("2 1/2", Fraction(5, 2)),
        ("\\frac{1}{2}", Fraction(1, 2)),
        ("-\\dfrac{3}{4}", Fraction(-3, 4)),
        ("\\tfrac12", Fraction(1, 2)),
        ("2\\frac{1}{2}", Fraction(5, 2)),
        ("18 dollars", 18),
        ("18\\text{ cm}", 18),
        ("40\\text{ miles per hour}", 40),
        ("90^\\circ", 90),
        ("5 cm^2", 5),
        ("1,23", None),
        ("18x", None),
        ("3x^2", None),
        ("2 pi", None),
        ("3 or 4", None),
        ("5 million", None),
        ("1/0", None),
        ("--5", None),
        ("x", None),
        ("", None),
        ("9" * 5000, None),
        ("\\frac{1}{x}", None),
    ],
)
def test_one_number(text, value):
    assert quantity(text) == (None if value is None else (Fraction(value), False))


@pytest.mark.parametrize("text", ["50%", "50\\%", "50 %", "50 percent"])
def test_a_percentage_has_its_sign(text):
    assert quantity(text) == (Fraction(50), True)


@pytest.mark.parametrize(
    "right,given,same",
    [
        ("50%", "50%", True),
        ("50%", "0.5", True),
        ("50%", "\\frac{1}{2}", True),
        ("50", "50%", True),
        ("0.5", "50%", True),
        ("50%", "5%", False),
        ("50%", "0.05", False),
        ("0.5%", "0.5", True),
        ("50%", "5000", False),
        ("1/3", "2/6", True),
        ("1/3", "0.333", False),
        ("1000000", "1000001", False),
        ("0.1", "0.10", True),
        ("12345678901234567890", "12345678901234567891", False),  # equal as floats
    ],
)
def test_equality_is_exact(right, given, same):
    assert equal(quantity(right), quantity(given)) is same


@pytest.mark.parametrize(
    "text,expected",
    [
        ("so \\boxed{18}", "18"),
        ("\\boxed{1} no, \\boxed{2}.", "2"),
        ("\\boxed{\\frac{1}{\\sqrt{2}}}", "\\frac{1}{\\sqrt{2}}"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed {7}", "7"),
        ("\\fbox{7}", "7"),
        ("\\boxed{\\boxed{3}}", "3"),
        ("first \\boxed{4}, then \\boxed{5", "4"),  # cut at its length: the last whole one counts
        ("\\boxed{5", None),
        ("boxed{5}", None),
        ("\\boxed{}", ""),
        ("a } b { \\boxed{6} {", "6"),
        ("\\boxed{a \\\\} b}", "a \\\\"),  # a line break, then the end of the box
        ("\\boxed{" * 50_000 + "8}", "8"),  # a model that repeats itself: one pass over the text
        ("", None),
    ],
)
def test_the_last_box(text, expected):
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    "text,expected",
    [
        ("a\n#### 72", "72"),
        ("#### 1\n#### 2\nrest", "2"),
        ("####72 clips", "72 clips"),
        ("#### ", None),
        ("### 5", None),
        ("5", None),
    ],
)
def test_what_follows_the_hashes(text, expected):
    assert after_hashes(text) == expected


@pytest.mark.parametrize(
    "text,expected",
    [
        ("16 - 3 - 4 = 9, so A: 18", "18"),
        ("It is -3.", "-3"),
        ("5-3", "3"),
        ("that is 1,234.50 dollars", "1,234.50"),
        ("half, 1/2", "1/2"),
        ("it takes 2 1/2 hours", "2 1/2"),
        ("it grew by 20%", "20%"),
        ("it grew by 20\\%", "20\\%"),
        ("12 / 4 = 3", "3"),
        ("none", None),
    ],
)
def test_the_last_number(text, expected):
    assert last_number(text) == expected


def test_ways_to_the_final_answer():
    text = "we have 3\n#### 4\n\\boxed{5} and 6"
    assert [final_answer(text, way) for way in ("any", "boxed", "hashes", "last_number")] == ["5", "5", "4", "6"]
    assert final_answer("#### 4\n6", "any") == "4"
    assert final_answer("6 and 7", "any") == "7"
    assert final_answer("6 and 7", "boxed") is None
    assert final_answer(" 6 and 7 ", "whole") == "6 and 7"
    assert final_answer(" ", "whole") is None


def test_a_reference_solution_is_never_searched_for_its_last_number():
    assert right_final_answer("it is x + 2\n") == "it is x + 2"
    assert right_final_answer("2 + 2 = <<2+2=4>>4\n#### 4") == "4"
    assert right_final_answer("thus \\boxed{x}.") == "x"


def test_extraction_takes_the_last_match_and_its_first_group():
    answer = Extraction("<answer>(.*?)</answer>")
    assert answer("<answer>1</answer> or <answer>2\n3</answer>") == "2\n3"
    assert answer("<answer>1") is None
    assert Extraction("[0-9]+")("1 and 22 and") == "22"
    assert Extraction(None)("all of it") == "all of it"
    assert Extraction("(a)|b")("b") is None
