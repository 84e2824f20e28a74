"""Stop strings, found in the bytes of a response: across the borders of tokens, and where a token ends inside a character."""

from typing import Optional, Sequence

import numpy as np


class StopStrings:
    """What each of R rows watches for, and the last bytes of its text: as many as could begin a stop string."""

    def __init__(self, rows: int, token_bytes: Optional[Sequence[bytes]]):
        self.token_bytes = token_bytes
        self.stops: list[tuple[bytes, ...]] = [()] * rows
        self.tails: list[bytes] = [b""] * rows
        self.any = False

    def start(self, row: int, stop_strings: Sequence[str]) -> None:
        self.stops[row], self.tails[row] = tuple(stop.encode() for stop in stop_strings), b""
        self.any = any(self.stops)

    def watched(self, rows: slice) -> list[int]:
        return [row for row in range(rows.start, rows.stop) if self.stops[row]] if self.any else []

    def ends(self, row: int, token: int) -> bool:
        """Take the row's next token; True where it completes a stop string."""
        known = token < len(self.token_bytes)  # some models have more ids than their tokenizer
        text = self.tails[row] + (self.token_bytes[token] if known else b"")
        longest = max(map(len, self.stops[row]))
        self.tails[row] = text[max(0, len(text) - longest + 1) :]
        return any(stop in text for stop in self.stops[row])

    def swap(self, one: np.ndarray, other: np.ndarray) -> None:
        for a, b in zip(one.tolist(), other.tolist()):
            self.stops[a], self.stops[b] = self.stops[b], self.stops[a]
            self.tails[a], self.tails[b] = self.tails[b], self.tails[a]
