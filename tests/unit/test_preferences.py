"""Preference files: three kinds of lines, the ids of a rollout, and what is wrong told by file and line."""

import json

import pytest

from aligner.config.groups import Overlong
from aligner.config.preference import Objective, PreferenceConfig
from aligner.config.supervised import SupervisedDataConfig
from aligner.data.preference_rows import load_preferences, preference_row
from aligner.data.preferences import read_preferences
from aligner.data.tokenizer import Tokenizer
from tests.unit.tiny_tokenizer import write_tokenizer

USER = {"role": "user", "content": "2 + 2"}


def said(text):
    return {"role": "assistant", "content": text}


def written(tmp_path, *lines):
    path = tmp_path / "preferences.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(tmp_path, *lines, objective=Objective.pairwise, attributes=()):
    return read_preferences(written(tmp_path, *lines), objective, list(attributes))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


PAIR = {"prompt": "2 + 2", "chosen": "4", "rejected": "5"}


@pytest.mark.parametrize(
    "line",
    [
        PAIR,
        {"messages": [USER], "chosen": "4", "rejected": "5"},
        {"messages": [USER], "chosen": [said("4")], "rejected": "5"},
        {"prompt": "2 + 2", "chosen": [said("4")], "rejected": [said("5")], "note": "kept out"},
        {"chosen": [USER, said("4")], "rejected": [USER, said("5")]},
    ],
)
def test_a_pair_may_be_written_in_many_ways(tmp_path, tokenizer, line):
    found = read(tmp_path, line)[0]
    assert (found.texts, found.ranks, found.margins, found.attributes) == (["4", "5"], [0, 1], [0.0, 0.0], None)
    row, other = (preference_row(r, tokenizer, SupervisedDataConfig()) for r in (found, read(tmp_path, PAIR)[0]))
    assert (row.ids, row.asked, row.prompt) == (other.ids, other.asked, "2 + 2")


def test_rankings_and_margins(tmp_path):
    lines = [
        {**PAIR, "margin": 0.5},
        {"prompt": "a", "responses": ["x", "y", "z"]},
        {"prompt": "a", "responses": ["x", "y", "z"], "ranks": [10**30, -5, -5]},
    ]
    pair, ordered, ranked = read(tmp_path, *lines)
    assert pair.margins == [0.5, 0.0]
    assert (ordered.ranks, ranked.ranks, ranked.texts) == ([0, 1, 2], [1, 0, 0], ["x", "y", "z"])
    assert ranked.origin.endswith("preferences.jsonl:3")


def test_attributes(tmp_path):
    lines = [
        {"prompt": "a", "response": "x", "attributes": {"help": 3, "length": None}},
        {"messages": [USER, said("4")], "attributes": {"help": 1.5}},
        {"messages": [USER], "response": [said("4")], "attributes": {"help": 1.5}},
    ]
    found = read(tmp_path, *lines, objective=Objective.regression, attributes=["help"])
    assert [row.attributes for row in found] == [{"help": 3.0, "length": None}, {"help": 1.5}, {"help": 1.5}]
    assert [row.texts for row in found] == [["x"], ["4"], ["4"]] and found[1].messages == [USER] == found[2].messages


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "is not JSON"),
        ('{"prompt": "a", "prompt": "b"}', "has the key `prompt` more than once"),
        ([1], "is a JSON array, not an object"),
        ({"prompt": "a"}, "it is neither (keys: prompt)"),
        ({**PAIR, "responses": ["a", "b"]}, "it is pair and ranking"),
        ({"prompt": "a", "chosen": "b"}, "lacks `rejected`, and has prompt, chosen"),
        ({**PAIR, "messages": [USER]}, "has both `prompt` and `messages`"),
        ({**PAIR, "chosen": ""}, "`chosen` is empty"),
        ({**PAIR, "rejected": 5}, "`rejected` is a JSON number, not a string"),
        ({**PAIR, "rejected": None}, "`rejected` is a JSON null, not a string"),
        ({**PAIR, "prompt": "  "}, "`prompt` is empty"),
        ({**PAIR, "margin": "big"}, "`margin` is a JSON string, not a number"),
        ({**PAIR, "margin": -1}, "`margin` is -1: it must not be negative"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "margin": NaN}', "holds NaN, which is not JSON"),
        (
            '{"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1e999}',
            "`margin` is no number that float32 holds",
        ),
        ({**PAIR, "margin": 10**400}, "`margin` is no number that float32 holds"),
        ({**PAIR, "margin": True}, "`margin` is a JSON boolean, not a number"),
        ({**PAIR, "ranks": [1, 2]}, "is a line of pair, which has no `ranks`"),
        ({"chosen": "a", "rejected": "b"}, "`chosen` is a text, and there is no `prompt`"),
        ({"chosen": [said("a")], "rejected": [said("b")]}, "`chosen` is the assistant's turn alone, and there is no"),
        ({**PAIR, "chosen": [USER, said("4")]}, "`chosen` is a whole conversation beside a prompt"),
        ({**PAIR, "chosen": [USER]}, "`chosen` must end with the assistant's turn, ends with user"),
        ({**PAIR, "chosen": []}, "`chosen` is empty, not a list of messages"),
        ({**PAIR, "chosen": [{"role": "bot", "content": "4"}]}, '`chosen[0]` has the role "bot"'),
        (
            {"chosen": [USER, said("4")], "rejected": [{"role": "user", "content": "3"}, said("5")]},
            "`chosen` and `rejected` answer different conversations",
        ),
        ({"chosen": [said("?"), said("4")], "rejected": [said("?"), said("5")]}, "must end with the user's turn"),
        (
            {"messages": [USER, said("4")], "chosen": "a", "rejected": "b"},
            "must end with the user's turn, ends with assis",
        ),
        ({"prompt": "a", "responses": ["x"]}, "`responses` must be a list of two responses or more"),
        ({"prompt": "a", "responses": {"x": 1}}, "`responses` must be a list of two responses or more"),
        ({"prompt": "a", "responses": ["x", 1]}, "`responses[1]` is a JSON number, not a string"),
        (
            {"prompt": "a", "responses": ["x", "y"], "ranks": [1]},
            "`ranks` must be 2 whole numbers, one a response, got [1]",
        ),
        ({"prompt": "a", "responses": ["x", "y"], "ranks": [1, 1.5]}, "`ranks` must be 2 whole numbers"),
        ({"prompt": "a", "responses": ["x", "y"], "ranks": [2, 2]}, "`ranks` are all 2: no response is better"),
        ({"prompt": "a", "responses": ["x", "y"], "margin": 1}, "is a line of ranking, which has no `margin`"),
        (
            {"prompt": "a", "response": "x", "attributes": {"help": 1}},
            "is a line of attributes, and preference.objective=pairwise is trained on pair and ranking lines",
        ),
    ],
)
def test_what_is_wrong_is_told_by_file_and_line(tmp_path, line, says):
    with pytest.raises(ValueError) as caught:
        read(tmp_path, PAIR, line)
    assert "1 of 2 lines are malformed" in str(caught.value)
    assert f"{tmp_path}/preferences.jsonl:2: " in str(caught.value) and says in str(caught.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (PAIR, "is a line of pair, and preference.objective=regression is trained on attributes lines"),
        ({"prompt": "a", "response": "x", "attributes": {}}, "`attributes` must be an object of numbers, by name"),
        ({"prompt": "a", "response": "x", "attributes": [1]}, "`attributes` must be an object of numbers, by name"),
        (
            {"prompt": "a", "response": "x", "attributes": {"help": "1"}},
            "`attributes.help` is a JSON string, not a num",
        ),
        (
            {"prompt": "a", "response": "x", "attributes": {"other": 1}},
            "gives none of preference.attributes (help), but other",
        ),
        ({"prompt": "a", "response": "x", "attributes": {"help": None}}, "gives none of preference.attributes (help)"),
        ({"prompt": "a", "attributes": {"help": 1}}, "lacks `response`"),
        (
            {"messages": [USER], "attributes": {"help": 1}},
            "`messages` must end with the assistant's turn, ends with user",
        ),
    ],
)
def test_what_is_wrong_with_attributes(tmp_path, line, says):
    with pytest.raises(ValueError) as caught:
        read(tmp_path, line, objective=Objective.regression, attributes=["help"])
    assert "preferences.jsonl:1: " in str(caught.value) and says in str(caught.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"prompt": "a", "responses": ["x", "y", "z"], "ranks": [1, 2, 2]}, "has two responses of equal rank"),
        ({**PAIR, "margin": 1}, "has a `margin`, which preference.objective=plackett_luce has no place for"),
    ],
)
def test_whole_rankings_have_an_order(tmp_path, line, says):
    with pytest.raises(ValueError, match=says):
        read(tmp_path, line, objective=Objective.plackett_luce)


def test_files_that_are_not_there_or_empty(tmp_path):
    with pytest.raises(ValueError, match="cannot read the preferences .*nowhere.jsonl: No such file"):
        read_preferences(tmp_path / "nowhere.jsonl", Objective.pairwise, [])
    with pytest.raises(ValueError, match="preferences.jsonl is empty: it needs one JSON object a line, with a pair"):
        read(tmp_path)


# Ids


def test_the_ids_are_those_of_a_rollout(tmp_path, tokenizer):
    """The prompt as PPO has it, what the engine would sample, and the end token with which it stops."""
    row = preference_row(read(tmp_path, PAIR)[0], tokenizer, SupervisedDataConfig(system="Be brief."))
    prompt = tokenizer.chat([USER], "Be brief.")
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(row.ids[0], skip_special=False) == f"{text}4<|im_end|>"
    assert [ids[: len(prompt)] for ids in row.ids] == [prompt, prompt]
    assert [tokenizer.decode(ids[len(prompt) : -1]) for ids in row.ids] == ["4", "5"]
    assert {ids[-1] for ids in row.ids} <= set(tokenizer.end_token_ids)


def test_without_a_chat_template_the_text_is_taken_as_it_is(tmp_path):
    how = {"specials": ("<s>", "</s>"), "bos": "<s>", "eos": "</s>", "adds_bos": True, "chat_template": None}
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "tokenizer", **how))
    row = preference_row(read(tmp_path, PAIR)[0], tokenizer, SupervisedDataConfig(chat=False))
    assert [tokenizer.decode(ids, skip_special=False) for ids in row.ids] == ["<s>2 + 24</s>", "<s>2 + 25</s>"]
    conversation = read(tmp_path, {"messages": [USER], "chosen": "a", "rejected": "b"})[0]
    with pytest.raises(ValueError, match="preferences.jsonl:1 is a conversation, which needs data.chat=true"):
        preference_row(conversation, tokenizer, SupervisedDataConfig(chat=False))


LLAMA3 = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
BARE = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"


@pytest.mark.parametrize(
    ("specials", "eos", "template", "end"),
    [
        (("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|endoftext|>", None, "<|im_end|>"),
        (
            ("<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            "<|end_of_text|>",
            LLAMA3,
            "<|eot_id|>",
        ),
        (("<|endoftext|>",), "<|endoftext|>", BARE, "<|endoftext|>"),
    ],
)
def test_the_end_of_a_response_is_the_templates(tmp_path, specials, eos, template, end):
    how = {} if template is None else {"chat_template": template}
    tokenizer = Tokenizer(write_tokenizer(tmp_path, specials=specials, eos=eos, **how))
    assert tokenizer.decode([tokenizer.response_end(chat=True)], skip_special=False) == end
    assert tokenizer.response_end(chat=False) == tokenizer.eos_id


def test_an_end_token_inside_a_response_is_refused(tmp_path, tokenizer):
    line = read(tmp_path, PAIR, {**PAIR, "rejected": "5<|im_end|>"})[1]
    with pytest.raises(ValueError, match=r"preferences.jsonl:2: a response holds the end token '<\|im_end\|>'"):
        preference_row(line, tokenizer, SupervisedDataConfig())


# Splits


def load(path, tokenizer, **data):
    settings = SupervisedDataConfig(train=str(path), **data)
    return load_preferences(settings, PreferenceConfig(), tokenizer=tokenizer, max_held_out=1000)


def test_prompts_are_held_out_and_not_pairs(tmp_path, tokenizer):
    lines = [{**PAIR, "prompt": f"{n // 3} + 1", "rejected": f"{n}"} for n in range(90)]
    rows = load(written(tmp_path, *lines), tokenizer, holdout=0.3)
    train, held = ({row.asked for row in side} for side in (rows.train, rows.held_out))
    assert train and held and not train & held and len(train | held) == 30
    assert len(rows.train) == 3 * len(train) and len(rows.held_out) == 3 * len(held)


def test_prompts_on_both_sides_are_told(tmp_path, tokenizer, caplog):
    path = written(tmp_path, PAIR, {**PAIR, "prompt": "3 + 3"})
    other = tmp_path / "held_out.jsonl"
    other.write_text(json.dumps({**PAIR, "rejected": "6"}) + "\n")
    assert len(load(path, tokenizer, validation=str(other)).held_out) == 1
    assert "1 of 1 held-out rows have prompts that are trained on too" in caplog.text
    assert "1 rows are held out, too few" in caplog.text
    assert load(path, tokenizer).held_out == [] and "no row is held out" in caplog.text


def test_long_rows_are_dropped_or_refused_by_their_longest_response(tmp_path, tokenizer):
    path = written(tmp_path, PAIR, {**PAIR, "rejected": "5" * 100})
    short = len(tokenizer.chat([USER])) + 2
    rows = load(path, tokenizer, max_length=short)
    assert (len(rows.train), rows.dropped) == (1, 1)
    with pytest.raises(ValueError, match=rf"preferences.jsonl:2 \({short + 99}\)"):
        load(path, tokenizer, max_length=short, overlong=Overlong.refuse)
    with pytest.raises(ValueError, match="cannot be cut"):
        load(path, tokenizer, max_length=short, overlong=Overlong.truncate)
