"""How waiting prompts get into the cache: each distinct one once, what another row already holds copied, long ones in pieces."""

from dataclasses import dataclass
from typing import Iterator

import numpy as np

from aligner.rollout.slots import Pending, Slots

WORTH_COPYING = 16  # tokens of a common beginning; fewer are computed again at no cost


@dataclass
class Prompt:
    """A distinct prompt: its tokens from `start` on are to be computed in `row`; rows row .. row + samples - 1 want it."""

    ids: np.ndarray  # [P] int64
    row: int
    samples: int
    start: int = 0


@dataclass(frozen=True)
class Pass:
    """One forward pass over u pieces of prompts: tokens[i] are positions starts[i] .. of the sequence in rows[i]. final: all of them
    end their prompts, else none does."""

    prompts: list[Prompt]
    tokens: list[np.ndarray]
    starts: np.ndarray  # [u] int64
    final: bool

    @property
    def rows(self) -> np.ndarray:
        """[u] int64"""
        return np.array([p.row for p in self.prompts])

    @property
    def finished(self) -> slice:
        """All rows that want these prompts: they are neighbours."""
        return slice(self.prompts[0].row, self.prompts[-1].row + self.prompts[-1].samples)

    def repeats(self) -> np.ndarray:
        """[n] int64: which of the u prompts each row of `finished` wants."""
        return np.repeat(np.arange(len(self.prompts)), [p.samples for p in self.prompts])

    def copies(self) -> tuple[np.ndarray, np.ndarray, int]:
        """(targets, sources, positions): rows of the cache that share a prompt with the row that computed it."""
        rows, sources = np.arange(self.finished.start, self.finished.stop), self.rows[self.repeats()]
        others = rows != sources
        return rows[others], sources[others], max(len(p.ids) for p in self.prompts)


class PrefillPlan:
    """For requests that join behind the active rows of `slots`. `pending` is their order of rows: samples of a prompt together, and
    prompts that have as much left to compute together. `targets`, `sources` [m] int64 and `copied`: rows of the cache to assign
    first, at once, and how many of their positions."""

    def __init__(self, chunk: list[Pending], slots: Slots):
        groups: dict[tuple[int, ...], list[Pending]] = {}
        for pending in chunk:
            groups.setdefault(tuple(pending.request.prompt_ids), []).append(pending)
        found = []
        for ids, group in groups.items():
            source, shared = slots.longest_prefix(ids)
            shared = min(shared, len(ids) - 1)  # the last token is computed: its logits are wanted
            found.append((shared if shared >= min(WORTH_COPYING, len(ids) - 1) else 0, source, ids, group))
        found.sort(key=lambda entry: len(entry[2]) - entry[0])
        self.pending = [pending for *_, group in found for pending in group]
        self.prompts: list[Prompt] = []
        row = slots.active
        for shared, _, ids, group in found:
            self.prompts.append(Prompt(np.array(ids, np.int64), row, len(group), shared))
            row += len(group)
        copied = [(p.row, source) for p, (shared, source, *_) in zip(self.prompts, found) if shared]
        self.targets, self.sources = np.array(copied, np.int64).reshape(-1, 2).T
        self.copied = max((p.start for p in self.prompts), default=0)

    def passes(self, budget: int) -> Iterator[Pass]:
        """At most `budget` right-padded tokens each. A prompt with more left is computed in pieces, before the others."""
        for prompt in self.prompts:
            while len(prompt.ids) - prompt.start > budget:
                end = prompt.start + budget
                yield Pass([prompt], [prompt.ids[prompt.start : end]], np.array([prompt.start]), final=False)
                prompt.start = end
        group: list[Prompt] = []
        for prompt in self.prompts:
            left = max(len(p.ids) - p.start for p in [*group, prompt])
            if group and (len(group) + 1) * left > budget:
                yield self._final(group)
                group = []
            group.append(prompt)
        yield self._final(group)

    def _final(self, group: list[Prompt]) -> Pass:
        tokens, starts = [p.ids[p.start :] for p in group], np.array([p.start for p in group])
        return Pass(group, tokens, starts, final=True)
