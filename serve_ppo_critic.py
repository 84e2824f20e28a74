"""The critic job: critic and reward on their own grid, served to the actor job over PyTriton.

python serve_ppo_critic.py model.checkpoint=DIR tasks=chain_sum       (one rank; also under torchrun and srun)"""

import logging

from aligner.runtime.errors import run_main
from aligner.runtime.signals import StopSignals

stop = StopSignals.install()  # before torch is imported: a signal may come while it is
log = logging.getLogger("aligner.critic")


def main() -> int:
    from aligner.config.jobs import CriticConfig
    from aligner.config.load import load

    config = load(CriticConfig, config_name="ppo_critic")  # before torch is imported: a wrong key is told at once
    from aligner.algorithms.agreement import on_reporter
    from aligner.algorithms.assemble import newest_pair, start_job, with_saved_dtype
    from aligner.algorithms.critic_job import build_critic_job
    from aligner.parallel.startup import shutdown
    from aligner.serving.ending import TOLD
    from aligner.serving.server import Place, check_place, serve, stop_asked

    job = start_job(config, "critic")
    on_reporter(lambda: check_place(config.serving), job.topology)
    config.model = with_saved_dtype(config.model, job, newest_pair(job))
    backend = build_critic_job(config, job)
    reason = serve(
        backend,
        config.serving,
        place=Place(job.folder.path),
        group=job.topology.cpu_group if job.topology.world_size > 1 else None,
        should_stop=stop_asked(config.run, config.serving, stop),
        grid=job.grid,
        timeout=config.parallel.timeout,
        stacks=job.stacks,
        on_ready=lambda info: job.record(endpoint=info.address),
    )
    log.info("the critic job ends: %s", reason)
    backend.close()
    shutdown()
    return 0 if reason == TOLD else stop.exit_code


if __name__ == "__main__":
    run_main(main)
