"""The actor job: policy, frozen reference and rollout engine on one grid, trained by PPO with a served critic.

    python train_ppo_actor.py model.checkpoint=DIR tasks=chain_sum        (one rank; also under torchrun and srun)"""

from aligner.runtime.errors import run_main
from aligner.runtime.signals import StopSignals

stop = StopSignals.install()  # before torch is imported: a signal may come while it is


def main() -> int:
    from aligner.algorithms.actor_job import build_actor
    from aligner.config.jobs import ActorConfig
    from aligner.config.load import load
    from aligner.parallel.startup import shutdown

    config = load(ActorConfig, config_name="ppo_actor")
    with build_actor(config) as actor:
        actor.trainer.fit(resume_from=actor.resume_from, should_stop=lambda: stop.stopping)
        actor.finish(complete=not stop.stopping)
    shutdown()
    return stop.exit_code


if __name__ == "__main__":
    run_main(main)
