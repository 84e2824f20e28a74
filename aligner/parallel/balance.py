"""Splitting rows over data-parallel ranks so that they finish together."""

from typing import Sequence


def balance_rows(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Row indices of each part: their numbers differ by one at most, and their sums of lengths are close.

    Longest first, each row goes to the part with the smallest sum that still has room (Graham 1969, with a bound on the count). The
    result depends on lengths and parts alone. Rows of a part are in ascending order. Raises ValueError for parts < 1."""
    if parts < 1:
        raise ValueError(f"rows are split over at least one part, got {parts}")
    room = [len(lengths) // parts + (part < len(lengths) % parts) for part in range(parts)]
    sums = [0] * parts
    chosen: list[list[int]] = [[] for _ in range(parts)]
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        part = min((p for p in range(parts) if len(chosen[p]) < room[p]), key=lambda p: (sums[p], p))
        chosen[part].append(row)
        sums[part] += lengths[row]
    return [sorted(rows) for rows in chosen]
