"""Cutting a global batch: every row once, equal counts on every rank, no wasted columns, and back again."""

import pytest
import torch

from aligner.models.micro_batches import (
    Plan,
    build,
    plan,
    plan_units,
    scatter,
    units_of,
    width_multiple,
    widths,
)

CPU = torch.device("cpu")


def _plans(lengths, parts, **kwargs):
    return [plan(lengths, parts, part, **kwargs) for part in range(len(parts))]


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 5, 64])
def test_every_row_once_and_equally_many_micro_batches(micro_batch_size):
    lengths = [5, 9, 2, 7, 7, 3, 8]
    plans = _plans(lengths, [[0, 1, 2, 3], [4, 5, 6]], micro_batch_size=micro_batch_size)
    rows = [row for p in plans for micro in p.micro_batches for row in micro]
    assert sorted(rows) == list(range(7))
    assert len({(len(p.micro_batches), p.rows_each) for p in plans}) == 1
    assert all(len(micro) <= p.rows_each <= micro_batch_size for p in plans for micro in p.micro_batches)


def test_six_rows_at_four_a_micro_batch_are_three_and_three():
    found = plan([1] * 6, [list(range(6))], 0, micro_batch_size=4)
    assert found.rows_each == 3 and [len(m) for m in found.micro_batches] == [3, 3]


def test_long_rows_come_first_and_ties_keep_their_order():
    assert plan([3, 9, 3, 5], [[0, 1, 2, 3]], 0, micro_batch_size=2).micro_batches == [[1, 3], [0, 2]]


def test_the_count_is_a_multiple_of_the_pipeline_degree_where_asked():
    found = plan([4, 4, 4], [[0, 1, 2]], 0, micro_batch_size=1, count_multiple=2)
    assert [len(m) for m in found.micro_batches] == [1, 1, 1, 0]


def test_more_ranks_than_rows_leaves_empty_micro_batches():
    plans = _plans([4], [[0], [], []], micro_batch_size=2)
    assert [p.micro_batches for p in plans] == [[[0]], [[]], [[]]]
    assert all(p.rows_each == 1 for p in plans)


def test_a_micro_batch_size_of_zero_is_refused():
    with pytest.raises(ValueError, match="micro_batch_size must be at least 1, is 0"):
        plan([1], [[0]], 0, micro_batch_size=0)


def plan_by_tokens(lengths, parts, part, **limits):
    """Each row is a unit."""
    return plan_units(lengths, [[[row] for row in rows] for rows in parts], part, **limits)


def test_a_budget_of_tokens_by_hand():
    # Widths are multiples of 4. 9 -> 12: two rows are 24. 7 -> 8: three rows (7, 5, 4) are 24. 3 -> 4: one row is left.
    parts = [[0, 1, 2, 3, 4, 5], [6]]
    lengths = [3, 9, 7, 8, 5, 4, 100]
    first, second = (plan_by_tokens(lengths, parts, part, micro_batch_tokens=24, multiple=4) for part in (0, 1))
    assert first.micro_batches == [[1, 3], [2, 4, 5], [0]]
    assert second.micro_batches == [[6], [], []]  # longer than the budget: alone; as many as the other rank has
    assert [first.height(i) for i in range(3)] == [2, 3, 1] and [second.height(i) for i in range(3)] == [1, 1, 1]
    with pytest.raises(ValueError, match="micro_batch_tokens must be at least 1, is 0"):
        plan_by_tokens(lengths, parts, 0, micro_batch_tokens=0, multiple=4)


@pytest.mark.parametrize("budget", [1, 7, 30, 10_000])
def test_a_budget_is_kept_and_no_row_is_lost(budget):
    lengths = [5, 9, 2, 7, 7, 3, 8, 1]
    plans = [
        plan_by_tokens(lengths, [[0, 1, 2, 3], [4, 5, 6, 7]], p, micro_batch_tokens=budget, multiple=2) for p in (0, 1)
    ]
    assert sorted(row for p in plans for micro in p.micro_batches for row in micro) == list(range(8))
    assert len({len(p.micro_batches) for p in plans}) == 1
    for p in plans:
        for micro, width in zip(p.micro_batches, widths(p, lengths, multiple=2), strict=True):
            assert len(micro) <= 1 or len(micro) * width <= budget


def test_units_are_rows_of_equal_id():
    assert units_of([7, 3, 7, 7, 3, 0]) == [[0, 2, 3], [1, 4], [5]]


def test_units_are_not_parted_by_hand():
    # Longest rows: 9 (unit 1), 8 (unit 0), 4 (unit 2), 2 (unit 3). Four rows: 1 and 0 fit, and so do 2 and 3.
    lengths, units = [8, 3, 9, 1, 4, 4, 2], [[0, 1], [2, 3], [4, 5], [6]]
    assert plan_units(lengths, [units], 0, micro_batch_size=4).micro_batches == [[2, 3, 0, 1], [4, 5, 6]]
    assert plan_units(lengths, [units], 0, micro_batch_size=3).micro_batches == [[2, 3], [0, 1], [4, 5, 6]]
    assert plan_units(lengths, [units], 0, micro_batch_size=1).micro_batches == [[2, 3], [0, 1], [4, 5], [6]]
    # 36 tokens: four rows of 9; then four of 8 would be 32, but unit 2 is gone; 3 rows of 4 are 12.
    found = plan_units(lengths, [units], 0, micro_batch_tokens=36, multiple=1)
    assert found.micro_batches == [[2, 3, 0, 1], [4, 5, 6]] and [found.height(i) for i in (0, 1)] == [4, 3]


def test_units_on_several_ranks():
    """Equally many micro-batches; of one shape where asked, of the largest that any rank has."""
    lengths, parts = [5] * 8, [[[0, 1, 2]], [[3, 4], [5, 6], [7]]]
    first, second = (plan_units(lengths, parts, part, micro_batch_size=2) for part in (0, 1))
    assert first.micro_batches == [[0, 1, 2], [], []] and second.micro_batches == [[3, 4], [5, 6], [7]]
    assert [first.height(i) for i in range(3)] == [3, 1, 1] and [second.height(i) for i in range(3)] == [2, 2, 1]
    for part in (0, 1):
        filled = plan_units(lengths, parts, part, micro_batch_size=2, filled=True, count_multiple=2)
        assert [filled.height(i) for i in range(4)] == [3] * 4 and len(filled.micro_batches) == 4


def test_a_field_of_one_value_a_row_is_cut_with_its_rows():
    ranks, tokens, lengths = torch.tensor([4, 5, 6]), torch.arange(12).view(3, 4), torch.tensor([4, 2, 3])
    micro = build([2, 0], tokens, lengths, {"ranks": ranks}, rows_each=3, width=3, device=CPU)
    assert micro.fields["ranks"].tolist() == [6, 4, 0]


def test_width_is_the_longest_row_rounded_up():
    lengths = [1, 4, 5, 16]
    cut = Plan([[], [0], [0, 1], [2, 0], [3]], rows_each=2)
    assert widths(cut, lengths, multiple=4) == [4, 4, 4, 8, 16]
    assert widths(cut, lengths, multiple=1) == [2, 2, 4, 5, 16]
    assert widths(cut, lengths, multiple=4, uniform=True) == [16] * 5
    assert width_multiple(1, on_gpu=False) == 1 and width_multiple(3, on_gpu=True) == 48


def test_a_micro_batch_holds_its_rows_and_masked_padding():
    tokens = torch.arange(1, 25).reshape(3, 8)
    mask = torch.ones(3, 8, dtype=torch.bool)
    micro = build([2, 0], tokens, torch.tensor([3, 8, 5]), {"mask": mask}, rows_each=3, width=6, device=CPU)
    assert micro.tokens.tolist() == [[17, 18, 19, 20, 21, 22], [1, 2, 3, 4, 5, 6], [0] * 6]
    assert micro.lengths.tolist() == [5, 3, 1]
    assert micro.fields["mask"][:2].all() and not micro.fields["mask"][2].any()
    assert micro.positions[1].tolist() == list(range(6))
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 4], [0, 1, 2, 2, 2, 2], [0] * 6]


def test_scatter_puts_rows_back_and_drops_columns_beyond_the_batch():
    tokens, lengths = torch.zeros(4, 5, dtype=torch.int64), torch.tensor([5, 1, 4, 2])
    micro = [
        build(rows, tokens, lengths, {}, rows_each=2, width=width, device=CPU)
        for rows, width in (([0, 2], 8), ([3], 4))
    ]
    parts = [torch.full((2, 8), 1.0), torch.full((2, 4), 2.0)]
    assert scatter(parts, micro, (4, 5)).tolist() == [[1.0] * 5, [0.0] * 5, [1.0] * 5, [2.0] * 4 + [0.0]]
    ends = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 9.0])]
    assert scatter(ends, micro, (4,)).tolist() == [1.0, 0.0, 2.0, 3.0]
