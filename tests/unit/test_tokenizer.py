"""The tokenizer's contract: BOS once or never, every end token known, the same folder the same fingerprint."""

import json

import pytest

from aligner.data.tokenizer import FINGERPRINT_TEXTS, Tokenizer
from tests.unit.tiny_tokenizer import CHATML, write_tokenizer

END_OF_TEXT, IM_START, IM_END = 256, 257, 258


def make(tmp_path, name="t", **settings):
    return Tokenizer(write_tokenizer(tmp_path / name, **settings))


def test_without_bos_and_pad(tmp_path):
    t = make(tmp_path)
    assert t.bos_id is None and t.eos_id == IM_END and t.vocab_size == 259
    assert t.end_token_ids == (END_OF_TEXT, IM_END)
    assert t.pad_id == END_OF_TEXT  # no pad of its own
    assert len(t.encode("ab")) == 2
    assert t.encode("") == []


@pytest.mark.parametrize("text", [*FINGERPRINT_TEXTS, " a", "a ", " .", "<|im_end|>x"])
def test_text_survives_encoding_and_decoding(tmp_path, text):
    t = make(tmp_path)
    assert t.decode(t.encode(text), skip_special=False) == text


def test_special_tokens_are_skipped_unless_asked_for(tmp_path):
    t = make(tmp_path)
    ids = [*t.encode("hi"), IM_END]
    assert t.decode(ids) == "hi" and t.decode(ids, skip_special=False) == "hi<|im_end|>"


def test_a_bos_comes_once_and_an_eos_never(tmp_path):
    t = make(tmp_path, bos="<|im_start|>", adds_bos=True, adds_eos=True)
    plain = make(tmp_path, "plain")
    assert t.encode("ab") == [IM_START, *plain.encode("ab")]
    assert t.encode("<|im_start|>ab") == [IM_START, *plain.encode("ab")]  # written by the user already
    assert t.encode("") == [IM_START]


def test_chat_ids_are_those_of_the_rendered_text(tmp_path):
    t = make(tmp_path, bos="<|im_start|>", adds_bos=True)
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = t.chat([{"role": "user", "content": "hi"}])
    assert t.decode(ids, skip_special=False) == rendered
    assert ids == t.encode(rendered) and ids.count(IM_START) == 2


def test_a_system_message_is_put_before_and_never_replaces(tmp_path):
    t = make(tmp_path)
    user = {"role": "user", "content": "hi"}
    own = {"role": "system", "content": "own"}
    assert "system\n<|im_end|>" in t.decode(t.chat([user], ""), skip_special=False)
    assert t.chat([own, user], "other") == t.chat([own, user])


def test_a_template_that_doubles_the_bos_is_refused(tmp_path):
    t = make(tmp_path, bos="<|im_start|>", chat_template="<|im_start|>" + CHATML)
    with pytest.raises(ValueError, match="twice"):
        t.chat([{"role": "user", "content": "hi"}])


def test_a_missing_or_refusing_template_is_one_sentence(tmp_path):
    message = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="data.chat=false"):
        make(tmp_path, chat_template=None).chat(message)
    t = make(tmp_path, "r", chat_template="{{ raise_exception('only user and assistant') }}")
    with pytest.raises(ValueError, match=r"refuses roles \['system', 'user'\]: only user"):
        t.chat(message, "be brief")


def test_end_tokens_of_the_generation_config_count(tmp_path):
    folder = write_tokenizer(tmp_path / "t", specials=("<eos>", "<turn>", "<|im_start|>"), eos="<eos>")
    assert Tokenizer(folder).end_token_ids == (256,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 257]}))
    assert Tokenizer(folder).end_token_ids == (256, 257)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 999}))
    with pytest.raises(ValueError, match="999 is not below the vocabulary size 259"):
        Tokenizer(folder)


def test_a_tokenizer_without_any_end_is_refused(tmp_path):
    with pytest.raises(ValueError, match="eos_token"):
        make(tmp_path, specials=("<x>",), eos=None)


def test_a_folder_without_a_fast_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer.json"):
        Tokenizer(tmp_path)


def test_fingerprint_is_of_the_content(tmp_path):
    first = make(tmp_path, "a").fingerprint()
    assert len(first) == 64
    assert make(tmp_path, "b").fingerprint() == first
    assert make(tmp_path, "c", chat_template="{{ messages }}").fingerprint() == first
    assert make(tmp_path, "d", pad="<|endoftext|>").fingerprint() != first
    assert make(tmp_path, "e", specials=("<|endoftext|>", "<|im_end|>", "<|im_start|>")).fingerprint() != first
    assert make(tmp_path, "f", bos="<|im_start|>", adds_bos=True).fingerprint() != first


def test_chat_template_hash_is_apart(tmp_path):
    hashes = {
        make(tmp_path, n, chat_template=t).chat_template_hash for n, t in [("a", CHATML), ("b", "x"), ("c", None)]
    }
    assert len(hashes) == 3 and "" in hashes


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_is_one_sentence_that_names_the_folder(tmp_path, name, content):
    folder = write_tokenizer(tmp_path / "t")
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        Tokenizer(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
