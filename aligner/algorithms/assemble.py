"""What entry scripts share: a checked grid, the run folder, process groups and tokenizer; and the trainer from its parts."""

import logging
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Optional

import torch

from aligner.algorithms.agreement import on_all, on_reporter
from aligner.algorithms.generation import Generation
from aligner.algorithms.pairs import PairedCheckpoints
from aligner.algorithms.ppo import PPOTrainer
from aligner.algorithms.supervised import SupervisedTrainer
from aligner.algorithms.validation import Validator
from aligner.config.groups import Dtype, ModelConfig, RewardPlace, RunConfig
from aligner.config.jobs import ActorConfig
from aligner.config.load import to_dict, to_yaml
from aligner.config.ppo import ReferencePlace
from aligner.data.batch import Sample
from aligner.data.interfaces import Critic, RewardSource, RolloutEngine
from aligner.data.splits import Limited, load_splits
from aligner.data.tokenizer import Tokenizer
from aligner.models.checkpoint_folder import TOKENIZER, checkpoint_shape, opened
from aligner.models.model_config import ModelShape
from aligner.models.policy import Policy, PolicyLoss
from aligner.models.training_state import resumed_dtype
from aligner.ops.policy_loss import Objective
from aligner.parallel.arrival import look_around
from aligner.parallel.collectives import broadcast_object
from aligner.parallel.device import ON_GPU, resolve_dtype, set_threads, synchronise, thread_count
from aligner.parallel.startup import detect_launch, shutdown, start
from aligner.parallel.topology import Topology, grid_problems
from aligner.rewards.source import build_reward, check_right_answers
from aligner.runtime.errors import ConfigError
from aligner.runtime.lock import RunLock
from aligner.runtime.log import setup_logging
from aligner.runtime.recorder import Recorder
from aligner.runtime.report import write_report
from aligner.runtime.run_folder import RunFolder
from aligner.runtime.signals import StopSignals
from aligner.runtime.stacks import Stacks
from aligner.runtime.time_limit import TimeLimit, asked_to_stop

log = logging.getLogger(__name__)

HUNG = 0.9  # of parallel.timeout: a rank's stacks are written before its collective is given up


@dataclass
class Job:
    """One rank of a started job. `lock` is held by rank 0 while it lives. arrived: what the run's record says of its ranks."""

    name: str
    topology: Topology
    folder: RunFolder
    shape: ModelShape
    tokenizer: Tokenizer
    lock: Any
    stacks: Stacks
    arrived: dict[str, Any] = field(default_factory=dict)

    @property
    def grid(self) -> str:
        t = self.topology
        return f"TP{t.tensor} x PP{t.pipeline} x DP{t.data}"

    def engine_dtype(self, config: Any) -> torch.dtype:
        """The engine's own type, or the policy's where it is auto. Collective."""
        own = config.engine.dtype
        return resolve_dtype(config.model.dtype if own is Dtype.auto else own)

    def record(self, **facts: Any) -> None:
        """Say in the run folder what and where this job is; rank 0 does."""
        if self.topology.is_reporter:
            known = {"pid": os.getpid(), "host": os.uname().nodename, "grid": self.grid, **self.arrived}
            self.folder.write_record(self.name, **known, **facts)


def start_job(config: Any, name: str) -> Job:
    """Refuse an impossible grid, join the other ranks, and hold the run. Every rank calls it first.

    Raises ConfigError or UserError, on every rank, before any model is built."""
    launch = detect_launch(os.environ)
    try:
        shape = checkpoint_shape(config.model.checkpoint).with_layers(config.model.num_layers)
    except ValueError as error:
        raise ConfigError(str(error) if "model." in str(error) else f"model.checkpoint={error}") from error
    if problems := grid_problems(config.parallel, launch.world_size, shape):
        raise ConfigError(*problems)
    topology = start(config.parallel, config.run.seed)
    folder = RunFolder.of(config.run)
    lock = on_reporter(lambda: _hold(folder, name, to_yaml(config)), topology)
    setup_logging(folder.logs, job=name, rank=launch.rank)
    arrived = look_around(config.parallel, topology, engine_ranks=getattr(config, "engine_ranks", 1))
    with opened(Path(config.model.checkpoint), topology, only=TOKENIZER) as checkpoint:
        tokenizer = Tokenizer(checkpoint / TOKENIZER)
    stacks = Stacks(folder.stacks(name, launch.rank))
    return Job(name, topology, folder, shape, tokenizer, lock, stacks, arrived)


def _hold(folder: RunFolder, name: str, settings: str) -> RunLock:
    lock = folder.lock(name)
    folder.write_config(name, settings)
    return lock


def resume_step(config: ActorConfig, job: Job) -> Optional[int]:
    """Step of the committed pair to continue from, the same on every rank; None for a run that begins. What came after it is deleted."""

    def found() -> Optional[int]:
        step = job.folder.checkpoints.resume_step(config.run.resume)
        job.folder.rewind(step)
        return step

    return broadcast_object(on_reporter(found, job.topology), 0, job.topology.cpu_group)


@dataclass(frozen=True)
class Samples:
    """Prompts to train on and held-out ones, and how many were too long."""

    train: list[Sample]
    held_out: list[Sample]
    dropped: int
    truncated: int

    def counts(self) -> dict[str, int]:
        sides = {"train_prompts": len(self.train), "held_out_prompts": len(self.held_out)}
        return {**sides, "dropped_prompts": self.dropped, "truncated_prompts": self.truncated}


def newest_pair(job: Job) -> Optional[int]:
    """Step of the newest committed pair, the same on every rank; None where there is none."""
    found = on_reporter(lambda: job.folder.checkpoints.newest(), job.topology)
    return broadcast_object(found, 0, job.topology.cpu_group)


def with_saved_dtype(model: ModelConfig, job: Job, step: Optional[int]) -> ModelConfig:
    """model.dtype=auto of a run that continues from the pair of `step` is the type that it was saved with. Collective."""
    saved = None if step is None else job.folder.checkpoints.step(step) / job.name
    return replace(model, dtype=resumed_dtype(model.dtype, saved, job.topology))


def load_samples(config: ActorConfig, job: Job) -> Samples:
    """Prompts of the data settings, at most validation.max_prompts of them held out. A malformed file raises on every rank."""
    limit = config.engine.max_input_len

    def load() -> tuple[Limited, Limited]:
        splits = load_splits(config.data, seed=config.run.seed, tokenizer=job.tokenizer, max_input_len=limit)
        check_right_answers(config.reward, [sample for split in splits for sample in split.samples])
        return splits

    train, held_out = on_all(load, job.topology)
    return Samples(
        train.samples,
        held_out.samples[: config.validation.max_prompts],
        dropped=train.dropped + held_out.dropped,
        truncated=train.truncated + held_out.truncated,
    )


def build_trainer(
    config: ActorConfig,
    job: Job,
    *,
    policy: Policy,
    engine: RolloutEngine,
    critic: Optional[Critic],
    reward: Optional[RewardSource],
    samples: Samples,
    resumed: Optional[int],
) -> PPOTrainer:
    stop_ids = tuple(sorted({*job.tokenizer.end_token_ids, *config.sampling.stop_token_ids}))
    if stop_ids[-1] >= job.shape.vocab_size:
        raise ConfigError(
            f"sampling.stop_token_ids holds {stop_ids[-1]}, and the model's ids end at {job.shape.vocab_size - 1}"
        )
    generation = Generation(
        engine=engine,
        critic=critic,
        reward=reward,
        topology=job.topology,
        chunk_size=config.critic.infer_batch_size,
        pad_id=job.tokenizer.pad_id,
        answer_deadline=config.critic.patience,
    )
    recorder = build_recorder(config, job, resumed, total=config.run.max_steps)
    generation.on_progress = recorder.detail
    return PPOTrainer(
        config=config,
        topology=job.topology,
        tokenizer=job.tokenizer,
        policy=policy,
        engine=engine,
        critic=critic,
        generation=generation,
        validator=Validator(
            generation,
            samples.held_out,
            config.validation,
            seed=config.run.seed,
            max_output_len=config.engine.max_output_len,
            stop_token_ids=stop_ids,
            stop_strings=tuple(config.sampling.stop_strings),
        ),
        checkpoints=PairedCheckpoints(
            job.folder.checkpoints,
            config.checkpoint,
            policy=policy,
            critic=critic,
            topology=job.topology,
            critic_deadline=config.critic.patience,
        ),
        recorder=recorder,
        train_samples=samples.train,
        stop_token_ids=stop_ids,
    )


def build_recorder(config: Any, job: Job, resumed: Optional[int], *, total: int, **more: Any) -> Recorder:
    """Of a job with `total` steps; more: further arguments of Recorder. Collective."""
    set_threads = thread_setter(config)

    def on_phase(name: str) -> None:
        job.stacks.expect(HUNG * config.parallel.timeout)
        set_threads(name)

    how = {"resumed": resumed, "synchronise": synchronise if ON_GPU else None, "on_phase": on_phase}
    how |= {"total": total, "job": job.name, **more}
    writes = on_reporter(lambda: Recorder(config, job.folder, settings=to_dict(config), **how), job.topology)
    return writes or Recorder(config, None, **how)


def thread_setter(config: Any) -> Callable[[str], None]:
    """To be called with the name of each phase that begins: sets this rank's CPU threads for it."""
    general = thread_count()  # parallel.threads, which start_job has set
    training = config.parallel.training_threads
    generating = config.engine.threads if hasattr(config, "engine") else training
    own = {"generate": generating, "validate": generating, "train": training}
    return lambda phase: set_threads(own.get(phase, 0) or general)


def facts(policy: Policy, engine: RolloutEngine, critic: Optional[Critic], samples: Samples) -> dict[str, Any]:
    """What the run's record tells of the actor's parts."""
    address = critic and critic.address
    return {
        "dtype": str(policy.model.dtype),
        "critic": address,
        "engine_bytes": engine.nbytes,
        **samples.counts(),
    }


def build_policy(config: ActorConfig, topology: Topology) -> Policy:
    ppo = config.ppo
    return Policy(
        config.model,
        config.optim,
        topology,
        loss=policy_loss_settings(config),
        micro_batch_size=ppo.micro_batch_size,
        micro_batch_tokens=ppo.micro_batch_tokens,
        reference=None if ppo.reference is ReferencePlace.none else ppo.reference,
    )


def policy_loss_settings(config: ActorConfig) -> PolicyLoss:
    ppo = config.ppo
    return PolicyLoss(
        config.sampling.temperature,
        Objective(
            kind=ppo.loss,
            low=ppo.clip,
            high=ppo.clip_high,
            dual=ppo.dual_clip,
            entropy_bonus=ppo.entropy_bonus,
            kl_estimator=ppo.kl_estimator,
        ),
        ppo.aggregate,
        ppo.constant_length,
    )


def own_reward(config: ActorConfig, job: Job) -> Optional[RewardSource]:
    """The verifier or remote reward of this job; None where another job scores."""
    return build_reward(config.reward, job.tokenizer) if config.reward.place is RewardPlace.actor else None


def stop_asked(run: RunConfig, stop: StopSignals, trainer: Any, *, steps: int) -> Callable[[], bool]:
    """fit()'s should_stop, of PPO's trainer as of the supervised one: whether a signal came, or run.max_time would not hold another step
    and a save. steps: of the whole run; after the last one there is nothing to stop for."""
    limit = TimeLimit(run.max_time, margin=run.max_time_margin)
    asked = asked_to_stop(limit, stop, lambda: trainer.recorder.longest_step + trainer.checkpoints.longest_save)
    return lambda: asked() if trainer.state.step < steps else stop.stopping


def already_complete(job: Job, steps: int, key: str = "run.max_steps") -> int:
    """Say so, leave the records of the run as they are, and leave the job. key: the setting that says how long a run is. Returns the exit
    code."""
    log.info(
        "run %s has its %d steps already: raise %s to continue, or delete %s to begin anew (report: %s)",
        job.folder.path.name,
        steps,
        key,
        job.folder.path,
        job.folder.report,
    )
    shutdown()
    return 0


def finish(job: Job, trainer: PPOTrainer | SupervisedTrainer, parts: list[Any], *, complete: bool) -> None:
    """Let the other jobs go where the run is complete (those of `parts` that are clients of one), close what the run writes, and say
    where its report is."""
    if job.topology.is_reporter:
        for other in [part for part in parts if hasattr(part, "stop")] if complete else []:
            try:
                other.stop()
            except RuntimeError as error:  # the run is whole all the same; the job ends at serving.idle_timeout
                log.warning("the job at %s could not be told that the run is complete: %s", other.address, error)
        if complete:
            job.folder.amend_record(job.name, complete=True)
        trainer.recorder.close()
        if not complete:
            steps = f"{trainer.state.step} of {trainer.total_steps} steps"
            print(f"stopped after {steps}, with a checkpoint: the same command continues it", flush=True)
        print(f"report: {write_report(job.folder.path)}", flush=True)
