"""Every malformed form of a prompt file becomes a sentence with file and line; templates, chat and the length limit."""

import json

import pytest

from aligner.config.groups import DataConfig, Overlong
from aligner.data.prompts import read_prompts
from aligner.data.splits import fill_template, load_splits
from aligner.data.tokenizer import Tokenizer
from tests.unit.tiny_tokenizer import write_tokenizer

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def write(tmp_path, *lines, end="\n", name="prompts.jsonl"):
    """A file of the given lines: bytes and text as they are, anything else as JSON."""
    as_bytes = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    path = tmp_path / name
    path.write_bytes(b"\n".join(as_bytes) + end.encode())
    return path


def test_good_lines(tmp_path):
    path = write(
        tmp_path, {"prompt": "a", "answer": 3}, {"messages": [USER], "tags": ["x"]}, {"prompt": "é\u2028b"}, end=""
    )
    text, chat, odd = read_prompts(path)
    assert (text.prompt, text.messages, text.fields, text.origin) == ("a", None, {"answer": 3}, f"{path}:1")
    assert (chat.prompt, chat.messages, chat.fields) == (None, [USER], {"tags": ["x"]})
    assert odd.prompt == "é\u2028b"  # a line ends at \n only


def test_windows_line_ends_are_read(tmp_path):
    assert [r.prompt for r in read_prompts(write(tmp_path, '{"prompt": "a"}\r', '{"prompt": "b"}\r'))] == ["a", "b"]


MALFORMED = [
    ("", "is blank"),
    ("   ", "is blank"),
    (b'\xef\xbb\xbf{"prompt": "a"}', "byte-order mark"),
    (b'{"prompt": "\xff"}', "is not UTF-8"),
    ("{", r"is not JSON .* not pretty-printed"),
    ('{"prompt": "a"} {"prompt": "b"}', "is not JSON"),
    ("{'prompt': 'a'}", "is not JSON"),
    ("[" * 100_000, "nested too deeply"),
    (["a"], "JSON array, not an object"),
    ('"a"', "JSON string, not an object"),
    ("3", "JSON number, not an object"),
    ("null", "JSON null, not an object"),
    ('{"prompt": "a", "answer": NaN}', "NaN, which is not JSON"),
    ('{"prompt": "a", "prompt": "b"}', "`prompt` more than once"),
    ({}, r"has neither \(keys: none\)"),
    ({"question": "a", "answer": "b"}, r"has neither \(keys: question, answer\)"),
    ({"prompt": "a", "messages": [USER]}, "has prompt and messages"),
    ({"prompt": None}, "`prompt` is a JSON null, not a string"),
    ({"prompt": 3}, "`prompt` is a JSON number"),
    ({"prompt": True}, "`prompt` is a JSON boolean"),
    ({"prompt": ["a"]}, "`prompt` is a JSON array"),
    ({"prompt": ""}, "`prompt` is empty"),
    ({"prompt": " \n"}, "`prompt` is empty"),
    ('{"prompt": "\\ud83d"}', "half of a surrogate pair"),
    ({"prompt": "a", "task": "b"}, "`task` is reserved"),
    ({"messages": "hi"}, "`messages` is a JSON string"),
    ({"messages": []}, "`messages` is empty"),
    ({"messages": ["hi"]}, r"`messages\[0\]` is a JSON string"),
    ({"messages": [{"role": "user"}]}, r"`messages\[0\]` must have the keys role and content, has role"),
    ({"messages": [{**USER, "name": "x"}]}, "has role, content, name"),
    ({"messages": [{"role": "human", "content": "a"}]}, 'the role "human", not one of'),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "the role"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, r"`messages\[0\].content` is a JSON array"),
    ({"messages": [{"role": "user", "content": ""}]}, r"`messages\[0\].content` is empty"),
    ({"messages": [USER, {"role": "system", "content": "a"}, USER]}, "system message that is not the first"),
    ({"messages": [USER, {"role": "assistant", "content": "a"}]}, "must end with the user's turn, ends with assistant"),
]


@pytest.mark.parametrize("line,message", MALFORMED)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = write(tmp_path, {"prompt": "a"}, line, {"prompt": "b"})
    with pytest.raises(ValueError, match=message) as caught:
        read_prompts(path)
    assert f"{path}:2: " in str(caught.value) and "1 of 3 lines" in str(caught.value)


def test_all_problems_come_at_once_and_ten_are_shown(tmp_path):
    with pytest.raises(ValueError, match="12 of 13 lines") as caught:
        read_prompts(write(tmp_path, {"prompt": "a"}, *[{"prompt": 3}] * 12))
    lines = str(caught.value).splitlines()
    assert len(lines) == 12 and ":11: " in lines[10] and lines[11] == "... and 2 more"


def test_empty_and_missing_files(tmp_path):
    with pytest.raises(ValueError, match="is empty"):
        read_prompts(write(tmp_path, end=""))
    with pytest.raises(ValueError, match="cannot read the prompts .*No such file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="cannot read the prompts .*directory"):
        read_prompts(tmp_path)


def test_templates():
    named = {"prompt": "a {b}", "question": "a {b}"}
    assert fill_template("Q: {question}\nA: {{}}", named) == "Q: a {b}\nA: {}"
    for bad in ("no placeholder", "{expresion}", "{}", "{0}", "{prompt!r}", "{prompt:>9}", "{prompt.x}", "{", "}"):
        with pytest.raises(ValueError, match="data.template"):
            fill_template(bad, named)
    with pytest.raises(ValueError, match=r"uses \{expression\}; it may use \{prompt\}, \{question\}"):
        fill_template("{expression}", named)


def load(tmp_path, tokenizer, *lines, max_input_len=1000, **data):
    config = DataConfig(prompts=str(write(tmp_path, *lines)), **data)
    return load_splits(config, seed=1, tokenizer=tokenizer, max_input_len=max_input_len)


def test_raw_text_is_the_template_alone(tmp_path, tokenizer):
    train, held = load(tmp_path, tokenizer, {"prompt": "3 + 4", "answer": 7}, template="Q: {prompt} =", chat=False)
    (sample,) = train.samples
    assert tokenizer.decode(sample.prompt_ids, skip_special=False) == sample.prompt == "Q: 3 + 4 ="
    assert sample.fields == {"answer": 7} and held.samples == []


def test_chat_wraps_text_and_takes_conversations(tmp_path, tokenizer):
    train, _ = load(tmp_path, tokenizer, {"prompt": "hi"}, {"messages": [USER]}, system="be brief")
    texts = [tokenizer.decode(s.prompt_ids, skip_special=False) for s in train.samples]
    assert (
        texts == ["<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"] * 2
    )
    with pytest.raises(ValueError, match="prompts.jsonl:1 has `messages`, which need data.chat=true"):
        load(tmp_path, tokenizer, {"messages": [USER]}, chat=False)


LENGTHS = [{"prompt": "x" * n} for n in (3, 4, 5, 6)]


def test_the_limit_is_on_the_final_ids(tmp_path, tokenizer):
    train, _ = load(tmp_path, tokenizer, *LENGTHS, template="__{prompt}", chat=False, max_input_len=6)
    assert [len(s.prompt_ids) for s in train.samples] == [5, 6] and (train.dropped, train.truncated) == (2, 0)


def test_truncating_keeps_the_last_tokens(tmp_path, tokenizer):
    settings = {"template": "{prompt}!", "chat": False, "max_input_len": 4, "overlong": Overlong.truncate}
    train, _ = load(tmp_path, tokenizer, *LENGTHS, **settings)
    assert [s.prompt for s in train.samples] == ["xxx!"] * 4 and (train.dropped, train.truncated) == (0, 3)
    assert all(tokenizer.encode(s.prompt) == s.prompt_ids for s in train.samples)


def test_refusing_names_the_lines(tmp_path, tokenizer):
    with pytest.raises(
        ValueError, match=r"2 of 4 prompts are longer than engine.max_input_len=4 .*:3 \(5\), .*:4 \(6\)"
    ):
        load(tmp_path, tokenizer, *LENGTHS, chat=False, max_input_len=4, overlong=Overlong.refuse)


def test_dropping_everything_is_refused(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="all 4 prompts are longer"):
        load(tmp_path, tokenizer, *LENGTHS, chat=False, max_input_len=2)


def test_validation_prompts_are_held_out_and_one_source_is_needed(tmp_path, tokenizer):
    held_file = write(tmp_path, {"prompt": "held"}, name="held.jsonl")
    train, held = load(tmp_path, tokenizer, {"prompt": "a"}, chat=False, validation_prompts=str(held_file))
    assert [s.prompt for s in held.samples] == ["held"] and held.samples[0].origin == f"{held_file}:1"
    with pytest.raises(ValueError, match="exactly one of data.task and data.prompts"):
        load_splits(DataConfig(), seed=1, tokenizer=tokenizer, max_input_len=9)


def test_real_questions_load(tmp_path, tokenizer, shared_data):
    lines = [
        json.loads(line) for line in shared_data("gsm8k/gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    train, _ = load(tmp_path, tokenizer, *[{"prompt": x["question"], "answer": x["answer"]} for x in lines[:200]])
    assert len(train.samples) + train.dropped == 200 and train.samples
    with pytest.raises(ValueError, match="80 of 80 lines .*\n.*neither .keys: question_id, category, turns"):
        read_prompts(shared_data("prompts/vicuna_question.jsonl"))
