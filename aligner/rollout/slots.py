"""The sequences that an engine decodes at once. Host arrays; row r is row r of the KV cache, and active rows come first."""

from dataclasses import dataclass

import numpy as np

from aligner.data.batch import Completion, Request
from aligner.rollout.philox import uniforms

NO_STOP = -1  # pads stop_ids; no token has this id


@dataclass(frozen=True)
class Pending:
    """A request with its order of submission."""

    order: int
    request: Request


class Slots:
    """Arrays over R rows: `lengths` prompt and response so far, `counts` response so far, both [R] int64; `tokens` [R, O] int64 and
    `logprobs`, `uniforms` [R, O] float32 over positions in the response; `stop_ids` [R, w] int64; `temperature` [R] float32."""

    def __init__(self, rows: int, max_output_len: int):
        self.rows, self.active = rows, 0
        self.pending: list[Pending] = []
        self.lengths, self.counts, self.limits = (np.zeros(rows, np.int64) for _ in range(3))
        self.stopped = np.zeros(rows, bool)
        self.temperature = np.ones(rows, np.float32)
        self.tokens = np.zeros((rows, max_output_len), np.int64)
        self.logprobs, self.uniforms = (np.zeros((rows, max_output_len), np.float32) for _ in range(2))
        self.stop_ids = np.full((rows, 1), NO_STOP, np.int64)

    @property
    def free(self) -> int:
        return self.rows - self.active

    def add(self, new: list[Pending]) -> None:
        """Take requests into the next rows. Their uniforms are drawn at once, for the whole response."""
        requests = [p.request for p in new]
        rows = slice(self.active, self.active + len(new))
        self.lengths[rows] = [len(r.prompt_ids) for r in requests]
        self.limits[rows] = [r.max_output_len for r in requests]
        self.temperature[rows] = [r.temperature for r in requests]
        self.counts[rows] = 0
        seeds, ids, streams = (
            np.array(x, np.uint64)[:, None] for x in zip(*((r.seed, r.sample_id, r.stream) for r in requests))
        )
        longest = int(self.limits[rows].max())
        self.uniforms[rows, :longest] = uniforms(seeds, ids, np.arange(longest), streams)
        self._set_stops(rows, [r.stop_token_ids for r in requests])
        self.pending += new
        self.active += len(new)

    def _set_stops(self, rows: slice, stops: list[tuple[int, ...]]) -> None:
        missing = max(len(ids) for ids in stops) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_STOP)
        width = self.stop_ids.shape[1]
        self.stop_ids[rows] = [list(ids) + [NO_STOP] * (width - len(ids)) for ids in stops]

    def next_uniforms(self, rows: slice) -> np.ndarray:
        """[n] float32, of the token that each row samples next."""
        return self.uniforms[np.arange(rows.start, rows.stop), self.counts[rows]]

    def last_tokens(self) -> np.ndarray:
        """[active] int64, whose keys and values are not in the cache yet; they belong at `lengths - 1`."""
        return self.tokens[np.arange(self.active), self.counts[: self.active] - 1]

    def record(self, rows: slice, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """One sampled token for each row."""
        at = (np.arange(rows.start, rows.stop), self.counts[rows])
        self.tokens[at], self.logprobs[at] = tokens, logprobs
        self.counts[rows] += 1
        self.lengths[rows] += 1
        self.stopped[rows] = (self.stop_ids[rows] == tokens[:, None]).any(1)

    def finished(self) -> np.ndarray:
        """[active] bool"""
        active = slice(0, self.active)
        return self.stopped[active] | (self.counts[active] >= self.limits[active])

    def completion(self, row: int, weight_version: int) -> Completion:
        request, count = self.pending[row].request, int(self.counts[row])
        return Completion(
            sample_id=request.sample_id,
            prompt_ids=request.prompt_ids,
            token_ids=self.tokens[row, :count].tolist(),
            logprobs=self.logprobs[row, :count].tolist(),
            finish_reason="stop" if self.stopped[row] else "length",
            weight_version=weight_version,
        )

    def remove(self, done: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drop rows where `done` [active] and close the holes with the last rows. Returns (holes, movers), int64 [m] each: cache
        row movers[i] must be copied over holes[i]."""
        kept = np.flatnonzero(~done)
        holes, movers = np.flatnonzero(done[: len(kept)]), kept[kept >= len(kept)]
        for name in (
            "lengths",
            "counts",
            "limits",
            "stopped",
            "temperature",
            "tokens",
            "logprobs",
            "uniforms",
            "stop_ids",
        ):
            array = getattr(self, name)
            array[holes] = array[movers]
        for hole, mover in zip(holes, movers):
            self.pending[hole] = self.pending[mover]
        self.active = len(kept)
        del self.pending[self.active :]
        return holes, movers
