"""report.html of a run, from its folder alone: python -m aligner.runtime.report runs/NAME.

A run that has not ended is reported as far as it got."""

import json
import sys
import time
from html import escape
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

from aligner.runtime.charts import Series, line_chart, stacked_bars
from aligner.runtime.errors import UserError, run_main
from aligner.runtime.metrics import read_jsonl
from aligner.runtime.progress import duration
from aligner.runtime.run_folder import RunFolder

SAMPLES_SHOWN = 8
Row = Mapping[str, Any]

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{ color-scheme: light dark; --soft: #8884; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 0 auto; padding: 1rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.2rem; margin-top: 2rem; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); gap: 1rem; }}
figure, .card {{ margin: 0; padding: .8rem; border: 1px solid var(--soft); border-radius: .5rem; min-width: 0; }}
figcaption {{ font-weight: 600; }} svg {{ width: 100%; height: auto; }} svg text {{ font-size: 12px; fill: currentColor; }}
.grid {{ stroke: var(--soft); }} .legend {{ font-size: .8rem; }} .key {{ margin-right: .8rem; white-space: nowrap; }}
.key i {{ display: inline-block; width: .7rem; height: .7rem; margin-right: .3rem; border-radius: 2px; }}
.big {{ font-size: 1.6rem; font-weight: 700; }} .note {{ font-size: .85rem; opacity: .8; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; margin: .3rem 0; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 0 .8rem; margin: 0; overflow-wrap: anywhere; }} dd {{ margin: 0; }}
</style></head><body>{body}</body></html>
"""


def write_report(folder: Path) -> Path:
    """Write report.html of a run's folder and return its path. UserError where there is no such folder."""
    if not folder.is_dir():
        raise UserError(f"there is no run folder {folder}: give the path of a run, for example runs/demo")
    run = RunFolder(folder)
    rows = read_jsonl(run.metrics)
    parts = [_head(run, rows), _jobs(run), _charts(rows), _calibration(run), _samples(run), _settings(run)]
    run.report.write_text(PAGE.format(title=escape(f"Run {folder.name}"), body="\n".join(parts)), encoding="utf-8")
    return run.report


def points(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
    """(step, value) of the rows that have the key."""
    return [(row["step"], row[key]) for row in rows if key in row]


def _card(label: str, value: str, note: str = "") -> str:
    small = f"<div class='note'>{escape(note)}</div>" if note else ""
    return f"<div class='card'>{escape(label)}<div class='big'>{escape(value)}</div>{small}</div>"


def _head(run: RunFolder, rows: Sequence[Row]) -> str:
    title = f"<h1>Run {escape(run.path.name)}</h1>"
    if not rows:
        return f"{title}<p>No step has ended yet.</p>"
    seconds = sum(row.get("time/step", 0.0) for row in rows)
    cards = [_card("Steps", str(rows[-1]["step"]), f"{duration(seconds)} of training and validation")]
    cards += [
        _change(rows, "val/accuracy", "Held-out accuracy"),
        _change(rows, "val/well_formed", "Well-formed answers, held out"),
    ]
    cards += [_change(rows, "val/reward", "Held-out reward"), _change(rows, "reward/mean", "Training reward")]
    cards += [_change(rows, "val/loss", "Held-out loss"), _change(rows, "val/perplexity", "Held-out perplexity")]
    return f"{title}<div class='cards'>{''.join(cards)}</div>"


def _change(rows: Sequence[Row], key: str, label: str) -> str:
    """First and last value of a metric, with its confidence interval where there is one; "" where it was never measured."""
    measured = [row for row in rows if key in row]
    if not measured:
        return ""
    first, last = measured[0], measured[-1]
    band = f"{key}_ci95"
    known = ("", "") if band not in last else (f" ± {first[band]:.2f}", f" ± {last[band]:.2f}")
    prompts = f", {last['val/count']:.0f} prompts" if key.startswith("val/") and "val/count" in last else ""
    note = f"step {first['step']}{known[0]} and step {last['step']}{known[1]}{' (95 %)' if known[0] else ''}{prompts}"
    return _card(label, f"{first[key]:.3f} → {last[key]:.3f}", note)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where the file is absent or being written."""
    try:
        found = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    return ", ".join(map(_plain, value)) if isinstance(value, list) else str(value)


def _facts(facts: Mapping[str, Any]) -> str:
    shown = {key: value for key, value in facts.items() if "token" not in key or "tokenizer" in key}
    return (
        "<dl>"
        + "".join(f"<dt>{escape(key)}</dt><dd>{escape(_plain(value))}</dd>" for key, value in shown.items())
        + "</dl>"
    )


def _jobs(run: RunFolder) -> str:
    """What each job said of itself, and where it serves. An endpoint file goes with its job; the record stays."""
    names: dict[str, dict[str, Any]] = {"actor": {}}
    names |= {path.stem.removeprefix("run_"): {} for path in sorted(run.path.glob("run_*.json"))}
    names |= {path.stem: _read_json(path) for path in sorted(run.endpoints.glob("*.json"))}
    cards = []
    for name, endpoint in names.items():
        facts = {**_read_json(run.record(name)), **endpoint}
        if isinstance(facts.get("started"), float):  # an endpoint file has seconds since the epoch
            facts["started"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts["started"]))
        if facts:
            cards.append(f"<div class='card'><b>{escape(name)} job</b>{_facts(facts)}</div>")
    return f"<h2>Jobs</h2><div class='cards'>{''.join(cards)}</div>" if cards else ""


def _charts(rows: Sequence[Row]) -> str:
    def series(key: str, label: str, shown: Optional[Sequence[Row]] = None) -> Series:
        return Series(label, points(rows if shown is None else shown, key))

    banded = [row for row in rows if "val/accuracy" in row and "val/accuracy_ci95" in row]
    accuracy = Series("accuracy ± 95 %", points(banded, "val/accuracy"), [row["val/accuracy_ci95"] for row in banded])
    if not banded:
        accuracy = series("val/accuracy", "accuracy")
    charts = [
        line_chart("Reward", [series("reward/mean", "training, sampled"), series("val/reward", "held out, greedy")]),
        line_chart("Held-out accuracy", [accuracy, series("val/well_formed", "well-formed answers")]),
        line_chart(
            "Accuracy in training (sampled)",
            [series("reward/accuracy", "accuracy"), series("reward/well_formed", "well formed")],
        ),
        line_chart("Loss", [series("train/loss", "training"), series("val/loss", "held out")]),
        line_chart("Held-out perplexity", [series("val/perplexity", "exp of the held-out loss")]),
        line_chart(
            "Share of tokens that were the likeliest",
            [series("train/token_accuracy", "training"), series("val/token_accuracy", "held out")],
        ),
        line_chart(
            "Margin of the better response", [series("train/margin", "training"), series("val/margin", "held out")]
        ),
        line_chart("KL to the reference, per token", [series("kl/mean", "mean of k1")]),
        line_chart("KL to the reference, per sequence", [series("kl/sequence", "mean of sums")]),
        line_chart(
            "Groups of equal scores", [series("groups/equal", "trained on"), series("sampling/equal", "sampled")]
        ),
        line_chart(
            "Response length (tokens)",
            [series("response/length", "training"), series("val/response_length", "held out")],
        ),
        line_chart(
            "Critic's explained variance", [series("critic/explained_variance", "before the update, against returns")]
        ),
        line_chart("Tokens per second", [series("tokens_per_second", "prompt and response tokens")]),
        _time_chart(rows),
    ]
    drawn = "".join(chart for chart in charts if chart)
    return f"<h2>Curves</h2><div class='cards'>{drawn}</div>" if drawn else ""


def _time_chart(rows: Sequence[Row]) -> str:
    rows = [row for row in rows if "time/step" in row]
    phases = {key for row in rows for key in row if key.startswith("time/") and key != "time/step"}
    totals = {key: sum(row.get(key, 0.0) for row in rows) for key in phases}
    ordered = sorted((key for key in phases if totals[key] > 0), key=lambda key: -totals[key])
    parts = {
        f"{key.removeprefix('time/')} ({totals[key]:.1f} s in all)": [row.get(key, 0.0) for row in rows]
        for key in ordered
    }
    return stacked_bars("Seconds per phase", [row["step"] for row in rows], parts)


def _calibration(run: RunFolder) -> str:
    """A reward model's reliability table, where the run has one."""
    table = _read_json(run.calibration)
    if not table.get("bins"):
        return ""
    head = "".join(
        f"<th>{name}</th>" for name in ("probability of the predicted order", "comparisons", "mean", "right")
    )
    rows = "".join(
        f"<tr><td>{b['low']:.2f} to {b['high']:.2f}</td><td>{b['weight']:.0f}</td><td>{b['confidence']:.3f}</td>"
        f"<td>{b['accuracy']:.3f}</td></tr>"
        for b in table["bins"]
    )
    error = f"expected calibration error {table['expected_calibration_error']:.3f}, after {table['updates']} updates"
    return f"<h2>Calibration on held-out comparisons</h2><p>{error}</p><table><tr>{head}</tr>{rows}</table>"


def _sample_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("step_*.jsonl"), key=lambda path: int(path.stem.removeprefix("step_")))


def _samples(run: RunFolder) -> str:
    """The first held-out prompts (the first, not chosen ones) with the responses of the first and last validation; training
    samples where nothing was validated."""
    held_out = _sample_files(run.validation(0).parent)
    files = held_out or _sample_files(run.rollouts(0).parent)
    if not files:
        return ""
    before, last_rows = read_jsonl(files[0])[:SAMPLES_SHOWN], read_jsonl(files[-1])
    steps = [path.stem.removeprefix("step_") for path in (files[0], files[-1])]
    if held_out:
        by_id = {row["sample_id"]: row for row in last_rows}
        pairs = [(row, by_id[row["sample_id"]]) for row in before if row["sample_id"] in by_id]
        blocks = "".join(
            f"<h3 class='note'>{_prompt(first)}</h3><div class='cards'>"
            f"{_response(first, f'after step {steps[0]}')}{_response(last, f'after step {steps[1]}')}</div>"
            for first, last in pairs
        )
        return f"<h2>The first {len(pairs)} held-out prompts, before and after</h2>{blocks}"
    shown = [(row, steps[0]) for row in before] + [
        (row, steps[1]) for row in last_rows[:SAMPLES_SHOWN] if files[-1] != files[0]
    ]
    cards = "".join(
        f"<div><h3 class='note'>{_prompt(row)}</h3>{_response(row, f'in step {step}')}</div>" for row, step in shown
    )
    return f"<h2>The first training samples of the first and last step</h2><div class='cards'>{cards}</div>"


def _prompt(row: Row) -> str:
    return f"{escape(str(row.get('origin', '')))}<pre>{escape(str(row.get('prompt', '')))}</pre>"


def _response(row: Row, when: str) -> str:
    parts = "".join(f", {name} {value:.3g}" for name, value in (row.get("parts") or {}).items())
    rank = f"rank {row['rank']}" if "rank" in row else ""
    score = f"score {row['score']:.3g}{parts}" if "score" in row else ""
    ended = f"ended by {row['finish_reason']}" if "finish_reason" in row else ""
    label = f"{when}: " + "; ".join(filter(None, [", ".join(filter(None, [score, rank])), ended]))
    return f"<div class='card'><div class='note'>{escape(label)}</div><pre>{escape(str(row.get('response', '')))}</pre></div>"


def _settings(run: RunFolder) -> str:
    jobs = ["actor", *sorted(path.stem.removeprefix("config_") for path in run.path.glob("config_*.yaml"))]
    found = [(job, run.config(job)) for job in jobs if run.config(job).exists()]
    blocks = "".join(
        f"<details><summary>{job} job</summary><pre>{escape(path.read_text())}</pre></details>" for job, path in found
    )
    return f"<h2>Settings</h2>{blocks}" if blocks else ""


def main() -> int:
    if len(sys.argv) != 2:
        raise UserError("usage: python -m aligner.runtime.report runs/NAME")
    print(write_report(Path(sys.argv[1])))
    return 0


if __name__ == "__main__":
    run_main(main)
