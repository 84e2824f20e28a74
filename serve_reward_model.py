"""The reward job: a reward model, a verifier or a remote reward on a grid of its own, served to the actor job (reward.place=server).

python serve_reward_model.py model.checkpoint=DIR reward.place=server reward.kind=model reward.checkpoint=DIR"""

import logging

from aligner.runtime.errors import run_main
from aligner.runtime.signals import StopSignals

stop = StopSignals.install()  # before torch is imported: a signal may come while it is
log = logging.getLogger("aligner.reward")


def main() -> int:
    from aligner.config.jobs import RewardServerConfig
    from aligner.config.load import load

    config = load(
        RewardServerConfig, config_name="reward_model"
    )  # before torch is imported: a wrong key is told at once
    from aligner.algorithms.agreement import on_reporter
    from aligner.algorithms.assemble import start_job
    from aligner.algorithms.reward_job import build_reward_job
    from aligner.parallel.startup import shutdown
    from aligner.serving.ending import TOLD
    from aligner.serving.server import Place, check_place, serve, stop_asked

    job = start_job(config, "reward")
    on_reporter(lambda: check_place(config.serving), job.topology)
    backend = build_reward_job(config, job)
    reason = serve(
        backend,
        config.serving,
        place=Place(job.folder.path, name="reward"),
        group=job.topology.cpu_group if job.topology.world_size > 1 else None,
        should_stop=stop_asked(config.run, config.serving, stop),
        grid=job.grid,
        timeout=config.parallel.timeout,
        stacks=job.stacks,
        drains=False,
        on_ready=lambda info: job.record(endpoint=info.address),
    )
    log.info("the reward job ends: %s", reason)
    backend.close()
    shutdown()
    return 0 if reason == TOLD else stop.exit_code


if __name__ == "__main__":
    run_main(main)
