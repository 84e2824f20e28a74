"""Numbers in responses, each case written down."""

import pytest

from aligner.rewards.answers import first_integer, integer, numbers


@pytest.mark.parametrize(
    "text,expected",
    [
        ("7", 7),
        ("The answer is 7.", 7),
        ("-3", -3),
        ("\u22123", -3),
        ("+3", 3),
        ("= -3", -3),
        ("x=-3", -3),
        ("(-3)", -3),
        ("5-3", 5),
        ("007", 7),
        ("0", 0),
        ("-0", 0),
        ("$1,234 in all", 1234),
        ("1,234,567", 1234567),
        ("1, 2", 1),
        ("8.0", 8),
        ("8.", 8),
        ("**8**", 8),
        ("\\boxed{8}", 8),
        ("8th", 8),
        ("is8", 8),
        ("It is...7", 7),
        ("3.5", None),
        (".5", None),
        ("-.0", None),
        ("3.5 or 4", None),
        ("", None),
        ("none", None),
        ("-", None),
        ("\u0663", None),  # a digit of another script: int() would take it
        ("9" * 5000, None),  # int() would refuse it
        ("-" + "1" * 3000, -int("1" * 3000)),
    ],
)
def test_first_integer(text, expected):
    assert first_integer(text) == expected


@pytest.mark.parametrize(
    "text,expected",
    [
        ("", []),
        ("3 + 4 = 7", ["3", "4", "7"]),
        ("5-3=2", ["5", "3", "2"]),
        ("-5 - -3", ["-5", "-3"]),
        ("3.5.7", ["3.5"]),
        ("-.5 and ...7", ["-.5", "7"]),
        ("1,23", ["1", "23"]),
        ("12,345,67", ["12,345", "67"]),
        ("2024-01-02", ["2024", "01", "02"]),
    ],
)
def test_numbers(text, expected):
    assert numbers(text) == expected


@pytest.mark.parametrize(
    "text,expected", [("7", 7), (" -7\n", -7), ("7.0", None), ("7 apples", None), ("", None), ("1/2", None)]
)
def test_integer_takes_the_whole_text(text, expected):
    assert integer(text) == expected
