"""Files between the stages of launch/local/pipeline.py: problems, demonstrations, preference pairs, and what the verifier says of
answers. Held-out problems are those that the RL jobs hold out too: same task, seed and key (conf/tasks/sums_of_two.yaml)."""

import itertools
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterable, Sequence

from aligner.config.groups import DataConfig
from aligner.config.reward import RewardConfig
from aligner.data.splits import fill_template
from aligner.data.tasks import Problem, draw_problems, split_problems
from aligner.rewards.pool import WorkerPool
from aligner.rewards.source import verifier_spec
from aligner.runtime.durable import write_durably
from aligner.runtime.metrics import read_jsonl

SCORING = 600.0  # seconds for all answers of one stage


@dataclass(frozen=True)
class Sizes:
    """How many problems each stage takes. Demonstrations and problems for pairs are of the training side, and do not overlap."""

    demonstrations: int
    pair_problems: int
    held_out: int


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """JSON lines, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())


def draw(data: DataConfig, seed: int) -> tuple[list[Problem], list[Problem]]:
    """(train, held-out) as train_ppo_actor.py draws them."""
    problems = draw_problems(data.task, dict(data.task_config), size=data.task_size, seed=seed, key=data.task_key)
    return split_problems(problems, data.holdout)


def write_problems(folder: Path, data: DataConfig, *, seed: int, sizes: Sizes) -> None:
    """demonstrations.jsonl (prompt, completion), pair_prompts.jsonl and held_out.jsonl (prompt, and the problem for the verifier)."""
    train, held_out = draw(data, seed)
    needed = sizes.demonstrations + sizes.pair_problems
    if len(train) < needed or len(held_out) < sizes.held_out:
        raise ValueError(
            f"the task has {len(train)} problems to train on and {len(held_out)} held out, and {needed} and {sizes.held_out} are needed: "
            "raise data.task_size"
        )
    demonstrated, paired = train[: sizes.demonstrations], train[sizes.demonstrations : needed]

    def prompt(problem: Problem) -> str:
        return fill_template(data.template, problem.placeholders())

    def asked(problem: Problem) -> dict[str, Any]:
        return {"prompt": prompt(problem), "problem": problem.fields}

    shown = [{"prompt": prompt(p), "completion": f" {p.fields['answer']}"} for p in demonstrated]
    write_lines(folder / "demonstrations.jsonl", shown)
    write_lines(folder / "pair_prompts.jsonl", map(asked, paired))
    write_lines(folder / "held_out.jsonl", map(asked, held_out[: sizes.held_out]))


def judge(prompts: Path, answers: Path, reward: RewardConfig) -> list[dict[str, Any]]:
    """Each line of generate.py's output as the verifier of `reward` says: {index, prompt, text, finish_reason, answer, right}, where
    `answer` is the problem's own.
    Raises RuntimeError for an answer that could not be scored."""
    asked = read_jsonl(prompts)
    rows = [{**row, "problem": asked[row["index"]]["problem"]} for row in read_jsonl(answers)]
    requests = [
        {"response": row["text"], "sample": {**row["problem"], "ended": row["finish_reason"] == "stop"}} for row in rows
    ]
    pool = WorkerPool(verifier_spec(reward), workers=1, timeout=10.0, memory_mb=2048)
    try:
        scores = pool.submit(requests).result(timeout=SCORING)
    finally:
        pool.close()
    if failed := [score.error for score in scores if score.error is not None]:
        raise RuntimeError(f"{len(failed)} of {len(rows)} answers could not be scored: {failed[0]}")
    kept = ("index", "prompt", "text", "finish_reason")
    return [
        {
            **{name: row[name] for name in kept},
            "answer": row["problem"]["answer"],
            "right": score.parts["accuracy"] == 1.0,
        }
        for row, score in zip(rows, scores, strict=True)
    ]


@dataclass
class Texts:
    """Different texts that were sampled as answers to one problem."""

    prompt: str
    answer: str
    right: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)  # not whole

    def add(self, row: dict[str, Any]) -> None:
        """An answer that was cut is never chosen; rejected it may be, so that the reward model sees all that the policy says."""
        whole = row["finish_reason"] == "stop"
        kind = self.cut if not whole else self.right if row["right"] else self.wrong
        if row["text"].strip() and row["text"] not in kind:
            kind.append(row["text"])


def pairs(
    judged: Sequence[dict[str, Any]], *, most: int, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """{prompt, chosen, rejected} to train on, and to hold out: for each problem with right answers at most `most` pairs and one.

    The rejected answer is in turn a wrong one, one that is right for another problem, and one that was cut. Without the second kind a
    reward model learns which numbers are often right, and PPO ends with one of them as its answer to everything."""
    by_problem: dict[int, Texts] = {}
    for row in judged:
        by_problem.setdefault(row["index"], Texts(row["prompt"], row["answer"])).add(row)
    answered = [texts for _, texts in sorted(by_problem.items()) if texts.right]
    generator = random.Random(seed)
    train, held_out = [], []
    for texts in answered:
        others = [right for other in answered if other.answer != texts.answer for right in other.right]
        borrowed = dict.fromkeys(generator.choices(others, k=most + 1)) if others else ()
        kinds = [generator.sample(list(kind), len(kind)) for kind in (texts.wrong, borrowed, texts.cut)]
        in_turn = dict.fromkeys(bad for row in itertools.zip_longest(*kinds) for bad in row if bad is not None)
        found = [
            {"prompt": texts.prompt, "chosen": generator.choice(texts.right), "rejected": bad}
            for bad in itertools.islice(in_turn, most + 1)
        ]
        train += found[:most]
        held_out += found[most:]
    return train, held_out
