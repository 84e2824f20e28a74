"""Supervised fine-tuning against TRL's SFTTrainer on the same model and rows: the same tokens learned, the same loss and gradient.

    python benchmarks/sft_against_trl.py [--model DIR] [--rows 16] [--packed]

Both sides read one JSONL file of prompts with completions and a Hugging Face folder (a random Llama of 0.3M parameters without --model),
and compute in float32. It ends with an error where token ids or learned tokens differ, or the loss or an element of the gradient by more
than 1e-4 of the largest."""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from trl_env import trl_python
from workload import CACHE, ROOT, converted, make_tiny

from aligner.algorithms.sft import collate_examples
from aligner.config.groups import Dtype, ModelConfig, OptimConfig, ParallelConfig
from aligner.config.supervised import SFTDataConfig
from aligner.data.conversations import Example, encode_all, read_conversations
from aligner.data.tokenizer import Tokenizer
from aligner.models import pipeline
from aligner.models.optimizer import clear_gradients
from aligner.models.policy import predicting_positions
from aligner.models.sft import SFTBatch, SFTModel
from aligner.parallel.startup import shutdown, start

TOLERANCE = 1e-4


def write_rows(path: Path, tokenizer: Tokenizer, count: int) -> None:
    """Prompts and completions of unlike length, of words that the tokenizer knows."""
    draw = random.Random(0)
    words = [w for w in sorted({tokenizer.decode([i]).strip() for i in range(tokenizer.vocab_size)}) if w.isalnum()]
    texts = [[" ".join(draw.choices(words, k=draw.randint(2, 30))) for _ in range(2)] for _ in range(count)]
    rows = [{"prompt": prompt, "completion": f" {completion}"} for prompt, completion in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def gradient(model: SFTModel, batch: SFTBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and its gradient under Hugging Face's names."""
    inner = model.model
    micro = inner.micro_batches(batch.tokens, batch.lengths, {"mask": batch.mask})
    clear_gradients(inner.chunks, inner.optimizer)
    loss = partial(model._loss, int(batch.mask.sum()))
    sums = pipeline.forward_backward(inner.chunks, micro, model.topology, loss=loss, positions=predicting_positions)
    for parameter in inner.plain_chunks[0].parameters():
        parameter.data.copy_(parameter.main_grad)  # so that the export of weights exports gradients
    return sums["loss"], {name: tensor.clone() for name, tensor in model.export()}


def ours(checkpoint: Path, data: Path, *, packed: bool) -> tuple[list[Example], float, dict[str, torch.Tensor]]:
    topology = start(ParallelConfig(threads=1), seed=0)
    tokenizer = Tokenizer(checkpoint / "tokenizer")
    examples = encode_all(read_conversations(data), tokenizer, SFTDataConfig(chat=False))
    settings = ModelConfig(checkpoint=str(checkpoint), dtype=Dtype.float32)
    cut = {"micro_batch_size": 4, "packed_tokens": 128 if packed else None}
    model = SFTModel(settings, OptimConfig(), topology, **cut)
    found = gradient(model, collate_examples(examples, tokenizer.pad_id))
    return examples, *found


def theirs(model: Path, data: Path, folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    command = [str(trl_python()), str(ROOT / "benchmarks" / "trl_sft.py")]
    given = {"model": model, "data": data, "folder": folder}
    subprocess.run([*command, *(f"--{name}={value}" for name, value in given.items())], check=True)
    return json.loads((folder / "rows.json").read_text()), load_file(folder / "gradients.safetensors")


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest between elements of like name, over the largest element there is. SystemExit where names differ."""
    if one.keys() != other.keys():
        raise SystemExit(f"gradients of other tensors: {sorted(one.keys() ^ other.keys())}")
    largest = max(float(tensor.abs().max()) for tensor in other.values())
    return max(float((one[name] - other[name]).abs().max()) for name in one) / largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--packed", action="store_true", help="this toolkit's side packs its rows")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model or make_tiny(CACHE / "sft-tiny" / "hf")
        checkpoint = converted(model, folder / "checkpoint")
        data = folder / "rows.jsonl"
        write_rows(data, Tokenizer(checkpoint / "tokenizer"), options.rows)
        examples, loss, gradients = ours(checkpoint, data, packed=options.packed)
        shutdown()
        told, expected = theirs(model, data, folder)
    for example, row in zip(examples, told["rows"], strict=True):
        labels = torch.where(example.mask, example.ids, -100).tolist()
        if example.ids.tolist() != row["ids"] or labels != row["labels"]:
            raise SystemExit(f"{example.origin}: other tokens are learned\n{labels}\n{row['labels']}")
    apart = {"loss": abs(loss - told["loss"]) / abs(told["loss"]), "gradient": difference(gradients, expected)}
    tokens = sum(int(example.mask.sum()) for example in examples)
    print(f"{len(examples)} rows, {tokens} learned tokens: loss {loss:.6f}, TRL {told['loss']:.6f}")
    print(json.dumps({"rows": len(examples), "tokens": tokens, "packed": options.packed, **apart}))
    if max(apart.values()) > TOLERANCE:
        sys.exit(f"the two differ by more than {TOLERANCE}: {apart}")


if __name__ == "__main__":
    main()
