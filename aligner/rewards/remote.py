"""Rewards of a service of the user's, asked over HTTP with plain JSON (docs/rewards.md): reward.kind=http.

A failure is an error that names the service, never a score of 0. Proxies of the environment are ignored, redirects are refused."""

import json
import queue
import random
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Callable, Optional

from aligner.data.batch import Score, ScoreRow
from aligner.data.tokenizer import Tokenizer
from aligner.rewards.replies import failure
from aligner.rewards.verifiers import finite_number

MAX_REPLY = 1 << 24
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
RETRIED = (408, 425, 429, 500, 502, 503, 504)
CLOSED = "the reward was closed"


@dataclass(frozen=True)
class Limits:
    """timeout: seconds of one attempt. deadline: seconds from a request's first attempt to giving up. concurrency: requests at once.
    batch_size: responses a request."""

    timeout: float
    deadline: float
    concurrency: int
    batch_size: int


class Refusal(Exception):
    """An answer that asking again would not change."""


class NotNow(Exception):
    """No answer, or one that says to try again. `after`: seconds that the service asks to wait."""

    def __init__(self, why: str, after: float = 0.0) -> None:
        super().__init__(why)
        self.after = after


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None  # the redirect is then an error with its own status


class HttpReward:
    """A RewardSource. Its threads are daemons: a service that hangs does not keep the process from ending."""

    def __init__(
        self,
        url: str,
        tokenizer: Tokenizer,
        limits: Limits,
        *,
        pause: Callable[[float], Any] = time.sleep,
    ) -> None:
        self.url, self._tokenizer, self._limits, self._pause = url, tokenizer, limits, pause
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())
        self._work: "queue.SimpleQueue[Optional[_Batch]]" = queue.SimpleQueue()
        self._closed = False
        for i in range(limits.concurrency):
            threading.Thread(target=self._serve, name=f"http reward {i}", daemon=True).start()

    def score(self, rows: list[ScoreRow]) -> "Future[list[Score]]":
        answer: Future[list[Score]] = Future()
        if not rows:
            answer.set_result([])
            return answer
        size = self._limits.batch_size
        whole = _Whole(answer, len(rows))
        for start in range(0, len(rows), size):
            self._work.put(_Batch(whole, start, [self._sample(row) for row in rows[start : start + size]]))
        return answer

    def close(self) -> None:
        """What is still waiting is tried once, and what is under way once more."""
        self._closed = True
        for _ in range(self._limits.concurrency):
            self._work.put(None)

    def _sample(self, row: ScoreRow) -> dict[str, Any]:
        return {
            "sample_id": row.sample_id,
            "prompt": self._tokenizer.decode(row.prompt_ids),
            "response": self._tokenizer.decode(row.response_ids),
            "ended": row.ended,
            "fields": row.fields,
        }

    def _serve(self) -> None:
        while (batch := self._work.get()) is not None:
            try:
                scores = self._scores(batch.samples)
            except Exception as error:
                scores = [failure(f"{self.url}: {type(error).__name__}: {error}")] * len(batch.samples)
            batch.whole.fill(batch.start, scores)

    def _scores(self, samples: list[dict[str, Any]]) -> list[Score]:
        """Ask, and ask again with growing pauses, until there is an answer or the deadline has passed."""
        body = json.dumps({"samples": samples}).encode()
        until, attempts, pause = time.monotonic() + self._limits.deadline, 0, FIRST_PAUSE
        while True:
            attempts += 1
            try:
                return _read(self._post(body, until), len(samples))
            except Refusal as error:
                why = f"{self.url}: {error}"
                break
            except NotNow as error:
                # half of it by chance: many clients that failed at once do not come back at once
                wait = max(error.after, pause * (0.5 + 0.5 * random.random()))
                why = f"{self.url} gave no score in {attempts} attempts: {error}"
                if self._closed or time.monotonic() + wait >= until:
                    why = f"{why}; {CLOSED}" if self._closed else f"{why} (reward.deadline={self._limits.deadline:g} s)"
                    break
                self._pause(wait)
                pause = min(2 * pause, LONGEST_PAUSE)
        return [failure(why)] * len(samples)

    def _post(self, body: bytes, until: float) -> bytes:
        end = min(until, time.monotonic() + self._limits.timeout)
        request = urllib.request.Request(
            self.url, data=body, headers={"Content-Type": "application/json"}, method="POST"
        )
        try:
            with self._opener.open(request, timeout=max(0.01, end - time.monotonic())) as response:
                return _read_all(response, end)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(300).decode(errors="replace")
            what = f"HTTP status {error.code}: {' '.join(said.split())[:200] or error.reason}"
            if error.code not in RETRIED:
                raise Refusal(what) from None
            raise NotNow(what, _seconds(error.headers.get("Retry-After"))) from None
        except (OSError, ValueError) as error:  # URLError and timeouts are OSErrors; http.client's are not all
            raise NotNow(str(getattr(error, "reason", error)) or type(error).__name__) from None
        except Exception as error:
            raise NotNow(f"{type(error).__name__}: {error}") from None


class _Whole:
    """The scores of one call, put together as its batches come in."""

    def __init__(self, answer: "Future[list[Score]]", rows: int) -> None:
        self._answer, self._scores, self._left = answer, [None] * rows, rows
        self._lock = threading.Lock()

    def fill(self, start: int, scores: list[Score]) -> None:
        with self._lock:
            self._scores[start : start + len(scores)] = scores
            self._left -= len(scores)
            done = self._left == 0
        if done:
            self._answer.set_result(self._scores)


@dataclass(frozen=True)
class _Batch:
    whole: _Whole
    start: int
    samples: list[dict[str, Any]]


def _read_all(response: Any, end: float) -> bytes:
    """A service that sends a byte now and then never trips the socket's own timeout."""
    parts, size = [], 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > MAX_REPLY:
            raise Refusal(f"its answer exceeds {MAX_REPLY} bytes")
        if time.monotonic() > end:
            raise NotNow("its answer did not end in time")
    return b"".join(parts)


def _seconds(retry_after: Optional[str]) -> float:
    return float(retry_after) if retry_after and retry_after.isdigit() else 0.0


def _read(body: bytes, rows: int) -> list[Score]:
    """{"scores": [...]}, one a sample: a number, {"reward": number, part: number ...} or {"error": text}. Raises Refusal."""
    try:
        scores = json.loads(body)["scores"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Refusal(f'its answer is not {{"scores": [...]}}: {body[:80]!r}') from None
    if not isinstance(scores, list) or len(scores) != rows:
        given = len(scores) if isinstance(scores, list) else type(scores).__name__
        raise Refusal(f"it was asked for {rows} scores and gave {given}")
    return [_read_score(score) for score in scores]


def _read_score(score: Any) -> Score:
    if isinstance(score, dict) and isinstance(score.get("error"), str):
        return failure(score["error"])
    parts = score if isinstance(score, dict) else {"reward": score}
    numbers = {name: finite_number(value) for name, value in parts.items()}
    if "reward" not in numbers or None in numbers.values():
        raise Refusal(f"a score must be a finite number or an object of them with a reward: {str(score)[:100]}")
    return Score(numbers.pop("reward"), numbers)
