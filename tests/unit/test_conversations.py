"""Conversations: every malformed form is refused with file and line, and the tokens that are learned are exactly the assistant's."""

import json

import pytest
import torch

from aligner.config.groups import Overlong
from aligner.config.supervised import LossOn, SFTDataConfig
from aligner.data.conversations import Conversation, encode, load_examples, read_conversations
from aligner.data.tokenizer import Tokenizer
from tests.unit.chat_templates import CHATML_SPECIALS, END, FAMILIES, MARKED, QWEN3
from tests.unit.test_prompts import write
from tests.unit.tiny_tokenizer import write_tokenizer

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
FOUR = [USER, ANSWER, {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4, of course"}]


def tokenizer(tmp_path, **settings) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path / "tokenizer", **settings))


def chat(messages, t, **settings):
    return encode(Conversation("f:1", messages=messages), t, SFTDataConfig(**settings))


def pieces(t, example) -> list[str]:
    """Text of each run of learned tokens."""
    runs, ids = [], example.ids.tolist()
    for at, learned in enumerate(example.mask.tolist()):
        if learned and not example.mask[at - 1]:
            runs.append([])
        if learned:
            runs[-1].append(ids[at])
    return [t.decode(run, skip_special=False) for run in runs]


MALFORMED = [
    ("{", "is not JSON"),
    (["a"], "JSON array, not an object"),
    ("", "is blank"),
    ({}, "needs `messages`, or `prompt` and `completion`, has neither (keys: none)"),
    ({"question": "a", "answer": "b"}, "has neither (keys: question, answer)"),
    ({"prompt": "a"}, "has `prompt`"),
    ({"completion": "a"}, "has `completion`"),
    ({"messages": FOUR, "prompt": "a", "completion": "b"}, "has `messages` and `prompt` and `completion`"),
    ({"prompt": "", "completion": "b"}, "`prompt` is empty"),
    ({"prompt": "a", "completion": " \n"}, "`completion` is empty"),
    ({"prompt": 3, "completion": "b"}, "`prompt` is a JSON number, not a string"),
    ({"prompt": "a", "completion": ["b"]}, "`completion` is a JSON array, not a string"),
    ('{"prompt": "a", "completion": "\\ud800"}', "half of a surrogate pair"),
    ({"messages": []}, "`messages` is empty"),
    ({"messages": "hi"}, "`messages` is a JSON string"),
    ({"messages": [USER, "hello"]}, "`messages[1]` is a JSON string, not an object"),
    ({"messages": [USER]}, "no turn of the assistant, so there is nothing to learn (roles: user)"),
    ({"messages": [*FOUR, USER]}, "must end with the assistant's turn, ends with user"),
    ({"messages": [ANSWER]}, "user and assistant in turn, the user first (roles: assistant)"),
    ({"messages": [USER, ANSWER, ANSWER]}, "user and assistant in turn"),
    ({"messages": [USER, USER, ANSWER]}, "user and assistant in turn"),
    ({"messages": [USER, {"role": "system", "content": "a"}, ANSWER]}, "a system message that is not the first"),
    ({"messages": [USER, {"role": "tool", "content": "a"}, ANSWER]}, 'the role "tool"'),
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, "`messages[1].content` is empty"),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, "`messages[1].content` is a JSON null"),
    ({"messages": [USER, {"role": "assistant"}]}, "must have the keys role and content, has role"),
]


@pytest.mark.parametrize(("line", "says"), MALFORMED)
def test_a_malformed_line_is_named(tmp_path, line, says):
    path = write(tmp_path, {"prompt": "a", "completion": "b"}, line)
    with pytest.raises(ValueError) as caught:
        read_conversations(path)
    assert f"1 of 2 lines are malformed:\n{path}:2: " in str(caught.value) and says in str(caught.value)


def test_empty_and_absent_files(tmp_path):
    (tmp_path / "empty").write_text("")
    with pytest.raises(ValueError, match="empty is empty: it needs one JSON object a line, with `messages`"):
        read_conversations(tmp_path / "empty")
    with pytest.raises(ValueError, match="cannot read the conversations .*No such file"):
        read_conversations(tmp_path / "absent")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_learned_tokens_are_the_assistants_with_the_end_of_its_turn(tmp_path, family):
    """Against the family's own text: ids in = ids out, one BOS at most, and nothing of the template's between the turns."""
    t, end = tokenizer(tmp_path, **FAMILIES[family]), END[family]
    example = chat([{"role": "system", "content": "Be kind."}, *FOUR], t)
    whole = t.rendered([{"role": "system", "content": "Be kind."}, *FOUR], opens=False)
    assert t.decode(example.ids.tolist(), skip_special=False) == whole
    assert example.ids.tolist() == t.encode(whole)
    assert pieces(t, example) == [f"hello{end}", f"4, of course{end}"]
    assert t.bos_id is None or example.ids[1] != t.bos_id
    assert example.prompt == "hi\n\nhello\n\n2+2?"
    last = chat(FOUR, t, loss_on=LossOn.last_turn)
    assert pieces(t, last) == [f"4, of course{end}"]
    assert last.ids[: last.answer_at].tolist() == t.chat(FOUR[:-1])  # what the model is given when it has to answer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_with_its_completion_is_a_conversation_of_two_turns(tmp_path, family):
    t = tokenizer(tmp_path, **FAMILIES[family])
    row = encode(Conversation("f:1", prompt="hi", completion="hello"), t, SFTDataConfig(system="Be brief."))
    asked = [{"role": "system", "content": "Be brief."}, USER]
    assert row.ids[: row.answer_at].tolist() == t.chat(asked)
    assert pieces(t, row) == [f"hello{END[family]}"]


def test_contents_that_look_like_an_end_token_stay_inside(tmp_path):
    t = tokenizer(tmp_path)
    answer = {"role": "assistant", "content": "it ends with <|im_end|>, they say"}
    assert pieces(t, chat([USER, answer], t)) == ["it ends with <|im_end|>, they say<|im_end|>"]


def test_a_template_that_marks_generation_is_believed(tmp_path):
    t = tokenizer(tmp_path, chat_template=MARKED)
    assert t.marks_generation
    assert pieces(t, chat(FOUR, t)) == ["hello<|im_end|>", "4, of course<|im_end|>"]
    assert pieces(t, chat(FOUR, t, loss_on=LossOn.last_turn)) == ["4, of course<|im_end|>"]


def test_a_template_that_writes_earlier_turns_otherwise(tmp_path):
    """Qwen 3: the last turn can be told, earlier ones cannot."""
    t = tokenizer(tmp_path, chat_template=QWEN3)
    with pytest.raises(
        ValueError, match=r"^f:1: the chat template .* the end of messages\[1\] .*data.loss_on=last_turn"
    ):
        chat(FOUR, t)
    example = chat(FOUR, t, loss_on=LossOn.last_turn)
    assert pieces(t, example) == ["<think>\n\n</think>\n\n4, of course<|im_end|>"]
    assert pieces(t, chat(FOUR[:2], t)) == ["<think>\n\n</think>\n\nhello<|im_end|>"]


def test_a_token_that_belongs_to_both_sides_is_refused(tmp_path):
    """The opening ends with a space, which this tokenizer puts together with the letter that follows."""
    spoken = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|im_end|>' }}{% endfor %}"
    spoken += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    t = tokenizer(tmp_path, merges=(("Ġ", "h"),), chat_template=spoken)
    with pytest.raises(ValueError, match=r"f:1: the opening of messages\[1\] and what follows it share a token"):
        chat([USER, ANSWER], t)
    assert pieces(t, chat([USER, {"role": "assistant", "content": "oh"}], t)) == ["oh<|im_end|>"]


def test_a_turn_without_an_end_token_is_refused(tmp_path):
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    plain += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    with pytest.raises(ValueError, match="f:1: the chat template of .* writes no end token .*never learn to stop"):
        chat(FOUR, tokenizer(tmp_path, chat_template=plain))


def test_a_bos_that_comes_twice_is_refused(tmp_path):
    twice = "{{ bos_token + bos_token }}" + FAMILIES["smollm2"]["chat_template"]
    with pytest.raises(ValueError, match="writes the BOS token twice"):
        chat(FOUR, tokenizer(tmp_path, **{**FAMILIES["llama3"], "chat_template": twice}))


def test_raw_texts(tmp_path):
    """The prompt's ids are the engine's, with its BOS; the completion is learned with the end of the sequence."""
    t = tokenizer(tmp_path, **FAMILIES["llama3"])
    row = encode(Conversation("f:1", prompt="1+1=", completion=" 2"), t, SFTDataConfig(chat=False))
    assert row.ids[: row.answer_at].tolist() == t.encode("1+1=") and row.ids.tolist().count(t.bos_id) == 1
    assert pieces(t, row) == [" 2<|eot_id|>"]
    with pytest.raises(ValueError, match="f:1: has `messages`, which need data.chat=true"):
        chat(FOUR, t, chat=False)


def test_raw_texts_whose_border_lies_inside_a_token(tmp_path):
    """The prompt stays what an engine is given for it, so the completion is taken apart from it."""
    t = tokenizer(tmp_path, merges=(("a", "b"),))
    row = encode(Conversation("f:1", prompt="xa", completion="by"), t, SFTDataConfig(chat=False))
    assert row.ids.tolist() == [*t.encode("xa"), *t.encode("by"), t.eos_id]
    assert len(t.encode("xaby")) == 3  # together they are one token less


# Files of a job


def load(tmp_path, *rows, t, max_held_out=100, **settings):
    data = SFTDataConfig(train=str(write(tmp_path, *rows)), **settings)
    return load_examples(data, t, max_held_out=max_held_out)


def lengths(rows) -> list[int]:
    return [len(row) for row in rows]


LONG = [{"prompt": "a" * 10, "completion": "b" * n} for n in (1, 20, 3, 30)]  # 12, 31, 14 and 41 tokens with the end


@pytest.mark.parametrize(
    ("overlong", "kept", "dropped", "cut"),
    [(Overlong.drop, [12, 14], 2, 0), (Overlong.truncate, [12, 31, 14, 35], 0, 1)],
)
def test_long_rows(tmp_path, overlong, kept, dropped, cut):
    t = tokenizer(tmp_path)
    limit = 35 if overlong is Overlong.truncate else 20
    rows = load(tmp_path, *LONG, t=t, chat=False, max_length=limit, overlong=overlong)
    assert lengths(rows.train) == kept
    assert (rows.dropped, rows.truncated) == (dropped, cut)
    assert rows.counts()["dropped_rows"] == dropped
    for row in rows.train:
        assert row.mask.sum() == len(row) - 10  # the first tokens stay


def test_a_cut_that_leaves_nothing_to_learn_drops_the_row(tmp_path):
    rows = load(tmp_path, *LONG, {"prompt": "a", "completion": "b"}, t=tokenizer(tmp_path), chat=False,
                max_length=10, overlong=Overlong.truncate)  # fmt: skip
    assert lengths(rows.train) == [3] and (rows.dropped, rows.truncated) == (4, 0)


def test_long_rows_are_refused_with_their_lines(tmp_path):
    with pytest.raises(
        ValueError, match=r"2 of 4 rows are longer than data.max_length=20 tokens: .*:2 \(31\), .*:4 \(41\); raise"
    ):
        load(tmp_path, *LONG, t=tokenizer(tmp_path), chat=False, max_length=20, overlong=Overlong.refuse)
    with pytest.raises(ValueError, match="all 4 rows are longer than data.max_length=5 tokens: raise it"):
        load(tmp_path, *LONG, t=tokenizer(tmp_path), chat=False, max_length=5)


def test_equal_prompts_are_on_one_side(tmp_path):
    rows = [{"prompt": f"question {n // 2}", "completion": f"answer {n}"} for n in range(80)]
    split = load(tmp_path, *rows, t=tokenizer(tmp_path), holdout=0.25)
    train, held = ({row.prompt for row in side} for side in (split.train, split.held_out))
    assert len(train | held) == 40 and not train & held
    assert len(split.train) == 2 * len(train) and 4 < len(held) < 20
    assert len(load(tmp_path, *rows, t=tokenizer(tmp_path), holdout=0.25, max_held_out=3).held_out) == 3


def test_a_file_of_held_out_rows(tmp_path):
    held = write(tmp_path, {"messages": FOUR}, name="held.jsonl")
    split = load(tmp_path, {"messages": FOUR[:2]}, t=tokenizer(tmp_path), validation=str(held))
    assert (len(split.train), len(split.held_out)) == (1, 1)
    assert split.held_out[0].origin == f"{held}:1"


def test_rows_that_cannot_be_encoded_come_at_once(tmp_path):
    t = tokenizer(tmp_path, chat_template=QWEN3)
    with pytest.raises(ValueError) as caught:
        load(tmp_path, {"messages": FOUR}, {"messages": FOUR[:2]}, {"messages": FOUR}, t=t)
    said = str(caught.value).splitlines()
    assert said[0] == "2 of 3 rows cannot be trained on:" and [line.split(":")[1] for line in said[1:]] == ["1", "3"]


def test_a_real_file(shared_data, tmp_path):
    """gsm8k's training problems as prompts and completions: every one is encoded, and its answer is what is learned."""
    lines = shared_data("gsm8k/gsm8k_train.jsonl").read_text().splitlines()[:400]
    problems = [json.loads(line) for line in lines]
    rows = [{"prompt": p["question"], "completion": p["answer"]} for p in problems]
    t = tokenizer(tmp_path, specials=CHATML_SPECIALS)
    split = load(tmp_path, *rows, t=t, max_length=4096)
    assert len(split.train) == len(rows)
    for row, problem in zip(split.train, problems, strict=True):
        assert pieces(t, row) == [problem["answer"] + "<|im_end|>"] and not torch.any(row.mask[: row.answer_at])
