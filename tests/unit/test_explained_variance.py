"""Explained variance and its parts, by hand and against a loop in numpy."""

import numpy as np
import pytest
import torch

from aligner.ops.explained_variance import explained_variance, explained_variance_parts

NAN = float("nan")


def test_explained_variance():
    mask = torch.tensor([[True, True, True, False]])
    returns = torch.tensor([[1.0, 2.0, 3.0, NAN]])
    assert explained_variance(returns.clone(), returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.full((1, 4), 2.0), returns, mask) == pytest.approx(0.0)
    assert explained_variance(-returns, returns, mask) == pytest.approx(1 - 4)
    assert explained_variance(returns, torch.ones(1, 4), mask) == 0  # all equal: nothing to explain
    assert explained_variance(returns, returns, torch.zeros(1, 4, dtype=torch.bool)) == 0


def test_parts_are_those_of_a_loop_over_tokens():
    rng = np.random.default_rng(0)
    lengths, starts = [1, 2, 3, 4, 5, 8, 9, 16, 0], [2, 0, 5, 1, 3, 2, 1, 0, 4]
    values, returns = rng.standard_normal((2, 9, 20))
    mask = np.zeros((9, 20), bool)
    parts: dict[str, list] = {f"position_{q}": [] for q in (1, 2, 3, 4)}
    buckets = {1: "tokens_1", 2: "tokens_2", 3: "tokens_3-4", 4: "tokens_3-4", 5: "tokens_5-8", 8: "tokens_5-8"}
    buckets |= {9: "tokens_9-16", 16: "tokens_9-16"}
    for b, (start, n) in enumerate(zip(starts, lengths)):
        for i in range(n):
            mask[b, start + i] = True
            pair = values[b, start + i], returns[b, start + i]
            parts[f"position_{int(4 * i / n) + 1}"].append(pair)
            parts.setdefault(buckets[n], []).append(pair)
    whole = np.var(returns[mask])
    values[~mask] = returns[~mask] = NAN
    found = explained_variance_parts(
        *(torch.tensor(x, dtype=torch.float32) for x in (values, returns)), torch.tensor(mask)
    )
    assert set(found) == set(parts)
    for name, pairs in parts.items():
        v, r = np.array(pairs).T
        want = 1 - np.var(r - v) / np.var(r) if np.var(r) > 1e-3 * whole else 0.0
        assert found[name] == pytest.approx(want, rel=1e-4, abs=1e-4), name


def test_an_empty_mask_has_positions_and_no_lengths():
    found = explained_variance_parts(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    assert found == {f"position_{q}": 0.0 for q in (1, 2, 3, 4)}
