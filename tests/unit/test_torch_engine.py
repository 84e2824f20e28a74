"""The torch engine against Hugging Face's generate and log_softmax, and its promise that a sample does not depend on its company."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from aligner.data.batch import Completion, Request
from aligner.rollout import native
from aligner.rollout.linear import Kernel, choose_kernel
from aligner.rollout.refit import weight_update
from tests.unit.tiny_engine import FAMILIES, KERNELS, VOCAB, tensors, tiny_engine, tiny_hf, tiny_shape

LENGTHS = [3, 17, 1, 9, 24, 9, 12, 5, 2, 20, 16]  # more prompts than the engine has rows, so that some wait


@pytest.fixture(scope="module", params=[(family, kernel) for family in FAMILIES for kernel in KERNELS], ids=str)
def pair(request):
    family, kernel = request.param
    model = tiny_hf(family)
    return family, model, tiny_engine(family, model, version=3, kernel=kernel)


def prompts(lengths=LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def requests(new: int = 12, **fields) -> list[Request]:
    return [
        Request(sample_id=i, prompt_ids=ids, max_output_len=new, seed=11, **fields) for i, ids in enumerate(prompts())
    ]


def hf_greedy(model, ids: list[int], new: int, eos=None) -> list[int]:
    with torch.no_grad():
        answer = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=new,
                                do_sample=False, eos_token_id=eos, pad_token_id=0)  # fmt: skip
    return answer[0, len(ids) :].tolist()


def hf_logprobs(model, done: Completion, temperature: float) -> np.ndarray:
    """Teacher-forced, of the response's tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([done.prompt_ids + done.token_ids])).logits[0]
    logprobs = (logits[len(done.prompt_ids) - 1 : -1] / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0].numpy()


def test_greedy_is_hugging_face_generate(pair):
    _, model, engine = pair
    for done, request in zip(engine.generate(requests(temperature=0.0)), requests()):
        assert done.token_ids == hf_greedy(model, request.prompt_ids, 12)
        assert (done.sample_id, done.prompt_ids) == (request.sample_id, request.prompt_ids)
        assert (done.finish_reason, done.weight_version) == ("length", 3)


def test_greedy_stops_as_hugging_face_does(pair):
    """Stop ids are taken from what the model says, so that some responses end early, at the first token or at the last."""
    _, model, engine = pair
    said = [hf_greedy(model, ids, 12) for ids in prompts()]
    stops = (said[0][4], said[1][0], said[2][11])
    done = engine.generate(requests(temperature=0.0, stop_token_ids=stops))
    for completion, ids in zip(done, prompts()):
        assert completion.token_ids == hf_greedy(model, ids, 12, eos=list(stops))
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] in stops)
    assert len({len(c.token_ids) for c in done}) > 1


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_hugging_face_log_softmax(pair, temperature):
    _, model, engine = pair
    for done in engine.generate(requests(temperature=temperature)):
        assert len(done.token_ids) == 12
        np.testing.assert_allclose(done.logprobs, hf_logprobs(model, done, temperature), atol=1e-5)


def test_greedy_logprobs_are_at_temperature_one(pair):
    _, model, engine = pair
    done = engine.generate(requests(temperature=0.0))[0]
    np.testing.assert_allclose(done.logprobs, hf_logprobs(model, done, 1.0), atol=1e-5)


@pytest.fixture(scope="module")
def llama():
    return tiny_hf("llama")


@pytest.fixture(scope="module")
def mixed(llama) -> tuple[list[Request], dict[int, list[int]]]:
    """Requests of mixed limits, temperatures, streams and stops, and each one's tokens when it runs alone."""
    mixed = [
        replace(r, max_output_len=1 + 5 * (r.sample_id % 7), temperature=0.5 + 0.25 * (r.sample_id % 3), stream=r.sample_id % 2,
                stop_token_ids=tuple(range(r.sample_id % 4 * 3)))
        for r in requests()
    ]  # fmt: skip
    engine = tiny_engine("llama", llama, max_batch_size=1)
    return mixed, {r.sample_id: engine.generate([r])[0].token_ids for r in mixed}


@pytest.mark.parametrize("rows", [1, 2, 4, 7, 32])
def test_batch_size_does_not_change_a_sample(llama, mixed, rows):
    done = tiny_engine("llama", llama, max_batch_size=rows).generate(mixed[0])
    assert {c.sample_id: c.token_ids for c in done} == mixed[1]


def test_order_and_company_do_not_change_a_sample(llama, mixed):
    engine = tiny_engine("llama", llama)
    chosen = [mixed[0][i] for i in (10, 2, 7, 0, 5)]
    strangers = [replace(r, sample_id=100 + r.sample_id, seed=5) for r in mixed[0]]
    done = engine.generate(strangers[:4] + chosen[::-1] + strangers[4:])
    assert {c.sample_id: c.token_ids for c in done if c.sample_id < 100} == {
        r.sample_id: mixed[1][r.sample_id] for r in chosen
    }


@pytest.mark.parametrize("budget", [1, 7, 20])  # the longest prompt has 24 tokens: it comes in pieces
@pytest.mark.parametrize("kernel", KERNELS)
def test_chunked_prefill_does_not_change_a_sample(llama, mixed, kernel, budget):
    engine = tiny_engine("llama", llama, kernel=kernel)
    engine.transformer.prefill_tokens = budget
    assert {c.sample_id: c.token_ids for c in engine.generate(mixed[0])} == mixed[1]


def test_joining_while_others_run_does_not_change_a_sample(llama, mixed):
    engine, waiting, tokens = tiny_engine("llama", llama), list(mixed[0]), {}
    while waiting or engine.running:
        if waiting:
            engine.submit([waiting.pop()])
        tokens.update({c.sample_id: c.token_ids for c in engine.completed(timeout=0)})
    assert tokens == mixed[1]
    assert engine.completed(timeout=10) == []


def count_prefilled(engine) -> list[int]:
    """Grows by the number of tokens of every prefill pass."""
    seen, prefill = [], engine.transformer.prefill
    engine.transformer.prefill = lambda tokens, **keywords: seen.append(sum(map(len, tokens))) or prefill(tokens, **keywords)  # fmt: skip
    return seen


def test_one_prompt_many_samples(llama):
    """They share one prefill, differ from one another, and each equals the sample that it is alone."""
    ids = prompts()[3]
    many = [Request(sample_id=i, prompt_ids=ids, max_output_len=8, seed=2) for i in range(9)]
    engine = tiny_engine("llama", llama, max_batch_size=9)
    seen = count_prefilled(engine)
    together = [c.token_ids for c in engine.generate(many)]
    assert seen == [len(ids)]
    assert len({tuple(t) for t in together}) > 5
    assert together == [tiny_engine("llama", llama, max_batch_size=1).generate([r])[0].token_ids for r in many]


def test_seed_and_stream_matter(llama):
    engine = tiny_engine("llama", llama)
    base = [c.token_ids for c in engine.generate(requests())]
    assert base == [c.token_ids for c in engine.generate(requests())]
    assert base != [c.token_ids for c in engine.generate([replace(r, seed=12) for r in requests()])]
    assert base != [c.token_ids for c in engine.generate([replace(r, stream=1) for r in requests()])]


def test_generate_leaves_what_was_submitted_before_to_completed(llama):
    engine = tiny_engine("llama", llama)
    first, *rest = requests()
    engine.submit([first])
    assert [c.sample_id for c in engine.generate(rest)] == [r.sample_id for r in rest]
    assert [c.sample_id for c in engine.completed(timeout=10)] == [first.sample_id]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"prompt_ids": [1] * 25}, ["sample_id 0", "25", "engine.max_input_len=24"]),
        ({"prompt_ids": []}, ["0 tokens"]),
        ({"max_output_len": 41}, ["41", "engine.max_output_len=40"]),
        ({"max_output_len": 0}, ["max_output_len=0"]),
        ({"prompt_ids": [1, VOCAB]}, [str(VOCAB), "prompt token id", "outside"]),
        ({"prompt_ids": [-1]}, ["-1", "outside"]),
        ({"stop_token_ids": (VOCAB,)}, ["stop token id", str(VOCAB)]),
        ({"temperature": -1.0}, ["temperature=-1.0"]),
        ({"temperature": float("nan")}, ["temperature=nan"]),
        ({"sample_id": -4}, ["sample_id=-4"]),
        ({"stream": -1}, ["stream=-1"]),
    ],
)
def test_requests_beyond_the_build_are_refused_whole(llama, change, words):
    engine = tiny_engine("llama", llama)
    good, bad = requests()[1], replace(requests()[0], **change)
    with pytest.raises(ValueError) as error:
        engine.submit([good, bad])
    assert all(word in str(error.value) for word in words), error.value
    assert engine.running == 0 and len(engine.generate([good])) == 1


def test_a_sample_id_in_flight_is_refused(llama):
    engine = tiny_engine("llama", llama)
    engine.submit(requests()[:2])
    with pytest.raises(ValueError, match="sample_id 1 is already in flight"):
        engine.submit(requests()[1:])
    assert len(engine.generate(requests()[2:])) == len(LENGTHS) - 2


@pytest.mark.parametrize(
    "build, words",
    [
        ({"max_batch_size": 0}, ["engine.max_batch_size=0"]),
        ({"max_input_len": 100, "max_output_len": 29}, ["129", "max_position_embeddings=128"]),
        ({"max_batch_size": 10**9}, ["GB of KV cache", "engine.max_batch_size=1000000000"]),
    ],
)
def test_builds_that_cannot_be_are_refused(build, words):
    with pytest.raises(ValueError) as error:
        tiny_engine("llama", **build)
    assert all(word in str(error.value) for word in words), error.value


def test_the_longest_sequence_of_the_build(llama):
    engine = tiny_engine("llama", llama)
    done = engine.generate([replace(requests(temperature=0.0)[4], max_output_len=40)])[0]
    assert len(done.prompt_ids) == 24 and done.token_ids == hf_greedy(llama, done.prompt_ids, 40)


def test_bytes_are_those_of_weights_and_cache(llama):
    engine = tiny_engine("llama", llama)
    parameters = sum(tensor.numel() for _, tensor in tensors(llama))
    assert engine.weight_nbytes == 4 * parameters
    kinds, layers, rows, kv_heads, positions, head_size = 2, 2, 5, 2, 24 + 40, 8
    assert engine.cache_nbytes == 4 * kinds * layers * rows * kv_heads * positions * head_size
    assert engine.nbytes == engine.weight_nbytes + engine.cache_nbytes


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_bfloat16_is_close_to_float32(family, kernel):
    model = tiny_hf(family)
    done = tiny_engine(family, model, dtype=torch.bfloat16, kernel=kernel).generate(requests(new=6))
    differences = np.concatenate([np.abs(np.array(c.logprobs) - hf_logprobs(model, c, 1.0)) for c in done])
    assert differences.max() < 0.5 and differences.mean() < 0.05


def test_every_kernel_gives_the_same_tokens(llama, mixed):
    for kernel in (Kernel.onednn, *KERNELS):
        done = tiny_engine("llama", llama, kernel=kernel).generate(mixed[0])
        assert {c.sample_id: c.token_ids for c in done} == mixed[1]


def test_kernel_choice_falls_back(monkeypatch):
    """Without a compiler, without oneDNN's private operator, off the CPU, or where it is not wanted: F.linear."""
    small, cpu = tiny_shape("llama"), torch.device("cpu")
    large = replace(small, hidden_size=512, ffn_hidden_size=512)
    choose = partial(choose_kernel, rows=4, dtype=torch.float32, device=cpu)
    assert choose(small, use_native=False) is Kernel.plain
    assert choose(small, device=torch.device("meta")) is Kernel.plain
    assert choose(small, dtype=torch.float64) is Kernel.plain
    assert choose(large) in Kernel and choose(large, dtype=torch.bfloat16) in (Kernel.plain, Kernel.native)
    monkeypatch.setattr(native, "library", lambda: None)
    assert choose(small) is Kernel.plain and choose(large) in (Kernel.plain, Kernel.onednn)

    monkeypatch.setattr("aligner.rollout.linear.onednn_works", lambda: False)
    assert choose(large) is Kernel.plain


def test_no_compiler_is_said_and_the_engine_works(llama, monkeypatch, caplog):
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
    monkeypatch.setenv("CC", "false")
    with caplog.at_level("INFO"):
        engine = tiny_engine("llama", llama)
    assert engine.kernel is Kernel.plain and "torch's kernels" in caplog.text


@pytest.mark.skipif(not KERNELS[1:], reason="there is no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 9, 16, 17, 41, 128, 131, 300])
def test_native_products_are_torchs(dtype, n):
    """Few and many rows, sizes that no vector divides, and more than one pass over the depth."""
    generator = torch.Generator().manual_seed(n)
    for out, in_ in ((7, 5), (150, 32), (64, 1100)):
        weight = torch.randn(out, in_, generator=generator).to(dtype)
        x = torch.randn(n, in_, generator=generator)
        got = native.linear(x, weight, torch.empty(native.PANEL_TOKENS * in_))
        torch.testing.assert_close(got.double(), x.double() @ weight.double().T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("where", ["model.norm.weight", "model.embed_tokens.weight"])  # the latter spoils the cache too
def test_weights_that_diverged_are_named_and_block_the_engine(llama, where, kernel):
    engine = tiny_engine("llama", llama, kernel=kernel)
    bad = [(name, torch.full_like(t, torch.nan) if name == where else t) for name, t in tensors(llama)]
    engine.refit(weight_update(bad, 8))
    with pytest.raises(FloatingPointError, match="weight version 8 .* sample_id"):
        engine.generate(requests())
    assert engine.running == 0
    with pytest.raises(RuntimeError, match="not finite"):
        engine.submit(requests())
    engine.refit(weight_update(tensors(llama), 9))
    short = Request(sample_id=0, prompt_ids=[7, 5], max_output_len=12, temperature=0.0)  # a row that held more before
    assert engine.generate([short])[0].token_ids == hf_greedy(llama, [7, 5], 12)
