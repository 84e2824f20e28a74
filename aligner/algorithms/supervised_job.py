"""What the entry scripts of supervised jobs share: how long the run is, the trainer from its parts, and the run itself."""

from typing import Any, Optional

from aligner.algorithms.assemble import Job, build_recorder, finish, stop_asked
from aligner.algorithms.pairs import PairedCheckpoints
from aligner.algorithms.supervised import PHASES, Course, Learner, SupervisedTrainer
from aligner.data.rows import Rows
from aligner.runtime.errors import ConfigError
from aligner.runtime.signals import StopSignals

LENGTH = "train.epochs or run.max_steps"  # what says how long a run is


def check_length(config: Any, job: Job) -> None:
    """Raises ConfigError where rows may be longer than the model's positions."""
    longest, positions = config.data.max_length, job.shape.max_position_embeddings
    if longest > positions:
        raise ConfigError(f"data.max_length={longest} exceeds the {positions} positions of the model: lower it")


def course_of(config: Any, rows: Rows) -> Course:
    return Course.of(config.train, config.run, len(rows.train))


def train(
    config: Any,
    job: Job,
    stop: StopSignals,
    *,
    learner: Learner,
    rows: Rows,
    course: Course,
    resumed: Optional[int],
) -> None:
    """Trains to the end, or until a stop is asked for, and leaves the report. Collective."""
    trainer = build_trainer(config, job, learner=learner, rows=rows, course=course, resumed=resumed)
    should_stop = stop_asked(config.run, stop, trainer, steps=course.steps)
    state = trainer.fit(resume_from=resumed, should_stop=should_stop)
    if not (complete := state.step >= course.steps):
        stop.ask()  # rank 0 alone looks at the clock
    finish(job, trainer, [], complete=complete)


def build_trainer(
    config: Any, job: Job, *, learner: Learner, rows: Rows, course: Course, resumed: Optional[int]
) -> SupervisedTrainer:
    """The loop of a job: config has the groups of aligner/config/supervised.py and `checkpoint`; the learner's weights are saved under
    the job's name. Collective."""
    return SupervisedTrainer(
        config=config,
        topology=job.topology,
        learner=learner,
        checkpoints=PairedCheckpoints(
            job.folder.checkpoints,
            config.checkpoint,
            policy=learner,
            critic=None,
            topology=job.topology,
            critic_deadline=0.0,
            job=job.name,
        ),
        recorder=build_recorder(config, job, resumed, total=course.steps, phases=PHASES),
        train_rows=rows.train,
        held_out=rows.held_out,
        course=course,
    )
