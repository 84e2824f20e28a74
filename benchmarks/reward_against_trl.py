"""A reward model's loss and gradients here and in TRL's RewardTrainer: the same tiny model, the same batch of pairs.

    python benchmarks/reward_against_trl.py        (TRL runs in an environment of its own, trl_env.py)

Ends with an error where they differ by more than 1e-4, for plain pairs, pairs with margins, and with the centre's penalty."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from trl_env import trl_python
from workload import ROOT, converted

CASES = {
    "pairs": (False, 0.0),
    "margins": (True, 0.0),
    "centred": (False, 0.01),
}  # name -> (margins, weight of the centre)
TOLERANCE = 1e-4
Told = tuple[float, dict[str, torch.Tensor]]
"""A loss, and its gradients by Hugging Face's names."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--micro-batch-size", type=int, default=4, help="of this side, in responses")
    return parser.parse_args()


def make_model(folder: Path) -> None:
    """A Llama of four layers under a score head that is not 0."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.08,
        num_labels=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder)


def make_pairs(count: int) -> list[dict]:
    """Responses of unlike length to prompts of unlike length; no id is the padding's."""
    generator = torch.Generator().manual_seed(1)

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(3, 200, (length,), generator=generator).tolist()

    rows = []
    for _ in range(count):
        prompt = ids(3, 12)
        chosen, rejected = ([*prompt, *ids(2, 30), 2] for _ in range(2))
        rows.append(
            {"chosen_ids": chosen, "rejected_ids": rejected, "margin": float(torch.rand(1, generator=generator))}
        )
    return rows


def batch_of(rows: list[dict], *, margins: bool):
    from aligner.data.preference_rows import padded_rows
    from aligner.models.reward_training import PreferenceBatch

    tokens, lengths = padded_rows(
        [row[key] for row in rows for key in ("chosen_ids", "rejected_ids")], pad_id=0, tensor_parallel=1
    )
    m = len(lengths)
    return PreferenceBatch(
        tokens=tokens,
        lengths=lengths,
        groups=torch.arange(len(rows)).repeat_interleave(2),
        ranks=torch.tensor([0, 1] * len(rows)),
        margins=torch.tensor([x for row in rows for x in (row["margin"] if margins else 0.0, 0.0)]),
        wanted=torch.zeros(m, 1),
        given=torch.zeros(m, 1, dtype=torch.bool),
    )


def ours(checkpoint: Path, rows: list[dict], micro_batch_size: int) -> dict[str, Told]:
    """What each case gives."""
    from aligner.config.groups import Dtype, ModelConfig, OptimConfig, ParallelConfig
    from aligner.config.preference import PreferenceConfig
    from aligner.models.hf import export_hf
    from aligner.models.reward_training import TrainedRewardModel
    from aligner.parallel.startup import start

    topology = start(ParallelConfig(), seed=0)
    settings = ModelConfig(checkpoint=str(checkpoint), dtype=Dtype.float32)
    found = {}
    for name, (margins, centre) in CASES.items():
        how = {"preference": PreferenceConfig(centre=centre), "micro_batch_size": micro_batch_size}
        # no learning rate, no weight decay: a step leaves the weights, and its gradients in the buffers
        reward = TrainedRewardModel(settings, OptimConfig(lr=0.0, clip_grad=0.0), topology, **how)
        metrics = reward.train(batch_of(rows, margins=margins))
        with torch.no_grad():
            for chunk in reward.model.plain_chunks:
                for parameter in chunk.parameters():
                    parameter.copy_(parameter.main_grad)
        gradients = {n: t.clone() for n, t in export_hf(reward.model.plain_chunks, reward.shape, topology)}
        found[name] = metrics["loss"], gradients
    return found


def theirs(model: Path, rows: list[dict], folder: Path) -> dict[str, Told]:
    """The same of TRL, in a process of its own environment."""
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {}
    for name, (margins, centre) in CASES.items():
        out = folder / f"{name}.safetensors"
        command = [str(trl_python()), str(ROOT / "benchmarks" / "trl_reward.py"), "--model", str(model)]
        command += ["--pairs", str(folder / "pairs.jsonl"), "--output", str(out), "--centre", str(centre)]
        subprocess.run([*command, *(["--margins"] if margins else [])], check=True, stdout=sys.stderr)
        tensors = load_file(out)
        found[name] = float(tensors.pop("loss")), tensors
    return found


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    rows = make_pairs(options.pairs)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "hf")
        make_tokenizer(folder / "hf")
        mine = ours(converted(folder / "hf", folder / "nemo"), rows, options.micro_batch_size)
        other = theirs(folder / "hf", rows, folder)
    worst = max(compared(case, *sides) for case, sides in {name: (mine[name], other[name]) for name in mine}.items())
    print(f"largest difference of losses and gradients: {worst:.2g}")
    if not worst <= TOLERANCE:
        sys.exit(f"the two differ by more than {TOLERANCE}")


def compared(case: str, mine: Told, other: Told) -> float:
    """The largest difference of the losses and of any gradient; both sides are printed."""
    (loss, gradients), (their_loss, their_gradients) = mine, other
    if gradients.keys() != their_gradients.keys():
        sys.exit(f"{case}: gradients of other tensors: {sorted(gradients.keys() ^ their_gradients.keys())}")
    apart = {n: float((gradients[n] - their_gradients[n]).abs().max()) for n in gradients}
    largest = max(float(t.abs().max()) for t in their_gradients.values())
    name = max(apart, key=apart.get)
    print(
        f"{case}: loss {loss:.7f}, TRL {their_loss:.7f}; largest gradient {largest:.3g}, off by {apart[name]:.2g} ({name})"
    )
    return max(abs(loss - their_loss), apart[name])


def make_tokenizer(folder: Path) -> None:
    """Both sides want one beside a model; the pairs are ids already."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 200)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
