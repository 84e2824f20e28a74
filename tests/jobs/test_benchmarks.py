"""Benchmarks run: on the smallest shapes, or, where they need minutes or TRL, as far as their commands and names can be checked."""

import argparse
import ast
import importlib
import json
import sys

import pytest
import torch

from aligner.config.groups import CriticPlace
from aligner.config.jobs import ActorConfig, CriticConfig, RewardTrainingConfig
from aligner.config.load import load
from tests.jobs.harness import REPO, Launcher

BENCHMARKS = REPO / "benchmarks"


@pytest.fixture
def benchmark_module(monkeypatch):
    """Imports a script of benchmarks/, as one that stands beside it would."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in {path.stem for path in BENCHMARKS.glob("*.py")} & set(sys.modules):
        del sys.modules[name]


def test_a_process_of_this_toolkits_side(jobs: Launcher, tiny_model, tiny_reward_model, tmp_path):
    """Its STEP lines are what ppo_step.py reads: every phase, and phases that sum to the step."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n:08d}"}) + "\n" for n in range(16)))
    numbers = {"rows": 4, "prompt": 8, "response": 4, "mini-batch": 2, "score-batch": 4, "steps": 2, "threads": 1}
    given = {"policy": tiny_model, "reward": tiny_reward_model, "prompts": prompts, "dtype": "float32", **numbers}
    job = jobs.start("benchmarks/aligner_ppo.py", *(f"--{name}={value}" for name, value in given.items())).finish()
    lines = [line.removeprefix("STEP ") for line in job.stdout.splitlines() if line.startswith("STEP ")]
    steps = [json.loads(line) for line in lines]
    assert len(steps) == 2
    for step in steps:
        assert {"generate", "score", "train", "other", "step", "cpu"} <= step.keys()
        assert sum(step[p] for p in ("generate", "score", "train", "other")) == pytest.approx(step["step"])
        assert min(step.values()) > -1e-6


def test_forward_and_backward_against_hugging_face(jobs: Launcher):
    """It ends with an error where the two sides do not compute the same loss and gradient norm."""
    numbers = ("--rows=2", "--repeats=1", "--threads=1", "--dtype=float32")
    job = jobs.start("benchmarks/forward_backward.py", "--shape=tiny", *numbers).finish()
    assert job.stdout.count("speed against Hugging Face") == 2


def test_the_engine_against_hugging_face(jobs: Launcher):
    """Both sides say the same tokens."""
    small = ("--models=1m", "--batches=1", "--rounds=1", "--median=2", "--longest=4", "--threads=1")
    job = jobs.start("benchmarks/rollout.py", *small, "--without=vllm").finish()
    assert "same tokens 4/4" in job.stdout


def test_a_refit_against_a_copy(jobs: Launcher):
    """What one rank measures: every case took some time."""
    job = jobs.start("benchmarks/refit.py", "--rank-of=one", "--shape=tiny", "--rounds=1").finish()
    measured = json.loads(job.stdout.splitlines()[-1])
    assert measured.keys() == {"bytes", "memcpy", "off", "sampled", "full", "gather"} and min(measured.values()) > 0


def test_the_settings_of_the_grids_are_those_of_the_jobs(benchmark_module, monkeypatch, tmp_path, tiny_model):
    grids = benchmark_module("grids")
    monkeypatch.setattr(sys, "argv", ["grids.py", "--model", str(tiny_model), "--threads", "2/1", "3"])
    options = grids.arguments()
    for grid in options.grids:
        for threads, (general, training) in {"2/1": (2, 1), "3": (3, 3)}.items():
            words = grids.command(grid, threads, str(tmp_path), options)
            actor = words[words.index("--actor") + 1 : words.index("--both")]
            both = words[words.index("--both") + 1 :]
            for config in (
                load(ActorConfig, [*both, *actor], "demo_actor"),
                load(CriticConfig, both, "demo_critic"),
            ):
                assert (config.parallel.threads, config.parallel.training_threads) == (general, training)
                assert config.run.max_steps == options.steps


def test_the_settings_of_the_served_critic_are_those_of_the_job(benchmark_module, monkeypatch, tmp_path, tiny_model):
    served = benchmark_module("served_critic")
    monkeypatch.setattr(sys, "argv", ["served_critic.py", "--model", str(tiny_model), "--threads", "3"])
    config = load(CriticConfig, served.overrides(served.arguments(), str(tmp_path)), "ppo_critic")
    assert (config.parallel.threads, config.run.name, config.critic.mini_batch_size) == (3, served.NAME, 16)


def test_both_sides_take_the_arguments_that_they_are_given(benchmark_module, monkeypatch, tmp_path):
    ppo_step, workload = benchmark_module("ppo_step"), benchmark_module("workload")
    monkeypatch.setattr(ppo_step, "trl_python", lambda: "python")
    monkeypatch.setattr(ppo_step, "converted", lambda source, folder: folder)
    work = workload.Workload(tmp_path, tmp_path / "hf", tmp_path / "reward-hf", tmp_path / "prompts.jsonl")
    options = argparse.Namespace(steps=2, threads=1, dtype="float32")
    for side in ppo_step.sides(work, workload.SHAPES["tiny"], options).values():
        script, *given = side.command[1:]
        assert (REPO / script).is_file()
        read = workload.worker_arguments("").parse_args([word for word in given if word != "--freeze-gc"])
        assert (read.rows, read.mini_batch, read.score_batch, read.steps) == (64, 16, 64, 2)


@pytest.mark.parametrize(("loss", "gradient", "fits"), [(0.7, 2.0, True), (0.7002, 2.0, False), (0.7, 2.0002, False)])
def test_reward_models_against_trl_tells_the_two_apart(benchmark_module, monkeypatch, loss, gradient, fits):

    script = benchmark_module("reward_against_trl")
    sides = [
        {case: (value, {"w": torch.tensor([1.0, g])}) for case in script.CASES}
        for value, g in ((0.7, 2.0), (loss, gradient))
    ]
    monkeypatch.setattr(script, "ours", lambda *_: sides[0])
    monkeypatch.setattr(script, "theirs", lambda *_: sides[1])
    monkeypatch.setattr(script, "converted", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["reward_against_trl.py"])
    if fits:
        script.main()
    else:
        with pytest.raises(SystemExit, match="differ by more than 0.0001"):
            script.main()


def test_the_settings_of_gsm8k_are_those_of_the_job(benchmark_module, monkeypatch, tmp_path, tiny_model, shared_data):
    """Every solution of a problem stands once, with its rank; the longest file's own pairs are all in them."""
    script = benchmark_module("gsm8k_reward")
    pairs = [json.loads(line) for line in shared_data("gsm8k/preference_pairs.jsonl").read_text().splitlines()]
    lines = script.rankings(pairs)
    ranked = {
        (line["prompt"], text): rank
        for line in lines
        for text, rank in zip(line["responses"], line["ranks"], strict=True)
    }
    assert len(ranked) == sum(len(line["responses"]) for line in lines) == 2922
    assert all(ranked[p["prompt"], p["chosen"]] == 0 and ranked[p["prompt"], p["rejected"]] == 1 for p in pairs)
    monkeypatch.setattr(sys, "argv", ["gsm8k_reward.py", "--pairs=x", f"--model={tiny_model}", "run.max_steps=3"])
    (tmp_path / "rankings.jsonl").write_text("")
    config = load(RewardTrainingConfig, script.overrides(script.arguments(), tmp_path), "reward_training")
    assert (config.run.max_steps, config.parallel.threads, config.model.checkpoint) == (3, 2, str(tiny_model))


def test_both_sides_of_grpo_take_the_arguments_that_they_are_given(benchmark_module, monkeypatch, tmp_path, tiny_model):
    """And the settings of this side load: one update of all rows, no reference, a function that scores."""
    grpo_step, workload = benchmark_module("grpo_step"), benchmark_module("workload")
    monkeypatch.setattr(grpo_step, "trl_python", lambda trl: "python")
    monkeypatch.setattr(grpo_step, "converted", lambda source, folder: tiny_model)
    monkeypatch.setattr(grpo_step, "make_prompts", lambda policy, folder, shape: tmp_path / "prompts.jsonl")
    (tmp_path / "prompts.jsonl").write_text("")
    options = argparse.Namespace(steps=2, threads=1)
    for side in grpo_step.sides(tmp_path, grpo_step.SHAPES["tiny"], options).values():
        script, *given = side.command[1:]
        assert (REPO / script).is_file()
        read = workload.grpo_arguments("").parse_args([word for word in given if word != "--freeze-gc"])
        assert (read.rows, read.group, read.micro_batch, read.steps) == (64, 8, 64, 2)
    (tmp_path / "reward.py").touch()
    words = benchmark_module("aligner_grpo").overrides(read, str(tmp_path))
    config = load(ActorConfig, words, "ppo_actor")
    assert config.ppo.rollout_batch_size * config.ppo.samples_per_prompt == config.ppo.mini_batch_size == 64
    assert config.critic.place is CriticPlace.none


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"label": 7}, "other tokens are learned"),
        ({"loss": 2.01}, "differ"),
        ({"gradient": 1e-3}, "differ"),
    ],
)
def test_sft_against_trl_tells_the_two_apart(benchmark_module, monkeypatch, tmp_path, change, says):
    from aligner.data.conversations import Example

    script = benchmark_module("sft_against_trl")
    example = Example(torch.tensor([5, 6, 7], dtype=torch.int32), torch.tensor([False, True, True]), 1, "f:1", "a")
    row = {"ids": [5, 6, 7], "labels": [-100, 6, change.get("label", 7) + ("label" in change)]}
    told = {"loss": change.get("loss", 2.0), "rows": [row]}
    mine, others = torch.tensor([1.0, -4.0]), torch.tensor([1.0, -4.0 - change.get("gradient", 0.0) * 4])
    monkeypatch.setattr(script, "ours", lambda *_, packed: ([example], 2.0, {"w": mine}))
    monkeypatch.setattr(script, "theirs", lambda *_: (told, {"w": others}))
    for name in ("converted", "Tokenizer", "write_rows", "shutdown"):
        monkeypatch.setattr(script, name, lambda *_: tmp_path)
    monkeypatch.setattr(sys, "argv", ["sft_against_trl.py", "--model", str(tmp_path)])
    if says is None:
        script.main()
    else:
        with pytest.raises(SystemExit, match=says):
            script.main()


@pytest.mark.parametrize("script", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_names_that_scripts_take_from_each_other_are_there(benchmark_module, script):
    """Of those too that run in TRL's or vLLM's environment, where this suite does not go."""
    tree = ast.parse((BENCHMARKS / f"{script}.py").read_text())
    beside = {path.stem for path in BENCHMARKS.glob("*.py")}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in beside:
            module = benchmark_module(node.module)
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_every_script_is_tried_here():
    # TRL's and vLLM's environments
    elsewhere = {"trl_ppo", "trl_grpo", "trl_reward", "trl_sft", "trl_env", "vllm_env", "vllm_worker"}
    here = {"aligner_ppo", "forward_backward", "rollout", "served_critic", "grids", "ppo_step", "refit", "workload"}
    here |= {"reward_against_trl", "gsm8k_reward", "aligner_grpo", "grpo_step", "sft_against_trl"}
    assert {path.stem for path in BENCHMARKS.glob("*.py")} == here | elsewhere
