"""What the pool makes of a line from a verifier process: the score, its error, or a process that is to be replaced."""

import math

import pytest

from aligner.rewards.replies import WorkerFailed, read_reply, read_score


def test_a_score_and_an_error():
    score = read_score(read_reply(b'{"number": 3, "parts": {"reward": 1, "a": 0.5}}', 3))
    assert (score.value, score.parts, score.error) == (1.0, {"a": 0.5}, None)
    score = read_score(read_reply(b'{"number": 3, "error": "mine"}', 3))
    assert math.isnan(score.value) and score.error == "mine"


@pytest.mark.parametrize("number", ["2", "4", "null", "true", "3.0", '"3"', "[3]"])
def test_a_reply_to_another_request_is_refused(number):
    line = f'{{"number": {number}, "parts": {{"reward": 1}}}}'.encode()
    with pytest.raises(WorkerFailed, match="is not to request 3: "):
        read_reply(line, 3)


@pytest.mark.parametrize("line", [b"", b"rubbish", b"\xff", b"[" * 100_000, b"5", b"null", b'"started"', b"[3]", b"{}"])
def test_a_line_that_is_no_reply_is_refused(line):
    with pytest.raises(WorkerFailed, match="its reply is not"):
        read_reply(line, 3)


@pytest.mark.parametrize(
    "rest",
    [
        '"started": true',
        '"error": null',
        '"error": {"reward": 1}',
        '"parts": null',
        '"parts": 1',
        '"parts": [1]',
        '"parts": {}',
        '"parts": {"a": 1}',
        '"parts": {"reward": "1"}',
        '"parts": {"reward": null}',
        '"parts": {"reward": NaN}',
        '"parts": {"reward": Infinity}',
        '"parts": {"reward": 1e300}',
        '"parts": {"reward": 1, "a": NaN}',
    ],
)
def test_a_reply_without_finite_numbers_or_an_error_is_refused(rest):
    with pytest.raises(WorkerFailed, match="its reply"):
        read_score(read_reply(f'{{"number": 3, {rest}}}'.encode(), 3))
