"""What launch/local/pipeline.py writes between its stages and at the end. Its stages themselves: tests/jobs/test_pipeline.py."""

import importlib
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from aligner.config.groups import DataConfig
from aligner.config.reward import RewardConfig
from aligner.data.tasks import operands

LOCAL = Path(__file__).resolve().parents[2] / "launch" / "local"


@pytest.fixture(scope="module")
def modules():
    sys.path.insert(0, str(LOCAL))
    yield [importlib.import_module(name) for name in ("pipeline_data", "pipeline_report", "pipeline")]
    sys.path.remove(str(LOCAL))


@pytest.fixture
def data(modules):
    return modules[0]


@pytest.fixture
def report(modules):
    return modules[1]


# Newcombe, Two-sided confidence intervals for the single proportion (1998), table I, method 3
@pytest.mark.parametrize(
    "k,n,low,high",
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_intervals(report, k, n, low, high):
    assert report.wilson(k / n, n) == pytest.approx((low, high), abs=5e-5)


def test_answers_to_one_problem_count_as_what_they_tell(report):
    """Alike, they are one answer; independent, they are as many as there are."""
    alike = [judged_row(i, "", i < 30) for i in range(100) for _ in range(4)]
    assert evaluated(report, alike).interval == pytest.approx(
        report.wilson(0.3, 100), rel=6e-3
    )  # its variance by n - 1
    generator = random.Random(0)
    apart = [judged_row(i, "", generator.random() < 0.3) for i in range(4000) for _ in range(4)]
    found = evaluated(report, apart)
    assert found.interval == pytest.approx(report.wilson(found.accuracy, 16000), rel=6e-3)
    assert evaluated(report, [judged_row(i, "", False) for i in range(20)]).interval == report.wilson(0.0, 20)


def test_changes_are_of_the_same_problems(report):
    """By hand: differences 1, 0, 0, -0.5, 0.5 have mean 0.2 and deviation 0.5099."""
    mean, low, high = report.change([0.0, 0.5, 1.0, 1.0, 0.5], [1.0, 0.5, 1.0, 0.5, 1.0])
    assert mean == pytest.approx(0.2) and (high - low) / 2 == pytest.approx(1.95996 * 0.509902 / 5**0.5, rel=1e-5)


def judged_row(index, text, right, finish="stop"):
    row = {"index": index, "prompt": f"p{index}", "text": text, "finish_reason": finish}
    return {**row, "answer": str(ANSWERS.get(index)), "right": right}


ANSWERS = dict(enumerate((7, 3, 9, 5, 7)))


def evaluated(report, rows, name="sft"):
    return report.Evaluated(name, rows, rows, 61.0)


def test_pairs_are_of_different_answers_to_one_problem_and_what_was_cut_is_never_chosen(data):
    rows = [
        judged_row(0, " 7", True),
        judged_row(0, " 7", True),
        judged_row(0, " 8", False),
        judged_row(0, " 7 is", True, "length"),
        judged_row(0, " ", False),
        judged_row(1, " 3", True),
        judged_row(1, " I am", False, "length"),
        judged_row(2, " 3", False),
        *(judged_row(3, f" {n}", n == 5) for n in range(6)),
    ]
    train, held_out = data.pairs(rows, most=3, seed=1)
    # In turn a wrong answer, another problem's, one that was cut.
    assert train[0] == {"prompt": "p0", "chosen": " 7", "rejected": " 8"}
    assert train[1]["rejected"] in (" 3", " 5") and train[2]["rejected"] == " 7 is"
    by_prompt = {f"p{n}": [row for row in train + held_out if row["prompt"] == f"p{n}"] for n in range(5)}
    assert {name: len(rows) for name, rows in by_prompt.items()} == {"p0": 4, "p1": 3, "p2": 0, "p3": 4, "p4": 0}
    assert all(len({row["rejected"] for row in rows}) == len(rows) for rows in by_prompt.values())
    assert {row["chosen"] for row in by_prompt["p3"]} == {" 5"} and len(held_out) == 2
    assert data.pairs(rows, most=3, seed=1) == (train, held_out)


def test_an_answer_that_another_problem_lends_is_not_right_here(data):
    rows = [judged_row(index, f" {ANSWERS[index]}", True) for index in (0, 3, 4)]
    train, held_out = data.pairs(rows, most=2, seed=1)  # problems 0 and 4 have the same answer
    assert held_out == []
    assert [(row["prompt"], row["rejected"]) for row in train] == [("p0", " 5"), ("p3", " 7"), ("p4", " 5")]


SETTINGS = DataConfig(
    task="chain_sum",
    task_config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    task_key="operands",
    task_size=300,
    template="What is {expression}? Answer:",
)


def test_no_problem_is_on_two_sides(data, tmp_path):
    pytest.importorskip("reasoning_gym")
    data.write_problems(tmp_path, SETTINGS, seed=3, sizes=data.Sizes(demonstrations=20, pair_problems=30, held_out=40))
    read = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("demonstrations", "pair_prompts", "held_out")
    }
    assert {name: len(rows) for name, rows in read.items()} == {
        "demonstrations": 20,
        "pair_prompts": 30,
        "held_out": 40,
    }
    for row in read["demonstrations"]:
        expression = row["prompt"].removeprefix("What is ").removesuffix("? Answer:")
        assert row["completion"] == f" {eval(expression)}"
    keys = {name: {operands(row["prompt"]) for row in rows} for name, rows in read.items()}
    assert not keys["held_out"] & (keys["demonstrations"] | keys["pair_prompts"])
    prompts = [row["prompt"] for rows in read.values() for row in rows]
    assert len(set(prompts)) == len(prompts)
    answers = tmp_path / "answers.jsonl"
    told = [(row["problem"]["answer"], "stop") for row in read["held_out"][:2]] + [("100000", "stop"), ("", "length")]
    rows = [{"index": i, "prompt": "p", "text": text, "finish_reason": end} for i, (text, end) in enumerate(told)]
    data.write_lines(answers, rows)
    judged = data.judge(tmp_path / "held_out.jsonl", answers, RewardConfig())
    assert [row["right"] for row in judged] == [True, True, False, False]
    with pytest.raises(ValueError, match="and 9000 and 10 are needed: raise data.task_size"):
        data.write_problems(tmp_path, SETTINGS, seed=3, sizes=data.Sizes(1000, 8000, 10))


def test_the_report_compares_the_stages(report, tmp_path):
    right = {"base": [0, 0, 1, 0], "sft": [0, 1, 1, 0], "ppo": [1, 1, 1, 0], "critic_free": [1, 1, 1, 1]}
    stages = [
        evaluated(report, [judged_row(i, f" {i}<", bool(r)) for i, r in enumerate(rights)], name)
        for name, rights in right.items()
    ]
    page = report.write(tmp_path, stages, {"task": "sums"}).read_text()
    told = json.loads((tmp_path / "summary.json").read_text())
    assert {name: (entry["accuracy"], entry["n"], entry["seconds"]) for name, entry in told.items()} == {
        "base": (0.25, 4, 61.0),
        "sft": (0.5, 4, 61.0),
        "ppo": (0.75, 4, 61.0),
        "critic_free": (1.0, 4, 61.0),
    }
    assert told["sft"]["ci95"] == pytest.approx([0.15, 0.85], abs=5e-4)
    assert told["ppo"]["change"] == 0.25 and "change" not in told["base"]
    assert (
        "+0.250 (-0.174 to +0.674) against sft" in page
        and "against base" in page
        and "<dd>sums</dd>" in page
        and " 3&lt;" in page
    )


def test_a_stage_that_is_complete_is_not_repeated_and_time_adds_up(modules, tmp_path, monkeypatch, capsys):
    pipeline = modules[2]
    made = pipeline.Pipeline.__new__(pipeline.Pipeline)
    made.folder, made.record, runs, fails = tmp_path, tmp_path / "stages.json", [], [True]

    def second():
        runs.append("b")
        if fails.pop():
            raise pipeline.UserError("broken")

    stages = [pipeline.Stage("a", "first", lambda: runs.append("a")), pipeline.Stage("b", "second", second)]
    monkeypatch.setattr(made, "stages", lambda: iter(stages), raising=False)
    monkeypatch.setattr(made, "report", lambda: runs.append("report"), raising=False)
    clock = iter([0.0, 5.0, 10.0, 17.0, 20.0, 24.0])
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with pytest.raises(pipeline.UserError, match="broken"):
        made.run()
    assert made.read_record()["b"] == {"seconds": 7.0, "complete": False}
    fails.append(False)
    made.run()
    made.run()
    assert runs == ["a", "b", "b", "report", "report"]
    assert made.read_record() == {"a": {"seconds": 5.0, "complete": True}, "b": {"seconds": 11.0, "complete": True}}
    assert "[2/2] second: complete (0:11)" in capsys.readouterr().out


def test_one_pipeline_a_folder(modules, tmp_path):
    pipeline = modules[2]
    with (
        pipeline.alone(tmp_path),
        pytest.raises(pipeline.UserError, match="another pipeline works in"),
        pipeline.alone(tmp_path),
    ):
        pass
