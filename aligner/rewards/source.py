"""The reward of a run, from its settings."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any, Sequence

from aligner.config.reward import RewardConfig, RewardKind, VerifierConfig, model_part, part_name
from aligner.config.validate_reward import parts_problems, verifier_problems
from aligner.data.batch import Sample, Score, ScoreRow
from aligner.data.interfaces import RewardSource
from aligner.data.jsonl import SHOWN
from aligner.data.tasks import STOP_STRINGS
from aligner.data.tokenizer import Tokenizer
from aligner.rewards.pool import WorkerPool
from aligner.rewards.problems import right_answer
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
    """The reward of every kind but model, and of the parts that are no model. A verifier's processes are up when this returns, so call it
    before a server or CUDA starts.

    Raises ValueError for a function that cannot be loaded, and for kind model, which is no verifier."""
    if reward.kind is RewardKind.model:
        raise ValueError(
            "reward.kind=model is scored by the reward model inside the critic or the reward job, not by a verifier (reward.place)"
        )
    if reward.kind is RewardKind.http:
        assert reward.url is not None, "checked with the settings"
        limits = Limits(reward.timeout, reward.deadline, reward.concurrency, reward.batch_size)
        return HttpReward(reward.url, tokenizer, limits)
    pool = WorkerPool(
        verifier_spec(reward),
        workers=reward.workers,
        timeout=reward.timeout,
        memory_mb=reward.memory_mb,
        failed_score=reward.failed_score,
    )
    return VerifierReward(pool, tokenizer)


def check_right_answers(reward: RewardConfig, samples: Sequence[Sample]) -> None:
    """Raises ValueError with the first samples of prompt files that lack the right answer which the reward compares with."""
    compared = (RewardKind.maths, RewardKind.exact)
    for part in (reward, *reward.parts):
        if part.kind not in compared:
            continue
        problems = []
        for sample in samples:
            try:
                if "task" not in sample.fields:
                    right_answer(sample.fields, part.answer_field)
            except ValueError as error:
                problems.append(f"{sample.origin}: {error}")
        if problems:
            raise ValueError(
                f"{len(problems)} of {len(samples)} prompts cannot be scored by reward.kind={part.kind.name}:\n"
                + "\n".join(problems[:SHOWN])
            )


def verifier_spec(reward: RewardConfig) -> dict[str, Any]:
    """What a worker builds its verifier from, as plain values. Raises ValueError for settings that do not go together."""
    if found := [*verifier_problems("reward", reward), *parts_problems(reward)]:
        raise ValueError("; ".join(found))
    spec = {**_part_spec(reward), "allow_eval": reward.allow_eval}
    if reward.kind is RewardKind.parts:
        spec["parts"] = [
            {**_part_spec(p), "weight": p.weight, "name": part_name(p)}
            for p in reward.parts
            if p is not model_part(reward)
        ]
    return spec


def _part_spec(part: VerifierConfig) -> dict[str, Any]:
    function = part.function
    if function is not None:
        path, _, name = function.rpartition(":")
        function = f"{Path(path).absolute()}:{name}" if path else function
    return {
        "kind": part.kind.value,
        "function": function,
        "answer": part.answer,
        "format_credit": part.format_credit,
        "answer_field": part.answer_field,
        "extract": part.extract,
        "final_answer": part.final_answer.value,
        "ignore_case": part.ignore_case,
        "pattern": part.pattern,
        "template": part.template,
    }
