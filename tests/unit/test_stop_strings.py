"""Stop strings: the ids that a search through the decoded text says, across tokens and inside characters."""

from dataclasses import replace

import pytest
import torch

from aligner.data.batch import Request
from aligner.data.tokenizer import Tokenizer
from aligner.rollout.stops import StopStrings
from tests.unit.tiny_engine import VOCAB, tiny_engine, tiny_hf
from tests.unit.tiny_tokenizer import write_tokenizer

PIECES = [b"a", b"b", b"ab", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x99", b"\x82", b" ", b"ba", b"\n", b"\n\n"]
TOKEN_BYTES = [PIECES[i % len(PIECES)] for i in range(VOCAB)]


def text(ids) -> str:
    return b"".join(TOKEN_BYTES[i] for i in ids).decode(errors="replace")


@pytest.mark.parametrize(
    "stop, ids, length",
    [
        ("abba", [0, 1, 9, 0], 3),  # a b ba
        ("abba", [2, 0, 2, 1, 0], 5),  # ab a ab b a: a false start first
        ("é", [3, 0, 3, 4, 0], 4),  # a first half alone does not count
        ("🙂", [5, 6, 7, 0], 3),  # three tokens for one character
        ("\n", [11, 0], 1),  # inside of a token
        ("b\nb", [1, 10, 1], 3),
        ("aaa", [0, 0, 1, 0, 0], None),
    ],
)
def test_the_token_that_completes_the_string(stop, ids, length):
    strings = StopStrings(2, TOKEN_BYTES)
    strings.start(1, (stop, "zzz"))
    found = [strings.ends(1, token) for token in ids]
    assert found.index(True) + 1 == length if length else not any(found)


@pytest.fixture(scope="module")
def engine():
    return tiny_engine("llama", tiny_hf("llama"), token_bytes=TOKEN_BYTES)


@pytest.mark.parametrize("stops", [("ab",), ("🙂", "é"), ("b a", "aba", "\n")])
def test_responses_end_where_the_text_first_has_one(engine, stops):
    """Against the same samples without stops: the shortest beginning whose text holds a stop string, every id kept."""
    asked = [Request(sample_id=i, prompt_ids=[1 + i, 5], max_output_len=40, seed=3) for i in range(12)]
    free = engine.generate(asked)
    done = engine.generate([replace(r, stop_strings=stops) for r in asked])
    for whole, cut in zip(free, done):
        ends = [n for n in range(1, 41) if any(s in text(whole.token_ids[:n]) for s in stops)]
        assert cut.token_ids == whole.token_ids[: min(ends, default=40)]
        assert cut.finish_reason == ("stop" if ends else "length")
        assert cut.logprobs == pytest.approx(whole.logprobs[: len(cut.token_ids)], abs=1e-4)
    assert any(c.finish_reason == "stop" for c in done)


def test_no_stop_string_ends_a_response_below_its_minimum(engine):
    asked = [Request(sample_id=i, prompt_ids=[1 + i, 5], max_output_len=40, seed=3) for i in range(8)]
    done = engine.generate([replace(r, stop_strings=("a", "b"), min_output_len=6) for r in asked])
    assert all(len(c.token_ids) > 6 for c in done) and any(c.finish_reason == "stop" for c in done)


def test_stop_strings_need_the_bytes_of_tokens():
    engine = tiny_engine("llama", tiny_hf("llama"))
    with pytest.raises(ValueError, match="token_bytes"):
        engine.submit([Request(sample_id=0, prompt_ids=[1], max_output_len=4, stop_strings=("a",))])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_token_bytes_are_what_is_decoded(tokenizer):
    pieces = tokenizer.token_bytes()
    for words in ("plain words", "naïve 🙂 你好\n\t", " ~"):
        ids = tokenizer.encode(words)
        assert b"".join(pieces[i] for i in ids).decode() == words == tokenizer.decode(ids)
    assert len(pieces) == tokenizer.vocab_size and {pieces[i] for i in tokenizer.end_token_ids} == {b""}


def test_token_bytes_of_a_sentencepiece_tokenizer():
    import json
    from types import SimpleNamespace

    from aligner.data.token_bytes import token_bytes

    decoder = {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    added = {0: SimpleNamespace(special=True), 4: SimpleNamespace(special=False)}
    fake = SimpleNamespace(
        backend_tokenizer=SimpleNamespace(to_str=lambda: json.dumps({"decoder": decoder})),
        added_tokens_decoder=added,
        get_vocab=lambda: {"<s>": 0, "\u2581the": 1, "<0xC3>": 2, "é": 3, "<think>": 4},
    )
    assert token_bytes(fake, 6) == [b"", b" the", b"\xc3", "é".encode(), b"<think>", b""]
    decoder["decoders"] = [{"type": "WordPiece"}]
    with pytest.raises(ValueError, match="WordPiece"):
        token_bytes(fake, 6)


def test_text_ends_with_the_stop_string(tokenizer):
    """The last token may hold more than the stop string, and an earlier one may be there where a minimum held it off."""
    ids = tokenizer.encode("one. two. three")
    assert tokenizer.response_text(ids) == "one. two. three"
    assert tokenizer.response_text(ids[:9], (". ", ".")) == "one. two."
    wide = Tokenizer.__new__(Tokenizer)
    wide.decode = text
    assert wide.response_text([0, 11], ("\n",)) == "a\n"
    assert wide.response_text([0, 11, 1, 11], ("\n",)) == "a\n\nb\n"
    assert wide.response_text([0, 1], ("\n",)) == "ab" and wide.response_text([], ("\n",)) == ""


def test_one_hidden_row_does_not_stop_another(engine):
    asked = [Request(sample_id=i, prompt_ids=[9], max_output_len=1 + i, seed=6) for i in range(9)]
    stops = {3: ("a",), 5: ("b", "\n")}
    alone = [engine.generate([replace(r, stop_strings=stops.get(r.sample_id, ()))])[0].token_ids for r in asked]
    together = engine.generate([replace(r, stop_strings=stops.get(r.sample_id, ())) for r in asked])
    assert [c.token_ids for c in together] == alone
    assert torch.tensor([len(t) for t in alone]).max() == 9
