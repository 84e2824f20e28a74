"""Verifiers in this process: what a response earns, and what is refused instead of being given 0."""

import pytest

from aligner.rewards.verifiers import FunctionVerifier, TaskVerifier, finite_number, load_function

reasoning_gym = pytest.importorskip("reasoning_gym")
CONFIG = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 50}


def sample(task="chain_sum", config=CONFIG, index=0, ended=True, **more):
    return {"task": task, "config": config, "seed": 1234, "index": index, "ended": ended, **more}


def score(verifier, response, fields):
    return verifier.score(verifier.prepare(fields), response, fields)


def test_first_integer_with_credit_for_form():
    verifier = TaskVerifier(answer="first_integer", format_credit=0.3, allow_eval=False)
    # problem 0 of seed 1234 is 0 + 1
    cases = [
        ("1", True, 1.0, 1.0, 1.0),
        ("1 and 2", True, 1.0, 0.5, 0.0),
        ("1", False, 1.0, 0.5, 0.0),
        ("0 + 1 = 1", True, 0.0, 0.5, 0.0),
        ("9", True, 0.0, 1.0, 1.0),
        ("", False, 0.0, 0.0, 0.0),
    ]
    for response, ended, accuracy, form, well_formed in cases:
        out = score(verifier, response, sample(ended=ended))
        assert out == {
            "reward": pytest.approx(accuracy + 0.3 * form),
            "accuracy": accuracy,
            "format": form,
            "well_formed": well_formed,
        }


def test_the_tasks_own_scorer():
    verifier = TaskVerifier(answer="task", format_credit=0.0, allow_eval=False)
    dataset = reasoning_gym.create_dataset("spell_backward", seed=1234, size=5)
    fields = sample("spell_backward", {"size": 5}, index=3)
    assert score(verifier, f" {dataset[3]['answer']}\n", fields)["reward"] == 1.0
    assert score(verifier, "no", fields)["reward"] < 1.0


def test_another_problem_than_the_senders_is_an_error():
    verifier = TaskVerifier(answer="first_integer", format_credit=0.0, allow_eval=False)
    with pytest.raises(ValueError, match="install the same reasoning-gym on both hosts"):
        verifier.prepare(sample(digest="0" * 16))


@pytest.mark.parametrize(
    "fields,message",
    [
        (
            {"answer": "3", "ended": True},
            r"needs prompts of a task \(data.task\); this sample has the fields \['answer', 'ended'\]",
        ),
        (sample("spell_backward", {"size": 5}), "not an integer: set reward.answer=task"),
        (sample("no_such_task"), "no reasoning-gym task"),
    ],
)
def test_what_cannot_be_scored_raises(fields, message):
    with pytest.raises(ValueError, match=message):
        TaskVerifier(answer="first_integer", format_credit=0.0, allow_eval=False).prepare(fields)


def test_an_unknown_answer_setting_is_refused():
    with pytest.raises(ValueError, match="reward.answer=last"):
        TaskVerifier(answer="last", format_credit=0.0, allow_eval=False)


def test_scorers_that_evaluate_text_need_permission():
    fields = sample("countdown", {"size": 5})
    with pytest.raises(ValueError, match=r"countdown evaluates text .*parse_expr.* reward.allow_eval=true"):
        TaskVerifier(answer="task", format_credit=0.0, allow_eval=False).prepare(fields)
    assert score(TaskVerifier(answer="task", format_credit=0.0, allow_eval=True), "1", fields)["reward"] < 1.0


FUNCTIONS = """
import helper_beside
import math

def number(response, sample): return len(response)
def parts(response, sample): return {"a": 1, "b": 0.5}
def chosen(response, sample): return {"reward": True, "b": 3}
def answer(response, sample): return float(response == sample["answer"])
def nothing(response, sample): return None
def text(response, sample): return "1"
def nan(response, sample): return math.nan
def large(response, sample): return 1e300
def large_part(response, sample): return {"reward": 1, "a": -1e300}
def large_sum(response, sample): return {"a": 3e38, "b": 3e38}
def nested(response, sample): return {"a": {"b": 1}}
def empty(response, sample): return {}
def one_argument(response): return 1
def optional(response, sample, more=3): return more
constant = 3
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "helper_beside.py").write_text("")
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.mark.parametrize(
    "name,expected",
    [
        ("number", {"reward": 3.0}),
        ("parts", {"reward": 1.5, "a": 1.0, "b": 0.5}),
        ("chosen", {"reward": 1.0, "b": 3.0}),
        ("optional", {"reward": 3.0}),
    ],
)
def test_a_function_of_the_users(file, name, expected):
    assert score(FunctionVerifier(f"{file}:{name}"), "abc", {"ended": True}) == expected


def test_a_function_sees_the_answer_of_a_task(file):
    assert score(FunctionVerifier(f"{file}:answer"), "1", sample())["reward"] == 1.0


@pytest.mark.parametrize("name", ["nothing", "text", "nan", "nested", "empty"])
def test_a_result_that_is_no_number_raises(file, name):
    with pytest.raises(TypeError, match=f"mine.py:{name} returned"):
        score(FunctionVerifier(f"{file}:{name}"), "abc", {"ended": True})


@pytest.mark.parametrize(
    "name,message",
    [
        ("large", r"large returned 'reward': 1e\+300; it must return a number that is finite in float32"),
        ("large_part", r"large_part returned 'a': -1e\+300"),
        ("large_sum", r"large_sum returned parts whose sum 6e\+38 is not finite in float32"),
    ],
)
def test_a_result_that_is_infinite_in_float32_raises(file, name, message):
    with pytest.raises(TypeError, match=message):
        score(FunctionVerifier(f"{file}:{name}"), "abc", {"ended": True})


def test_the_largest_float32_is_still_a_number():
    largest = (2 - 2**-23) * 2.0**127
    assert finite_number(largest) == largest and finite_number(-largest) == -largest
    assert finite_number(2.0**128) is None


@pytest.mark.parametrize(
    "function,message",
    [
        ("{file}", "not of the form file.py:name"),
        ("{file}x:number", "there is no file"),
        ("{file}:numbr", "has no function numbr; it has number, parts"),
        ("{file}:constant", "has no function constant"),
        ("{file}:one_argument", r"must take \(response, sample\), takes \(response\)"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused(file, function, message):
    with pytest.raises(ValueError, match=message):
        load_function(function.format(file=file))


def test_a_file_that_does_not_import_is_refused(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_module_at_all")
    with pytest.raises(
        ValueError, match="cannot be imported: ModuleNotFoundError: No module named 'no_such_module_at_all'"
    ):
        load_function(f"{tmp_path}/broken.py:f")


def test_the_length_reward_that_is_shipped(request):
    function = load_function(f"{request.config.rootpath}/conf/tasks/length.py:about_100_characters")
    rewards = [function("x" * n, {})["reward"] for n in (0, 50, 100, 150, 200, 1000)]
    assert rewards == [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
