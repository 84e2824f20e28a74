"""Philox4x32-10 against the known-answer vectors published with Random123, and the uniforms made of it."""

import numpy as np
import pytest

from aligner.rollout.philox import philox4x32, uniforms

# kat_vectors of Random123 1.14: counter, key, expected.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[np.ndarray]:
    return [np.array([int(word, 16)], np.uint64) for word in text.split()]


@pytest.mark.parametrize("counter, key, expected", VECTORS)
def test_published_vectors(counter, key, expected):
    assert [int(word[0]) for word in philox4x32(words(counter), words(key))] == [
        int(word, 16) for word in expected.split()
    ]


@pytest.mark.parametrize("counter, key, expected", VECTORS)
def test_uniforms_are_the_first_word_of_the_published_vectors(counter, key, expected):
    c, k = [int(w, 16) for w in counter.split()], [int(w, 16) for w in key.split()]
    u = uniforms(k[0] | k[1] << 32, np.uint64(c[0] | c[1] << 32), c[2], c[3])
    assert float(u) == (int(expected.split()[0], 16) >> 8) * 2.0**-24


def test_vectorised_equals_one_at_a_time():
    ids, positions = np.array([[0], [7], [2**40 + 3]], np.uint64), np.arange(50)
    together = uniforms(1234, ids, positions, 1)
    assert together.shape == (3, 50) and together.dtype == np.float32
    alone = [[float(uniforms(1234, int(i), int(p), 1)) for p in positions] for i in ids[:, 0]]
    np.testing.assert_array_equal(together, np.array(alone, np.float32))


def test_every_argument_matters():
    base = uniforms(1, 2, np.arange(100), 0)
    for other in (uniforms(2, 2, np.arange(100), 0), uniforms(1, 3, np.arange(100), 0), uniforms(1, 2, np.arange(100), 1),
                  uniforms(1 + 2**32, 2, np.arange(100), 0), uniforms(1, 2 + 2**32, np.arange(100), 0)):  # fmt: skip
        assert (base != other).mean() > 0.95


def test_range_and_mean():
    u = uniforms(5, np.arange(400)[:, None], np.arange(100), 0)
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.005 and abs(u.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(u[:, 0], u[:, 1])[0, 1]) < 0.15
