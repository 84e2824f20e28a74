"""Settings: what is written arrives, what is wrong is named, all at once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from aligner.config import keys
from aligner.config.groups import CriticPlace, EngineKind, Resume, RewardKind, RewardPlace, Schedule
from aligner.config.implied import settled
from aligner.config.jobs import JOBS, ActorConfig, CriticConfig, RewardTrainingConfig, SFTConfig
from aligner.config.load import CONF, load, to_dict, to_yaml
from aligner.config.ppo import (
    Advantage,
    Aggregate,
    KLEstimator,
    KLPlace,
    KLReduction,
    PolicyObjective,
    ReferencePlace,
    RewardScale,
    Truncation,
)
from aligner.config.reward import RewardPart
from aligner.config.validate import problems as cross_problems
from aligner.runtime.errors import ConfigError

GIVEN = ["model.checkpoint=somewhere", "data.task=chain_sum"]


def problems(*words: str, job=ActorConfig, name: str = "ppo_actor") -> list[str]:
    """The lines that a command line earns."""
    with pytest.raises(ConfigError) as caught:
        load(job, words, name)
    return caught.value.problems


def test_values_of_every_type_arrive():
    config = load(
        ActorConfig,
        [*GIVEN, "ppo.clip=0.3", "run.max_steps=7", "optim.distributed=true", "run.resume=must", "parallel.virtual_pipeline=null",
         "sampling.stop_token_ids=[1,2]", "data.task_config.min_terms=2", "+ppo.epochs=3", "data.system='a, b'"],
    )  # fmt: skip
    assert config.ppo.clip == 0.3
    assert (config.run.max_steps, config.ppo.epochs) == (7, 3)
    assert config.optim.distributed is True
    assert config.run.resume is Resume.must
    assert config.parallel.virtual_pipeline is None
    assert config.sampling.stop_token_ids == [1, 2]
    assert config.data.task_config == {"min_terms": 2}
    assert config.data.system == "a, b"


def test_a_value_can_refer_to_another():
    config = load(ActorConfig, [*GIVEN, "run.max_steps=40", "optim.decay_steps=${run.max_steps}"])
    assert config.optim.decay_steps == 40


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("ppo.cliip=0.1", "unknown key ppo.cliip: did you mean ppo.clip?"),
        ("clip=0.1", "unknown key clip: did you mean ppo.clip?"),
        ("pppo.clip=0.1", "unknown key pppo.clip: did you mean ppo.clip?"),
        ("serving.port=8000", "unknown key serving.port: it belongs to the critic job"),
        ("+foo.bar=1", "the groups are run, parallel"),
        ("ppo=3", "ppo is a group"),
        ("ppo.clip=high", "ppo.clip='high' is not a number"),
        ("run.max_steps=1.5", "run.max_steps=1.5 is not an integer"),
        ("optim.distributed=maybe", "is not true or false"),
        ("ppo.advantage=gea", "one of gae, group_norm, dr_grpo, rloo, reinforce_baseline (did you mean gae?)"),
        ("ppo.clip=null", "ppo.clip=None is not a number"),
        ("run.seed=${nowhere.at_all}", "run.seed: Interpolation key 'nowhere.at_all' not found"),
        ("~ppo.clip", "cannot be deleted; ppo.clip=null makes one absent"),
        ("ppo.clip=0.1,0.2", "sweeps are not supported"),
        ("word", "'word' is not group.key=value"),
        ("=1", "'=1' is not group.key=value"),
        ("--bogus", "unknown option --bogus"),
        ("run.seed.deeper=1", "unknown key run.seed.deeper"),
    ],
)
def test_a_wrong_word_is_named(word, says):
    found = problems(*GIVEN, word)
    assert len(found) == 1
    assert says in found[0]


def test_all_problems_come_at_once():
    found = problems("ppo.cliip=1", "ppo.clip=high", "ppo.lam=3", "data.task=x", "ppo.mini_batch_size=100")
    assert len(found) == 5  # with the missing checkpoint
    assert any(line.startswith("model.checkpoint is required") for line in found)
    message = str(ConfigError(*found))
    assert message.splitlines()[0].endswith("5 problems:")
    assert len(message.splitlines()) == 6


def actor(**changed: object) -> ActorConfig:
    """Settings that fit together, but for those given as group__key=value."""
    config = ActorConfig()
    config.model.checkpoint, config.data.task = "somewhere", "chain_sum"
    for key, value in changed.items():
        group, name = key.split("__")
        assert hasattr(getattr(config, group), name)
        setattr(getattr(config, group), name, value)
    return settled(config)


NO_CRITIC = {"critic__place": CriticPlace.none}
FREE = {"ppo__advantage": Advantage.reinforce_baseline}
MIXED = {
    "reward__kind": RewardKind.parts,
    "reward__parts": [RewardPart(kind=RewardKind.model), RewardPart(kind=RewardKind.task)],
}
GROUPED = {"ppo__advantage": Advantage.group_norm, "ppo__samples_per_prompt": 8}


def test_a_reward_model_among_the_parts_fits():
    config = actor(**MIXED, reward__checkpoint="there", reward__standardise=True)
    assert list(cross_problems(config)) == []


def test_settings_that_fit_have_no_problems():
    assert cross_problems(actor()) == []


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"ppo__mini_batch_size": 96}, "128 samples a step, which is no multiple of ppo.mini_batch_size=96"),
        (NO_CRITIC, "set ppo.advantage to one of group_norm, dr_grpo, rloo, reinforce_baseline"),
        ({**NO_CRITIC, "reward__place": RewardPlace.critic}, "critic.place=none leaves nobody to score"),
        ({**FREE, "ppo__truncation": Truncation.bootstrap}, "ppo.truncation=bootstrap needs a critic"),
        ({**NO_CRITIC, "reward__kind": RewardKind.model}, "needs a job to run the reward model"),
        ({**NO_CRITIC, **MIXED, "reward__checkpoint": "there"}, "needs a job to run the reward model"),
        ({**MIXED, "reward__place": RewardPlace.actor}, "a reward model runs in the critic job"),
        (MIXED, "needs reward.checkpoint"),
        ({"reward__standardise": True}, "reward.standardise=true needs a reward model"),
        ({"ppo__advantage": Advantage.rloo}, "ppo.advantage=rloo compares the responses to one prompt"),
        ({**GROUPED, "ppo__gamma": 0.9}, "and ppo.gamma=0.9 discounts it by token"),
        (
            {**GROUPED, "ppo__reward_scale": RewardScale.group},
            "takes off the mean that ppo.advantage=group_norm takes off",
        ),
        ({"ppo__dynamic_sampling": True}, "ppo.dynamic_sampling drops groups whose scores are all equal"),
        (
            {**GROUPED, "ppo__dynamic_sampling": True, "ppo__dynamic_sampling_max_prompts": 100},
            "ppo.dynamic_sampling_max_prompts=100 must be at least ppo.rollout_batch_size=128",
        ),
        ({"ppo__kl_place": KLPlace.loss}, "has a gradient of 0 on average"),
        (
            {
                "ppo__kl_place": KLPlace.loss,
                "ppo__kl_reduction": KLReduction.sequence,
                "ppo__kl_estimator": KLEstimator.k3,
            },
            "ppo.kl_reduction=sequence is of ppo.kl_place=reward",
        ),
        ({"ppo__reference": ReferencePlace.none}, "leaves nothing to measure the KL to"),
        ({"ppo__dual_clip": 1.0}, "ppo.dual_clip=1 must be greater than 1"),
        ({"ppo__dual_clip": 3.0, "ppo__loss": PolicyObjective.cispo}, "needs ppo.loss=clip, and it is cispo"),
        (
            {"ppo__loss": PolicyObjective.gspo, "ppo__aggregate": Aggregate.token},
            "ppo.loss=gspo has one ratio a response",
        ),
        ({"ppo__clip_high": 0.0}, "ppo.clip_high=0.0 must be greater than 0"),
        ({"ppo__overlong_cache": 600}, "ppo.overlong_cache=600 exceeds ppo.overlong_length=512"),
        ({"ppo__overlong_cache": 60, "ppo__overlong_length": 600}, "ppo.overlong_length=600 is never reached"),
        ({**NO_CRITIC, "ppo__critic_warmup_steps": 2}, "ppo.critic_warmup_steps=2 needs a critic"),
        ({"optim__schedule": Schedule.cosine}, "needs optim.decay_steps (0) greater than optim.warmup_steps (0)"),
        ({"engine__tensor": 2}, "engine.tensor=2 needs engine.kind=trtllm"),
        ({"engine__kind": EngineKind.trtllm, "engine__timeout": 3000.0}, "must be at least engine.timeout=3000"),
        (
            {"engine__kind": EngineKind.trtllm, "ppo__importance_cap": 2.0, "sampling__temperature": 0.7},
            "whether TensorRT-LLM's are those of sampling.temperature=0.7 was never verified",
        ),
        (
            {"engine__kind": EngineKind.trtllm, "validation__min_p": 0.1},
            "validation.min_p=0.1 is not there with engine",
        ),
        ({"engine__memory_fraction": 1.5}, "engine.memory_fraction=1.5 must lie between 0 and 1"),
        ({"refit__bucket_mb": 0}, "refit.bucket_mb=0 must be greater than 0"),
        ({"optim__min_lr": 1.0}, "optim.min_lr=1.0 exceeds optim.lr=1e-06"),
        ({"data__prompts": "absent.jsonl"}, "exactly one of data.prompts and data.task"),
        ({"data__prompts": "absent.jsonl"}, "data.prompts=absent.jsonl: there is no such file"),
        ({"data__task": None, "data__prompts": __file__}, "needs data.validation_prompts"),
        ({"data__task": None, "data__prompts": __file__}, "reward.kind=task needs data.task"),
        ({"data__task": None}, "exactly one of data.prompts and data.task"),
        ({"data__task_key": "answer"}, "must be question or operands"),
        ({"reward__kind": RewardKind.function}, "reward.kind=function needs reward.function=file.py:name"),
        ({"reward__kind": RewardKind.function, "reward__function": "absent.py:score"}, "there is no file"),
        ({"reward__function": "absent.py:score"}, "needs reward.kind=function"),
        ({"reward__kind": RewardKind.model}, "needs reward.checkpoint"),
        (
            {"reward__kind": RewardKind.model, "reward__format_credit": 0.3},
            "reward.format_credit=0.3 needs reward.kind=task",
        ),
        (
            {
                "data__task": None,
                "data__prompts": __file__,
                "reward__kind": RewardKind.parts,
                "reward__parts": [RewardPart()],
            },
            "reward.kind=task needs data.task",
        ),
        ({"reward__kind": RewardKind.regex}, "reward.kind=regex needs reward.pattern"),
        ({"reward__failed_score": float("nan")}, "reward.failed_score=nan must be a finite number"),
        ({"data__holdout": 0.0}, "leaves no problem to validate on"),
        ({"data__holdout": 1.0}, "leaves no problem to train on"),
        ({"reward__checkpoint": "somewhere"}, "needs a reward model"),
        ({"sampling__temperature": 0.0}, "sampling.temperature=0.0 must be greater than 0"),
        ({"engine__max_output_len": 0}, "engine.max_output_len=0 must be greater than 0"),
        ({"ppo__kl_target": -1.0}, "ppo.kl_target=-1.0 must be greater than 0"),
        ({"ppo__kl_target": 1.0, "ppo__kl_coefficient": 0.0}, "it must start above 0"),
        ({"ppo__gamma": 1.5}, "must lie between 0 and 1"),
        ({"optim__beta1": 1.0}, "optim.beta1=1 never learns"),
        ({"optim__lr": float("nan")}, "optim.lr=nan must be a finite number"),
        ({"optim__lr": -1.0}, "optim.lr=-1.0 must not be negative"),
        ({"parallel__sequence": True}, "needs parallel.tensor > 1"),
        ({"parallel__virtual_pipeline": 2}, "needs parallel.pipeline > 1"),
        ({"critic__endpoint": "nowhere"}, "must be host:port"),
        ({"critic__local_overrides": ["a=b"]}, "needs critic.place=local"),
        ({"data__template": "Answer"}, "must hold"),
        ({"data__template": "{prompt"}, "data.template='{prompt'"),
        ({"sampling__stop_token_ids": [3, -1]}, "must not hold -1"),
        ({"critic__endpoint": "here:0"}, "with a port from 1 to 65535"),
        ({"critic__endpoint": "here:99999"}, "with a port from 1 to 65535"),
        ({"run__seed": 2**63}, "must be at most 9223372036854775807"),
        ({"engine__threads": 5000}, "engine.threads=5000 must be at most 1024"),
        ({"run__dir": ""}, "must be the path of a folder"),
        ({"run__name": "a/b"}, "no slash"),
        ({"run__name": "a\nb"}, "no line breaks"),
        ({"run__name": "a\x07b"}, "no control characters"),
        ({"run__name": "a "}, "no space at either end"),
        ({"run__name": "ä" * 200}, "400 bytes long"),
        ({"parallel__pipeline": -2}, "parallel.pipeline=-2 must be at least 1"),
        ({"refit__sync_every": 3}, "refit.sync_every=3 trains on responses of older weights"),
        ({"refit__sync_every": 0}, "refit.sync_every=0 must be greater than 0"),
        ({"ppo__importance_cap": 0.5}, "ppo.importance_cap=0.5 must be at least 1"),
        (
            {"refit__sync_every": 2, "ppo__importance_cap": 2.0, "engine__offload_during_training": True},
            "refit.sync_every=2 needs the engine to keep its weights",
        ),
        ({"ppo__critic_warmup_steps": 100}, "leaves no step of run.max_steps=100"),
    ],
)
def test_settings_that_contradict_each_other(changed, says):
    assert any(says in line for line in cross_problems(actor(**changed)))


def test_the_critic_job_is_checked_too():
    config = CriticConfig()
    config.serving.port, config.serving.token_file = 70000, "absent"
    found = cross_problems(config)
    assert len(found) == 2
    assert "at most 65535" in found[0]
    assert "there is no such file" in found[1]


def test_a_reward_model_is_looked_for_where_it_is_loaded():
    config = CriticConfig()
    config.reward.kind, config.reward.checkpoint = RewardKind.model, "absent"
    said = {}
    for place in (RewardPlace.critic, RewardPlace.server, RewardPlace.actor):
        config.reward.place = place
        said[place.name] = list(cross_problems(config))
    assert said["server"] == [] and "the actor job runs no reward model" in said["actor"][0]
    assert said["critic"] == ["reward.checkpoint=absent: there is no such folder or .nemo archive"]


def test_lazy_refits_pass_with_their_correction():
    config = load(ActorConfig, [*GIVEN, "refit.sync_every=4", "ppo.importance_cap=2"])
    assert (config.refit.sync_every, config.ppo.importance_cap) == (4, 2.0)


@pytest.mark.parametrize(
    ("advantage", "whiten", "aggregate"),
    [
        ("group_norm", False, Aggregate.sequence),
        ("dr_grpo", False, Aggregate.constant),
        ("rloo", False, Aggregate.token),
        ("reinforce_baseline", True, Aggregate.token),
    ],
)
def test_a_critic_free_advantage_is_the_one_setting_that_a_run_without_a_critic_needs(advantage, whiten, aggregate):
    config = load(ActorConfig, [*GIVEN, f"ppo.advantage={advantage}", "ppo.samples_per_prompt=4"])
    assert (config.critic.place, config.reward.place) == (CriticPlace.none, RewardPlace.actor)
    assert (config.ppo.truncation, config.ppo.whiten, config.ppo.aggregate) == (Truncation.ignore, whiten, aggregate)
    assert config.ppo.constant_length == config.engine.max_output_len


def test_gae_without_a_critic_is_one_problem():
    (line,) = problems(*GIVEN, "critic.place=none")
    assert line.startswith("ppo.advantage=gae needs a critic, and critic.place is none")


def test_with_gae_there_is_a_critic_job_that_scores():
    config = load(ActorConfig, GIVEN)
    assert (config.critic.place, config.reward.place) == (CriticPlace.remote, RewardPlace.critic)
    assert (config.ppo.truncation, config.ppo.whiten, config.ppo.clip_high) == (Truncation.bootstrap, True, 0.2)
    assert load(CriticConfig, ["model.checkpoint=there"], "ppo_critic").reward.place is RewardPlace.critic


def test_what_is_given_is_not_implied():
    words = [
        "critic.place=local",
        "ppo.whiten=true",
        "ppo.aggregate=token",
        "ppo.truncation=mask",
        "ppo.clip_high=0.28",
    ]
    words += ["reward.place=actor", "ppo.constant_length=99"]
    config = load(ActorConfig, [*GIVEN, "ppo.advantage=dr_grpo", "ppo.samples_per_prompt=4", *words])
    assert (config.critic.place, config.reward.place) == (CriticPlace.local, RewardPlace.actor)
    assert (config.ppo.whiten, config.ppo.aggregate, config.ppo.truncation) == (True, Aggregate.token, Truncation.mask)
    assert (config.ppo.clip_high, config.ppo.constant_length) == (0.28, 99)


@pytest.mark.parametrize(("loss", "aggregate"), [("gspo", Aggregate.sequence), ("cispo", Aggregate.token)])
def test_a_loss_brings_its_aggregation(loss, aggregate):
    words = [f"ppo.loss={loss}", "ppo.advantage=group_norm", "ppo.samples_per_prompt=4"]
    assert load(ActorConfig, [*GIVEN, *words]).ppo.aggregate is aggregate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's own configurations: an experiment on top of a task's file."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine.yaml").write_text(
        "# @package _global_\ndata:\n  task: chain_sum\n  task_config: {min_terms: 2}\nreward:\n  format_credit: 0.25\n"
    )
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - tasks: mine\n  - _self_\nmodel:\n  checkpoint: there\nrun:\n  name: mine\n"
    )
    return tmp_path


def test_files_of_the_users_own(folder):
    config = load(ActorConfig, ["--config-dir", str(folder), "--config-name", "mine", "data.task_config.max_terms=3"])
    assert (config.run.name, config.model.checkpoint) == ("mine", "there")
    assert config.data.task_config == {"min_terms": 2, "max_terms": 3}


def test_a_task_is_chosen_on_the_command_line_and_serves_both_jobs(folder):
    chosen = ["--config-dir", str(folder), "tasks=mine", "model.checkpoint=there"]
    assert load(ActorConfig, chosen).data.task == "chain_sum"
    assert load(CriticConfig, chosen, "ppo_critic").reward.format_credit == 0.25


def test_absent_files_are_named(folder):
    assert "did you mean mine?" in problems("--config-dir", str(folder), "--config-name", "mnie")[0]
    (line,) = problems("--config-dir", str(folder), "tasks=other", "model.checkpoint=there")
    assert "tasks/other" in line
    assert "mine" in line


def test_printed_settings_load_again(capsys):
    words = [*GIVEN, "run.resume=must", "data.task_config.min_terms=2"]
    with pytest.raises(SystemExit) as ended:
        load(ActorConfig, [*words, "--cfg", "job"])
    assert ended.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    config = load(ActorConfig, words)
    assert printed == yaml.safe_load(to_yaml(config)) == to_dict(config)
    assert printed["run"]["resume"] == "must"
    assert json.dumps(printed)


def test_only_rank_0_prints(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        load(ActorConfig, [*GIVEN, "--cfg", "job"])
    assert capsys.readouterr().out == ""


def test_help_names_groups_and_files(capsys):
    with pytest.raises(SystemExit):
        load(CriticConfig, ["--help"], "ppo_critic")
    text = capsys.readouterr().out
    assert "serving" in text
    assert "docs/configuration.md" in text
    assert "ppo_actor" in text


def test_loading_leaves_no_folder(tmp_path):
    code = "from aligner.config.load import load; from aligner.config.jobs import ActorConfig; load(ActorConfig)"
    subprocess.run([sys.executable, "-c", code, *GIVEN], cwd=tmp_path, check=True)
    assert list(tmp_path.iterdir()) == []


# What is shipped in conf/

SHIPPED = sorted(CONF.rglob("*.yaml"))


def shipped_settings(path: Path) -> dict[str, object]:
    """group.key -> value that the file itself writes, defaults list aside."""
    content = yaml.safe_load(path.read_text()) or {}
    return {
        f"{group}.{key}": value
        for group, values in content.items()
        if group != "defaults"
        for key, value in values.items()
    }


def inherited_settings(path: Path) -> dict[str, object]:
    """Settings of the files that its defaults list names."""
    found: dict[str, object] = {}
    for entry in (yaml.safe_load(path.read_text()) or {}).get("defaults", []):
        group, name = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
        if name != "_self_":
            file = CONF / group / f"{name}.yaml"
            found |= inherited_settings(file) | shipped_settings(file)
    return found


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(CONF)))
def test_shipped_files_write_known_keys_and_no_defaults(path):
    """A line that changes nothing is a second place for a default."""
    inherited = inherited_settings(path)
    for key, value in shipped_settings(path).items():
        owners = [job for job in JOBS.values() if key in keys.docs(job)]
        assert owners, f"{path}: {key} is not a setting"
        group, name = key.split(".")
        defaults = [OmegaConf.to_container(OmegaConf.structured(job), enum_to_str=True)[group][name] for job in owners]
        assert value not in ([inherited[key]] if key in inherited else defaults), (
            f"{path}: {key}={value} changes nothing"
        )


@pytest.mark.parametrize("path", [p for p in SHIPPED if p.parent == CONF], ids=lambda path: path.stem)
def test_shipped_configurations_load(path):
    """With a checkpoint and a task, where the file leaves them to the user."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        written = compose(path.stem)
    jobs = {"sft": SFTConfig, "critic": CriticConfig, "reward_training": RewardTrainingConfig}
    job = next((jobs[name] for name in jobs if name in path.stem), ActorConfig)
    supervised = job in (SFTConfig, RewardTrainingConfig)
    words = ["data.train=/dev/null"] if supervised and "train" not in written.get("data", {}) else []
    words += [] if "checkpoint" in written.get("model", {}) else ["model.checkpoint=somewhere"]
    if job is ActorConfig and not {"task", "prompts"} & set(written.get("data", {})):
        words.append("data.task=chain_sum")
    assert isinstance(load(job, words, path.stem), job)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("sampling.top_k=40", "sampling.top_k=40: training samples from the policy's own distribution"),
        ("sampling.top_p=0.9", "validation.top_p and generate.py may use it"),
        ("sampling.min_p=0.1", "sampling.min_p=0.1"),
        ("sampling.repetition_penalty=1.1", "the ratio of log-probs would be biased"),
        ("sampling.min_output_len=3", "sampling.min_output_len=3"),
        ("sampling.stop_strings=['']", "sampling.stop_strings holds an empty string"),
        ("validation.top_p=1.5", "validation.top_p=1.5 must lie between 0 and 1"),
        ("validation.min_output_len=100000", "exceeds engine.max_output_len"),
    ],
)
def test_what_would_bias_training_is_refused(word, says):
    assert [says in line for line in problems(*GIVEN, word)] == [True]


def test_validation_may_sample_as_it_likes():
    settings = ["temperature=0.7", "top_k=40", "top_p=0.9", "min_p=0.1", "repetition_penalty=1.1", "min_output_len=3"]
    config = load(ActorConfig, [*GIVEN, *(f"validation.{s}" for s in settings)], "ppo_actor")
    assert (config.validation.top_k, config.validation.temperature) == (40, 0.7)
