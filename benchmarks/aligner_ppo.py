"""One process of this toolkit's PPO trainer, with the critic and the reward model in it. Started by ppo_step.py.

Prints a line `STEP {...}` a step, with the phases of trl_ppo.py, and this toolkit's own beside. `score` is what follows a response:
log-probs of policy and reference, values, rewards, advantages. `other` has the refit of the engine and the run's records."""

import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from workload import CLIP, KL, LEARNING_RATE, worker_arguments

from aligner.algorithms.assemble import Job, build_policy, build_trainer, load_samples, start_job
from aligner.algorithms.critic_job import build_critic_job
from aligner.algorithms.ppo import PPOTrainer
from aligner.config.jobs import ActorConfig, CriticConfig
from aligner.config.load import load
from aligner.parallel.device import DEVICE, resolve_dtype
from aligner.parallel.startup import shutdown
from aligner.rollout.torch_engine import TorchEngine
from aligner.serving.local import LocalCritic


class TimedCritic(LocalCritic):
    """Seconds of each step's inference and training, which the trainer counts to the phases in which it asks."""

    def __init__(self, backend) -> None:
        super().__init__(backend)
        self.inference, self.training = [0.0], []
        self.cpu = [time.process_time()]

    def infer(self, rows):
        began = time.perf_counter()
        answer = super().infer(rows)
        self.inference[-1] += time.perf_counter() - began
        return answer

    def train(self, step, batch):
        began = time.perf_counter()
        answer = super().train(step, batch)
        self.training.append(time.perf_counter() - began)
        self.inference.append(0.0)
        self.cpu.append(time.process_time())
        return answer


def actor_overrides(options, folder: str) -> list[str]:
    return [
        "run.name=benchmark",
        f"run.dir={folder}",
        f"run.max_steps={options.steps}",
        f"parallel.threads={options.threads}",
        f"model.checkpoint={options.policy}",
        f"model.dtype={options.dtype}",
        f"data.prompts={options.prompts}",
        "data.chat=false",
        f"optim.lr={LEARNING_RATE}",
        f"engine.max_batch_size={options.rows}",
        f"engine.max_input_len={options.prompt}",
        f"engine.max_output_len={options.response}",
        f"ppo.rollout_batch_size={options.rows}",
        f"ppo.mini_batch_size={options.mini_batch}",
        f"ppo.micro_batch_size={options.mini_batch}",
        f"ppo.clip={CLIP}",
        f"ppo.kl_coefficient={KL}",
        "reward.kind=model",
        f"reward.checkpoint={options.reward}",
        "critic.place=local",
        f"critic.infer_batch_size={options.score_batch}",
        "checkpoint.at_end=false",
        "validation.every=0",
        "engine.offload_during_training=true",  # a refit follows every update anyway
    ]


def critic_overrides(options, folder: str) -> list[str]:
    return [
        "run.name=benchmark",
        f"run.dir={folder}",
        f"model.checkpoint={options.reward}",
        f"model.dtype={options.dtype}",
        f"optim.lr={LEARNING_RATE}",
        "reward.kind=model",
        f"reward.checkpoint={options.reward}",
        f"critic.mini_batch_size={options.mini_batch}",
        f"critic.micro_batch_size={options.mini_batch}",
        f"reward.micro_batch_size={options.mini_batch}",
    ]


def build(options, folder: str) -> tuple[PPOTrainer, TimedCritic, Job]:
    config = load(ActorConfig, actor_overrides(options, folder), "ppo_actor")
    job = start_job(config, "actor")
    critic = TimedCritic(build_critic_job(load(CriticConfig, critic_overrides(options, folder), "ppo_critic"), job))
    engine = TorchEngine(
        job.shape,
        max_batch_size=options.rows,
        max_input_len=options.prompt,
        max_output_len=options.response,
        dtype=resolve_dtype(config.model.dtype),
        device=DEVICE,
        certify=config.refit.certify,
    )
    samples = load_samples(config, job)
    policy = build_policy(config, job.topology)
    parts = {"policy": policy, "engine": engine, "critic": critic, "reward": None}
    trainer = build_trainer(config, job, **parts, samples=samples, resumed=None)
    trainer.stop_token_ids = ()  # responses of a fixed length, as on the other side
    return trainer, critic, job


def phases(row: dict, *, inference: float, training: float, cpu: float) -> dict[str, float]:
    """One row of metrics.jsonl and the critic's share, as trl_ppo.py counts."""
    told = {name.removeprefix("time/"): value for name, value in row.items() if name.startswith("time/")}
    generate = told["generate"] - inference
    score = told["logprobs"] + told["advantages"] + inference
    common = {"generate": generate, "score": score, "train": told["train"], "step": told["step"]}
    common["cpu"] = cpu
    common["other"] = told["step"] - generate - score - told["train"]
    own = {"refit": told["refit"], "logprobs": told["logprobs"], "critic inference": inference}
    return common | own | {"critic training": training, "policy training": told["train"] - training}


def main() -> None:
    options = worker_arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer, critic, job = build(options, folder)
        trainer.fit(resume_from=None)
        trainer.recorder.close()
        rows = [json.loads(line) for line in (Path(job.folder.path) / "metrics.jsonl").read_text().splitlines()]
        cpu = [later - earlier for earlier, later in pairwise(critic.cpu)]  # from one critic update to the next
        for row, *own in zip(rows, critic.inference, critic.training, cpu, strict=False):
            assert row["response/length"] == options.response, row["response/length"]
            print("STEP", json.dumps(phases(row, **dict(zip(("inference", "training", "cpu"), own)))), flush=True)
        shutdown()


if __name__ == "__main__":
    main()
