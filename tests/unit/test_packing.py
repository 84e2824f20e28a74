"""Packed rows: which lie together, and where each begins."""

import random

import pytest
import torch

from aligner.models.micro_batches import build_packed, plan_packed, scatter


def test_the_longest_first_where_they_fit_first():
    """Worked out by hand: 7 opens a bin, 5 another, 4 goes beside 5, 3 beside 7 (10 of 10), 2 opens a third, 1 ends the second."""
    lengths = [3, 7, 2, 5, 4, 1]
    assert plan_packed(lengths, [range(6)], 0, budget=10).micro_batches == [[1, 0], [3, 4, 5], [2]]


def test_a_row_beyond_the_budget_goes_alone_and_ranks_have_equally_many():
    parts = [[0, 1], [2, 3, 4, 5]]
    lengths = [12, 2, 9, 9, 9, 1]
    first, second = (plan_packed(lengths, parts, part, budget=10).micro_batches for part in (0, 1))
    assert first == [[0], [1], []] and second == [[2, 5], [3], [4]]


@pytest.mark.parametrize("seed", range(5))
def test_every_row_once_and_no_bin_beyond_the_budget(seed):
    random.seed(seed)
    lengths = [random.randint(1, 60) for _ in range(100)]
    bins = plan_packed(lengths, [range(100)], 0, budget=64).micro_batches
    assert sorted(row for rows in bins for row in rows) == list(range(100))
    assert max(sum(lengths[row] for row in rows) for rows in bins) <= 64
    # first-fit decreasing needs at most 11/9 of the fewest bins there could be, and 6/9 (Dosa 2007)
    assert len(bins) <= 11 / 9 * -(-sum(lengths) // 64) * 1.2 + 1


def test_where_sequences_lie():
    tokens = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7], [8, 9, 0, 0]])
    fields = {"mask": tokens > 2}
    micro = build_packed([1, 2], tokens, torch.tensor([3, 4, 2]), fields, multiple=4, device=torch.device("cpu"))
    assert micro.tokens.tolist() == [[4, 5, 6, 7, 8, 9, 0, 0]]
    assert micro.fields["mask"].tolist() == [[True] * 6 + [False] * 2]
    assert micro.bounds.tolist() == [0, 4, 6, 8] and micro.longest == 4  # padding is a sequence of its own
    assert micro.positions.tolist() == micro.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1]]
    assert micro.rows.tolist() == [1, 2]
    empty = build_packed([], tokens, torch.tensor([3, 4, 2]), fields, multiple=1, device=torch.device("cpu"))
    assert empty.tokens.shape == (1, 2) and not empty.fields["mask"].any() and empty.bounds.tolist() == [0, 2]
    with pytest.raises(AssertionError, match="told in sums"):
        scatter([torch.zeros(1, 8)], [micro], (3, 4))
