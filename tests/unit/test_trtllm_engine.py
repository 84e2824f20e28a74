"""The TensorRT-LLM engine against a strict stand-in for the package: order of calls, refusals, and the torch engine's tokens."""

import asyncio
import os
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from aligner.config.groups import Certify
from aligner.data.batch import Request
from aligner.data.tokenizer import Tokenizer
from aligner.rollout.refit import certified_refit, weight_update
from aligner.runtime.errors import UserError
from aligner.trtllm.background import BackgroundLoop
from aligner.trtllm.engine_build import EngineBuild
from aligner.trtllm.environment import clean_environment
from aligner.trtllm.sampling import request_seed
from tests.fake_trtllm import checkpoint_with_tokenizer, fake_engine, fake_package
from tests.unit.tiny_engine import tensors, tiny_engine, tiny_hf, tiny_shape

PROMPTS = ([3, 4, 5], [7], [9, 10, 11, 12, 13, 14, 15, 16])


@pytest.fixture(autouse=True)
def package():
    with fake_package():
        yield


@pytest.fixture
def checkpoint(tmp_path):
    return checkpoint_with_tokenizer(tmp_path)


@pytest.fixture
def engine(checkpoint):
    """With the weights of tiny_hf("llama") in it."""
    engine = fake_engine(tiny_shape("llama"), checkpoint)
    certified_refit(engine, tensors(tiny_hf("llama")), version=0)
    yield engine
    engine.close()


def requests(**changes):
    settings = {"max_output_len": 12, "temperature": 0.0, **changes}
    return [Request(sample_id=i, prompt_ids=list(ids), **settings) for i, ids in enumerate(PROMPTS)]


def responses(engine, **changes):
    return [(c.sample_id, c.token_ids, c.finish_reason) for c in engine.generate(requests(**changes))]


def llm(engine):
    return engine._client._llm


@pytest.mark.parametrize("kind", ["llama", "llama3_rope", "qwen2", "qwen3"])
def test_greedy_tokens_and_logprobs_are_the_torch_engines(checkpoint, kind):
    model = tiny_hf(kind)
    ours, theirs = fake_engine(tiny_shape(kind), checkpoint), tiny_engine(kind, model)
    certified_refit(ours, tensors(model), version=0)
    found, expected = ours.generate(requests()), theirs.generate(requests())
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    for a, b in zip(found, expected):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert (a.sample_id, a.prompt_ids, a.finish_reason, a.weight_version) == (
            b.sample_id,
            b.prompt_ids,
            b.finish_reason,
            b.weight_version,
        )
    ours.close()


def test_a_refit_is_buckets_and_then_none(engine):
    """Each bucket has 4 KB at most (larger tensors are alone), all names come once, and the last call finishes."""
    *sent, last = llm(engine).calls
    assert last is None and len(sent) > 3
    sizes = {name: tensor.numel() * 4 for name, tensor in tensors(tiny_hf("llama"))}
    assert sorted(name for bucket in sent for name in bucket) == sorted(sizes)
    assert all(len(bucket) == 1 or sum(sizes[n] for n in bucket) <= 4096 for bucket in sent)


def test_a_second_refit_replaces_the_weights(engine):
    other = tiny_hf("llama", seed=1)
    before = responses(engine)
    certificate = certified_refit(engine, tensors(other), version=1)
    theirs = tiny_engine("llama", other)
    assert responses(engine) == responses(theirs) != before
    assert engine.generate(requests())[0].weight_version == 1 == certificate.version
    assert certificate.checksums.keys() == {name for name, _ in tensors(other)}


def test_the_engine_keeps_copies_of_what_it_was_sent(engine):
    """The caller may overwrite a tensor as soon as the next one is asked for."""
    model, scratch = tiny_hf("llama", seed=1), {}

    def reused():
        for name, tensor in tensors(model):
            buffer = scratch.setdefault(tuple(tensor.shape), torch.empty_like(tensor))
            yield name, buffer.copy_(tensor)

    engine.refit(weight_update(reused(), 1))
    assert responses(engine) == responses(tiny_engine("llama", model))


def test_sampling_depends_on_seed_and_sample_id_alone(engine):
    together = {c.sample_id: c.token_ids for c in engine.generate(requests(temperature=1.0, seed=5))}
    alone = [engine.generate([r])[0].token_ids for r in reversed(requests(temperature=1.0, seed=5))]
    assert alone == [together[2], together[1], together[0]]
    assert responses(engine, temperature=1.0, seed=6) != responses(engine, temperature=1.0, seed=5)
    seeds = {request_seed(replace(r, seed=s, stream=t)) for r in requests() for s in (0, 1, 2**64 - 1) for t in (0, 1)}
    assert len(seeds) == 18 and all(0 <= seed < 2**63 for seed in seeds)


def test_logprobs_are_the_sampled_tokens(engine):
    """Not those of the best token, which stands first in TensorRT-LLM's answer. Oracle: a teacher-forced pass at the temperature."""
    model = tiny_hf("llama")
    for completion in engine.generate(requests(temperature=1.7, seed=3)):
        ids = torch.tensor([completion.prompt_ids + completion.token_ids])
        with torch.no_grad():
            expected = (model(ids).logits[0, :-1] / 1.7).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        assert completion.logprobs == pytest.approx(expected[-len(completion.token_ids) :].tolist(), abs=1e-4)


def test_stop_tokens_stay_in_the_response(engine):
    first = engine.generate(requests())
    stop = first[0].token_ids[3]
    found = engine.generate(requests(stop_token_ids=(stop,)))
    assert (
        found[0].finish_reason == "stop"
        and found[0].token_ids == first[0].token_ids[: first[0].token_ids.index(stop) + 1]
    )
    theirs = tiny_engine("llama", tiny_hf("llama")).generate(requests(stop_token_ids=(stop,)))
    assert [c.token_ids for c in found] == [c.token_ids for c in theirs]


def test_a_stop_string_ends_the_response_and_stays_in_it(checkpoint):
    """One token a byte: the stop string is what two sampled tokens spell, wherever they first stand together."""
    shape = replace(tiny_shape("llama"), vocab_size=259, padded_vocab_size=384)
    torch.manual_seed(0)
    config = tiny_hf("llama").config
    config.vocab_size = 259
    engine, tokenizer = fake_engine(shape, checkpoint), Tokenizer(checkpoint / "tokenizer")
    certified_refit(engine, tensors(type(tiny_hf("llama"))(config).float()), version=0)
    asked = requests(temperature=1.0, seed=1, max_output_len=40)[:1]
    plain = engine.generate(asked)[0].token_ids
    text = next(
        t for t in (tokenizer.decode(list(pair)) for pair in zip(plain, plain[1:])) if t.isascii() and len(t) == 2
    )
    (found,) = engine.generate([replace(asked[0], stop_strings=(text,))])
    end = tokenizer.decode(plain).index(text) + 2
    assert tokenizer.decode(found.token_ids).endswith(text) and found.finish_reason == "stop"
    assert (
        found.token_ids == plain[: len(found.token_ids)]
        and tokenizer.decode(found.token_ids) == tokenizer.decode(plain)[:end]
    )
    engine.close()


def test_settings_that_it_does_not_have_are_refused(engine):
    for name, value in (("min_p", 0.1), ("repetition_penalty", 1.2), ("min_output_len", 3)):
        with pytest.raises(ValueError, match=f"engine.kind=trtllm does not take {name}={value}; leave it out"):
            engine.submit(requests(**{name: value}))


def test_completions_come_as_they_finish(engine):
    long, short = requests()[0], replace(requests()[1], max_output_len=2)
    engine.submit([long, short])
    order = []
    while len(order) < 2:
        order += [c.sample_id for c in engine.completed(timeout=60)]
    assert order == [1, 0] and engine.completed(timeout=0) == [] and engine.running == 0


def test_shapes_are_those_of_the_build(engine):
    for changes, message in (
        ({"max_output_len": 41}, "max_output_len=41"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"stop_token_ids": (150,)}, "stop token id 150"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(requests(**changes))
    with pytest.raises(ValueError, match="prompt has 25 tokens"):
        engine.submit([Request(sample_id=1, prompt_ids=[1] * 25, max_output_len=1)])
    with pytest.raises(ValueError, match="sample_id 0 is already in flight"):
        engine.submit([requests()[0]] * 2)
    assert engine.running == 0


def test_a_broken_refit_poisons_until_a_whole_one(engine):
    named = tensors(tiny_hf("llama", seed=1))
    for broken, message in (
        (named[:-1], "1 of .* tensors are missing"),
        ([*named, ("model.other", torch.zeros(1))], "'model.other' is not one of"),
        ([(named[0][0], named[0][1][:5])], "has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            certified_refit(engine, broken, version=1)
        with pytest.raises(RuntimeError, match="the refit to weight version 1 failed"):
            engine.submit(requests())
    certified_refit(engine, named, version=2)
    assert responses(engine) == responses(tiny_engine("llama", tiny_hf("llama", seed=1)))
    engine.poison("its certificate differs")
    with pytest.raises(RuntimeError, match="its certificate differs"):
        engine.submit(requests())


def test_a_bucket_that_the_workers_refuse_poisons(engine, monkeypatch):
    """A uuid that no worker has: what a wrong GPU would look like."""
    monkeypatch.setattr("aligner.trtllm.engine.device_uuid", lambda local_rank: "GPU-of-somebody-else")
    with pytest.raises(RuntimeError, match="sending weights to TensorRT-LLM failed: device UUIDs"):
        certified_refit(engine, tensors(tiny_hf("llama")), version=1)
    with pytest.raises(RuntimeError, match="refit it with every tensor first"):
        engine.submit(requests())


def test_no_refit_and_no_pause_while_requests_run(engine):
    engine.submit(requests())
    with pytest.raises(RuntimeError, match="cannot refit while 3 requests run"):
        engine.refit(weight_update(tensors(tiny_hf("llama")), 1))
    with pytest.raises(RuntimeError, match="cannot pause while 3 requests run"):
        engine.pause()
    while engine.running:
        engine.completed(timeout=60)


def test_memory_is_given_back_and_taken_again(engine):
    """The stand-in refuses a release with blocks in the prefix cache, other tags at resume, and any call in between."""
    responses(engine)
    engine.pause()
    for call in (lambda: responses(engine), engine.pause, lambda: engine.refit(weight_update([], 1))):
        with pytest.raises(RuntimeError, match="paused; call resume"):
            call()
    with pytest.raises(RuntimeError, match="called while the engine is released"):
        llm(engine).generate_async(inputs=[1], sampling_params=None)
    engine.resume()
    engine.resume()  # again is harmless
    with pytest.raises(RuntimeError, match="given back by pause"):
        responses(engine)
    certified_refit(engine, tensors(tiny_hf("llama")), version=1)
    assert responses(engine) == responses(tiny_engine("llama", tiny_hf("llama")))


def test_a_closed_engine_refuses_everything(engine):
    inside = llm(engine)
    engine.close()
    engine.close()
    assert inside._state == "shut down"
    for call in (lambda: responses(engine), engine.pause, engine.resume, lambda: engine.completed(timeout=0)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_failed_request_is_named_and_the_rest_dropped(engine, monkeypatch):
    async def fails(prompt, settings):
        raise ValueError("out of blocks")

    monkeypatch.setattr(llm(engine)._model, "generate", fails)
    engine.submit(requests())
    with pytest.raises(RuntimeError, match=r"TensorRT-LLM failed on sample_id \d: out of blocks"):
        engine.completed(timeout=60)
    assert engine.running == 0


def test_a_call_that_hangs_ends_at_its_deadline(checkpoint, monkeypatch):
    engine = fake_engine(tiny_shape("llama"), checkpoint, timeout=3.0)  # its start has to fit too

    async def hangs(weights):
        await asyncio.sleep(60)

    monkeypatch.setattr(llm(engine), "update_weights", hangs)
    began = time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"sending weights to TensorRT-LLM did not end within 3 s \(engine.timeout\)"
    ):
        certified_refit(engine, tensors(tiny_hf("llama")), version=0)
    assert time.monotonic() - began < 30  # not the minute that the call would take
    engine.close()


def test_launcher_variables_are_hidden_at_the_start_alone(checkpoint, monkeypatch):
    """The stand-in's constructor refuses what is left of them."""
    given = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "SLURM_PROCID": "3",
        "PMIX_RANK": "3",
        "OMPI_COMM_WORLD_RANK": "3",
        "PMI_FD": "4",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TLLM_RAY_FORCE_LOCAL_CLUSTER", raising=False)
    fake_engine(tiny_shape("llama"), checkpoint).close()
    assert {name: os.environ.get(name) for name in given} == given and "TLLM_RAY_FORCE_LOCAL_CLUSTER" not in os.environ
    with clean_environment(["2", "5"]):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,5" and not given.keys() & os.environ.keys()
        os.environ["SET_BY_TRTLLM"] = "1"
    assert os.environ.pop("SET_BY_TRTLLM") == "1"


def test_an_absent_package_says_what_to_install(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(UserError, match="NVIDIA's container.*PyPI's own.*stub.*engine.kind=torch works without it"):
        fake_engine(tiny_shape("llama"), checkpoint)


def test_an_old_package_is_told_apart(checkpoint):
    import tensorrt_llm

    del tensorrt_llm.AsyncLLM
    with pytest.raises(UserError, match="needs AsyncLLM of TensorRT-LLM 1.2 or later, and 1.3.0-fake is installed"):
        fake_engine(tiny_shape("llama"), checkpoint)


def test_what_cannot_be_built_is_refused_before_anything_starts(checkpoint):
    long = EngineBuild(dtype="float32", max_batch_size=5, max_input_len=100, max_output_len=40)
    with pytest.raises(ValueError, match=r"= 140 exceeds the model's max_position_embeddings=128"):
        fake_engine(tiny_shape("llama"), checkpoint, build=long)


def test_a_family_that_its_backend_lacks_is_refused(checkpoint):
    other = SimpleNamespace(**{**vars(tiny_shape("llama")), "family": "gpt2"})
    with pytest.raises(ValueError, match="PyTorch backend has no gpt2 models .*; use engine.kind=torch"):
        fake_engine(other, checkpoint)


def test_certificates_cover_what_was_sent(checkpoint):
    """In bfloat16: of the copies, not of the float32 source. Off has none."""
    build = EngineBuild(dtype="bfloat16", max_batch_size=5, max_input_len=24, max_output_len=40)
    for certify, count in ((Certify.full, len(tensors(tiny_hf("qwen3")))), (Certify.off, 0)):
        engine = fake_engine(tiny_shape("qwen3"), checkpoint, build=build, certify=certify)
        assert len(certified_refit(engine, tensors(tiny_hf("qwen3")), version=4).checksums) == count
        engine.close()
    assert engine.dtype is torch.bfloat16 and engine.nbytes == sum(2 * t.numel() for _, t in tensors(tiny_hf("qwen3")))


def test_the_loop_keeps_an_error_of_a_coroutine_apart_from_its_own_deadline():
    loop = BackgroundLoop("test")

    async def late():
        raise TimeoutError("of its own")

    with pytest.raises(RuntimeError, match="waiting failed: .*of its own"):
        loop.run(late(), what="waiting", timeout=10)
    loop.close()
    loop.close()
