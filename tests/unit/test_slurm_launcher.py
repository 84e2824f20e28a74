"""launch/slurm without a Slurm: which sbatch and srun commands it makes of options and environment, and what it refuses."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "launch" / "slurm"


def submit(script: str, *words: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ALIGNER_", "SLURM_"))}
    command = [str(FOLDER / script), "--python", "sh", *words]
    return subprocess.run(command, env={**clean, **environment}, cwd="/", capture_output=True, text=True)


def commands(script: str, *words: str, **environment: str) -> list[list[str]]:
    """The words of each sbatch command that would be given."""
    done = submit(script, "--name", "first", "--runs", "/r", "--dry-run", "--no-check", *words, **environment)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("sbatch ")]


def value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_two_allocations_of_their_own_sizes():
    sizes = ("--gpus-per-node", "8", "--actor-nodes=2", "--critic-gpus-per-node", "4", "--time", "4:00:00")
    critic, actor = commands("submit_ppo.sh", *sizes, "--sbatch-arg=--exclusive", "--sbatch-arg", "--mem=0")
    assert [value(c, "--nodes") for c in (critic, actor)] == ["1", "2"]
    assert [value(c, "--gpus-per-node") for c in (critic, actor)] == ["4", "8"]
    assert [value(c, "--ntasks-per-node") for c in (critic, actor)] == ["4", "8"]
    assert value(actor, "--dependency") == "after:JOB1" and "--dependency" not in critic
    for command in (critic, actor):
        assert value(command, "--signal") == "B:USR1@300" and value(command, "--time") == "4:00:00"
        assert {"--exclusive", "--mem=0", "--requeue", "--export=ALL"} <= set(command)
        assert not {"--account", "--partition", "--qos"} & set(command), "only where they are set"
    script = critic.index(str(FOLDER / "critic.sbatch"))
    assert critic[script + 1 :] == ["run.name=first", "run.dir='/r'", "serving.drain_timeout=275"]
    assert actor[-3:] == [str(FOLDER / "actor.sbatch"), "run.name=first", "run.dir='/r'"]


def test_the_environment_counts_where_no_option_is_given():
    environment = {"ALIGNER_PARTITION": "gpu", "ALIGNER_ACTOR_NODES": "3", "ALIGNER_ACCOUNT": "theirs"}
    critic, actor = commands("submit_ppo.sh", "--account", "mine", "--critic-partition", "cpu", **environment)
    assert [value(c, "--partition") for c in (critic, actor)] == ["cpu", "gpu"]
    assert [value(c, "--nodes") for c in (critic, actor)] == ["1", "3"]
    assert {value(c, "--account") for c in (critic, actor)} == {"mine"}


def test_a_chain_waits_link_by_link_and_is_never_requeued():
    links = commands("submit_ppo.sh", "--chain", "2", "--reward-nodes", "1", "--both", "a=1")
    after = [value(link, "--dependency") if "--dependency" in link else "" for link in links]
    again = "afterany:JOB1:JOB2:JOB3"
    assert after == ["", "", "after:JOB1:JOB2", again, again, "after:JOB4:JOB5"]
    assert all("--no-requeue" in link and "--requeue" not in link for link in links)
    assert all(link[-2:] == ["reward.place=server", "a=1"] for link in links)


def test_one_heterogeneous_job_carries_the_words_of_every_part():
    (command,) = commands("submit_ppo.sh", "--together", "--actor-nodes", "2", "--actor", "a=1", "--critic", "b=2")
    assert command.count(":") == 1
    parts = command[command.index(str(FOLDER / "together.sbatch")) + 1 :]
    place = ["run.name=first", "run.dir='/r'"]
    critic = ["critic", "1", "1", "5", "serve_ppo_critic.py", *place, "serving.drain_timeout=275", "b=2"]
    assert parts == [*critic, "actor", "2", "1", "4", "train_ppo_actor.py", *place, "a=1"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["x=1"], "'x=1' stands before --both, --actor, --critic and --reward"),
        (["--nam", "x"], "there is no option --nam"),
        (["--nodes"], "--nodes needs a value"),
        (["--nodes", "two"], "--critic-nodes two is no whole number of at least 1"),
        (["--signal-before", "5"], "--signal-before 5 is no whole number of at least 30"),
        (["--both", "run.name=second"], "run.name=second: give --name and --runs instead"),
        (["--reward", "x=1"], "--reward has overrides, but there is no reward job"),
        (["--python", "/no/python"], "there is no /no/python here"),
        (["--name", "a/b"], "--name 'a/b' is no name of a run"),
    ],
)
def test_what_is_refused_is_one_sentence(words, said):
    done = submit("submit_ppo.sh", "--name", "first", "--dry-run", "--no-check", *words)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {said}"), done.stderr
    assert len(done.stderr.splitlines()) == 1


def srun(tmp_path: Path, **environment: str) -> list[str]:
    """The words that a batch script gives srun for two nodes of four tasks."""
    known = {"ALIGNER_ROOT": str(ROOT), "ALIGNER_RUN": str(tmp_path), "ALIGNER_PYTHON": "python", "SLURM_JOB_ID": "7"}
    code = f"source {FOLDER}/common.sh; srun_words 2 4; printf '%s\\n' \"${{SRUN[@]}}\""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ALIGNER_")}
    done = subprocess.run(
        ["bash", "-c", code], env={**clean, **known, **environment}, cwd="/", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_containers_only_where_one_is_set(tmp_path):
    plain = ["--nodes", "2", "--ntasks", "8", "--ntasks-per-node", "4"]
    plain += ["--kill-on-bad-exit=1", "--wait=0", "--mpi=none"]
    assert srun(tmp_path) == plain
    assert srun(tmp_path, ALIGNER_CONTAINER_MOUNTS="/a:/a") == plain
    image = {"ALIGNER_CONTAINER_IMAGE": "/images/a b.sqsh", "ALIGNER_CONTAINER_MOUNTS": "/a:/a,/b c:/b"}
    expected = ["--container-image=/images/a b.sqsh", "--container-workdir=/", "--container-mounts=/a:/a,/b c:/b"]
    assert srun(tmp_path, **image) == [*plain, *expected]
    more = {"ALIGNER_SRUN_ARG": "--mpi=pmix\n--comment=two words", "ALIGNER_CPUS_PER_TASK": "6"}
    assert srun(tmp_path, **more) == [*plain, "--cpus-per-task", "6", "--mpi=pmix", "--comment=two words"]
