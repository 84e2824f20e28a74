"""A tiny Llama with a byte-level tokenizer, made on the spot: what tests of whole jobs run on."""

import json
from pathlib import Path

import torch

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_tokenizer(folder: Path) -> int:
    """A byte-level tokenizer (one token a byte) with ChatML's special tokens. Returns the size of its vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(SPECIAL + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(vocabulary)


def write_model(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 32,
    tied: bool = True,
    positions: int = 256,
    scores: bool = False,
) -> Path:
    """A Hugging Face folder of a random Llama (4 heads, 2 KV heads) with the tokenizer above; a reward model where it `scores`."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    vocabulary = write_tokenizer(folder)
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-5,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    if scores:
        config.num_labels = 1
    torch.manual_seed(seed)
    model = LlamaForSequenceClassification(config) if scores else LlamaForCausalLM(config)
    model.save_pretrained(folder, safe_serialization=True)
    return folder
