"""The actor job: policy, frozen reference and rollout engine on one grid, trained by PPO with a served critic.

    python train_ppo_actor.py model.checkpoint=DIR tasks=chain_sum        (one rank; also under torchrun and srun)"""

import logging

from aligner.runtime.errors import UserError, run_main
from aligner.runtime.signals import StopSignals

stop = StopSignals.install()  # before torch is imported: a signal may come while it is
log = logging.getLogger("aligner.actor")


def main() -> int:
    from aligner.config.jobs import ActorConfig
    from aligner.config.load import load

    config = load(ActorConfig, config_name="ppo_actor")  # before torch is imported: a wrong key is told at once
    from aligner.algorithms.assemble import (
        build_policy,
        build_trainer,
        load_samples,
        resume_step,
        scores_itself,
        start_job,
    )
    from aligner.parallel.startup import shutdown
    from aligner.rewards.source import build_reward

    job = start_job(config, "actor")
    resumed = resume_step(config, job)
    samples = load_samples(config, job.tokenizer)
    reward = build_reward(config.reward, job.tokenizer) if scores_itself(config) else None
    # A critic whose address is given answers at once or never; otherwise it may start while the policy is built.
    critic = connect_critic(config, job) if config.critic.endpoint else None
    policy = build_policy(config, job.topology)
    engine = build_engine(config, job)
    critic = critic or connect_critic(config, job)
    job.record(critic=critic and critic.address, engine_bytes=engine.nbytes)
    trainer = build_trainer(
        config, job, policy=policy, engine=engine, critic=critic, reward=reward, samples=samples, resumed=resumed
    )
    state = trainer.fit(resume_from=resumed, should_stop=lambda: stop.stopping)
    finish(config, job, critic, trainer, complete=state.step >= config.run.max_steps)
    for part in (critic, reward, engine):
        if part is not None:
            part.close()
    shutdown()
    return stop.exit_code


def build_engine(config, job):
    from aligner.config.groups import EngineKind
    from aligner.parallel.device import DEVICE, resolve_dtype
    from aligner.rollout.torch_engine import TorchEngine

    if config.engine.kind is EngineKind.trtllm:
        raise UserError("engine.kind=trtllm is not there yet: use engine.kind=torch, which runs on CPU and GPU")
    return TorchEngine(
        job.shape,
        max_batch_size=config.engine.max_batch_size,
        max_input_len=config.engine.max_input_len,
        max_output_len=config.engine.max_output_len,
        dtype=resolve_dtype(config.model.dtype if config.engine.dtype.value == "auto" else config.engine.dtype),
        device=DEVICE,
        certify=config.refit.certify,
    )


def connect_critic(config, job):
    """The critic job, a critic in this process, or None."""
    from aligner.algorithms.critic_job import actor_contract, build_critic_job
    from aligner.config.groups import CriticPlace
    from aligner.config.jobs import CriticConfig
    from aligner.config.load import load
    from aligner.serving.client import RemoteCritic
    from aligner.serving.hello import Contract
    from aligner.serving.local import LocalCritic

    if config.critic.place is CriticPlace.none:
        return None
    if config.critic.place is CriticPlace.local:
        if job.topology.world_size > 1:
            raise UserError(f"critic.place=local needs one rank, there are {job.topology.world_size}: start a critic job (remote)")
        overrides = [*config.critic.local_overrides, f"run.name={config.run.name}"]
        return LocalCritic(build_critic_job(load(CriticConfig, overrides, config.critic.local_config), job))
    return RemoteCritic(
        Contract(**actor_contract(config, job)),
        config.critic,
        endpoint_file=job.folder.endpoints / "critic.json",
        trains=job.topology.is_reporter,
    )


def finish(config, job, critic, trainer, *, complete: bool) -> None:
    """Let the critic job go where the run is complete, and write the report."""
    from aligner.runtime.report import write_report

    if not job.topology.is_reporter:
        return
    if complete and critic is not None:
        critic.stop()
    trainer.recorder.close()
    print(f"report: {write_report(job.folder.path)}", flush=True)


if __name__ == "__main__":
    run_main(main)
