"""Supervised fine-tuning on conversations, or on prompts with their completions.

python train_sft.py model.checkpoint=DIR data.train=FILE.jsonl        (one rank; also under torchrun and srun)"""

from aligner.runtime.errors import run_main
from aligner.runtime.signals import StopSignals

stop = StopSignals.install()  # before torch is imported: a signal may come while it is


def main() -> int:
    from aligner.config.jobs import SFTConfig
    from aligner.config.load import load

    config = load(SFTConfig, config_name="sft")  # before torch is imported: a wrong key is told at once
    from aligner.algorithms import assemble, sft, supervised_job
    from aligner.algorithms.agreement import on_all
    from aligner.data.conversations import load_examples
    from aligner.parallel.startup import shutdown

    job = assemble.start_job(config, "sft")
    supervised_job.check_length(config, job)
    limits = {"max_held_out": config.validation.max_rows}
    rows = on_all(lambda: load_examples(config.data, job.tokenizer, **limits), job.topology)
    course = supervised_job.course_of(config, rows)
    resumed = assemble.resume_step(config, job)
    if resumed is not None and resumed >= course.steps:
        return assemble.already_complete(job, resumed, supervised_job.LENGTH)
    config.model = assemble.with_saved_dtype(config.model, job, resumed)
    model = sft.build_model(config, job.topology)
    dtype = job.engine_dtype(config)
    engine = on_all(lambda: connect_engine(config, job, dtype), job.topology)
    generations = engine and sft.Generations(config, job.topology, job.tokenizer, model, engine)
    batch_size = config.train.mini_batch_size
    learner = sft.SFTLearner(model, job.tokenizer, batch_size=batch_size, generations=generations)
    job.record(dtype=str(model.model.dtype), steps=course.steps, **rows.counts())
    supervised_job.train(config, job, stop, learner=learner, rows=rows, course=course, resumed=resumed)
    if engine is not None:
        engine.close()
    shutdown()
    return stop.exit_code


def connect_engine(config, job, dtype):
    """The engine that answers held-out prompts, or None where none are to be answered."""
    from aligner.trtllm.build import build_engine

    if not config.validation.generations:
        return None
    return build_engine(config, job.shape, job.topology, dtype=dtype, tokenizer=job.tokenizer)


if __name__ == "__main__":
    run_main(main)
