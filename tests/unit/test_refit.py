"""Refit: equality with Hugging Face after each one, poison after a bad one, certificates, and memory given back and taken again."""

import pytest
import torch

from aligner.config.groups import Certify
from aligner.data.batch import Request
from aligner.data.interfaces import WeightUpdate
from aligner.models.hf import hf_names
from aligner.rollout.refit import certified_refit, checksum, source_checksums, verify, weight_update
from tests.unit.tiny_engine import FAMILIES, VOCAB, tensors, tiny_engine, tiny_hf, tiny_shape

PROMPTS = [[5, 9, 33], [1], list(range(40, 57))]


def greedy(engine) -> list[list[int]]:
    requests = [
        Request(sample_id=i, prompt_ids=ids, max_output_len=10, temperature=0.0) for i, ids in enumerate(PROMPTS)
    ]
    return [completion.token_ids for completion in engine.generate(requests)]


def hf_greedy(model) -> list[list[int]]:
    answers = []
    for ids in PROMPTS:
        with torch.no_grad():
            answer = model.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=10, do_sample=False
            )
        answers.append(answer[0, len(ids) :].tolist())
    return answers


@pytest.fixture(scope="module")
def model():
    return tiny_hf("llama")


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_refit_gives_the_new_model(kind):
    """In place: the buffers stay where they were."""
    engine = tiny_engine(kind)
    address = engine.weights.embedding.data_ptr(), engine.weights.layers[0].qkv.weight.data_ptr()
    for version in range(3):
        model = tiny_hf(kind, seed=version)
        certificate = engine.refit(weight_update(tensors(model), version))
        assert (certificate.version, certificate.tensors) == (version, len(tensors(model)))
        assert greedy(engine) == hf_greedy(model)
    assert address == (engine.weights.embedding.data_ptr(), engine.weights.layers[0].qkv.weight.data_ptr())


@pytest.mark.parametrize("kind", FAMILIES)
def test_expected_names_and_shapes_are_those_of_hugging_face(kind):
    expected = {name: tuple(tensor.shape) for name, tensor in tensors(tiny_hf(kind))}
    assert tiny_engine(kind).weights.expected() == expected


@pytest.mark.parametrize("kind", FAMILIES)
def test_expected_names_and_shapes_are_those_of_the_export(kind):
    names = {name: tuple(shape) for name, shape in hf_names(tiny_shape(kind)).items()}
    assert tiny_engine(kind).weights.expected() == names


def without(pairs, name):
    return [(n, t) for n, t in pairs if n != name]


DOWN = "model.layers.1.mlp.down_proj.weight"
BAD_UPDATES = {
    "missing": (lambda pairs: without(pairs, DOWN), f"1 of 20 tensors are missing: {DOWN}"),
    "nothing": (lambda pairs: [], "20 of 20 tensors are missing"),
    "extra": (lambda pairs: pairs + [("lm_head.weight", pairs[0][1])], "'lm_head.weight' is not one of the 20"),
    "twice": (lambda pairs: pairs + pairs[:1], "'model.embed_tokens.weight' came twice"),
    "misshaped": (lambda pairs: without(pairs, DOWN) + [(DOWN, torch.zeros(48, 32))], r"\[48, 32\], .* \[32, 48\]"),
    "padded": (lambda pairs: [(pairs[0][0], torch.zeros(256, 32))] + pairs[1:], rf"\[256, 32\], .* \[{VOCAB}, 32\]"),
}


@pytest.mark.parametrize("kind", BAD_UPDATES)
def test_a_bad_refit_raises_and_poisons_until_a_whole_one(model, kind):
    engine = tiny_engine("llama", model, version=1)
    spoil, message = BAD_UPDATES[kind]
    with pytest.raises(ValueError, match=message):
        engine.refit(weight_update(spoil(tensors(tiny_hf("llama", seed=9))), 2))
    for _ in range(2):  # using it does not heal it
        with pytest.raises(RuntimeError, match="refit to weight version 2 failed"):
            greedy(engine)
    with pytest.raises(ValueError):
        engine.refit(weight_update(spoil(tensors(model)), 3))
    engine.refit(weight_update(tensors(model), 4))
    assert greedy(engine) == hf_greedy(model)


def test_a_refused_refit_consumes_its_source_whole(model):
    """Where the source is a collective, the other ranks would wait for one that left it."""
    left = iter([("nobody.weight", torch.zeros(1)), *tensors(model)])
    with pytest.raises(ValueError, match="nobody.weight"):
        certified_refit(tiny_engine("llama", model), left, version=2)
    assert list(left) == []


def test_a_certificate_that_does_not_hold_poisons(model, monkeypatch):
    """The engine took every tensor, and holds something else."""
    engine = tiny_engine("llama", certify=Certify.full)
    write = engine.weights.write
    monkeypatch.setattr(engine.weights, "write", lambda name, tensor: write(name, tensor * (1 + (name == DOWN))))
    with pytest.raises(RuntimeError, match=f"1 of 20 checksums .* first {DOWN}"):
        certified_refit(engine, tensors(model), version=2)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="the engine does not hold the policy's weights; refit it with every tensor"):
        greedy(engine)
    certified_refit(engine, tensors(model), version=3)
    assert greedy(engine) == hf_greedy(model)


def test_a_source_that_fails_midway_poisons(model):
    engine = tiny_engine("llama", model)

    def failing():
        yield from tensors(model)[:3]
        raise ConnectionError("rank 1 died")

    with pytest.raises(ConnectionError):
        engine.refit(weight_update(failing(), 1))
    with pytest.raises(RuntimeError, match="rank 1 died"):
        greedy(engine)


def test_an_engine_without_weights_cannot_generate():
    with pytest.raises(RuntimeError, match="no weights yet"):
        greedy(tiny_engine("llama"))


def test_refit_and_pause_are_refused_while_requests_run(model):
    engine = tiny_engine("llama", model, version=1)
    engine.submit([Request(sample_id=1, prompt_ids=[3, 4], max_output_len=10, temperature=0.0)])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot refit while 1 requests run"):
            engine.refit(weight_update(tensors(model), 2))
        with pytest.raises(RuntimeError, match="cannot pause while 1 requests run"):
            engine.pause()
        engine.completed(timeout=0)
    assert [c.weight_version for c in engine.completed(timeout=60)] == [1]
    engine.refit(weight_update(tensors(model), 2))


def test_an_adapter_update_is_refused_and_changes_nothing(model):
    engine = tiny_engine("llama", model)
    with pytest.raises(ValueError, match="adapter"):
        engine.refit(WeightUpdate(version=1, tensors=iter([]), kind="adapter"))
    assert greedy(engine) == hf_greedy(model)


def test_pause_gives_memory_back_and_resume_wants_a_refit(model):
    engine = tiny_engine("llama", model)
    engine.pause()
    assert engine.cache.tensor.untyped_storage().nbytes() == 0 == engine.weights.embedding.untyped_storage().nbytes()
    assert engine.weights.layers[0].qkv.weight.untyped_storage().nbytes() == 0
    for call in (lambda: greedy(engine), lambda: engine.refit(weight_update(tensors(model), 1)), engine.pause):
        with pytest.raises(RuntimeError, match="paused"):
            call()
    engine.resume()
    engine.resume()  # again is harmless
    with pytest.raises(RuntimeError, match="given back by pause"):
        greedy(engine)
    engine.refit(weight_update(tensors(model), 1))
    assert greedy(engine) == hf_greedy(model)
    assert engine.nbytes == engine.cache.tensor.untyped_storage().nbytes() + engine.weights.nbytes


def test_a_closed_engine_refuses_everything(model):
    engine = tiny_engine("llama", model)
    engine.submit([Request(sample_id=1, prompt_ids=[3, 4], max_output_len=10)])
    engine.close()
    engine.close()
    for call in (lambda: greedy(engine), lambda: engine.completed(timeout=0), engine.pause, engine.resume):
        with pytest.raises(RuntimeError, match="closed"):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("certify", [Certify.full, Certify.sampled])
def test_certificate_equals_the_senders_checksums(dtype, certify):
    """Both sides see the engine's dtype. A fault in one element of what the engine holds is found by full."""
    model = tiny_hf("qwen3")
    engine = tiny_engine("qwen3", dtype=dtype, certify=certify)
    sent = {}
    source = source_checksums(tensors(model), sent, dtype=dtype, certify=certify, version=5)
    certificate = engine.refit(weight_update(source, 5))
    assert certificate.checksums == sent and len(sent) == certificate.tensors
    verify(certificate, sent)
    other = {**sent, "model.norm.weight": "0" * 32}
    with pytest.raises(RuntimeError, match="1 of .* first model.norm.weight"):
        verify(certificate, other)


def test_certify_off_has_no_checksums(model):
    engine, sent = tiny_engine("llama", certify=Certify.off), {}
    source = source_checksums(tensors(model), sent, dtype=torch.float32, certify=Certify.off, version=1)
    certificate = engine.refit(weight_update(source, 1))
    assert certificate.checksums == sent == {}
    verify(certificate, sent)


def plain_checksum(tensor: torch.Tensor) -> str:
    """The same two sums in Python's integers."""
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    size = tensor.element_size() if len(raw) % 8 else 8
    words = [int.from_bytes(raw[i : i + size], "little", signed=True) for i in range(0, len(raw), size)]
    return "".join(f"{s % 2**64:016x}" for s in (sum(words), sum(w * (i + 1) for i, w in enumerate(words))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows, columns", [(67, 71), (80, 71), (67, 72)])
def test_checksum_is_two_integer_sums(dtype, rows, columns, monkeypatch):
    """Words of one element (an odd number of 2 or 4 bytes), words of 8 bytes across rows and within them; one block, and many."""
    tensor = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert checksum(tensor, Certify.full, 0) == plain_checksum(tensor)
    monkeypatch.setattr("aligner.rollout.refit.BLOCK", 300)
    assert checksum(tensor, Certify.full, 0) == plain_checksum(tensor)
    for version in (0, 5, 19):
        assert checksum(tensor, Certify.sampled, version) == plain_checksum(tensor[version % 16 :: 16])
    shifted = torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(
        rows, columns
    )  # starts at no multiple of 8 bytes
    assert checksum(shifted, Certify.full, 0) == plain_checksum(tensor)
    assert checksum(tensor.t().contiguous().t(), Certify.full, 0) == plain_checksum(
        tensor
    )  # in another order in memory
    assert checksum(tensor[0], Certify.full, 0) == plain_checksum(tensor[0])


def test_checksum_sees_a_changed_bit_and_a_changed_place():
    tensor = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    seen = {checksum(tensor, Certify.full, 0)}
    flipped = tensor.clone()
    flipped.view(torch.int32)[2, 3] ^= 1
    seen |= {
        checksum(flipped, Certify.full, 0),
        checksum(tensor.flip(1), Certify.full, 0),
        checksum(tensor[[1, 0, 2, 3]], Certify.full, 0),
    }
    assert len(seen) == 4


def test_sixteen_sampled_certificates_cover_every_element():
    tensor = torch.zeros(100, 64)
    for row in range(100):
        changed = tensor.clone()
        changed[row, 7] = 1.0
        differing = [
            v for v in range(16) if checksum(tensor, Certify.sampled, v) != checksum(changed, Certify.sampled, v)
        ]
        assert len(differing) == 1
