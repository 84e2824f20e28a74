"""report.html stands alone, shows what the folder holds, and escapes it."""

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from aligner.runtime.charts import Series, line_chart, nice_ticks, stacked_bars, tick_label
from aligner.runtime.errors import UserError
from aligner.runtime.report import write_report
from aligner.runtime.run_folder import RunFolder

VOID = {"meta", "br"}


class Outline(HTMLParser):
    """Checks that tags close in order; collects the text and what would be fetched."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.fetched = [], [], []

    def handle_starttag(self, tag, attrs):
        self.fetched += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def outline(path: Path) -> Outline:
    parsed = Outline()
    parsed.feed(path.read_text(encoding="utf-8"))
    assert parsed.open == []
    assert parsed.fetched == []
    return parsed


def metrics(step: int) -> dict:
    row = {
        "step": step,
        "reward/mean": 0.2 + step / 10,
        "kl/mean": 0.01 * step,
        "response/length": 5.0,
        "critic/explained_variance": -0.5 + step / 4,
        "tokens_per_second": 500.0,
        "time/generate": 2.0,
        "time/train": 3.0,
        "time/other": 0.5,
        "time/step": 5.5,
    }
    if step % 2 == 0:
        row |= {"val/accuracy": step / 8, "val/accuracy_ci95": 0.1, "val/well_formed": 0.5, "val/count": 60.0}
    return row


def sample(number: int, response: str) -> dict:
    return {
        "sample_id": number,
        "origin": f"chain_sum:{number}",
        "prompt": f"What is {number} < 3 & 4?",
        "response": response,
        "score": 0.5,
        "parts": {"accuracy": 0.0},
        "finish_reason": "stop",
    }


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "de<mo>")
    folder.path.mkdir()
    return folder


def test_a_whole_run(run):
    run.metrics.write_text("".join(json.dumps(metrics(step)) + "\n" for step in range(5)))
    run.write_samples(run.validation(0), [sample(i, "<script>alert(1)</script>") for i in range(20)])
    run.write_samples(run.validation(10), [sample(i, f"after {i}") for i in reversed(range(20))])
    run.write_samples(run.validation(2), [sample(i, "in between") for i in range(20)])
    run.write_record("actor", pid=4711, grid={"tensor": 1, "data": 2})
    run.endpoints.mkdir()
    endpoint = {"host": "127.0.0.1", "port": 8765, "pid": 4712, "token": "hidden", "grid": {"tensor": 2}}
    endpoint["started"] = time.mktime((2026, 5, 17, 9, 8, 7, 0, 0, -1))
    (run.endpoints / "critic.json").write_text(json.dumps(endpoint))
    run.write_config("actor", "ppo:\n  clip: 0.2\n")
    path = write_report(run.path)
    assert path == run.path / "report.html"
    html = path.read_text(encoding="utf-8")
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    text = " ".join(" ".join(outline(path).text).split())
    for shown in (
        "Run de<mo>",
        "4711",
        "4712",
        "8765",
        "2026-05-17 09:08:07",
        "tensor 1, data 2",
        "0.000 → 0.500",
        "step 0 ± 0.10 and step 4 ± 0.10 (95 %), 60 prompts",
        "What is 0 < 3 & 4?",
        "after 7",
        "clip: 0.2",
        "train (15.0 s in all)",
        "first 8 held-out prompts",
    ):
        assert shown in text, shown
    for hidden in ("hidden", "after 8", "in between"):
        assert hidden not in text
    assert html.count("<svg") == 7
    assert 'name="viewport"' in html


def test_a_run_that_has_just_begun(run):
    assert "No step has ended yet" in " ".join(outline(write_report(run.path)).text)


def test_a_killed_run_without_validation(run):
    run.metrics.write_text(json.dumps({"step": 1, "reward/mean": 0.5, "time/step": 1.0}) + '\n{"step": 2, "rew')
    run.write_samples(run.rollouts(1), [sample(1, "only")])
    run.endpoints.mkdir()
    (run.endpoints / "critic.json").write_text('{"host": ')
    text = " ".join(outline(write_report(run.path)).text)
    assert "only" in text
    assert "training samples" in text
    assert "Held-out" not in text


def test_no_folder_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="there is no run folder"):
        write_report(tmp_path / "absent")


# Charts


def svg(figure: str) -> ElementTree.Element:
    return ElementTree.fromstring(re.search(r"<svg.*</svg>", figure, re.DOTALL).group())


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.5, 1.0]),
        (0, 10, [0, 5, 10]),
        (-0.3, 0.55, [-0.5, 0, 0.5, 1.0]),
        (3, 3, [3, 4]),
        (0, 0, [0, 0.5, 1.0]),
    ],
)
def test_ticks_are_round_and_enclose_the_data(low, high, ticks):
    found = nice_ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    assert found == pytest.approx(ticks) or len(found) <= 7


def test_labels():
    assert [tick_label(v) for v in (0.0, 0.25, 1500, 2e7, 1e-5, -0.5)] == [
        "0",
        "0.25",
        "1500",
        "2e+07",
        "1e-05",
        "-0.5",
    ]


def test_a_line_goes_where_the_values_are():
    """The highest value is drawn highest, the last furthest right, and the band encloses the line."""
    drawing = svg(line_chart("a & b", [Series("x", [(0, 1.0), (1, 3.0), (2, 2.0)], [0.5, 0.5, 0.5])]))
    line = [tuple(map(float, p.split(","))) for p in drawing.find("polyline").get("points").split()]
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    assert min(line, key=lambda p: p[1]) == line[1]
    band = [tuple(map(float, p.split(","))) for p in drawing.find("polygon").get("points").split()]
    assert len(band) == 6
    assert all(band[i][1] < line[i][1] < band[5 - i][1] for i in range(3))


def test_bars_are_as_high_as_their_parts():
    drawing = svg(stacked_bars("t", [1, 2], {"a": [1.0, 2.0], "b": [1.0, 0.0]}))
    bars = [(float(r.get("x")), float(r.get("y")), float(r.get("height"))) for r in drawing.findall("rect")]
    first_a, second_a, first_b = bars
    assert first_a[2] == pytest.approx(first_b[2], abs=0.2)
    assert second_a[2] == pytest.approx(2 * first_a[2], abs=0.2)
    assert first_b[1] + first_b[2] == pytest.approx(first_a[1], abs=0.2)  # b stands on a
    assert first_a[0] == first_b[0] < second_a[0]


def test_nothing_to_draw_is_nothing():
    assert line_chart("x", [Series("a", [])]) == stacked_bars("x", [], {}) == stacked_bars("x", [1], {}) == ""
    assert svg(line_chart("x", [Series("a", [(7, 0.0)])])) is not None  # one point of a flat line
