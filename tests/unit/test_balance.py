"""balance_rows against its definition: a partition, equal counts, sums no further apart than the longest row."""

import random

import pytest

from aligner.parallel.balance import balance_rows


@pytest.mark.parametrize("rows, parts", [(0, 3), (1, 4), (7, 3), (64, 8), (65, 8), (5, 1)])
def test_partition_with_equal_counts_and_close_sums(rows, parts):
    lengths = [random.Random(rows).randint(1, 500) for _ in range(rows)]
    chosen = balance_rows(lengths, parts)
    assert sorted(sum(chosen, [])) == list(range(rows)) and len(chosen) == parts
    counts = [len(part) for part in chosen]
    assert max(counts) - min(counts) <= 1
    if rows % parts == 0 and rows:
        sums = [sum(lengths[i] for i in part) for part in chosen]
        assert max(sums) - min(sums) <= max(lengths)
    assert chosen == balance_rows(lengths, parts)


def test_hand_computed():
    # 9 -> part 0; 8 -> part 1; 3 -> part 1 (8 < 9) makes 11; 1 -> part 0.
    assert balance_rows([3, 9, 1, 8], 2) == [[1, 2], [0, 3]]


def test_refuses_no_parts():
    with pytest.raises(ValueError, match="at least one part, got 0"):
        balance_rows([1], 0)
