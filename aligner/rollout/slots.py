"""The sequences that an engine decodes at once. Host arrays; row r is row r of the KV cache, and active rows come first.

Rows behind the active ones keep what their last sequence left in the cache, until another takes their place: a prompt that comes
again, or that begins like an earlier one, is copied from there or from an active row instead of being computed."""

from dataclasses import dataclass
from typing import Optional, Sequence

import numpy as np

from aligner.data.batch import Completion, Request
from aligner.rollout.philox import uniforms
from aligner.rollout.stops import StopStrings

NO_STOP = -1  # pads stop_ids; no token has this id
# One value a row of the request's setting of that name.
SETTINGS = {
    "temperature": np.float32,
    "top_k": np.int64,
    "top_p": np.float32,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
    "min_output_len": np.int64,
}


@dataclass(frozen=True)
class Pending:
    """A request with its order of submission."""

    order: int
    request: Request


class Slots:
    """Arrays over R rows: `lengths` prompt and response so far, `counts` response so far, `cached` positions whose keys and values
    the cache holds, [R] int64; `tokens` [R, I + O] int64 over positions of the sequence; `logprobs`, `uniforms` [R, O] float32 over
    positions in the response; `stop_ids` [R, w] int64; and one [R] array for each of SETTINGS."""

    def __init__(
        self, rows: int, max_input_len: int, max_output_len: int, *, token_bytes: Optional[Sequence[bytes]] = None
    ):
        self.rows, self.active = rows, 0
        self.pending: list[Pending] = []
        self.lengths, self.counts, self.cached, self.limits = (np.zeros(rows, np.int64) for _ in range(4))
        self.stopped = np.zeros(rows, bool)
        for name, dtype in SETTINGS.items():
            setattr(self, name, np.zeros(rows, dtype))
        self.tokens = np.zeros((rows, max_input_len + max_output_len), np.int64)
        self.logprobs, self.uniforms = (np.zeros((rows, max_output_len), np.float32) for _ in range(2))
        self.stop_ids = np.full((rows, 1), NO_STOP, np.int64)
        self.strings = StopStrings(rows, token_bytes)
        self.at = np.arange(rows)
        self._look()

    def _look(self) -> None:
        """What any active row asks for, found once and not at every token."""
        active = slice(0, self.active)
        self.any_greedy = bool((self.temperature[active] == 0).any())
        self.any_truncated = bool(
            ((self.top_k[active] > 0) | (self.top_p[active] < 1) | (self.min_p[active] > 0)).any()
        )
        self.any_penalty = bool((self.repetition_penalty[active] != 1).any())
        self.any_minimum = bool((self.min_output_len[active] > 0).any())

    @property
    def free(self) -> int:
        return self.rows - self.active

    def add(self, new: list[Pending]) -> None:
        """Take requests into the next rows. Their uniforms are drawn at once, for the whole response."""
        requests = [p.request for p in new]
        rows = slice(self.active, self.active + len(new))
        self.lengths[rows] = [len(r.prompt_ids) for r in requests]
        self.limits[rows] = [r.max_output_len for r in requests]
        self.counts[rows], self.cached[rows], self.stopped[rows] = 0, 0, False
        for name in SETTINGS:
            getattr(self, name)[rows] = [getattr(r, name) for r in requests]
        for row, request in enumerate(requests, rows.start):
            self.tokens[row, : len(request.prompt_ids)] = request.prompt_ids
            self.strings.start(row, request.stop_strings)
        seeds, ids, streams = (
            np.array(x, np.uint64)[:, None] for x in zip(*((r.seed, r.sample_id, r.stream) for r in requests))
        )
        longest = int(self.limits[rows].max())
        self.uniforms[rows, :longest] = uniforms(seeds, ids, np.arange(longest), streams)
        self._set_stops(rows, [r.stop_token_ids for r in requests])
        self.pending += new
        self.active += len(new)
        self._look()

    def _set_stops(self, rows: slice, stops: list[tuple[int, ...]]) -> None:
        missing = max(len(ids) for ids in stops) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_STOP)
        width = self.stop_ids.shape[1]
        self.stop_ids[rows] = [list(ids) + [NO_STOP] * (width - len(ids)) for ids in stops]

    def longest_prefix(self, prompt: Sequence[int]) -> tuple[int, int]:
        """(row, n): the row whose cache holds the most first tokens of `prompt`, and how many."""
        same = self.tokens[:, : len(prompt)] == np.asarray(prompt)
        shared = np.where(same.all(1), len(prompt), same.argmin(1))
        shared = np.minimum(shared, self.cached)
        row = int(shared.argmax())
        return row, int(shared[row])

    def next_uniforms(self, rows: slice) -> np.ndarray:
        """[n] float32, of the token that each row samples next."""
        return self.uniforms[self.at[rows], self.counts[rows]]

    def last_tokens(self) -> np.ndarray:
        """[active] int64, whose keys and values are not in the cache yet; they belong at `lengths - 1`."""
        return self.tokens[self.at[: self.active], self.lengths[: self.active] - 1]

    def history(self, rows: slice) -> np.ndarray:
        """[n, L] int64: every id of prompt and response; shorter rows repeat their last one."""
        at = np.minimum(np.arange(int(self.lengths[rows].max())), self.lengths[rows, None] - 1)
        return np.take_along_axis(self.tokens[rows], at, 1)

    def forbidden(self, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """(row within `rows`, id) of the stop ids that are impossible yet."""
        early = self.counts[rows] < self.min_output_len[rows]
        row, at = np.nonzero((self.stop_ids[rows] != NO_STOP) & early[:, None])
        return row, self.stop_ids[rows][row, at]

    def record(self, rows: slice, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """One sampled token for each row; everything before it is in the cache."""
        at, counts, lengths = self.at[rows], self.counts[rows], self.lengths[rows]
        self.tokens[at, lengths], self.logprobs[at, counts] = tokens, logprobs
        self.cached[rows] = lengths
        counts += 1  # views: the arrays themselves
        lengths += 1
        self.stopped[rows] = (self.stop_ids[rows] == tokens[:, None]).any(1)
        for row in self.strings.watched(rows):
            if self.strings.ends(row, int(self.tokens[row, self.lengths[row] - 1])):
                self.stopped[row] |= self.counts[row] > self.min_output_len[row]

    def finished(self) -> np.ndarray:
        """[active] bool"""
        active = slice(0, self.active)
        return self.stopped[active] | (self.counts[active] >= self.limits[active])

    def completion(self, row: int, weight_version: int) -> Completion:
        request, count, length = self.pending[row].request, int(self.counts[row]), int(self.lengths[row])
        return Completion(
            sample_id=request.sample_id,
            prompt_ids=request.prompt_ids,
            token_ids=self.tokens[row, length - count : length].tolist(),
            logprobs=self.logprobs[row, :count].tolist(),
            finish_reason="stop" if self.stopped[row] else "length",
            weight_version=weight_version,
        )

    def remove(self, done: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drop rows where `done` [active] and close the holes with the last rows. Returns (holes, movers), int64 [m] each: rows
        holes[i] and movers[i] of the cache must change places."""
        kept = np.flatnonzero(~done)
        holes, movers = np.flatnonzero(done[: len(kept)]), kept[kept >= len(kept)]
        target, source = np.concatenate([holes, movers]), np.concatenate([movers, holes])
        arrays = ("lengths", "counts", "cached", "limits", "stopped", "tokens", "logprobs", "uniforms", "stop_ids")
        if len(holes):
            for name in (*arrays, *SETTINGS):
                array = getattr(self, name)
                array[target] = array[source]
            self.strings.swap(holes, movers)
        for hole, mover in zip(holes, movers):
            self.pending[hole] = self.pending[mover]
        self.active = len(kept)
        del self.pending[self.active :]
        self._look()
        return holes, movers

    def forget(self) -> None:
        """What earlier sequences left in the cache is no longer of use."""
        self.cached[:] = 0
