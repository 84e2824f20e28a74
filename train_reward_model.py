"""Reward-model training: a score head on a backbone, from comparisons of responses or from attributes of single ones.

python train_reward_model.py model.checkpoint=DIR data.train=FILE data.holdout=0.1   (one rank; also under torchrun and srun)"""

import logging

from aligner.runtime.errors import run_main
from aligner.runtime.signals import StopSignals

log = logging.getLogger("aligner.reward_model")
stop = StopSignals.install()  # before torch is imported: a signal may come while it is


def main() -> int:
    from aligner.config.jobs import RewardTrainingConfig
    from aligner.config.load import load

    # Before torch is imported: a wrong key is told at once
    config = load(RewardTrainingConfig, config_name="reward_training")
    from aligner.algorithms import assemble, supervised_job
    from aligner.algorithms.agreement import on_all
    from aligner.algorithms.preference import build_learner, load_rows
    from aligner.parallel.startup import shutdown

    job = assemble.start_job(config, "reward_model")
    supervised_job.check_length(config, job)
    rows = on_all(lambda: load_rows(config, job.tokenizer), job.topology)
    course = supervised_job.course_of(config, rows)
    resumed = assemble.resume_step(config, job)
    if resumed is not None and resumed >= course.steps:
        return assemble.already_complete(job, resumed, supervised_job.LENGTH)
    config.model = assemble.with_saved_dtype(config.model, job, resumed)
    learner = build_learner(config, job, rows)
    job.record(dtype=str(learner.model.model.dtype), **rows.counts())
    supervised_job.train(config, job, stop, learner=learner, rows=rows, course=course, resumed=resumed)
    shutdown()
    return stop.exit_code


if __name__ == "__main__":
    run_main(main)
