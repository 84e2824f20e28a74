"""What supervised jobs train on and hold out: rows of files, split by the hash of what was asked, within the length limit."""

import logging
from dataclasses import dataclass
from typing import Any, Callable, Generic, Optional, Sequence, TypeVar

from aligner.config.groups import Overlong
from aligner.data.jsonl import SHOWN
from aligner.data.tasks import held_out

log = logging.getLogger(__name__)
Row = TypeVar("Row")


@dataclass(frozen=True)
class Rows(Generic[Row]):
    """Rows to train on and held-out ones, and how many of both were too long."""

    train: list[Row]
    held_out: list[Row]
    dropped: int = 0
    truncated: int = 0

    def counts(self) -> dict[str, int]:
        sides = {"train_rows": len(self.train), "held_out_rows": len(self.held_out)}
        return {**sides, "dropped_rows": self.dropped, "truncated_rows": self.truncated}


def split_rows(rows: Sequence[Row], share: float, key: Callable[[Row], str]) -> tuple[list[Row], list[Row]]:
    """(train, held-out): rows of one key, the prompt, are all on one side. Raises ValueError where a side that is asked for stays empty."""
    held = [row for row in rows if held_out(key(row), share)]
    train = [row for row in rows if not held_out(key(row), share)]
    if not train or (share > 0 and not held):
        raise ValueError(
            f"data.holdout={share} leaves {len(train)} rows to train on and {len(held)} held out, of {len({key(r) for r in rows})} "
            "distinct prompts: change it, or give data.validation"
        )
    return train, held


def limit_rows(
    rows: Sequence[Row],
    *,
    overlong: Overlong,
    max_length: int,
    length: Callable[[Row], int],
    origin: Callable[[Row], str],
    cut: Optional[Callable[[Row], Optional[Row]]],
) -> Rows[Row]:
    """Rows of at most max_length tokens, in `train`: others are dropped, cut, or refused with their origins (ValueError).

    length: tokens of a row; cut: the row cut to max_length, or None where nothing to learn is left of it (it is dropped then); absent:
    rows of this kind cannot be cut."""
    long = [row for row in rows if length(row) > max_length]
    if not long:
        return Rows(list(rows), [])
    if overlong is Overlong.refuse:
        shown = ", ".join(f"{origin(row)} ({length(row)})" for row in long[:SHOWN])
        more = f" and {len(long) - SHOWN} more" if len(long) > SHOWN else ""
        raise ValueError(
            f"{len(long)} of {len(rows)} rows are longer than data.max_length={max_length} tokens: {shown}{more}; raise it, or set "
            f"data.overlong to drop{' or truncate' if cut else ''}"
        )
    if overlong is Overlong.truncate and cut is None:
        raise ValueError("data.overlong=truncate: rows of this kind cannot be cut, set it to drop or refuse")
    cuts = [row if length(row) <= max_length else cut(row) if overlong is Overlong.truncate else None for row in rows]
    kept = [row for row in cuts if row is not None]
    dropped = len(rows) - len(kept)
    truncated = len(long) - dropped
    if dropped:
        log.warning("dropped %d of %d rows longer than data.max_length=%d tokens", dropped, len(rows), max_length)
    if truncated:
        log.warning("cut %d of %d rows to their first %d tokens (data.max_length)", truncated, len(rows), max_length)
    return Rows(kept, [], dropped, truncated)


def load_rows(
    data: Any,
    *,
    read: Callable[[str], list[Row]],
    key: Callable[[Row], str],
    limit: Callable[[list[Row]], Rows[Row]],
    max_held_out: int,
) -> Rows[Row]:
    """The rows of data.train and data.validation (a SupervisedDataConfig). read: all rows of a file; key: what was asked; limit:
    limit_rows of this kind of row. At most max_held_out are held out. Raises ValueError where nothing is left to train on."""
    if data.validation is not None:
        train, held = read(data.train), read(data.validation)
    elif data.holdout:
        train, held = split_rows(read(data.train), data.holdout, key)
    else:
        train, held = read(data.train), []
    fitting, fitting_held = limit(train), limit(held)
    if not fitting.train:
        raise ValueError(
            f"{data.train}: all {len(train)} rows are longer than data.max_length={data.max_length} tokens: raise it"
        )
    return Rows(
        fitting.train,
        fitting_held.train[:max_held_out],
        fitting.dropped + fitting_held.dropped,
        fitting.truncated + fitting_held.truncated,
    )
