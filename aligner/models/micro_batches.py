"""How a global batch becomes the micro-batches of one rank, and how their results become a global tensor again. Pure: no ranks are asked.

Legend: B rows of the global batch (replicated on the CPU of every rank), S its columns; m rows and W columns of a micro-batch."""

import math
from dataclasses import dataclass, field
from typing import Callable, Mapping, Optional, Sequence

import torch
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """The rows of one data-parallel rank, cut. `micro_batches[i]` are indices into the global batch; none is longer than `rows_each`,
    and all ranks have equally many, empty ones included (a pipeline or a collective would hang otherwise). filled: each is padded to
    rows_each; otherwise it has the rows that it has (1 where it is empty)."""

    micro_batches: list[list[int]]
    rows_each: int
    filled: bool = True

    def height(self, number: int) -> int:
        """The m of a micro-batch."""
        return self.rows_each if self.filled else max(1, len(self.micro_batches[number]))


@dataclass(frozen=True)
class MicroBatch:
    """m rows, of which the first len(rows) are real and the rest are wholly masked padding.

    lengths is 1 and every mask and field is 0 (False) in padding rows. A field has a value a token, or one a row. Packed, m is 1 and its
    one row holds all of `rows` behind each other, in that order; padding at its end is a sequence of its own."""

    rows: Tensor  # [<= m] int64, indices into the global batch, on the CPU
    tokens: Tensor  # [m, W] int64
    lengths: Tensor  # [m] int64
    fields: dict[str, Tensor] = field(default_factory=dict)  # [m, W] or [m] each
    bounds: Optional[Tensor] = (
        None  # [k + 1] int32, packed: sequence i is tokens[0, bounds[i] : bounds[i + 1]]; absent: not packed
    )
    longest: int = 0  # packed: tokens of the longest sequence

    @property
    def positions(self) -> Tensor:
        """[m, W] int64: 0, 1, 2 ... in each row, or in each sequence of a packed one."""
        at = torch.arange(self.tokens.size(1), device=self.tokens.device)
        if self.bounds is not None:
            sizes = self.bounds.diff()
            at = at - self.bounds[:-1].long().repeat_interleave(sizes.long())
        return at.expand_as(self.tokens)

    @property
    def position_ids(self) -> Tensor:
        """[m, W] int64, what the model embeds: padding repeats the last real one, since learned positions may end there."""
        return self.positions.minimum(self.lengths[:, None] - 1)


def plan(
    lengths: Sequence[int], parts: Sequence[Sequence[int]], part: int, *, micro_batch_size: int, count_multiple: int = 1
) -> Plan:
    """Cut the rows parts[part] into micro-batches of at most micro_batch_size rows, long rows first.

    lengths: tokens of each of the B rows. parts: the rows of each data-parallel rank. Sorting puts rows of like length together, so
    that little is padded, and the largest memory use comes first. The number of micro-batches is that of the rank with most rows,
    rounded up to a multiple of count_multiple (the interleaved schedule needs a multiple of the pipeline degree)."""
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size must be at least 1, is {micro_batch_size}")
    most = max(len(rows) for rows in parts)
    count = max(1, -(-most // micro_batch_size))
    rows_each = max(1, -(-most // count))
    count = -(-count // count_multiple) * count_multiple
    rows = sorted(parts[part], key=lambda row: (-lengths[row], row))
    cut = [list(rows[i * rows_each : (i + 1) * rows_each]) for i in range(count)]
    assert sum(map(len, cut)) == len(rows)
    return Plan(cut, rows_each)


def plan_units(
    lengths: Sequence[int],
    parts: Sequence[Sequence[Sequence[int]]],
    part: int,
    *,
    micro_batch_size: Optional[int] = None,
    micro_batch_tokens: Optional[int] = None,
    multiple: int = 1,
    filled: bool = False,
    count_multiple: int = 1,
) -> Plan:
    """Cut units of rows, none of which is divided: those with the longest row first, put together while at most micro_batch_size rows,
    and at most micro_batch_tokens tokens with their padding, are. What exceeds a limit by itself goes alone.

    parts: the units of each data-parallel rank. filled: all micro-batches get the rows of the largest on any rank."""
    for name, limit in (("micro_batch_size", micro_batch_size), ("micro_batch_tokens", micro_batch_tokens)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name} must be at least 1, is {limit}")

    def fits(rows: int, longest: int) -> bool:
        few = micro_batch_size is None or rows <= micro_batch_size
        return few and (micro_batch_tokens is None or rows * _width(longest, multiple) <= micro_batch_tokens)

    cuts = [_packed(lengths, units, fits) for units in parts]
    count = max(1, *map(len, cuts))
    count = -(-count // count_multiple) * count_multiple
    mine = cuts[part] + [[] for _ in range(count - len(cuts[part]))]
    rows_each = max(len(rows) for cut in (cuts if filled else [mine]) for rows in [[], *cut])
    return Plan(mine, max(1, rows_each), filled=filled)


def _packed(
    lengths: Sequence[int], units: Sequence[Sequence[int]], fits: Callable[[int, int], bool]
) -> list[list[int]]:
    """fits: whether so many rows, the longest of so many tokens, may go together."""
    packed: list[list[int]] = []
    longest = 0
    for unit in sorted(units, key=lambda unit: (-max(lengths[row] for row in unit), unit[0])):
        if packed and fits(len(packed[-1]) + len(unit), longest):
            packed[-1] += unit
        else:
            longest = max(lengths[row] for row in unit)
            packed.append(list(unit))
    return packed


def plan_packed(lengths: Sequence[int], parts: Sequence[Sequence[int]], part: int, *, budget: int) -> Plan:
    """The same for packed micro-batches of one row: sequences that are put behind each other have at most `budget` tokens together.

    First fit of the longest first (first-fit decreasing), so that it depends on the rows alone. All ranks have as many as the one with
    most."""
    bins = [_first_fit(lengths, rows, budget) for rows in parts]
    count = max(1, *map(len, bins))
    mine = bins[part] + [[] for _ in range(count - len(bins[part]))]
    return Plan(mine, 1)


def _first_fit(lengths: Sequence[int], rows: Sequence[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        at = next((i for i, left in enumerate(room) if left >= lengths[row]), None)
        if at is None:
            at = len(bins)
            bins.append([])
            room.append(max(budget, lengths[row]))  # one that exceeds the budget goes alone
        bins[at].append(row)
        room[at] -= lengths[row]
    return bins


def units_of(ids: Sequence[int]) -> list[list[int]]:
    """Rows of equal id, together; in order of the first row of each."""
    found: dict[int, list[int]] = {}
    for row, value in enumerate(ids):
        found.setdefault(value, []).append(row)
    return list(found.values())


def _width(longest: int, multiple: int) -> int:
    """`longest` tokens rounded up to a multiple of `multiple`, and at least 2, so that there is a next token to be about."""
    return -(-max(longest, 2) // multiple) * multiple


def widths(plan: Plan, lengths: Sequence[int], *, multiple: int, uniform: bool = False) -> list[int]:
    """W of each micro-batch: its longest row rounded up to a multiple of `multiple`. uniform: the largest of them for all."""
    found = [_width(max((lengths[row] for row in rows), default=0), multiple) for rows in plan.micro_batches]
    return [max(found)] * len(found) if uniform else found


def build(
    chosen: list[int],
    tokens: Tensor,
    lengths: Tensor,
    fields: Mapping[str, Tensor],
    *,
    rows_each: int,
    width: int,
    device: torch.device,
) -> MicroBatch:
    """One micro-batch on `device`: m = rows_each, W = width. tokens [B, S], lengths [B], fields [B, S] or [B] on the CPU; what lies
    beyond S is padding."""
    rows = torch.tensor(chosen, dtype=torch.int64)

    def cut(x: Tensor) -> Tensor:
        y = torch.zeros((rows_each, width)[: x.dim()], dtype=x.dtype)
        part = x[rows] if x.dim() == 1 else x[rows, :width]
        y[tuple(map(slice, part.shape))] = part
        return y.to(device, non_blocking=True)

    own_lengths = torch.ones(rows_each, dtype=torch.int64)
    own_lengths[: len(chosen)] = lengths[rows]
    return MicroBatch(rows, cut(tokens), own_lengths.to(device), {name: cut(x) for name, x in fields.items()})


def build_packed(
    chosen: list[int],
    tokens: Tensor,
    lengths: Tensor,
    fields: Mapping[str, Tensor],
    *,
    multiple: int,
    device: torch.device,
) -> MicroBatch:
    """The same of one row, in which the chosen ones lie behind each other; its width is theirs, rounded up to a multiple of `multiple`."""
    sizes = [int(lengths[row]) for row in chosen]
    total = sum(sizes)
    width = _width(total, multiple)

    def join(x: Tensor) -> Tensor:
        parts = [x[row, :size] for row, size in zip(chosen, sizes, strict=True)]
        return torch.cat([*parts, torch.zeros(width - total, dtype=x.dtype)])[None].to(device, non_blocking=True)

    padding = [width - total] if width > total else []
    bounds = torch.tensor([0, *sizes, *padding], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return MicroBatch(
        rows=torch.tensor(chosen, dtype=torch.int64),
        tokens=join(tokens),
        lengths=torch.tensor([width], device=device),
        fields={name: join(x) for name, x in fields.items()},
        bounds=bounds.to(device),
        longest=max([*sizes, *padding]),
    )


def width_multiple(tensor_parallel: int, on_gpu: bool) -> int:
    """Granularity of W. A GPU's matrix units want multiples of 16; on a CPU a padded column costs what a real one does."""
    return math.lcm(16 if on_gpu else 1, tensor_parallel)


def scatter(parts: Sequence[Tensor], micro_batches: Sequence[MicroBatch], shape: tuple[int, ...]) -> Tensor:
    """A float32 tensor of `shape` ([B, S] or [B]) with the rows of parts ([m, W] or [m], one a micro-batch) at their places in the
    global batch; 0 elsewhere, so that the sum over data-parallel ranks is the whole. Columns beyond S (padding) are dropped."""
    assert all(micro.bounds is None for micro in micro_batches), "packed rows are told in sums, not at their places"
    device = parts[0].device if parts else torch.device("cpu")
    whole = torch.zeros(shape, dtype=torch.float32, device=device)
    for part, micro in zip(parts, micro_batches, strict=True):
        real = part[: len(micro.rows)].float()
        rows = micro.rows.to(device)
        if part.dim() == 1:
            whole[rows] = real
        else:
            columns = min(part.size(1), shape[1])
            whole[rows, :columns] = real[:, :columns]
    return whole
