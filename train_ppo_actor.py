"""The actor job: policy, frozen reference and rollout engine on one grid, trained by PPO with a served critic.

python train_ppo_actor.py model.checkpoint=DIR tasks=chain_sum        (one rank; also under torchrun and srun)"""

import logging

from aligner.runtime.errors import UserError, run_main
from aligner.runtime.signals import StopSignals

log = logging.getLogger("aligner.actor")
stop = StopSignals.install()  # before torch is imported: a signal may come while it is


def main() -> int:
    from aligner.config.jobs import ActorConfig
    from aligner.config.load import load

    config = load(ActorConfig, config_name="ppo_actor")  # before torch is imported: a wrong key is told at once
    from aligner.algorithms import assemble
    from aligner.algorithms.agreement import on_all
    from aligner.parallel.startup import shutdown
    from aligner.trtllm.build import build_engine

    job = assemble.start_job(config, "actor")
    samples = assemble.load_samples(config, job)
    resumed = assemble.resume_step(config, job)
    if resumed is not None and resumed >= config.run.max_steps:
        return assemble.already_complete(job, resumed)
    config.model = assemble.with_saved_dtype(config.model, job, resumed)
    reward = assemble.own_reward(config, job) or on_all(lambda: connect_reward(config, job), job.topology)
    # A critic whose address is given answers at once or never; another may start while the policy is built.
    critic = on_all(lambda: connect_critic(config, job), job.topology) if config.critic.endpoint else None
    policy = assemble.build_policy(config, job.topology)
    how = {"dtype": job.engine_dtype(config), "tokenizer": job.tokenizer}
    how["stop_strings"] = config.sampling.stop_strings
    engine = on_all(lambda: build_engine(config, job.shape, job.topology, **how), job.topology)
    critic = critic or on_all(lambda: connect_critic(config, job), job.topology)
    job.record(**assemble.facts(policy, engine, critic, samples))
    parts = {"policy": policy, "engine": engine, "critic": critic, "reward": reward}
    trainer = assemble.build_trainer(config, job, **parts, samples=samples, resumed=resumed)
    should_stop = assemble.stop_asked(config.run, stop, trainer, steps=config.run.max_steps)
    state = trainer.fit(resume_from=resumed, should_stop=should_stop)
    if not (complete := state.step >= config.run.max_steps):
        stop.ask()  # rank 0 alone looks at the clock
    assemble.finish(job, trainer, [critic, reward], complete=complete)
    for part in filter(None, (critic, reward, engine)):
        part.close()
    shutdown()
    return 0 if complete else stop.exit_code


def connect_reward(config, job):
    """The reward job, or None where another job scores."""
    from aligner.algorithms.critic_job import reward_contract
    from aligner.serving.remote_reward import connect

    how = {"keeps_alive": job.topology.is_reporter, "stop": stop, "say": log.info}
    return connect(config, reward_contract(config, job), job.folder.endpoints / "reward.json", **how)


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
    contract = Contract(**actor_contract(config, job))
    if config.critic.place is CriticPlace.local:
        if (ranks := job.topology.world_size) > 1:
            raise UserError(
                f"critic.place=local needs one rank, there are {ranks}: start a critic job (critic.place=remote)"
            )
        overrides = [*config.critic.local_overrides, f"run.name={config.run.name}"]
        backend = build_critic_job(load(CriticConfig, overrides, config.critic.local_config), job)
        return LocalCritic.fitting(contract, backend)
    file = job.folder.endpoints / "critic.json"
    how = {"journal": job.folder.journal, "stacks": job.stacks, "stop": stop, "say": log.info}
    return RemoteCritic(contract, config.critic, endpoint_file=file, trains=job.topology.is_reporter, **how)


if __name__ == "__main__":
    run_main(main)
