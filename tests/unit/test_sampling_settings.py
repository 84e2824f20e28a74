"""Every sampling setting against Hugging Face's logits processors: log-probs exactly, frequencies by a chi-square test; and the
sampler's tail with a million draws."""

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from aligner.rollout.philox import uniforms
from aligner.rollout.sampling import Truncation, penalise, sample
from tests.unit.tiny_engine import KERNELS, tiny_engine, tiny_hf

DRAWS = 50_000
SETTINGS = [
    {},
    {"temperature": 0.6},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"repetition_penalty": 1.7},
    {"min_output_len": 4, "stop_token_ids": (0, 3, 9)},
    {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
]


def exact(logits: torch.Tensor, held: list[int], *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
          min_output_len=0, stop_token_ids=()) -> torch.Tensor:  # fmt: skip
    """[V] float64 probabilities by Hugging Face's processors, in the order of its generate()."""
    scores, ids = logits[None].float(), torch.tensor([held])
    if repetition_penalty != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(repetition_penalty)(ids, scores)
    if min_output_len:
        scores = hf.MinNewTokensLengthLogitsProcessor(len(held), min_output_len, list(stop_token_ids))(ids, scores)
    scores = hf.TemperatureLogitsWarper(temperature)(ids, scores)
    if top_k:
        scores = hf.TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = hf.TopPLogitsWarper(top_p)(ids, scores)
    if min_p:
        scores = hf.MinPLogitsWarper(min_p)(ids, scores)
    return scores[0].double().softmax(-1)


def chi_square_per_freedom(counts: np.ndarray, p: np.ndarray) -> tuple[float, int]:
    """(statistic minus its degrees of freedom, over its standard deviation sqrt(2 df)); cells expected under 5 are pooled."""
    expected = p * counts.sum()
    rare = expected < 5
    cells = [(counts[~rare], expected[~rare])]
    if expected[rare].sum() >= 5:
        cells.append((counts[rare].sum(keepdims=True), expected[rare].sum(keepdims=True)))
    observed, expected = (np.concatenate(x) for x in zip(*cells))
    freedom = len(observed) - 1
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)), freedom


@pytest.fixture(scope="module", params=KERNELS)
def llama(request):
    model = tiny_hf("llama")
    return model, tiny_engine("llama", model, max_batch_size=3, kernel=request.param)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(s) or "plain")
def test_frequencies_and_logprobs(settings):
    """Many rows with the same logits, the uniforms of as many samples: the frequencies are the exact distribution's."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3)) * 2
    held = [4, 9, 9, 17, 30]
    p = exact(logits, held, **settings)
    rows = logits.repeat(DRAWS, 1)
    column = lambda name, off, dtype: torch.full((DRAWS,), settings.get(name, off), dtype=dtype)  # noqa: E731
    if "repetition_penalty" in settings:
        history = torch.tensor(held).repeat(DRAWS, 1)
        penalise(rows, history=history, penalty=column("repetition_penalty", 1.0, torch.float32))
    if "min_output_len" in settings:
        rows[:, list(settings["stop_token_ids"])] = -torch.inf
    truncation = Truncation(
        column("top_k", 0, torch.int64), column("top_p", 1.0, torch.float32), column("min_p", 0.0, torch.float32)
    )
    tokens, logprobs = sample(
        rows,
        uniforms=torch.from_numpy(uniforms(5, np.arange(DRAWS), 0, 0)),
        temperature=column("temperature", 1.0, torch.float32),
        vocab_size=50,
        truncation=truncation if {"top_k", "top_p", "min_p"} & settings.keys() else None,
    )
    counts = np.bincount(tokens.numpy(), minlength=50)
    assert (counts[p.numpy() == 0] == 0).all()
    deviation, freedom = chi_square_per_freedom(counts, p.numpy())
    assert abs(deviation) < 4, (
        f"chi-square is {deviation:.1f} standard deviations from its {freedom} degrees of freedom"
    )
    np.testing.assert_allclose(logprobs, p.log()[tokens], atol=2e-5)


def test_a_wrong_distribution_fails_the_chi_square_test():
    p = np.array([0.5, 0.3, 0.2])
    counts = np.bincount(np.random.default_rng(0).choice(3, DRAWS, p=[0.485, 0.315, 0.2]))
    assert chi_square_per_freedom(counts, p)[0] > 4


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(s) or "plain")
def test_engine_logprobs_are_those_of_the_distribution(llama, settings):
    """Every token's log-prob by a teacher-forced forward and Hugging Face's processors; the history grows as the response does."""
    from aligner.data.batch import Request

    model, engine = llama
    prompts = [[5, 9, 9, 100], [7], [3, 140, 22, 5, 5, 6, 1]]
    done = engine.generate(
        [Request(sample_id=i, prompt_ids=ids, max_output_len=10, seed=4, **settings) for i, ids in enumerate(prompts)]
    )
    for completion in done:
        ids = completion.prompt_ids + completion.token_ids
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        for i, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs)):
            at = len(completion.prompt_ids) + i
            now = settings | {"min_output_len": max(0, settings.get("min_output_len", 0) - i)}
            p = exact(logits[at - 1], ids[:at], **now)
            assert abs(float(p[token].log()) - logprob) < 1e-4


def test_settings_of_mixed_rows_do_not_mix(llama):
    """One batch of every setting, more rows than the engine has: each sample is what it is alone."""
    from aligner.data.batch import Request

    _, engine = llama
    mixed = [
        Request(sample_id=i, prompt_ids=[3, 1 + i, 5], max_output_len=5 + 4 * (i % 3), seed=8, **settings)
        for i, settings in enumerate(SETTINGS + [{"temperature": 0.0, "repetition_penalty": 1.3}])
    ]
    assert [c.token_ids for c in engine.generate(mixed)] == [engine.generate([r])[0].token_ids for r in mixed]


def test_greedy_with_penalty_and_minimum_is_hugging_faces(llama):
    from aligner.data.batch import Request

    model, engine = llama
    ids = [5, 9, 9, 100]
    settings = {"repetition_penalty": 1.5, "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        free = model.generate(torch.tensor([ids]), eos_token_id=None, **settings)[0, 4:].tolist()
        stop = free[2]
        want = model.generate(torch.tensor([ids]), eos_token_id=stop, min_new_tokens=6, **settings)[0, 4:].tolist()
    asked = {"temperature": 0.0, "repetition_penalty": 1.5, "stop_token_ids": (stop,), "min_output_len": 6}
    done = engine.generate([Request(sample_id=0, prompt_ids=ids, max_output_len=16, **asked)])[0]
    assert done.token_ids == want and stop not in want[:6]


def test_ids_that_tie_with_the_last_one_kept_are_kept():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]] * 400)
    one = torch.ones(400)
    for truncation in (
        Truncation(torch.full((400,), 2), one, 0 * one),
        Truncation(torch.zeros(400, dtype=torch.int64), 0.7 * one, 0 * one),
    ):
        u = (torch.arange(400) + 0.5) / 400
        tokens, _ = sample(logits.clone(), uniforms=u, temperature=one, vocab_size=4, truncation=truncation)
        assert set(tokens.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("spread", [0.0, 4.0])
def test_top_p_over_more_ids_than_are_sorted_first(spread):
    """A nucleus of thousands of ids of 20 000 is that of a whole sort."""
    logits = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(0)) * spread
    p = exact(logits[1], [0], top_p=0.9) if spread else torch.full((20_000,), 1 / 20_000)
    u = torch.tensor([0.3, 1 - 2**-24])
    truncation = Truncation(torch.tensor([3, 0]), torch.tensor([1.0, 0.9]), torch.zeros(2))
    tokens, logprobs = sample(
        logits.clone(), uniforms=u, temperature=torch.ones(2), vocab_size=20_000, truncation=truncation
    )
    assert abs(float(p[tokens[1]].log()) - float(logprobs[1])) < 1e-4
