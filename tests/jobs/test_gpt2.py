"""GPT-2 as it is published, through every script: converted there and back, sampled from, and trained from an archive."""

import json
import tarfile
from pathlib import Path

import pytest
import torch

from tests.jobs.harness import Launcher, read_jsonl
from tests.tiny import write_tokenizer

ENDS = [0, 2]  # <|endoftext|> and <|im_end|>


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    """A random GPT-2 as the published one is stored: without the prefix, with causal masks and no n_inner; its tokenizer adds a BOS."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, processors
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("gpt2") / "hf"
    vocabulary = write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": "<|endoftext|>"}))
    torch.manual_seed(7)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=4, n_positions=96, vocab_size=vocabulary, bos_token_id=0, eos_token_id=2,
        initializer_range=0.2,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.save_pretrained(folder)
    weights = {name: tensor.clone() for name, tensor in model.transformer.state_dict().items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 96, 96).tril() for layer in range(2)}
    save_file(weights | masks, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_gpt2_there_and_back_and_its_answers(shared_jobs, gpt2):
    """Bit for bit, what transformers reads in the end is what it was; --raw puts the BOS first, and greedy ids are transformers'."""
    from transformers import GPT2LMHeadModel

    nemo, back = gpt2.parent / "nemo", gpt2.parent / "back"
    shared_jobs.start("convert_hf_to_nemo.py", "--hf_checkpoint", str(gpt2), "--output_dir", str(nemo)).finish(120)
    shared_jobs.start("convert_nemo_to_hf.py", "--nemo_checkpoint", str(nemo), "--output_dir", str(back)).finish(120)
    before, after = (GPT2LMHeadModel.from_pretrained(folder) for folder in (gpt2, back))
    theirs, ours = before.state_dict(), after.state_dict()
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)
    options = ("--prompt", "sing", "--raw", "--greedy", "--max_output_len", "20", "--dtype", "float32")
    found = [first_answer(shared_jobs, folder, *options) for folder in (gpt2, nemo, back)]
    vocabulary = json.loads((gpt2 / "tokenizer.json").read_text())["model"]["vocab"]
    ids = [0, *(vocabulary[letter] for letter in "sing")]
    want = before.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, 5), max_new_tokens=20, do_sample=False, eos_token_id=ENDS,
        pad_token_id=0,
    )  # fmt: skip
    assert found == [want[0, 5:].tolist()] * 3


def first_answer(jobs: Launcher, checkpoint: Path, *options: str) -> list[int]:
    job = jobs.start("generate.py", "--checkpoint", str(checkpoint), *options).finish(120)
    return read_jsonl(job.output)[0]["token_ids"]


@pytest.mark.faults
def test_ppo_from_an_archive(jobs, gpt2, tmp_path):
    """Three steps with a critic of the same model; the actor that is saved can be sampled from."""
    nemo, archive = tmp_path / "nemo", tmp_path / "gpt2.nemo"
    jobs.start("convert_hf_to_nemo.py", "--hf_checkpoint", str(gpt2), "--output_dir", str(nemo)).finish(120)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(nemo, arcname=".")
    jobs.model = archive
    jobs.alone("archive").finish()
    run = jobs.run("archive")
    assert run.steps[-1] == 3 and run.pairs == ["step_000003"]
    # the engine's log-probs are the policy's
    assert all(row["drift/max"] < 1e-3 for row in run.rows[1:])
    assert first_answer(jobs, run.path, "--prompt", "1+2=", "--raw", "--max_output_len", "4")
