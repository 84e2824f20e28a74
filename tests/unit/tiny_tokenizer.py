"""A byte-level tokenizer of about 260 ids, made on the spot: every text has an encoding and decodes back."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tokenizer(
    folder: Path,
    *,
    specials: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    bos: str | None = None,
    eos: str | None = "<|im_end|>",
    pad: str | None = None,
    adds_bos: bool = False,
    adds_eos: bool = False,
    chat_template: str | None = CHATML,
    merges: tuple[tuple[str, str], ...] = (),
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    if adds_bos or adds_eos:
        single = " ".join(([bos] if adds_bos else []) + ["$A"] + ([eos] if adds_eos else []))
        named = [(name, tokenizer.token_to_id(name)) for name in (bos, eos) if name]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=named)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos, "pad_token": pad}
    config |= {"chat_template": chat_template} if chat_template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder
