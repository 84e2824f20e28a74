"""The torch engine with a real model, SmolLM2-135M: greedy tokens are Hugging Face's, log-probs those of a teacher-forced forward.

Needs its Hugging Face folder in ALIGNER_SMOLLM2_HF, or where `benchmarks/` puts it (python tools/smollm2.py --hf_dir DIR writes one)."""

import os
import random
from pathlib import Path

import pytest
import torch

from aligner.data.batch import Request
from aligner.models.hf_config import shape_of
from aligner.rollout.refit import weight_update
from aligner.rollout.torch_engine import TorchEngine

CACHED = Path(__file__).resolve().parents[2] / ".cache" / "SmolLM2-135M-Instruct-hf"
NEAR = 1e-3  # where Hugging Face's two best logits are as close as this, rounding may choose either
NEW = 10
QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours and say in one sentence what happens when two of them are mixed.",
    "2 + 3 =",
    "Hi",
    "Translate into German: The weather is fine today, but tomorrow it will rain in the whole country, says the forecast.",
    "Write a haiku about the sea.",
    "Who wrote Hamlet?",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    path = Path(os.environ.get("ALIGNER_SMOLLM2_HF") or CACHED)
    if not (path / "config.json").is_file():
        pytest.skip("no Hugging Face folder of SmolLM2 in ALIGNER_SMOLLM2_HF (see tools/smollm2.py --hf_dir)")
    return path


@pytest.fixture(scope="module")
def model(folder):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(folder) -> list[list[int]]:
    from aligner.data.tokenizer import Tokenizer

    tokenizer = Tokenizer(folder)
    return [tokenizer.chat([{"role": "user", "content": question}], system="") for question in QUESTIONS]


def engine(model, rows: int) -> TorchEngine:
    shape = shape_of(model.config.to_dict())
    built = TorchEngine(shape, max_batch_size=rows, max_input_len=64, max_output_len=NEW, dtype=torch.float32)
    tensors = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    built.refit(weight_update(tensors, 0))
    return built


@torch.no_grad()
def logits_of(model, completion) -> torch.Tensor:
    """Hugging Face's, teacher-forced, before each token of the response."""
    ids = completion.prompt_ids + completion.token_ids
    return model(torch.tensor([ids])).logits[0, len(completion.prompt_ids) - 1 : -1]


def test_greedy_in_every_order_and_slot_count(model, prompts):
    """Each token is the best of Hugging Face's logits for what was said before it, or as good as the best within 1e-3. With no such
    near tie the response is exactly that of Hugging Face's generate."""
    checked: dict[tuple, bool] = {}
    rng = random.Random(1)
    for rows in (1, 3, len(prompts)):
        built, order = engine(model, rows), rng.sample(range(len(prompts)), len(prompts))
        done = built.generate(
            [Request(sample_id=i, prompt_ids=prompts[i], max_output_len=NEW, temperature=0.0) for i in order]
        )
        for completion in done:
            key = (completion.sample_id, *completion.token_ids)
            if key not in checked:
                checked[key] = follows(model, completion)
            assert checked[key], (rows, order, completion)
        built.close()
    assert len(checked) <= len(prompts) + 1, "different slots gave different responses: more than near ties explain"


def follows(model, completion) -> bool:
    logits = logits_of(model, completion)
    chosen = logits.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    tops = logits.topk(2).values
    near = bool((tops[:, 0] - tops[:, 1] < NEAR).any())
    return bool((chosen >= tops[:, 0] - NEAR).all()) and (near or generated(model, completion))


@torch.no_grad()
def generated(model, completion) -> bool:
    ids = torch.tensor([completion.prompt_ids])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return found[0, ids.size(1) :].tolist() == completion.token_ids


def test_logprobs_of_samples(model, prompts):
    done = engine(model, 4).generate(
        [Request(sample_id=i, prompt_ids=ids, max_output_len=NEW, temperature=0.8) for i, ids in enumerate(prompts)]
    )
    for completion in done:
        expected = (logits_of(model, completion) / 0.8).log_softmax(-1)
        expected = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
