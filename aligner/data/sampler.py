"""The order of prompts: a pure function of (seed, prompts consumed), so that resuming needs one number."""

import random


class PromptSampler:
    """Endless indices into n prompts, epoch after epoch. With shuffle each epoch is a new permutation."""

    def __init__(self, n: int, *, seed: int, shuffle: bool) -> None:
        if n < 1:
            raise ValueError("there are no prompts to draw from")
        self.n, self.seed, self.shuffle = n, seed, shuffle
        self._kept: tuple[int, list[int]] = (-1, [])

    def take(self, consumed: int, k: int) -> list[int]:
        """The k indices that follow the first `consumed` ones; they may span epochs."""
        assert consumed >= 0 and k >= 0, f"consumed {consumed}, k {k}"
        return [self._epoch(at // self.n)[at % self.n] for at in range(consumed, consumed + k)]

    def _epoch(self, epoch: int) -> list[int]:
        if self._kept[0] != epoch:
            order = list(range(self.n))
            if self.shuffle:
                random.Random(f"{self.seed}:{epoch}").shuffle(
                    order
                )  # a string seed is hashed by sha512: stable everywhere
            self._kept = (epoch, order)
        return self._kept[1]
