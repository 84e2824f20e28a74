"""Mathematical answers: worked cases, GSM8K's own solutions with their own labels, and expressions that have no end."""

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from aligner.config.reward import RewardConfig, RewardKind
from aligner.rewards.child import in_child
from aligner.rewards.maths import MathsVerifier
from aligner.rewards.pool import WorkerPool
from aligner.rewards.source import verifier_spec

GSM8K = Path(os.environ.get("ALIGNER_GSM8K", "/work/shared/data/gsm8k"))


def verifier(*, extract=None, final="any", timeout=60.0, answer_field="answer"):
    return MathsVerifier(answer_field=answer_field, extract=extract, final=final, timeout=timeout)


def score(checked, response, answer):
    sample = {"answer": answer}
    return checked.score(checked.prepare(sample), response, sample)


@pytest.mark.parametrize(
    "answer,response,accuracy",
    [
        ("18", "16 - 3 - 4 = 9, 9 * 2 = \\boxed{18}", 1),
        ("18", "\\boxed{18} dollars, or 20?", 1),
        ("18", "#### 18", 1),
        ("18", "A: $18.00", 1),
        ("18", "18, no, 19", 0),
        (18, "18", 1),
        (0.5, "one half, 1/2", 1),
        ("1000", "it is 1,000.", 1),
        ("50", "she has 50% left", 1),
        ("\\frac{1}{2}", "\\boxed{0.5}", 1),
        ("so 9 * 2 = <<9*2=18>>18\n#### 18", "18", 1),
        ("thus $\\boxed{7}$", "7", 1),
        ("7", "", 0),
    ],
)
def test_numbers(answer, response, accuracy):
    scored = score(verifier(), response, answer)
    assert (scored["reward"], scored["accuracy"], scored["undecided"]) == (accuracy, accuracy, 0.0)
    assert scored["answered"] == float(response != "")


@pytest.mark.parametrize(
    "answer,response,accuracy",
    [
        ("\\frac{\\sqrt{3}}{2}", "so \\boxed{\\frac{1}{2}\\sqrt{3}}", 1),
        ("x^2+2x+1", "\\boxed{(x+1)^2}", 1),
        ("x^2+2x+1", "\\boxed{(x+1)^2+1}", 0),
        ("2", "\\boxed{\\sqrt{4}}", 1),
        ("\\frac{\\pi}{2}", "\\boxed{0.5\\pi}", 1),
        ("\\{1,2\\}", "\\boxed{\\{2,1\\}}", 1),
        ("(1,2)", "\\boxed{(2,1)}", 0),
        ("[0,1)", "the answer is $[0,1)$", 1),
        ("[0,1)", "the answer is $[0,1]$", 0),
        ("\\text{east}", "\\boxed{\\text{east}}", 1),
        ("\\text{east}", "\\boxed{\\text{west}}", 0),
        ("\\sqrt{2}", "\\boxed{\\frac{", 0),
        ("\\sqrt{2}", "I do not know", 0),
    ],
)
def test_expressions(answer, response, accuracy):
    scored = score(verifier(), response, answer)
    assert (scored["accuracy"], scored["undecided"]) == (accuracy, 0.0)


@pytest.fixture(scope="module")
def pool():
    """One worker, with the limits that a job's have; what a comparison may take is half of its timeout."""
    spec = verifier_spec(RewardConfig(kind=RewardKind.maths))
    made = WorkerPool(spec, workers=1, timeout=8.0, memory_mb=1024)
    yield made
    made.close()


def ask(pool, answer, *responses):
    requests = [{"response": r, "sample": {"answer": answer, "ended": True}} for r in responses]
    return pool.submit(requests).result(timeout=200)


def test_answers_that_cannot_be_compared_are_counted_and_cost_neither_job_nor_worker(pool):
    """A tower of powers, a factorial of a factorial, and an expression too long to be tried. The worker that met them goes on."""
    before = pool.pids
    hostile = ("\\boxed{9^{9^{9^{9^9}}}}", "\\boxed{(99999999!)!}", "\\boxed{" + "x+" * 2000 + "x}")
    *scores, last = ask(pool, "\\sqrt{3}", *hostile, "\\boxed{3^{1/2}}")
    assert [(s.error, s.value) for s in scores] == [(None, 0.0)] * 3
    assert scores[0].parts["undecided"] == scores[2].parts["undecided"] == 1.0
    assert (last.value, last.parts["undecided"]) == (1.0, 0.0)
    assert pool.pids == before


def test_what_a_response_evaluates_stays_in_the_child(pool, tmp_path):
    file = tmp_path / "touched"
    code = f"__import__('pathlib').Path('{file}').touch()"
    ask(pool, "\\sqrt{3}", f"\\boxed{{{code}}}", f"${code}$", code)
    assert not file.exists()


def test_a_sample_without_a_right_answer_is_an_error(pool):
    (failed,) = ask(pool, " ", "3")
    assert "the right answer, field answer, is empty" in failed.error


def test_settings_say_where_the_answer_is():
    assert score(verifier(final="boxed"), "#### 18", "18")["answered"] == 0.0
    assert score(verifier(final="hashes"), "\\boxed{1} #### 18", "18")["accuracy"] == 1.0
    assert score(verifier(final="last_number"), "#### 17 or 18", "18")["accuracy"] == 1.0
    assert score(verifier(final="whole"), " 18 ", "18")["accuracy"] == 1.0
    assert score(verifier(final="whole"), "it is 18", "18")["accuracy"] == 0.0
    tags = verifier(extract="<answer>(.*?)</answer>")
    assert score(tags, "18 <answer>17</answer>", "18")["accuracy"] == 0.0
    assert score(tags, "17 <answer>18</answer> 16", "18")["accuracy"] == 1.0
    assert score(tags, "18", "18") == {"reward": 0.0, "accuracy": 0.0, "answered": 0.0, "undecided": 0.0}
    named = verifier(answer_field="gold")
    assert named.score(named.prepare({"gold": "7"}), "7", {})["accuracy"] == 1.0


def test_a_task_has_its_own_answer():
    pytest.importorskip("reasoning_gym")
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 50}
    sample = {"task": "chain_sum", "config": config, "seed": 1234, "index": 0}  # 0 + 1
    checked = verifier()
    assert checked.score(checked.prepare(sample), "0 + 1 = 1", sample)["accuracy"] == 1.0


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not on this machine")
def test_gsm8k_solutions_are_right_for_their_own_question_only():
    """1319 reference solutions: each has its own answer, and none that of the next question where that is another number."""
    lines = (GSM8K / "gsm8k_test.jsonl").read_text().splitlines()
    records, checked = [json.loads(line) for line in lines], verifier()
    assert len(records) == 1319
    for record, following in zip(records, records[1:] + records[:1], strict=True):
        wanted = record["answer"].rsplit("#### ", 1)[1].replace(",", "")
        assert score(checked, f"{record['answer']}", wanted)["accuracy"] == 1.0, record
        assert score(checked, record["answer"].replace("####", "A:"), record["answer"])["accuracy"] == 1.0, record
        other = following["answer"].rsplit("#### ", 1)[1].replace(",", "")
        assert score(checked, record["answer"], other)["accuracy"] == float(wanted == other), record


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not on this machine")
def test_gsm8k_models_are_judged_as_their_authors_did():
    """5276 solutions by four models, with the labels that were published with them."""
    checked, total = verifier(final="last_number"), 0
    for line in (GSM8K / "gsm8k_example_model_solutions.jsonl").read_text().splitlines():
        record = json.loads(line)
        truth = record["ground_truth"].rsplit("A: ", 1)[1]
        for model in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
            said = record[model]
            assert score(checked, said["solution"], truth)["accuracy"] == float(said["is_correct"]), (truth, said)
            total += 1
    assert total == 5276


@pytest.mark.parametrize(
    "work,expected", [(lambda: True, True), (lambda: False, False), (lambda: 1 / 0, None), (lambda: os._exit(0), None)]
)
def test_work_in_a_child(work, expected):
    assert in_child(work, 60.0) is expected


def test_work_that_hangs_is_ended():
    before = set(psutil.Process().children())
    assert in_child(lambda: time.sleep(1000), 0.2) is None
    assert set(psutil.Process().children()) <= before
