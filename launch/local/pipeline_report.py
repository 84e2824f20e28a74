"""What came of the stages: accuracies with 95 % intervals, differences on the same problems, summary.json and report.html."""

import json
import math
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Sequence

from aligner.runtime.charts import COLOURS
from aligner.runtime.durable import write_durably
from aligner.runtime.progress import duration
from aligner.runtime.report import PAGE

Z = 1.959963984540054  # the normal distribution's 97.5 % quantile
SHOWN = 8
TITLES = {
    "base": "Base model",
    "sft": "Supervised fine-tuning",
    "ppo": "PPO, served critic, reward model",
    "critic_free": "Critic-free RL, verifier",
}


@dataclass(frozen=True)
class Evaluated:
    """The model of one stage. right: of each held-out problem, in order, the answer that was sampled; answers: these; greedy: whether the
    likeliest answer is right. seconds: all that the stage took, evaluation included."""

    name: str
    right: Sequence[bool]
    answers: Sequence[dict[str, Any]]
    seconds: float
    greedy: Sequence[bool]

    @property
    def greedy_accuracy(self) -> float:
        return sum(self.greedy) / len(self.greedy)

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(sum(self.right), len(self.right))


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95 % score interval of a share (Wilson 1927)."""
    p, z2 = successes / n, Z * Z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> tuple[int, int, float]:
    """(problems gained, lost, two-sided exact p-value) of two models on the same problems: gains and losses are a fair coin's tosses where
    the models are equally good (McNemar 1947)."""
    gained = sum(b < a for b, a in zip(before, after, strict=True))
    lost = sum(b > a for b, a in zip(before, after, strict=True))
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1)) / 2**n
    return gained, lost, min(1.0, 2 * tail)


def summary(stages: Sequence[Evaluated]) -> dict[str, Any]:
    """Per stage accuracy, ci95 (low, high), n, seconds, and greedy_accuracy."""
    return {
        stage.name: {
            "accuracy": stage.accuracy,
            "ci95": list(stage.interval),
            "n": len(stage.right),
            "seconds": round(stage.seconds, 1),
            "greedy_accuracy": stage.greedy_accuracy,
        }
        for stage in stages
    }


def write(folder: Path, stages: Sequence[Evaluated], facts: dict[str, str]) -> Path:
    """summary.json and report.html; returns the latter. facts: what else the report says, label by label."""
    write_durably(folder / "summary.json", json.dumps(summary(stages), indent=2).encode() + b"\n")
    parts = [_head(stages), _table(stages), _facts(facts), _answers(stages)]
    page = folder / "report.html"
    page.write_text(PAGE.format(title="Pipeline", body="\n".join(parts)), encoding="utf-8")
    return page


def _head(stages: Sequence[Evaluated]) -> str:
    n = len(stages[0].right)
    return (
        f"<h1>From a base model to an aligned one</h1><p>The same {n} held-out problems, each answered once by the model of each stage "
        "(sampled at temperature 1, as in training), and checked by the task's verifier. Lines are 95 % intervals.</p>"
        f"{_bars(stages)}"
    )


def _bars(stages: Sequence[Evaluated]) -> str:
    height, left, width = 44, 230, 700
    rows = []
    for i, stage in enumerate(stages):
        y, (low, high) = 12 + i * height, stage.interval
        x = [left + share * (width - left - 60) for share in (stage.accuracy, low, high)]
        rows.append(
            f'<text x="0" y="{y + 17}">{escape(TITLES[stage.name])}</text>'
            f'<rect x="{left}" y="{y}" width="{x[0] - left:.1f}" height="24" fill="{COLOURS[i]}"/>'
            f'<line x1="{x[1]:.1f}" x2="{x[2]:.1f}" y1="{y + 12}" y2="{y + 12}" stroke="currentColor" stroke-width="2"/>'
            f'<text x="{x[2] + 8:.1f}" y="{y + 17}">{stage.accuracy:.3f}</text>'
        )
    body = "".join(rows)
    size = f"0 0 {width} {12 + len(stages) * height}"
    return f'<figure><svg viewBox="{size}" role="img" aria-label="Accuracy by stage">{body}</svg></figure>'


def _table(stages: Sequence[Evaluated]) -> str:
    by_name = {stage.name: stage for stage in stages}
    rows = []
    for stage in stages:
        low, high = stage.interval
        against = by_name["base" if stage.name == "sft" else "sft"]
        change = ""
        if stage.name != "base":
            gained, lost, p = mcnemar(against.right, stage.right)
            change = f"{gained} gained, {lost} lost against {against.name}, p = {p:.2g}"
        cells = [
            escape(TITLES[stage.name]),
            f"{stage.accuracy:.3f}",
            f"{low:.3f} to {high:.3f}",
            str(len(stage.right)),
            f"{stage.greedy_accuracy:.3f}",
            change,
            duration(stage.seconds),
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    heads = ("stage", "accuracy", "95 %", "problems", "greedy", "change (McNemar)", "time")
    head = "".join(f"<th align='left'>{name}</th>" for name in heads)
    return f"<table cellpadding='6'><tr>{head}</tr>{''.join(rows)}</table>"


def _facts(facts: dict[str, str]) -> str:
    return "<h2>How</h2><dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items()) + "</dl>"


def _answers(stages: Sequence[Evaluated]) -> str:
    """The first held-out problems (the first, not chosen ones), and what each stage answers."""
    blocks = []
    for at in range(min(SHOWN, len(stages[0].right))):
        cells = "".join(
            f"<div class='card'><div class='note'>{escape(stage.name)}: {'right' if stage.right[at] else 'wrong'}</div>"
            f"<pre>{escape(stage.answers[at]['text'])}</pre></div>"
            for stage in stages
        )
        blocks.append(f"<pre>{escape(stages[0].answers[at]['prompt'])}</pre><div class='cards'>{cells}</div>")
    return f"<h2>The first {len(blocks)} held-out problems</h2>{''.join(blocks)}"
