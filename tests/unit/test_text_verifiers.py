"""Exact match, regular expressions, form, and several verifiers in one, each case written down."""

import pytest

from aligner.config.reward import RewardConfig, RewardKind, RewardPart, reward_name
from aligner.data.batch import Sample
from aligner.rewards.build import build_verifier
from aligner.rewards.source import check_right_answers, verifier_spec
from aligner.rewards.text import ExactVerifier, FormatVerifier, RegexVerifier

TAGS = "<think>{}</think><answer>{}</answer>"


def score(verifier, response, **fields):
    return verifier.score(verifier.prepare(fields), response, fields)


def exact(*, answer_field="answer", extract=None, ignore_case=False):
    return ExactVerifier(answer_field=answer_field, extract=extract, ignore_case=ignore_case)


@pytest.mark.parametrize(
    "response,accuracy",
    [("New York", 1), ("  New\n York ", 1), ("new york", 0), ("New York.", 0), ("It is New York", 0), ("", 0)],
)
def test_exact(response, accuracy):
    assert score(exact(), response, answer="New York ") == {"reward": accuracy, "accuracy": accuracy, "answered": 1.0}


def test_exact_without_regard_to_case_and_forms_of_letters():
    assert score(exact(ignore_case=True), "STRASSE", answer="straße")["reward"] == 1.0
    assert score(exact(), "cafe\u0301", answer="caf\u00e9")["reward"] == 1.0


def test_exact_of_what_is_extracted():
    verifier = exact(extract="<answer>(.*?)</answer>", answer_field="gold")
    assert score(verifier, "well <answer> 7 </answer>", gold=7) == {"reward": 1.0, "accuracy": 1.0, "answered": 1.0}
    assert score(verifier, "7", gold="7") == {"reward": 0.0, "accuracy": 0.0, "answered": 0.0}


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"solution": "7"}, "has no field answer for its right answer, it has solution: set reward.answer_field"),
        ({"answer": "  "}, "field answer, is empty"),
        ({"answer": ["7"]}, r"is \['7'\]: it must be text or a number"),
        ({"answer": True}, "is True: it must be"),
    ],
)
def test_a_sample_without_a_right_answer_is_an_error(fields, message):
    with pytest.raises(ValueError, match=message):
        exact().prepare(fields)
    told = f"1 of 2 prompts cannot be scored by reward.kind=exact:\na.jsonl:2: .*{message}"
    samples = [
        Sample([1], "p", "a.jsonl:1", {"answer": 3}),
        Sample([1], "p", "a.jsonl:2", fields),
    ]
    with pytest.raises(ValueError, match=told):
        check_right_answers(RewardConfig(kind=RewardKind.exact), samples)
    parts = RewardConfig(kind=RewardKind.parts, parts=[RewardPart(kind=RewardKind.exact)])
    with pytest.raises(ValueError, match=told):
        check_right_answers(parts, samples)
    check_right_answers(RewardConfig(kind=RewardKind.regex, pattern="a"), samples)


def test_regex():
    verifier = RegexVerifier(pattern="a.c")
    assert [score(verifier, text)["reward"] for text in ("xabcx", "xa\ncx", "ac", "")] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "response,reward",
    [
        ("<think>a</think><answer>b</answer>", 1),
        (" <think>\na b\n</think>\n\n <answer>b < c</answer>\n", 1),
        ("<think></think><answer>b</answer>", 0),
        ("<think>a</think><answer> </answer>", 0),
        ("<think>a</think><answer>b</answer> and more", 0),
        ("so <think>a</think><answer>b</answer>", 0),
        ("<think>a</think> thus <answer>b</answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a<think>b</think><answer>c</answer>", 0),
        ("<think>a</think>x<answer>q</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b", 0),
        ("<think>a", 0),
        ("", 0),
    ],
)
def test_the_form_of_a_template(response, reward):
    assert score(FormatVerifier(template=TAGS), response) == {"reward": reward}


@pytest.mark.parametrize(
    "template,response,reward",
    [
        ("{} The answer is {}.", "Two and two: The answer is 4.", 1),
        ("{} The answer is {}.", "The answer is 4.", 0),
        ("Answer: {}", "Answer: 4 or so", 1),
        ("Answer: {}", "Answer:", 0),
        ("{} QED", "so it is. QED", 1),
    ],
)
def test_templates_without_tags(template, response, reward):
    assert score(FormatVerifier(template=template), response) == {"reward": reward}


def test_the_form_of_a_pattern_is_of_the_whole_response():
    verifier = FormatVerifier(pattern=r"a.*\d+")
    assert [score(verifier, text)["reward"] for text in (" a\n1 ", "a 1 b", "1")] == [1.0, 0.0, 0.0]


PARTS = [
    RewardPart(kind=RewardKind.exact, weight=2.0, extract="<answer>(.*?)</answer>", answer_field="gold"),
    RewardPart(kind=RewardKind.format, weight=0.5, template=TAGS),
    RewardPart(kind=RewardKind.regex, weight=-1.0, pattern="sorry", name="apology"),
]


@pytest.mark.parametrize(
    "response,reward,accuracy,form,apology",
    [
        ("<think>a</think><answer>7</answer>", 2.5, 1, 1, 0),
        ("<answer>7</answer>", 2.0, 1, 0, 0),
        ("<think>sorry</think><answer>8</answer>", -0.5, 0, 1, 1),
    ],
)
def test_several_verifiers_with_weights(response, reward, accuracy, form, apology):
    spec = verifier_spec(RewardConfig(kind=RewardKind.parts, parts=PARTS)) | {"timeout": 10.0}
    assert score(build_verifier(spec), response, gold="7") == {
        "reward": reward,
        "exact": accuracy,
        "exact/accuracy": accuracy,
        "exact/answered": 1.0,
        "accuracy": accuracy,
        "format": form,
        "apology": apology,
    }


def test_a_reward_model_among_the_parts_is_no_verifier():
    """The verifiers' process gives the rest of the sum; both jobs must name the same parts."""
    parts = [RewardPart(kind=RewardKind.model, weight=0.5, name="taste"), *PARTS[2:]]
    reward = RewardConfig(kind=RewardKind.parts, parts=parts)
    spec = verifier_spec(reward) | {"timeout": 10.0}
    assert score(build_verifier(spec), "sorry") == {"reward": -1.0, "apology": 1.0}
    assert reward_name(reward) == "parts(taste: 0.5 model, apology: -1 regex)" and reward_name(RewardConfig()) == "task"
    with pytest.raises(ValueError, match="model is no verifier"):
        build_verifier(spec | {"kind": "model"})


def test_a_sum_that_is_infinite_in_float32_is_an_error(tmp_path):
    (tmp_path / "mine.py").write_text("def large(response, sample): return 3e38\n")
    part = {"kind": RewardKind.function, "function": f"{tmp_path}/mine.py:large"}
    parts = [RewardPart(**part, name="a"), RewardPart(**part, name="b")]
    spec = verifier_spec(RewardConfig(kind=RewardKind.parts, parts=parts)) | {"timeout": 10.0}
    with pytest.raises(TypeError, match=r"the weighted sum 6e\+38 of .* is not finite in float32"):
        score(build_verifier(spec), "a")


def part(**settings):
    return {"kind": RewardKind.parts, "parts": [RewardPart(**settings)]}


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"pattern": "a"}, "reward.pattern=a needs reward.kind=format or regex, and it is task"),
        ({"kind": RewardKind.regex}, "reward.kind=regex needs reward.pattern"),
        ({"kind": RewardKind.regex, "pattern": "(a"}, r"reward.pattern='\(a' is no regular expression: missing \)"),
        ({"kind": RewardKind.maths, "extract": "[a"}, r"reward.extract='\[a' is no regular expression"),
        ({"kind": RewardKind.format}, "exactly one of reward.template and reward.pattern"),
        ({"kind": RewardKind.format, "template": "a{}", "pattern": "a"}, "exactly one of reward.template and"),
        ({"kind": RewardKind.format, "template": "<a>{x}</a>"}, "has no {}, which stands for some text"),
        ({"kind": RewardKind.format, "template": "<a>{}{}</a>"}, "needs text between one {} and the next"),
        ({"kind": RewardKind.format, "template": "{}"}, "needs text between one {} and the next"),
        ({"kind": RewardKind.format, "template": "<a>{}<a>"}, "has '<a>' twice"),
        ({"kind": RewardKind.parts}, "reward.kind=parts needs reward.parts"),
        ({"parts": [RewardPart()]}, "reward.parts needs reward.kind=parts, and it is task"),
        (part(kind=RewardKind.http), r"reward.parts\[0\].kind=http cannot be a part"),
        (part(kind=RewardKind.model), "reward.parts is a reward model alone: set reward.kind=model instead"),
        (
            {"kind": RewardKind.parts, "parts": [RewardPart(kind=RewardKind.model, name=name) for name in "ab"]},
            "reward.parts has 2 reward models",
        ),
        (part(kind=RewardKind.exact, weight=0.0), r"reward.parts\[0\].weight=0.0 must be a finite number other than 0"),
        (part(kind=RewardKind.exact, name="mean"), r"reward.parts\[0\].name=mean: reward/mean must be"),
        (part(kind=RewardKind.exact, name="a/b"), r"reward.parts\[0\].name=a/b"),
        (part(kind=RewardKind.regex), r"reward.parts\[0\].kind=regex needs reward.parts\[0\].pattern"),
        (part(kind=RewardKind.exact, format_credit=0.3), r"reward.parts\[0\].format_credit=0.3 needs"),
        (
            {"kind": RewardKind.parts, "parts": [RewardPart(kind=RewardKind.exact)] * 2},
            "reward.parts has 2 parts that are logged as reward/exact",
        ),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(ValueError, match=message):
        verifier_spec(RewardConfig(**settings))
