"""The tokenizer of a local folder. Everything downstream passes token ids, so that nothing is tokenised twice."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Optional, Sequence

from aligner.data.token_bytes import token_bytes

# Names that chat models end a turn or a document with; where a tokenizer has one as a special token, it ends a response.
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<end_of_turn>", "<|end_of_text|>", "<|end|>")

# What two tokenizers must encode alike to be taken for the same: spaces, digits, case, accents, code, scripts, symbols, special text.
FINGERPRINT_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  two leading spaces,\ttabs\nand\r\nnew lines\n\n",
    "3 + 4 = 7; 1234567.89 - 0x1F",
    "Don't WE'VE can't isn't",
    "naïve café Ångström Übergröße",
    "def f(x):\n    return x ** 2  # squared",
    "你好，世界 Привет мир नमस्ते 🙂👍🏽",
    "<|im_start|>user\n<s>[INST] <|endoftext|>",
)


def with_system(messages: list[dict[str, str]], system: Optional[str]) -> list[dict[str, str]]:
    """The conversation with this system message before it, where it has none of its own; None: as it is."""
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


class Tokenizer:
    """A fast tokenizer read from `folder` (tokenizer.json and tokenizer_config.json), never from a hub.

    vocab_size is the number of real ids. bos_id is None where the tokenizer has none; pad_id falls back to an end token, since
    what is padding is said by lengths and masks, never by the id."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / "tokenizer.json").is_file():
            raise ValueError(
                f"{self.folder} has no tokenizer.json: a checkpoint needs a fast tokenizer in its tokenizer/ folder"
            )
        from transformers import PreTrainedTokenizerFast  # 3 s of import that only those who read a tokenizer pay

        try:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(str(self.folder), local_files_only=True)
        except Exception as error:  # of JSON, of the tokenizers library, of transformers: a file that was cut or edited
            said = " ".join(str(error).split())[:200]
            raise ValueError(f"the tokenizer in {self.folder} cannot be read ({said}): copy it again") from error
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        self.bos_id: Optional[int] = self._tokenizer.bos_token_id
        self.eos_id: Optional[int] = self._tokenizer.eos_token_id
        self.end_token_ids = self._find_end_tokens()
        pad = self._tokenizer.pad_token_id
        self.pad_id: int = pad if pad is not None else self.end_token_ids[0]
        self._starts_with_bos = self._ids("a", special=True)[:1] == [self.bos_id] != self._ids("a")[:1]

    def _ids(self, text: str, special: bool = False) -> list[int]:
        return self._tokenizer(text, add_special_tokens=special)["input_ids"]

    def _find_end_tokens(self) -> tuple[int, ...]:
        """The eos token, those of generation_config.json and config.json beside the tokenizer, and the known end-of-turn tokens."""
        found = [self.eos_id]
        for name in ("generation_config.json", "config.json"):
            path = self.folder / name
            declared = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
            found += declared if isinstance(declared, list) else [declared]
        special = {str(token): i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        found += [special[name] for name in END_TOKENS if name in special]
        ends = tuple(sorted({i for i in found if i is not None}))
        if not ends:
            raise ValueError(f"{self.folder} names no end token: set eos_token in tokenizer_config.json")
        if ends[-1] >= self.vocab_size:
            raise ValueError(
                f"{self.folder}: end token id {ends[-1]} is not below the vocabulary size {self.vocab_size}"
            )
        return ends

    def encode(self, text: str) -> list[int]:
        """Ids of a text that opens a sequence: with the BOS of tokenizers that add one, once, and never an EOS."""
        ids = self._ids(text)
        if self._starts_with_bos and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """Ids of a text that goes on after another: nothing is put before or after it."""
        return self._ids(text)

    def response_end(self, *, chat: bool) -> int:
        """The id that ends a response: what the chat template writes after the assistant's turn where it is an end token, else the
        eos token (the first end token where there is none)."""
        fallback = self.end_token_ids[0] if self.eos_id is None else self.eos_id
        if not chat or not self._tokenizer.chat_template:
            return fallback
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        asked, answered = (
            self._tokenizer.apply_chat_template(some, tokenize=True, return_dict=False) for some in (turns[:1], turns)
        )
        ends = [[i for i in ids if i in self.end_token_ids] for ids in (asked, answered)]
        return ends[1][-1] if len(ends[1]) > len(ends[0]) else fallback

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    def response_text(self, ids: list[int], stop_strings: Sequence[str] = ()) -> str:
        """Text of a response. Where its last token completed a stop string, the text ends with that string."""
        text = self.decode(ids)
        if not stop_strings or not ids:
            return text
        before = len(self.decode(ids[:-1]))
        ends = [at + len(stop) for stop in stop_strings if (at := text.find(stop, max(0, before - len(stop)))) >= 0]
        return text[: min(ends)] if ends else text

    def token_bytes(self) -> list[bytes]:
        """What each id adds to a text, in UTF-8; nothing for special tokens. Several ids may share one character.

        Raises ValueError for a tokenizer that is neither byte-level nor of SentencePiece's kind."""
        return token_bytes(self._tokenizer, self.vocab_size)

    def chat(self, messages: list[dict[str, str]], system: Optional[str] = None) -> list[int]:
        """Ids of a conversation by the chat template, with the opening of the assistant's turn.

        system: put before conversations that have no system message; None leaves the template's own default. The template alone
        decides about a BOS. Raises ValueError where there is no template or it refuses the messages."""
        ids = self._templated(with_system(messages, system), add_generation_prompt=True, return_dict=False)
        return self._with_one_bos(ids)

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        if self.bos_id is not None and ids[:2] == [self.bos_id] * 2:
            raise ValueError(f"the chat template of {self.folder} writes the BOS token twice")
        return ids

    def _templated(self, messages: list[dict[str, str]], **how: Any) -> Any:
        if not self._tokenizer.chat_template:
            raise ValueError(
                f"{self.folder} has no chat template: set data.chat=false, or add one to tokenizer_config.json"
            )
        try:
            return self._tokenizer.apply_chat_template(messages, **{"tokenize": True, **how})
        except Exception as error:  # jinja2's, of many kinds: a template raises for roles that it does not know
            roles = [message["role"] for message in messages]
            raise ValueError(f"the chat template of {self.folder} refuses roles {roles}: {error}") from error

    def rendered(self, messages: list[dict[str, str]], *, opens: bool) -> str:
        """The text of a conversation by the chat template. opens: with the opening of the assistant's next turn."""
        return self._templated(messages, tokenize=False, add_generation_prompt=opens)

    def encode_rendered(self, texts: list[str]) -> list[list[int]]:
        """Ids of texts that the chat template has written: it alone decides about a BOS, and none may have two."""
        return [self._with_one_bos(ids) for ids in self._tokenizer(texts, add_special_tokens=False)["input_ids"]]

    @property
    def marks_generation(self) -> bool:
        """Whether the chat template says itself, by {% generation %}, what the assistant has written."""
        template = self._tokenizer.chat_template
        return isinstance(template, str) and re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None

    def marked(self, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
        """Ids of a conversation, and which of them lie inside {% generation %}."""
        found = self._templated(messages, return_dict=True, return_assistant_tokens_mask=True)
        return self._with_one_bos(found["input_ids"]), [bool(m) for m in found["assistant_masks"]]

    def _special_ids(self) -> dict[str, Any]:
        t = self._tokenizer
        added = sorted(i for i, token in t.added_tokens_decoder.items() if token.special)
        return {
            "bos": t.bos_token_id,
            "eos": t.eos_token_id,
            "pad": t.pad_token_id,
            "unk": t.unk_token_id,
            "special": added,
        }

    def fingerprint(self) -> str:
        """sha256 (hex) of the sorted vocabulary, the special ids and the encodings of eight fixed strings."""
        content = {
            "vocabulary": sorted(self._tokenizer.get_vocab().items()),
            "special": self._special_ids(),
            "encodings": [self.encode(text) for text in FINGERPRINT_TEXTS],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def chat_template_hash(self) -> str:
        """sha256 (hex) of the chat template; empty without one. Apart from the fingerprint: a different template is only a warning."""
        template = self._tokenizer.chat_template
        return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest() if template else ""
