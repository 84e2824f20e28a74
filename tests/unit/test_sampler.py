"""The order of prompts is a pure function of (seed, consumed)."""

import pytest

from aligner.data.sampler import PromptSampler


def test_resuming_anywhere_continues_the_same_order():
    whole = PromptSampler(7, seed=3, shuffle=True).take(0, 50)
    for consumed in (0, 1, 6, 7, 8, 14, 33):  # epoch boundaries and between
        assert PromptSampler(7, seed=3, shuffle=True).take(consumed, 12) == whole[consumed : consumed + 12]
    sampler = PromptSampler(7, seed=3, shuffle=True)
    assert [i for at in range(0, 50, 5) for i in sampler.take(at, 5)] == whole
    assert sampler.take(14, 3) == whole[14:17]  # and backwards


def test_each_epoch_holds_every_prompt_once_in_a_new_order():
    order = PromptSampler(20, seed=0, shuffle=True).take(0, 60)
    epochs = [order[:20], order[20:40], order[40:]]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_seed_decides():
    first, again, other = (PromptSampler(20, seed=s, shuffle=True).take(0, 20) for s in (1, 1, 2))
    assert first == again != other


def test_the_order_is_written_down():
    """A change here would make old runs resume with other prompts."""
    assert PromptSampler(8, seed=1234, shuffle=True).take(0, 8) == [0, 4, 7, 6, 1, 3, 2, 5]


def test_without_shuffling():
    assert PromptSampler(3, seed=1, shuffle=False).take(2, 5) == [2, 0, 1, 2, 0]


def test_far_along_and_larger_than_an_epoch():
    n, consumed = 5, 2**40 + 3
    taken = PromptSampler(n, seed=1, shuffle=True).take(consumed, 12)
    at = -consumed % n
    assert sorted(taken[at : at + n]) == list(range(n))


def test_no_prompts_are_refused():
    with pytest.raises(ValueError, match="no prompts"):
        PromptSampler(0, seed=1, shuffle=True)
