"""One process of TRL's PPO trainer, timed by phase. Runs in TRL's environment (trl_env.py), started by ppo_step.py.

Prints a line `STEP {...}` a step: seconds of generate, score (reference, values, rewards and what follows from them), train, other and
step, and the step's CPU seconds. Responses have a fixed length, as on the other side."""

import argparse
import gc
import json
import os
import tempfile
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer
from workload import CLIP, KL, LEARNING_RATE, worker_arguments


def arguments() -> argparse.Namespace:
    parser = worker_arguments(__doc__)
    parser.add_argument("--freeze-gc", action="store_true", help="gc.freeze() before training")
    return parser.parse_args()


class PhaseClock(TrainerCallback):
    """Reads the clock where TRL's step passes from one phase to the next. A step ends where the next one's generation begins."""

    def __init__(self) -> None:
        self.began: float | None = None
        self.generated = self.training = self.trained = self.cpu = 0.0

    def watch(self, module) -> None:
        """Time module.batch_generation and the first module.forward that has gradients."""
        generate, forward = module.batch_generation, module.forward

        def timed_generation(*args, **kwargs):
            self.end_step()
            self.began, self.training, self.cpu = time.perf_counter(), 0.0, time.process_time()
            result = generate(*args, **kwargs)
            self.generated = time.perf_counter()
            return result

        def watched_forward(*args, **kwargs):
            if torch.is_grad_enabled() and not self.training:
                self.training = time.perf_counter()
            return forward(*args, **kwargs)

        module.batch_generation, module.forward = timed_generation, watched_forward

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.trained = time.perf_counter()

    def end_step(self) -> None:
        if self.began is None:
            return
        now = time.perf_counter()
        phases = {
            "generate": self.generated - self.began,
            "score": self.training - self.generated,
            "train": self.trained - self.training,
            "other": now - self.trained,
            "step": now - self.began,
            "cpu": time.process_time() - self.cpu,
        }
        print("STEP", json.dumps(phases), flush=True)


def read_prompts(path: Path, tokenizer, length: int) -> Dataset:
    texts = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert all(len(row) == length for row in ids), f"{path} has prompts of other lengths than {length}"
    return Dataset.from_dict({"input_ids": ids})


def settings(options: argparse.Namespace, folder: str) -> PPOConfig:
    return PPOConfig(
        output_dir=folder,
        use_cpu=True,
        report_to="none",
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=options.rows,
        num_mini_batches=options.rows // options.mini_batch,
        local_rollout_forward_batch_size=options.score_batch,
        total_episodes=options.rows * options.steps,
        num_ppo_epochs=1,
        kl_coef=KL,
        cliprange=CLIP,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        temperature=1.0,
        response_length=options.response,
        stop_token=None,
        num_sample_generations=0,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.policy, padding_side="left")
    dtype = getattr(torch, options.dtype)
    policy, reference = (AutoModelForCausalLM.from_pretrained(options.policy, dtype=dtype) for _ in range(2))
    value, reward = (
        AutoModelForSequenceClassification.from_pretrained(options.reward, num_labels=1, dtype=dtype) for _ in range(2)
    )
    clock = PhaseClock()
    clock.watch(ppo_trainer)
    with tempfile.TemporaryDirectory() as folder:
        trainer = PPOTrainer(
            args=settings(options, folder),
            processing_class=tokenizer,
            model=policy,
            ref_model=reference,
            reward_model=reward,
            value_model=value,
            train_dataset=read_prompts(options.prompts, tokenizer, options.prompt),
            callbacks=[clock],
        )
        if options.freeze_gc:
            gc.collect()
            gc.freeze()
        trainer.train()
        clock.end_step()


if __name__ == "__main__":
    main()
