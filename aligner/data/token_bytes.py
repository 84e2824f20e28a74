"""The bytes behind token ids, so that a stop string is found across the borders of tokens and inside of characters."""

import json
import re
from typing import Any

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's byte fallback
SPACE = "\u2581"  # SentencePiece writes a space so


def byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE (GPT-2) writes for each byte: itself where it is printable, else from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def token_bytes(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """[vocab_size] UTF-8 bytes of every id of a PreTrainedTokenizerFast; empty for special tokens and ids without a token.

    Raises ValueError for a tokenizer that is neither byte-level nor of SentencePiece's kind."""
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}
    kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if "type" in part}
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()

        def plain(piece: str) -> bytes:
            return bytes(alphabet[letter] for letter in piece)

    elif kinds & {"ByteFallback", "Metaspace", "Replace"}:

        def plain(piece: str) -> bytes:
            byte = BYTE_TOKEN.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, " ").encode()

    else:
        raise ValueError(
            f"stop strings need a byte-level or a SentencePiece tokenizer, this one decodes by {sorted(kinds) or 'nothing'}; "
            "use stop token ids"
        )
    added = tokenizer.added_tokens_decoder
    found = [b""] * vocab_size
    for piece, index in tokenizer.get_vocab().items():
        if index not in added:
            found[index] = plain(piece)
        elif not added[index].special:
            found[index] = piece.encode()
    return found
