"""The figures of the start-up probe: which groups count as slow, and who is behind them."""

from aligner.parallel.probe import Figure, lines, slow_groups, slow_warning

SIZE = 16_000_000
HOSTS = [f"n{rank // 2}" for rank in range(8)]


def tensor_groups(*seconds):
    return [Figure("tensor", (2 * i, 2 * i + 1), 20.0, s) for i, s in enumerate(seconds)]


def test_bandwidth_is_the_tensor_s_bytes_over_the_time():
    assert Figure("world", (0, 1), 10.0, 0.002).bandwidth_gb_s(SIZE) == 8.0


def test_a_group_is_slow_against_the_median_of_the_others():
    assert slow_groups(tensor_groups(0.001, 0.001, 0.0029, 0.001)) == []
    slow = tensor_groups(0.001, 0.001, 0.0031, 0.001)
    assert slow_groups(slow) == [slow[2]]
    assert slow_groups(tensor_groups(0.1)) == []  # alone it has nothing to be compared with
    assert slow_warning(tensor_groups(0.001, 0.001), SIZE, HOSTS) is None


def test_one_slow_group_names_its_ranks_and_hosts():
    said = slow_warning(tensor_groups(0.001, 0.001, 0.016, 0.001), SIZE, HOSTS)
    assert said == (
        "a group is far behind the others of its kind: look at n2 "
        "(tensor group of ranks 4, 5: 1 GB/s, the others' median is 16)"
    )


def test_a_rank_that_all_slow_groups_share_is_named():
    figures = tensor_groups(0.001, 0.001, 0.016, 0.001)
    figures += [Figure("data", (0, 2, 4, 6), 20.0, 0.001), Figure("data", (1, 3, 5, 7), 20.0, 0.016)]
    assert slow_warning(figures, SIZE, HOSTS).startswith(
        "rank 5 on n2 is slow: it is in every group that is far behind ("
    )


def test_a_line_a_kind():
    figures = [*tensor_groups(0.001, 0.002), Figure("world", tuple(range(4)), 35.4, 0.004)]
    assert lines(figures, SIZE) == [
        "tensor: 2 x 2 ranks, 20 us for 8 B, 12 GB/s for 16 MB, the slowest 8 GB/s",
        "world: 1 x 4 ranks, 35 us for 8 B, 4 GB/s for 16 MB",
    ]
