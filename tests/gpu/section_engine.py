"""The embedded engine on this device: against Hugging Face, against itself on the CPU, across refits, and how fast it is."""

import time

import torch
from gpu_models import FAMILIES, tiny_hf, weights_of
from torch import Tensor

VOCABULARY, LONGEST, RESPONSE = 259, 24, 24


def engine(section) -> None:
    for family in FAMILIES:
        model = tiny_hf(family, VOCABULARY)
        built = build(model)
        refit(built, model, version=0)
        section.facts[f"{family}/greedy_equal"] = share = greedy_share(model, built)
        section.expect(share == 1.0, f"{family}: {share:.0%} of the greedy responses equal Hugging Face's")
        on_cpu = build(model, device="cpu")
        refit(on_cpu, model, version=0)
        for temperature in (1.0, 0.7):
            compare_samples(section, f"{family}/T{temperature}", built, on_cpu, temperature)
        refits(section, family, built, model)
        built.close()


def build(model, device=None, dtype: torch.dtype = torch.float32):
    from aligner.models.hf_config import shape_of
    from aligner.parallel.device import DEVICE
    from aligner.rollout.torch_engine import TorchEngine

    return TorchEngine(
        shape_of(model.config.to_dict()),
        max_batch_size=8,  # fewer than the requests: rows are refilled, and their cache moved
        max_input_len=LONGEST,
        max_output_len=RESPONSE,
        dtype=dtype,
        device=device or DEVICE,
    )


def refit(engine, model, *, version: int) -> None:
    from aligner.rollout.refit import certified_refit

    certified_refit(engine, weights_of(model).items(), version=version)


def requests(count: int, temperature: float) -> list:
    from aligner.data.batch import Request

    generator = torch.Generator().manual_seed(6)
    lengths = torch.randint(1, LONGEST + 1, (count,), generator=generator).tolist()
    return [
        Request(
            sample_id=1000 + i,
            prompt_ids=torch.randint(3, VOCABULARY, (length,), generator=generator).tolist(),
            max_output_len=RESPONSE - i % 3 * 5,
            temperature=temperature,
            seed=11,
        )
        for i, length in enumerate(lengths)
    ]


@torch.no_grad()
def greedy_share(model, engine) -> float:
    """The share of responses whose tokens are Hugging Face's: a whole forward pass for every token, no cache, on the same device."""
    on_device = model.to(engine.device)
    asked, equal = requests(10, temperature=0.0), 0
    for request, answer in zip(asked, engine.generate(asked), strict=True):
        ids = torch.tensor([request.prompt_ids], device=engine.device)
        for _ in range(request.max_output_len):
            ids = torch.cat([ids, on_device(ids).logits[:, -1:].argmax(-1)], dim=1)
        equal += ids[0, len(request.prompt_ids) :].tolist() == answer.token_ids
    return equal / len(asked)


def compare_samples(section, name: str, engine, on_cpu, temperature: float) -> None:
    """The same uniforms on both devices: the same tokens, but where a uniform lies within rounding of a boundary (about one token in
    ten thousand), after which a response goes its own way."""
    asked = requests(24, temperature)
    pairs = list(zip(engine.generate(asked), on_cpu.generate(asked), strict=True))
    same = [a.token_ids == b.token_ids for a, b in pairs]
    section.facts[f"{name}/samples_equal"] = f"{sum(same)}/{len(same)}"
    section.expect(sum(same) >= len(same) - 1, f"{name}: {sum(same)} of {len(same)} samples equal the CPU's")
    gaps = [abs(x - y) for (a, b), equal in zip(pairs, same) if equal for x, y in zip(a.logprobs, b.logprobs)]
    section.at_most(f"{name}/logprobs", max(gaps, default=float("nan")), 1e-4)


def refits(section, name: str, engine, model) -> None:
    """Other weights give other tokens, the first ones again the first tokens; also after pause() and resume()."""
    asked = requests(8, temperature=1.0)
    first = [answer.token_ids for answer in engine.generate(asked)]
    kept = {key: tensor.clone() for key, tensor in weights_of(model).items()}
    with torch.no_grad():
        for tensor in weights_of(model).values():
            tensor.mul_(1.1)
    refit(engine, model, version=1)
    answers = engine.generate(asked)
    section.expect([a.token_ids for a in answers] != first, f"{name}: a refit to other weights changed nothing")
    section.expect({a.weight_version for a in answers} == {1}, f"{name}: the weight version is not that of the refit")
    with torch.no_grad():
        for key, tensor in weights_of(model).items():
            tensor.copy_(kept[key])
    engine.pause()
    engine.resume()
    refit(engine, model, version=2)
    again = [answer.token_ids for answer in engine.generate(asked)]
    section.expect(again == first, f"{name}: the first weights, after pause() and resume(), give other tokens")


def throughput(section) -> None:
    """Tokens a second of a random Llama of 1.24 billion parameters in bfloat16: 64 prompts of 128 tokens, 256 tokens each."""
    from aligner.models.hf_mapping import hf_names
    from aligner.parallel.device import DEVICE, peak_memory_bytes, synchronise
    from aligner.rollout.refit import certified_refit
    from aligner.rollout.torch_engine import TorchEngine

    shape = llama_1b(small=not section.on_gpu)
    rows, prompt, response = (64, 128, 256) if section.on_gpu else (4, 16, 8)
    dtype = torch.bfloat16 if section.on_gpu else torch.float32
    engine = TorchEngine(
        shape, max_batch_size=rows, max_input_len=prompt, max_output_len=response, dtype=dtype, device=DEVICE
    )
    names = hf_names(shape)
    for version in (0, 1):  # the first one warms up
        began = time.perf_counter()
        certified_refit(engine, random_weights(names, dtype, DEVICE), version=version)
        synchronise()
        section.facts["refit_seconds"] = round(time.perf_counter() - began, 3)
    timed(engine, shape.vocab_size, rows, prompt, 4)
    first = timed(engine, shape.vocab_size, rows, prompt, 1)
    whole = timed(engine, shape.vocab_size, rows, prompt, response)
    section.facts |= {
        "parameters": sum(torch.Size(size).numel() for size in names.values()),
        "engine_gb": round(engine.nbytes / 1e9, 2),
        "prefill_seconds": round(first, 3),
        "generate_seconds": round(whole, 3),
        "tokens_per_second": round(rows * response / whole),
        "decode_step_ms": round(1e3 * (whole - first) / (response - 1), 2),
        "peak_gb": round(peak_memory_bytes() / 1e9, 2),
    }
    engine.close()


def timed(engine, vocabulary: int, rows: int, prompt: int, response: int) -> float:
    """Seconds of a generation without end tokens."""
    from aligner.data.batch import Request
    from aligner.parallel.device import synchronise

    ids = torch.randint(0, vocabulary, (rows, prompt), generator=torch.Generator().manual_seed(7)).tolist()
    asked = [Request(sample_id=i, prompt_ids=row, max_output_len=response) for i, row in enumerate(ids)]
    synchronise()
    began = time.perf_counter()
    answers = engine.generate(asked)
    seconds = time.perf_counter() - began
    assert all(len(answer.token_ids) == response for answer in answers)
    return seconds


def random_weights(names: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device):
    """(name, tensor) one at a time: norms of ones, the rest small."""
    for name, size in names.items():
        tensor: Tensor = torch.ones(size, dtype=dtype, device=device)
        yield name, tensor if "norm" in name else tensor.normal_(0, 0.02)


def llama_1b(*, small: bool):
    from aligner.models.model_config import ModelShape, padded

    vocabulary = 1000 if small else 128256
    return ModelShape(
        family="llama",
        head="lm",
        num_layers=2 if small else 16,
        hidden_size=64 if small else 2048,
        ffn_hidden_size=128 if small else 8192,
        num_attention_heads=4 if small else 32,
        num_query_groups=2 if small else 8,
        kv_channels=16 if small else 64,
        vocab_size=vocabulary,
        padded_vocab_size=padded(vocabulary),
        max_position_embeddings=2048,
        layernorm_epsilon=1e-5,
        rotary_base=500000.0,
        rope_scaling=None,
        qkv_bias=False,
        qk_norm=False,
        tied=True,
    )
