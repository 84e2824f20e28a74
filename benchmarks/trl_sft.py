"""TRL's SFTTrainer on one batch: what it makes of the rows, the loss, and the gradient. Runs in TRL's environment (trl_env.py), started by
sft_against_trl.py, which reads FOLDER/rows.json and FOLDER/gradients.safetensors."""

import argparse
import json
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "data", "folder"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.data.read_text().splitlines()]
    settings = {"use_cpu": True, "bf16": False, "report_to": "none", "gradient_checkpointing": False, "seed": 0}
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        args=SFTConfig(str(options.folder / "trl"), max_length=512, loss_type="nll", **settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(options.model),
    )
    made = [trainer.train_dataset[i] for i in range(len(rows))]
    batch = trainer.data_collator(made)
    learned = (batch["labels"][:, 1:] != -100).sum()
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=learned)
    loss.backward()
    gradients = {name: p.grad.contiguous() for name, p in trainer.model.named_parameters()}
    save_file(gradients, str(options.folder / "gradients.safetensors"))
    ids = [{"ids": row["input_ids"], "labels": row["labels"]} for row in made]
    (options.folder / "rows.json").write_text(json.dumps({"loss": float(loss), "rows": ids}))


if __name__ == "__main__":
    main()
