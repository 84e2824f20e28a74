"""The loss and gradients of TRL's RewardTrainer on one batch of pairs. Runs in TRL's environment, started by reward_against_trl.py."""

import argparse
import json
import os
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "pairs", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--margins", action="store_true")
    parser.add_argument("--centre", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in options.pairs.read_text().splitlines()]
    keys = ("chosen_ids", "rejected_ids", *(("margin",) if options.margins else ()))
    data = Dataset.from_list([{key: row[key] for key in keys} for row in rows])
    with tempfile.TemporaryDirectory() as folder:
        settings = RewardConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to="none",
            gradient_checkpointing=False,
            per_device_train_batch_size=len(rows),
            center_rewards_coefficient=options.centre or None,
            max_length=None,
            dataloader_pin_memory=False,
        )
        trainer = RewardTrainer(
            model=AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=1, dtype=torch.float32),
            args=settings,
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(options.model),
        )
        inputs = trainer._prepare_inputs(trainer.data_collator(list(trainer.train_dataset)))
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
    gradients = {name: p.grad.contiguous() for name, p in trainer.model.named_parameters()}
    save_file({"loss": loss.detach(), **gradients}, options.output)


if __name__ == "__main__":
    main()
