"""One process of this toolkit's trainer without a critic. Started by grpo_step.py.

Prints a line `STEP {...}` a step, with the phases of trl_grpo.py: `score` has log-probs, rewards and advantages, `other` the refit of the
engine and the run's records."""

import argparse
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from workload import LEARNING_RATE, grpo_arguments

from aligner.algorithms.assemble import build_policy, build_trainer, load_samples, own_reward, start_job
from aligner.config.jobs import ActorConfig
from aligner.config.load import load
from aligner.parallel.device import DEVICE, resolve_dtype
from aligner.parallel.startup import shutdown
from aligner.rollout.torch_engine import TorchEngine

REWARD = '''
def letters(response: str, sample: dict) -> float:
    """What trl_grpo.py gives."""
    return sum(c in "eE" for c in response) / max(1, len(response))
'''


def overrides(options: argparse.Namespace, folder: str) -> list[str]:
    return [
        "run.name=benchmark",
        f"run.dir={folder}",
        f"run.max_steps={options.steps}",
        f"parallel.threads={options.threads}",
        f"model.checkpoint={options.policy}",
        "model.dtype=float32",
        f"data.prompts={options.prompts}",
        "data.chat=false",
        f"optim.lr={LEARNING_RATE}",
        f"engine.max_batch_size={options.rows}",
        f"engine.max_input_len={options.prompt}",
        f"engine.max_output_len={options.response}",
        "engine.offload_during_training=true",  # a refit follows every update anyway
        "ppo.advantage=group_norm",
        f"ppo.rollout_batch_size={options.rows // options.group}",
        f"ppo.samples_per_prompt={options.group}",
        f"ppo.mini_batch_size={options.rows}",
        f"ppo.micro_batch_size={options.micro_batch}",
        "ppo.kl_coefficient=0",
        "ppo.reference=none",
        "reward.kind=function",
        f"reward.function={folder}/reward.py:letters",
        "checkpoint.at_end=false",
        "validation.every=0",
    ]


def build(options: argparse.Namespace, folder: str):
    (Path(folder) / "reward.py").write_text(REWARD)
    config = load(ActorConfig, overrides(options, folder))
    job = start_job(config, "actor")
    reward = own_reward(config, job)
    samples, policy = load_samples(config, job), build_policy(config, job.topology)
    limits = {name: getattr(config.engine, name) for name in ("max_batch_size", "max_input_len", "max_output_len")}
    how = {"dtype": resolve_dtype(config.model.dtype), "device": DEVICE, "certify": config.refit.certify}
    engine = TorchEngine(job.shape, **limits, **how)
    parts = {"policy": policy, "engine": engine, "critic": None, "reward": reward}
    trainer = build_trainer(config, job, **parts, samples=samples, resumed=None)
    trainer.stop_token_ids = ()  # responses of a fixed length, as on the other side
    return trainer, reward, job


def phases(row: dict, cpu: float) -> dict[str, float]:
    """One row of metrics.jsonl as trl_grpo.py counts."""
    told = {name.removeprefix("time/"): value for name, value in row.items() if name.startswith("time/")}
    score = told.get("logprobs", 0.0) + told["critic_wait"] + told["advantages"]
    common = {"generate": told["generate"], "score": score, "train": told["train"], "step": told["step"], "cpu": cpu}
    common["other"] = told["step"] - told["generate"] - score - told["train"]
    return common | {"refit": told["refit"], "logprobs": told.get("logprobs", 0.0)}


def main() -> None:
    options = grpo_arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer, reward, job = build(options, folder)
        cpu, end_step = [time.process_time()], trainer.end_step

        def timed_end(*args, **kwargs):
            end_step(*args, **kwargs)
            cpu.append(time.process_time())

        trainer.end_step = timed_end
        trainer.fit(resume_from=None)
        trainer.recorder.close()
        rows = [json.loads(line) for line in (Path(job.folder.path) / "metrics.jsonl").read_text().splitlines()]
        for row, (before, after) in zip(rows, pairwise(cpu), strict=True):
            assert row["response/length"] == options.response, row["response/length"]
            print("STEP", json.dumps(phases(row, after - before)), flush=True)
        reward.close()
        shutdown()


if __name__ == "__main__":
    main()
