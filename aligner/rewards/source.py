"""The reward of a run, from its settings."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from aligner.config.groups import RewardConfig, RewardKind
from aligner.data.batch import Score, ScoreRow
from aligner.data.interfaces import RewardSource
from aligner.data.tasks import STOP_STRINGS
from aligner.data.tokenizer import Tokenizer
from aligner.rewards.pool import WorkerPool
from aligner.rewards.remote import HttpReward, Limits


class VerifierReward:
    """A RewardSource: decodes responses here and has them scored by the verifier processes."""

    def __init__(self, pool: WorkerPool, tokenizer: Tokenizer) -> None:
        self.pool, self._tokenizer = pool, tokenizer

    def score(self, rows: list[ScoreRow]) -> "Future[list[Score]]":
        return self.pool.submit([self._request(row) for row in rows])

    def _request(self, row: ScoreRow) -> dict[str, Any]:
        sample = {"prompt": self._tokenizer.decode(row.prompt_ids), **row.fields, "ended": row.ended}
        stops = sample.pop(STOP_STRINGS, ())
        return {"response": self._tokenizer.response_text(row.response_ids, stops), "sample": sample}

    def close(self) -> None:
        self.pool.close()


def build_reward(reward: RewardConfig, tokenizer: Tokenizer) -> RewardSource:
    """The reward of kind task, function or http. A verifier's processes are up when this returns, so call it before a server or CUDA
    starts.

    Raises ValueError for a function that cannot be loaded, and for kind model, which is no verifier."""
    if reward.kind is RewardKind.model:
        raise ValueError(
            "reward.kind=model is scored by the reward model inside the critic job, not by a verifier (reward.place=critic)"
        )
    if reward.kind is RewardKind.http:
        assert reward.url is not None, "checked with the settings"
        limits = Limits(reward.timeout, reward.deadline, reward.concurrency, reward.batch_size)
        return HttpReward(reward.url, tokenizer, limits)
    spec: dict[str, Any] = {"kind": reward.kind.value, "answer": reward.answer}
    spec |= {"format_credit": reward.format_credit, "allow_eval": reward.allow_eval}
    if reward.kind is RewardKind.function:
        if not reward.function:
            raise ValueError("reward.kind=function needs reward.function=file.py:name")
        if reward.format_credit:
            raise ValueError(
                "reward.format_credit goes with reward.kind=task; a function gives its own credit for form"
            )
        path, _, name = reward.function.rpartition(":")
        spec["function"] = f"{Path(path).absolute()}:{name}" if path else reward.function
    return VerifierReward(
        WorkerPool(spec, workers=reward.workers, timeout=reward.timeout, memory_mb=reward.memory_mb), tokenizer
    )
