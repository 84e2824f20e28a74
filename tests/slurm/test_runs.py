"""PPO runs of a tiny model on a real Slurm, by launch/slurm: whatever happens to their jobs, they end as the undisturbed run (*exact* on
the same grid, *close* on another), or say in one sentence why not, and nobody holds nodes.

Jobs are held still at a named point (aligner/runtime/faults.py) while something happens to them, as steps of a tiny model take no time."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from aligner.serving.access import node_address
from tests.jobs.conftest import fork_server, tiny_model  # noqa: F401 - fixtures
from tests.jobs.harness import ACTOR_SETTINGS, CRITIC_SETTINGS, REPO, Run, state_of
from tests.jobs.test_layouts import assert_close
from tests.jobs.test_resume import assert_exact, settings
from tests.slurm.cluster import Cluster, command_of
from tests.slurm.harness import Submitted, Submitter

STEPS = 4
TEMPLATE = '{prompt} $HOME `id` "so"  [a,b] it\\\'s'  # as Hydra reads it between single quotes
STILL = {"ALIGNER_FAULT": "pause generated:2"}
ALL_STEPS = tuple(range(1, STEPS + 1))


def bind() -> tuple[str, ...]:
    """Where this machine has no address that others know, the critic serves on loopback."""
    try:
        node_address()
    except ValueError:
        return ("serving.bind=127.0.0.1",)
    return ()


class Runs(Submitter):
    """Submits runs that differ in what happens to them alone."""

    def __init__(self, cluster: Cluster, folder: Path, model: Path) -> None:
        super().__init__(cluster, folder / "runs")
        self.runs.mkdir()
        actor, critic = settings(folder, steps=STEPS, every=10)
        patient = ("critic.connect_timeout=200", "critic.reconnect_timeout=150", "parallel.timeout=400")
        self.both = (f"model.checkpoint={model}", "model.dtype=float32", "parallel.threads=1", "tasks=chain_sum")
        self.actor = (*ACTOR_SETTINGS, *actor, *patient, f"data.template='{TEMPLATE}'")
        self.critic = (*CRITIC_SETTINGS, *critic, *bind(), "serving.heartbeat=1", "parallel.timeout=400")

    def sections(self, *actor: str, critic: tuple[str, ...] = ()) -> list[str]:
        return ["--both", *self.both, "--actor", *self.actor, *actor, "--critic", *self.critic, *critic]

    def ppo(self, name: str, *options: str, actor: tuple[str, ...] = (), critic=(), **environment: str) -> Submitted:
        how = ("--no-check", "--python", sys.executable)
        words = ("submit_ppo.sh", *how, *options, *self.sections(*actor, critic=critic))
        return self.submit(words, name, **environment)


@pytest.fixture(scope="module")
def shared(slurm, tiny_model, tmp_path_factory) -> Runs:  # noqa: F811
    return Runs(slurm, tmp_path_factory.mktemp("slurm_runs"), tiny_model)


@pytest.fixture
def runs(cluster, shared) -> Runs:
    return shared


@pytest.fixture(scope="module")
def undisturbed(shared):
    """Its settings are read before it is submitted, as they are unless --no-check is said."""
    words = ("submit_ppo.sh", "--python", sys.executable, "--gpus-per-node", "1", *shared.sections())
    return shared.submit(words, "whole", ALIGNER_END_WAIT="60").end()


def test_two_allocations(runs, undisturbed):
    run = undisturbed.run
    assert run.steps == [0, *ALL_STEPS] and run.pairs == ["step_000004"]
    assert json.loads((run.path / "run.json").read_text())["complete"]
    template = TEMPLATE.replace("\\'", "'")
    assert OmegaConf.load(run.path / "config.yaml").data.template == template
    after = template.partition("{prompt}")[2]
    assert any(after in sample["prompt"] for sample in run.samples(1))
    assert not (run.path / "endpoints" / "critic.json").exists()
    assert (
        "tail -F" in undisturbed.said and f"squeue -j {undisturbed.every[0]},{undisturbed.every[1]}" in undisturbed.said
    )


# ---- make test-slurm


def pid_of(submitted: Submitted, job: str) -> int:
    return int(
        json.loads((submitted.run.path / ("run.json" if job == "actor" else f"run_{job}.json")).read_text())["pid"]
    )


def still(submitted: Submitted) -> Submitted:
    """Wait until the actor stands still in step 2."""
    record = submitted.run.path / "run.json"
    submitted.until(lambda: record.exists() and state_of(pid_of(submitted, "actor")) == "T")
    return submitted


def go_on(submitted: Submitted, pid: int = 0) -> None:
    os.kill(pid or pid_of(submitted, "actor"), signal.SIGCONT)


def go_on_where_still(submitted: Submitted) -> None:
    """A requeued actor stands still again, unless it was continued before it was killed (Slurm does both) and saved step 2."""

    def come() -> str:
        return (
            "T" if state_of(pid_of(submitted, "actor")) == "T" else submitted.state("actor") == "COMPLETED" and "over"
        )

    if submitted.until(come) == "T":
        go_on(submitted)


def ranks_of(job: int, script: str) -> dict[int, int]:
    """pids of a job's ranks that run a script, by rank: the children of Slurm's step daemon."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "environ").read_text(errors="replace").split("\0")
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        own = dict(word.split("=", 1) for word in words if "=" in word)
        is_its = own.get("SLURM_JOB_ID") == str(job) and script in command_of(int(process.name))
        if is_its and command_of(int(parent)).startswith("slurmstepd"):
            found[int(own["SLURM_PROCID"])] = int(process.name)
    return found


def restarts(submitted: Submitted, job: str) -> int:
    return int(submitted.cluster.job(submitted.jobs[job])["Restarts"])


@pytest.mark.slurm
def test_warned_before_the_time_limit(runs, undisturbed):
    """SIGUSR1 to both batch scripts, as Slurm sends it: both save, requeue themselves, and go on."""
    submitted = still(runs.ppo("limit", **STILL))
    submitted.signal("USR1", "critic", "actor")
    time.sleep(2)
    go_on(submitted)
    submitted.until_said("actor", "requeueing this job (newest checkpoint: step_000002)")
    submitted.end()
    assert_exact(submitted.run, undisturbed.run)
    assert submitted.run.pairs == ["step_000002", "step_000004"]
    assert "the critic job ends: it was told to stop by a signal; the actor job has saved a pair" in submitted.log(
        "critic"
    )
    assert (restarts(submitted, "actor"), restarts(submitted, "critic")) == (1, 1)


@pytest.mark.slurm
def test_warned_in_one_job(runs, undisturbed):
    """As heterogeneous job: Slurm's warning reaches both parts, and they are requeued together."""
    submitted = still(runs.ppo("together", "--together", "--actor-nodes", "1", **STILL))
    submitted.signal("USR1", "together")
    time.sleep(2)
    go_on(submitted)
    submitted.until_said("together", "requeueing this job (newest checkpoint: step_000002)")
    submitted.end()
    assert_exact(submitted.run, undisturbed.run)
    assert restarts(submitted, "together") == 1 and "the actor job has saved a pair" in submitted.log("together")


@pytest.mark.slurm
def test_preempted_and_requeued_onto_another_node(runs, cluster, undisturbed):
    """A job of a higher partition takes the critic's node. SIGTERM reaches every process there; the pair is saved, and the critic comes
    back elsewhere."""
    submitted = still(runs.ppo("preempted", "--actor-sbatch-arg=-wnode4", **STILL))
    host = json.loads((submitted.run.path / "run_critic.json").read_text())["host"]
    taken = cluster.run("sbatch", "--parsable", "-phigh", f"-w{host}", "--exclusive", "-o/dev/null", "--wrap=sleep 600")
    time.sleep(3)
    go_on(submitted)
    submitted.end()
    assert_exact(submitted.run, undisturbed.run)
    assert submitted.run.pairs == ["step_000002", "step_000004"] and restarts(submitted, "critic") == 1
    assert json.loads((submitted.run.path / "run_critic.json").read_text())["host"] != host
    assert cluster.states()[int(taken)] == "RUNNING"


@pytest.mark.slurm
def test_two_runs_at_once_of_which_ranks_die(runs, cluster, undisturbed):
    """On the same nodes. In one the critic's rank is killed, in the other one of the actor's two."""
    nodes = ("--sbatch-arg=-wnode[1-2]", "--nodes", "2")
    first = runs.ppo("critic_killed", "--sbatch-arg=-wnode1", **STILL)
    second = runs.ppo("rank_killed", *nodes, **STILL)
    still(first), still(second)
    ranks = second.until(lambda: len(found := ranks_of(second.jobs["actor"], "train_ppo_actor.py")) == 2 and found)
    second.until(lambda: all(state_of(pid) == "T" for pid in ranks.values()))
    os.kill(pid_of(first, "critic"), signal.SIGKILL)
    os.kill(ranks[1], signal.SIGKILL)
    go_on(first)
    second.until_said("actor", "starting it again (1 more times at most)")
    again = second.until(lambda: len(found := ranks_of(second.jobs["actor"], "train_ppo_actor.py")) == 2 and found)
    second.until(lambda: all(state_of(pid) == "T" for pid in again.values()))
    for pid in again.values():
        go_on(second, pid)
    first.end(), second.end()
    assert_exact(first.run, undisturbed.run)
    assert_close(second.run, undisturbed.run, steps=ALL_STEPS)
    assert "critic: starting it again" in first.log("critic") and restarts(first, "critic") == 0


@pytest.mark.slurm
@pytest.mark.parametrize("lost", ["critic", "actor"])
def test_a_node_is_lost(runs, cluster, undisturbed, lost):
    """Slurm requeues the job that was on it; the other one waits for it."""
    options = [f"--{job}-sbatch-arg={'-x' if job == lost else '-w'}node4" for job in ("critic", "actor")]
    submitted = still(runs.ppo(f"down_{lost}", *options, actor=("checkpoint.every=1",), **STILL))
    host = json.loads((submitted.run.path / f"run{'_critic' if lost == 'critic' else ''}.json").read_text())["host"]
    pid = pid_of(submitted, "actor")
    cluster.run("scontrol", "update", f"NodeName={host}", "State=DOWN", "Reason=test")
    if lost == "critic":
        submitted.until(lambda: state_of(pid_of(submitted, "critic")) in ("", "Z"))
        go_on(submitted)
    else:
        submitted.until(lambda: state_of(pid) in ("", "Z"))
        go_on_where_still(submitted)
    submitted.end()
    assert_exact(submitted.run, undisturbed.run)
    assert restarts(submitted, lost) == 1
    assert cluster.job(submitted.jobs[lost])["NodeList"] != host


@pytest.mark.slurm
def test_either_is_cancelled(runs, cluster, undisturbed):
    """The other one ends too, soon and with one sentence. Submitted again, the run goes on."""
    actor = ("checkpoint.every=1",)
    first = still(runs.ppo("cancelled", actor=actor, **STILL))
    first.cancel("critic")
    first.until_state("critic", "CANCELLED")
    go_on(first)
    began = time.monotonic()
    first.end(critic="CANCELLED", actor="FAILED")
    assert time.monotonic() - began < 100, "critic.reconnect_timeout alone is 150 s"
    assert f"error: job {first.jobs['critic']}, which this one needs, has ended" in first.log("actor")
    assert "Traceback" not in first.log("actor")
    second = still(runs.ppo("cancelled", actor=actor, **STILL))
    second.cancel("actor")
    go_on(second)
    second.end(actor="CANCELLED")
    assert cluster.run("squeue", "-h") == ""
    third = runs.ppo("cancelled", actor=actor).end()
    assert_exact(third.run, undisturbed.run)


@pytest.mark.slurm
def test_a_critic_that_is_refused(runs, cluster):
    """The actor ends with one sentence, and its nodes are free."""
    submitted = runs.ppo("refused", critic=("critic.mini_batch_size=0",))
    submitted.end(critic="FAILED", actor="FAILED")
    assert cluster.job(submitted.jobs["critic"])["ExitCode"] == "2:0"
    assert cluster.job(submitted.jobs["actor"])["ExitCode"] == "3:0"
    assert "critic.mini_batch_size" in submitted.log("critic")
    assert f"error: job {submitted.jobs['critic']}, which this one needs, has ended" in submitted.log("actor")
    assert cluster.run("squeue", "-h") == ""


@pytest.mark.slurm
@pytest.mark.parametrize("how", [(), ("--together",)], ids=["apart", "together"])
def test_a_reward_job_of_its_own(runs, undisturbed, how):
    submitted = runs.submit(
        (
            *("submit_ppo.sh", "--no-check", "--python", sys.executable, *how, "--reward-nodes", "1"),
            *runs.sections(),
            *("--reward", *[w for w in runs.critic if w.startswith(("reward.", "serving.bind", "serving.det"))]),
        ),
        f"reward_{'_'.join(how).strip('-')}",
    ).end()
    assert_exact(submitted.run, undisturbed.run)
    assert (submitted.run.path / "run_reward.json").exists()


@pytest.mark.slurm
def test_one_job_without_a_critic(runs, undisturbed):
    """submit_job.sh, as for supervised runs; warned, requeued, finished."""
    free = ("critic.place=none", "ppo.advantage=reinforce_baseline", "reward.place=actor", "ppo.critic_warmup_steps=0")
    free += ("ppo.critic_fallback_steps=0", "ppo.truncation=ignore")
    settings = (*runs.both, *runs.actor, *free)
    how = ("submit_job.sh", "--no-check", "--python", sys.executable)
    whole = runs.submit((*how, "train_ppo_actor.py", *settings), "single_whole")
    submitted = runs.submit((*how, "train_ppo_actor.py", *settings), "single", **STILL)
    still(submitted)
    submitted.signal("USR1", "job")
    time.sleep(1)
    go_on(submitted)
    submitted.end(), whole.end()
    assert restarts(submitted, "job") == 1
    assert_exact(submitted.run, whole.run)


@pytest.mark.slurm
def test_supervised_jobs(runs, tmp_path):
    """SFT on two nodes, and a reward model on one, at once."""
    told = {"prompt": "Say 1", "completion": "1.", "chosen": "1.", "rejected": "2."}
    rows = {"sft": ("prompt", "completion"), "pairs": ("prompt", "chosen", "rejected")}
    for name, keys in rows.items():
        lines = [json.dumps({key: told[key].replace("1", str(n)) for key in keys}) + "\n" for n in range(12)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    how = ("submit_job.sh", "--python", sys.executable, "--gpus-per-node", "1")
    model = [word for word in runs.both if word.startswith(("model.", "parallel."))]
    common = (*model, "train.mini_batch_size=4", "data.max_length=128")

    def submit(script: str, name: str, rows: str, *options: str) -> Submitted:
        return runs.submit((*how, *options, script, *common, f"data.train={tmp_path}/{rows}.jsonl"), name)

    sft = submit("train_sft.py", "sft", "sft", "--nodes", "2")
    reward_model = submit("train_reward_model.py", "reward_model", "pairs")
    for submitted in (sft.end(), reward_model.end()):
        assert submitted.run.steps == [1, 2, 3] and submitted.run.pairs == ["step_000003"]
    record = json.loads((sft.run.path / "run_sft.json").read_text())
    assert record["grid"] == "TP1 x PP1 x DP2" and len(set(record["hosts"])) == 2


@pytest.mark.slurm
def test_by_hand(runs, cluster, undisturbed):
    """`srun python ...` twice, without launch/slurm."""
    place = [f"run.dir={runs.runs}", "run.name=by_hand", *runs.both]
    srun = ["srun", "-N1", "--ntasks-per-node=1", "--kill-on-bad-exit=1", sys.executable]
    jobs = (("serve_ppo_critic.py", runs.critic), ("train_ppo_actor.py", runs.actor))
    commands = [[*srun, str(REPO / script), *place, *words] for script, words in jobs]
    started = [subprocess.Popen(c, env=cluster.environment, stderr=subprocess.PIPE, text=True) for c in commands]
    for process in started:
        _, said = process.communicate(timeout=240)
        assert process.returncode == 0, said
    assert_exact(Run(runs.runs / "by_hand"), undisturbed.run)
