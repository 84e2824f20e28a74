"""The sampler against a loop in numpy float64, and at the edges where rounding could choose an impossible token."""

import sys

import numpy as np
import pytest
import torch

from aligner.rollout import native
from aligner.rollout.philox import uniforms
from aligner.rollout.sampling import sample
from tests.unit.tiny_engine import KERNELS


@pytest.fixture(autouse=True, params=[kernel.value for kernel in KERNELS])
def implementation(request, monkeypatch):
    """Every test with both: torch's kernels, and those compiled from kernels/."""
    monkeypatch.setattr(sys.modules[__name__], "NATIVE", request.param == "native")


NATIVE = False


def draw(logits, uniforms, temperature=1.0, vocab_size=None, **keywords):
    logits, n = torch.as_tensor(logits, dtype=torch.float32).clone(), len(logits)
    temperature = torch.as_tensor(temperature, dtype=torch.float32).expand(n)
    u = torch.as_tensor(uniforms, dtype=torch.float32).expand(n)
    if NATIVE:
        logits = logits[:, : vocab_size or logits.size(1)].contiguous()
        found = native.Sampler(n, logits.size(1))(logits, uniforms=u.numpy(), temperature=temperature.numpy())
        return tuple(map(torch.from_numpy, found))
    return sample(logits, uniforms=u, temperature=temperature, vocab_size=vocab_size or logits.size(1), **keywords)


def reference(logits: np.ndarray, u: float, temperature: float) -> tuple[int, float]:
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    token = next(i for i, c in enumerate(np.cumsum(p)) if c > u * p.sum())
    return token, float(np.log(p[token] / p.sum()))


@pytest.mark.parametrize("vocab", [3, 150, 1000])
def test_tokens_and_logprobs_of_a_loop(vocab):
    rng = np.random.default_rng(vocab)
    logits, u, temperature = rng.normal(size=(64, vocab)) * 3, rng.random(64), rng.uniform(0.3, 2.0, 64)
    tokens, logprobs = draw(logits, u, temperature)
    expected = [reference(*row) for row in zip(logits, u, temperature)]
    assert tokens.tolist() == [token for token, _ in expected]
    np.testing.assert_allclose(logprobs, [logprob for _, logprob in expected], atol=1e-5)


def test_boundaries_are_half_open():
    """p = 1/4 each: u in [k/4, (k+1)/4) is token k."""
    tokens, logprobs = draw([[0.0] * 4] * 6, [0.0, 0.25, 0.4999, 0.5, 0.75, 1 - 2**-24])
    assert tokens.tolist() == [0, 1, 1, 2, 3, 3]
    np.testing.assert_allclose(logprobs, np.log(0.25), atol=1e-6)


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-24, 1.0])
def test_never_an_id_of_probability_zero(u):
    """Leading and trailing ids are impossible; u = 1 stands for a product that rounding lifted to the total."""
    logits = np.full((1, 3000), -np.inf)
    logits[0, 1000:2000] = np.random.default_rng(0).normal(size=1000)
    token, logprob = draw(logits, [u])
    assert 1000 <= int(token) < 2000 and np.isfinite(float(logprob))


@pytest.mark.parametrize("seed", range(5))
def test_tail_of_a_large_vocabulary(seed):
    """The largest uniform under many tiny probabilities gives a possible id, with the log-prob of that id."""
    logits = np.random.default_rng(seed).normal(size=(4, 49152)) * 5
    logits[:, -100:] = -200.0
    tokens, logprobs = draw(logits, [1 - 2**-24] * 4)
    assert (tokens < 49152 - 100).all()
    expected = torch.as_tensor(logits).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    np.testing.assert_allclose(logprobs, expected, atol=2e-5)


def test_padding_is_never_chosen_and_has_no_mass():
    logits = np.zeros((2, 8))
    logits[:, 5:] = 100.0
    for temperature in (1.0, 0.0):
        tokens, logprobs = draw(logits, [0.99, 1.0], temperature, vocab_size=5)
        assert (tokens < 5).all()
        np.testing.assert_allclose(logprobs, np.log(1 / 5), atol=1e-6)


def test_greedy_rows_among_tempered_ones():
    logits = np.random.default_rng(1).normal(size=(4, 50))
    tokens, logprobs = draw(logits, [0.3] * 4, [0.0, 0.7, 0.0, 1.0])
    assert tokens[[0, 2]].tolist() == logits[[0, 2]].argmax(1).tolist()
    assert tokens[[1, 3]].tolist() == [reference(logits[1], 0.3, 0.7)[0], reference(logits[3], 0.3, 1.0)[0]]
    np.testing.assert_allclose(logprobs[0], torch.as_tensor(logits[0]).log_softmax(0).max(), atol=1e-6)


def test_without_greedy_rows_the_answer_is_the_same():
    logits, u = np.random.default_rng(2).normal(size=(8, 50)), np.linspace(0, 0.99, 8)
    for a, b in zip(draw(logits, u, 0.9), draw(logits, u, 0.9, any_greedy=False)):
        assert torch.equal(a, b)


def test_frequencies_follow_the_distribution():
    logits = np.array([0.0, 1.0, -1.0, 2.0])
    tokens, _ = draw(np.tile(logits, (20000, 1)), (np.arange(20000) + 0.5) / 20000, 1.5)
    p = np.exp(logits / 1.5) / np.exp(logits / 1.5).sum()
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 20000, p, atol=1e-3)


def test_a_row_with_nan_says_so_in_its_logprob_alone():
    logits = np.zeros((2, 10))
    logits[0, 3] = np.nan
    tokens, logprobs = draw(logits, [0.5, 0.5])
    assert torch.isnan(logprobs).tolist() == [True, False] and 0 <= int(tokens[0]) < 10


@pytest.mark.parametrize("infinite", [np.inf, -np.inf])
def test_infinite_logits_say_so_in_the_logprob(infinite):
    """+inf: no distribution. -inf is an impossible id, unless every id is."""
    logits = np.zeros((2, 300))
    logits[0, 7] = infinite
    logits[1] = infinite
    tokens, logprobs = draw(logits, [0.5, 0.5])
    assert torch.isfinite(logprobs).tolist() == [infinite < 0, False]
    assert int(tokens[0]) != 7 or infinite > 0


def test_a_million_draws_of_the_tail():
    """512 ids, half of the mass on the first and a geometric tail down to 3e-8 behind sums near 1: every id, and the last hundred
    together, comes as often as its probability says."""
    vocab, draws, rows = 512, 1_000_000, 10_000
    p = np.exp(-np.arange(vocab) / 45.0)
    p[1:] *= 0.5 / p[1:].sum()
    p[0] = 0.5
    many, counts = torch.from_numpy(np.log(p)).float().expand(rows, -1), np.zeros(vocab, np.int64)
    for start in range(0, draws, rows):
        tokens, _ = draw(many, uniforms(1, np.arange(start, start + rows), 0, 0), any_greedy=False)
        counts += np.bincount(tokens.numpy(), minlength=vocab)
    seen = p * draws >= 5
    z = (counts[seen] - draws * p[seen]) / np.sqrt(draws * p[seen] * (1 - p[seen]))
    assert np.abs(z).max() < 4.5 and abs((z**2).sum() - seen.sum()) < 4 * np.sqrt(2 * seen.sum())
    tail, expected = counts[-100:].sum(), draws * p[-100:].sum()
    assert 20 < expected < 200 and abs(tail - expected) < 4 * np.sqrt(expected), (tail, expected)
