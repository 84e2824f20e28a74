"""What came of the stages: accuracies with 95 % intervals, differences on the same problems, summary.json and report.html."""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, Optional, Sequence

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
    """The model of one stage. sampled, greedy: its judged answers to the held-out problems (pipeline_data.py): one or more sampled ones
    each, and the likeliest one. seconds: all that the stage took, evaluation included."""

    name: str
    sampled: Sequence[dict[str, Any]]
    greedy: Sequence[dict[str, Any]]
    seconds: float

    @cached_property
    def right(self) -> list[float]:
        """Of each problem the share of its sampled answers that are right."""
        return shares(self.sampled)

    @property
    def greedy_accuracy(self) -> float:
        return sum(shares(self.greedy)) / len(self.greedy)

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)

    @property
    def interval(self) -> tuple[float, float]:
        """Of 95 %, over problems. Answers to one problem are alike, so they count as the number of independent ones that would have the
        same variance (Korn and Graubard 1998)."""
        p, n = self.accuracy, len(self.right)
        error = _standard_error(self.right)
        return wilson(p, p * (1 - p) / error**2 if error else n)


def shares(judged: Sequence[dict[str, Any]]) -> list[float]:
    """Of each problem (`index`, from 0 on) the share of its answers that are right."""
    by_problem: dict[int, list[bool]] = {}
    for row in judged:
        by_problem.setdefault(row["index"], []).append(row["right"])
    return [sum(right) / len(right) for _, right in sorted(by_problem.items())]


def wilson(p: float, n: float) -> tuple[float, float]:
    """95 % score interval of a share p of n (Wilson 1927)."""
    z2 = Z * Z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def change(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high): by how much two models differ on the same problems, with the paired 95 % interval over problems."""
    differences = [a - b for b, a in zip(before, after, strict=True)]
    mean, half = sum(differences) / len(differences), Z * _standard_error(differences)
    return mean, mean - half, mean + half


def _standard_error(values: Sequence[float]) -> float:
    """Of their mean, by the variance of the values themselves: with one answer a problem, `interval` is Wilson's."""
    n, mean = len(values), sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values)) / n


def before(stage: Evaluated, stages: Sequence[Evaluated]) -> Optional[Evaluated]:
    """The stage that this one started from."""
    name = {"base": None, "sft": "base"}.get(stage.name, "sft")
    return next((other for other in stages if other.name == name), None)


def summary(stages: Sequence[Evaluated]) -> dict[str, Any]:
    """Per stage accuracy, ci95 (low, high), n (problems), seconds, and greedy_accuracy; and, against the stage that it started from,
    change and change_ci95."""
    return {stage.name: _summary(stage, before(stage, stages)) for stage in stages}


def _summary(stage: Evaluated, earlier: Optional[Evaluated]) -> dict[str, Any]:
    told = {
        "accuracy": stage.accuracy,
        "ci95": list(stage.interval),
        "n": len(stage.right),
        "seconds": round(stage.seconds, 1),
        "greedy_accuracy": stage.greedy_accuracy,
    }
    if earlier is not None:
        mean, *interval = change(earlier.right, stage.right)
        told |= {"change": mean, "change_ci95": interval}
    return told


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
        f"<h1>From a base model to an aligned one</h1><p>The same {n} held-out problems, answered by the model of each stage (sampled at "
        "temperature 1, as in training), and checked by the task's verifier. Lines are 95 % intervals.</p>"
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
    rows = []
    for stage in stages:
        (low, high), earlier = stage.interval, before(stage, stages)
        cells = [
            escape(TITLES[stage.name]),
            f"{stage.accuracy:.3f}",
            f"{low:.3f} to {high:.3f}",
            str(len(stage.right)),
            f"{stage.greedy_accuracy:.3f}",
            "" if earlier is None else _change(earlier, stage),
            duration(stage.seconds),
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    heads = ("stage", "accuracy", "95 %", "problems", "greedy", "change on the same problems (95 %)", "time")
    head = "".join(f"<th align='left'>{name}</th>" for name in heads)
    return f"<table cellpadding='6'><tr>{head}</tr>{''.join(rows)}</table>"


def _change(earlier: Evaluated, stage: Evaluated) -> str:
    mean, low, high = change(earlier.right, stage.right)
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f}) against {earlier.name}"


def _facts(facts: dict[str, str]) -> str:
    return "<h2>How</h2><dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items()) + "</dl>"


def _answers(stages: Sequence[Evaluated]) -> str:
    """The first held-out problems (the first, not chosen ones), and the likeliest answer of each stage."""
    blocks = []
    for rows in list(zip(*(stage.greedy for stage in stages), strict=True))[:SHOWN]:
        cells = "".join(
            f"<div class='card'><div class='note'>{escape(stage.name)}: {'right' if row['right'] else 'wrong'}</div>"
            f"<pre>{escape(row['text'])}</pre></div>"
            for stage, row in zip(stages, rows, strict=True)
        )
        blocks.append(f"<pre>{escape(rows[0]['prompt'])}</pre><div class='cards'>{cells}</div>")
    return f"<h2>The likeliest answers to the first {len(blocks)} held-out problems</h2>{''.join(blocks)}"
