"""Layout invariance (*close*) of the whole PPO loop: the same three steps on 1 rank, DP2, TP2, PP2 and TP2 x PP2 give the same tokens,
and losses and metrics to 1e-4.

The trainer, policy, engine, critic and records are those of a job; the critic runs on the actor's own grid, so that no server is
needed, and the reward is computed here. tests/jobs/test_layouts.py has the same for two jobs with grids of their own."""

from concurrent.futures import Future
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch

from tests.dist.harness import run_ranks, topologies
from tests.jobs.harness import ACTOR_SETTINGS, CRITIC_SETTINGS, Run
from tests.jobs.test_layouts import assert_close
from tests.tiny import write_model

# ranks -> {name: grid}
GRIDS = {
    1: {"one": (1, 1, None, False)},
    2: {"dp2": (1, 1, None, False), "tp2": (2, 1, None, False), "pp2": (1, 2, None, False)},
    4: {"tp2_pp2": (2, 2, None, False)},
}


# Groups of two responses whose scores are often equal: a response counts where it has a digit. One more algorithm a step would show less.
CRITIC_FREE = (
    "ppo.advantage=group_norm",
    "ppo.samples_per_prompt=2",
    "ppo.rollout_batch_size=4",
    "ppo.dynamic_sampling=true",
    "ppo.loss=gspo",
    "ppo.kl_place=loss",
    "ppo.kl_estimator=k3",
    "ppo.critic_warmup_steps=0",
    "ppo.mini_batch_size=8",  # one update a step, which its log-probs are read off
)


TWO_PASSES = "one-two-passes"


def _body(rank, base, grids):
    for name, grid in grids.items():
        (topology,) = topologies(grid)
        _run(name, base, topology)
        _run(f"{name}-critic-free", base, topology, *CRITIC_FREE)
        if name == "one":
            _run(TWO_PASSES, base, topology, *CRITIC_FREE)


def _run(name, base, topology, *free):
    """Three steps on a grid; rank 0 writes the run's folder. free: settings of a run without a critic."""
    from aligner.algorithms.assemble import Job, build_policy, build_trainer
    from aligner.algorithms.critic_job import build_critic_job
    from aligner.config.jobs import ActorConfig, CriticConfig
    from aligner.config.load import load
    from aligner.data.tokenizer import Tokenizer
    from aligner.models.checkpoint_folder import checkpoint_shape
    from aligner.rollout.torch_engine import TorchEngine
    from aligner.runtime.run_folder import RunFolder
    from aligner.runtime.stacks import Stacks

    model = base / "nemo"
    both = [f"run.dir={base}", f"run.name={name}", f"model.checkpoint={model}", "model.dtype=float32"]
    both += ["tasks=chain_sum", "reward.place=actor"]
    actor = [*ACTOR_SETTINGS, "ppo.micro_batch_size=2", "checkpoint.at_end=false", "critic.infer_batch_size=64"]
    config = load(ActorConfig, [*both, *actor, *free])
    tokenizer = Tokenizer(model / "tokenizer")
    stacks = Stacks(base / f"stacks-{name}-{topology.rank}")
    job = Job("actor", topology, RunFolder.of(config.run), checkpoint_shape(model), tokenizer, lock=None, stacks=stacks)
    if topology.is_reporter:
        job.folder.path.mkdir()
    critic = None
    if not free:
        critic_settings = load(CriticConfig, [*both, *CRITIC_SETTINGS, "critic.micro_batch_size=2"], "ppo_critic")
        critic = _on_the_actors_grid(build_critic_job(critic_settings, job), topology)
    limits = {key: getattr(config.engine, key) for key in ("max_batch_size", "max_input_len", "max_output_len")}
    engine = TorchEngine(job.shape, **limits, dtype=torch.float32)
    parts = {
        "policy": build_policy(config, topology),
        "engine": engine,
        "critic": critic,
        "reward": _Digits(any_digit=bool(free)),
    }
    trainer = build_trainer(config, job, **parts, samples=_samples(tokenizer), resumed=None)
    # A served critic is asked by rank 0 alone; one on the same grid trains with all ranks.
    if critic is not None:
        trainer.start_critic_training = lambda step, experience: critic.train(step, experience.critic_batch())
    with (
        patch("aligner.algorithms.ppo.update_tells_logprobs", lambda ppo: False)
        if name == TWO_PASSES
        else nullcontext()
    ):
        trainer.fit(resume_from=None)
    trainer.recorder.close()


def _on_the_actors_grid(backend, topology):
    """A critic in the ranks of the actor, whose calls are collective: each rank asks once about its rows of a rollout."""
    from dataclasses import replace

    from aligner.data.batch import CriticAnswer
    from aligner.parallel.collectives import gather_objects
    from aligner.serving.local import LocalCritic

    class GridCritic(LocalCritic):
        def _infer(self, rows):
            every = gather_objects(rows, topology.cpu_group)
            names = ("tokens", "lengths", "prompt_lengths", "sample_ids", "truncated")
            merged = {name: torch.cat([getattr(part, name) for part in every]) for name in names}
            answer = super()._infer(replace(rows, **merged, fields=[f for part in every for f in part.fields]))
            first = sum(len(part.lengths) for part in every[: topology.rank])
            mine = slice(first, first + len(rows.lengths))
            return CriticAnswer(answer.values[mine], answer.bootstrap[mine], None)

    return GridCritic(backend)


class _Digits:
    """A reward: the share of digits among a response's tokens, or whether there is any."""

    def __init__(self, *, any_digit):
        self.any_digit = any_digit

    def score(self, rows):
        from aligner.data.batch import Score

        done = Future()
        shares = [sum(19 <= token < 29 for token in row.response_ids) / 8 for row in rows]
        shares = [float(share > 0) for share in shares] if self.any_digit else shares
        done.set_result([Score(share, {"ended": float(row.ended)}) for share, row in zip(shares, rows)])
        return done


def _samples(tokenizer):
    from aligner.algorithms.assemble import Samples
    from aligner.data.batch import Sample

    texts = [f"{'7' * (i % 5)}{i}+{i % 7}=" for i in range(40)]  # of unlike length
    made = [Sample(prompt_ids=tokenizer.encode(text), prompt=text, origin=text, fields={}) for text in texts]
    return Samples(made[:30], made[30:38], dropped=0, truncated=0)


def _convert_and_run(rank, base, grids):
    from aligner.models.convert import hf_to_nemo

    hf_to_nemo(write_model(base / "hf"), base / "nemo", progress=lambda said: None)
    _body(rank, base, grids)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The run on one rank, and the folder in which the others lie."""
    base = tmp_path_factory.mktemp("runs")
    run_ranks(_convert_and_run, 1, base, GRIDS[1])
    run = Run(base / "one")
    assert run.steps == [0, 1, 2, 3] and len(run.samples(3)) == 8
    assert len({sample["score"] for sample in run.samples(3)}) > 1, "a reward that is the same for all teaches nothing"
    free = Run(base / "one-critic-free")
    assert max(row["sampling/prompts"] for row in free.rows[1:]) > 4, "no group was replaced: this test shows nothing"
    assert_close(Run(base / TWO_PASSES), free)
    return run, base


@pytest.mark.parametrize("world", [2, 4])
def test_three_steps_are_the_same_on_every_grid(reference, world):
    expected, base = reference
    run_ranks(_body, world, base, GRIDS[world])
    for name in GRIDS[world]:
        assert_close(Run(base / name), expected)
        assert_close(Run(base / f"{name}-critic-free"), Run(base / "one-critic-free"))
