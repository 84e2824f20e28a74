"""One process of TRL's GRPO trainer, timed by phase. Runs in TRL's environment (trl_env.py), started by grpo_step.py.

Prints a line `STEP {...}` a step: seconds of generate, score (rewards, advantages), train and step, and the step's CPU seconds.
Responses have a fixed length, as on the other side."""

import argparse
import gc
import json
import os
import tempfile
import time

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}

import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from workload import LEARNING_RATE, grpo_arguments


def arguments() -> argparse.Namespace:
    parser = grpo_arguments(__doc__)
    parser.add_argument("--freeze-gc", action="store_true", help="gc.freeze() before training")
    return parser.parse_args()


class TimedTrainer(GRPOTrainer):
    """Seconds of the generation and of what follows it; the rest of a step is training."""

    generated = scored = 0.0

    def _generate_and_score_completions(self, *args, **kwargs):
        began = time.perf_counter()
        result = super()._generate_and_score_completions(*args, **kwargs)
        self.scored = time.perf_counter() - began
        return result

    def _generate_single_turn(self, *args, **kwargs):
        began = time.perf_counter()
        result = super()._generate_single_turn(*args, **kwargs)
        self.generated = time.perf_counter() - began
        return result


class StepClock(TrainerCallback):
    """A step ends where the optimizer has stepped, and the next one begins there."""

    def __init__(self) -> None:
        self.trainer, self.began, self.cpu = None, 0.0, 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.began, self.cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        now, cpu = time.perf_counter(), time.process_time()
        step, generate, score = now - self.began, self.trainer.generated, self.trainer.scored - self.trainer.generated
        told = {"generate": generate, "score": score, "train": step - generate - score, "other": 0.0, "step": step}
        print("STEP", json.dumps(told | {"cpu": cpu - self.cpu}), flush=True)
        self.began, self.cpu = now, cpu


def letters(completions, **kwargs) -> list[float]:
    return [sum(c in "eE" for c in text) / max(1, len(text)) for text in completions]


def settings(options: argparse.Namespace, folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        report_to="none",
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.rows // options.micro_batch,
        num_generations=options.group,
        max_completion_length=options.response,
        generation_kwargs={"min_new_tokens": options.response},
        max_steps=options.steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        loss_type="grpo",
        beta=0.0,
        temperature=1.0,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
    )


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.policy, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(options.policy, dtype=torch.float32)
    texts = [json.loads(line)["prompt"] for line in options.prompts.read_text().splitlines()]
    assert all(len(tokenizer(t, add_special_tokens=False)["input_ids"]) == options.prompt for t in texts)
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            model=model,
            reward_funcs=letters,
            args=settings(options, folder),
            train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        clock.trainer = trainer
        trainer.remove_callback(transformers.PrinterCallback)
        if options.freeze_gc:
            gc.collect()
            gc.freeze()
        trainer.train()


if __name__ == "__main__":
    main()
