"""The harness itself: it names the rank that failed and the one that was late, and leaves no process behind."""

import time

import psutil
import pytest

from tests.dist.harness import run_ranks


def _fails(rank):
    if rank == 1:
        raise KeyError("what a rank says")
    return rank


def _starts(rank):
    return rank


def _sleeps(rank):
    time.sleep(600 * rank)


def test_harness_tells_which_rank_failed_and_which_was_late():
    with pytest.raises(AssertionError, match=r"(?s)rank 1: Traceback.*what a rank says"):
        run_ranks(_fails, 2)
    assert run_ranks(_starts, 2) == [0, 1]  # the deadline below is not that of their start
    with pytest.raises(AssertionError, match=r"ranks \[1\] of 2 were not done after 20 s"):
        run_ranks(_sleeps, 2, deadline=20)
    left = [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]
    assert not left
