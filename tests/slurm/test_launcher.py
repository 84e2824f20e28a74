"""launch/slurm on a real Slurm, with ranks that stand_in.py plays: how words arrive, and what follows from how a job ends."""

import os
import shutil
import subprocess
import time

import pytest

from tests.jobs.harness import REPO
from tests.slurm.harness import Submitter, shellcheck, until

FILES = sorted((REPO / "launch" / "slurm").iterdir())
AWKWARD = (
    "c='two words'",
    'data.system="He said: \\"no\\""',
    "data.template='{prompt} $HOME `id` \\'s'",
    "list=[a,b]",
    "~gone",
    "+new={x: 1, y: [2]}",
    "back=\\",
    "glob=*",
    "",
    "line=\nbreak",
)


@pytest.fixture
def submitter(cluster, tmp_path) -> Submitter:
    return Submitter(cluster, tmp_path)


def test_the_scripts_are_clean():
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck: apt-get install -y --no-install-recommends shellcheck")
    assert shellcheck(*FILES) == ""


def test_overrides_arrive_whole(cluster, tmp_path):
    """In all kinds of jobs, and in each part of a heterogeneous one, of a run in an awkward folder; the ranks see their own world."""
    submitter = Submitter(cluster, tmp_path / "it's 50% [x],{y}")
    submitter.runs.mkdir()
    sections = ("--both", *AWKWARD, "--actor", "only=actor", "--critic", "only=critic")
    apart = submitter.played("submit_ppo.sh", "apart", "--actor-nodes", "2", "--critic-tasks-per-node", "2", *sections)
    more = ("--reward-nodes", "1", "--together", "--actor-config", "mine", "--gpus-per-node", "2")
    together = submitter.played("submit_ppo.sh", "together", *more, *sections, "--reward", "only=reward")
    single = submitter.played("submit_job.sh", "single", "--tasks-per-node", "2", "train_ppo_actor.py", *AWKWARD)
    quoted = str(submitter.runs).replace("'", "\\'")
    for submitted in (apart, together, single):
        submitted.end()
        assert any(submitted.log(name) for name in submitted.jobs)
        place = [f"run.name={submitted.run.path.name}", f"run.dir='{quoted}'"]
        for start in submitted.starts:
            assert start["folder"] == os.getcwd()
            words = [
                w for w in start["words"] if not w.startswith(("only=", "serving.drain_timeout=", "reward.place="))
            ]
            if submitted is together and start["script"] == "train_ppo_actor":
                assert words[:2] == ["--config-name", "mine"]
                words = words[2:]
            assert words == [*place, *AWKWARD], start
    worlds = {(s["script"], s["rank"], s["ranks"]) for s in apart.starts}
    actor, critic, reward = "train_ppo_actor", "serve_ppo_critic", "serve_reward_model"
    assert worlds == {(actor, 0, 2), (actor, 1, 2), (critic, 0, 2), (critic, 1, 2)}
    assert len({s["host"] for s in apart.starts if s["script"] == actor}) == 2
    assert {(s["script"], s["rank"], s["ranks"]) for s in together.starts} == {
        (name, rank, 2) for name in (actor, critic, reward) for rank in (0, 1)
    }
    assert all(f"only={s['script'].split('_')[-1]}" in s["words"] for s in apart.starts)
    assert [s["ranks"] for s in single.starts] == [2, 2]


def test_signals_requeue_and_chains(submitter, cluster):
    """At once, as each of them mostly waits."""
    both = submitter.played("submit_ppo.sh", "limit", "--actor", "play=saves,0", "--critic", "play=serve,serve")
    died = submitter.played(
        "submit_job.sh",
        "died",
        "train_sft.py" if (REPO / "train_sft.py").exists() else "train_ppo_actor.py",
        "play=killed,1,0",
    )
    refused = submitter.played("submit_ppo.sh", "refused", "--actor", "play=2", "--critic", "play=serve")
    chain = submitter.played(
        *("submit_ppo.sh", "chain", "--chain", "4", "--actor", "play=saves,0", "--critic", "play=serve,serve"),
        ALIGNER_PEER_POLL="10",  # neither finds the other gone before it has ended itself
    )
    stalls = submitter.played("submit_job.sh", "stalls", "train_ppo_actor.py", "play=85", ALIGNER_STALLS="1")
    deaf = submitter.played(
        *("submit_job.sh", "deaf", "--signal-before", "30"), "train_ppo_actor.py", "play=deaf,0", "late=x y"
    )

    deaf.until(lambda: len(deaf.starts) == 1)
    deaf.signal("USR1", "job")
    both.until(lambda: len(both.starts) == 2)
    both.signal("USR1", "critic", "actor")
    chain.until(lambda: len(chain.starts) == 2)
    chain.signal("USR1", "actor", "critic")

    # A job that died is started again where it is; one that was refused is not, and its critic ends with it.
    died.end()
    assert died.started(died.starts[0]["script"]) == 3 and "exit code 137" in died.log("job")
    refused.end(actor="FAILED")
    assert refused.started("train_ppo_actor") == 1 and cluster.job(refused.jobs["actor"])["ExitCode"] == "2:0"
    assert f"job {refused.jobs['actor']} of this run has ended" in refused.log("critic")

    both.end()
    assert both.started("train_ppo_actor") == 2 and both.started("serve_ppo_critic") == 2
    assert cluster.job(both.jobs["actor"])["Restarts"] == cluster.job(both.jobs["critic"])["Restarts"] == "1"
    assert "requeueing this job (newest checkpoint: step_000001)" in both.log("actor")

    # The second link completes the run, the other two never start.
    chain.until(lambda: [cluster.states()[job] for job in chain.every[4:]] == ["CANCELLED"] * 4)
    assert [cluster.states()[job] for job in chain.every[:2]] == ["FAILED"] * 2  # 85, without a requeue
    chain.until(lambda: [cluster.states()[job] for job in chain.every[2:4]] == ["COMPLETED"] * 2)
    assert chain.started("train_ppo_actor") == 2 and cluster.job(chain.every[0])["Restarts"] == "0"

    deaf.end()
    assert deaf.started("train_ppo_actor") == 2 and "nothing was saved within 10 s of the signal" in deaf.log("job")

    stalls.end(job="FAILED")
    assert "error: requeued 1 times without a new checkpoint (newest: none)" in stalls.log("job")
    assert stalls.started("train_ppo_actor") == 2


def test_cancelled_ended_and_gone(submitter, cluster):
    serve = ("--actor", "play=serve", "--critic", "play=serve")
    actor, critic, stopped = (
        submitter.played("submit_ppo.sh", name, *serve) for name in ("actor", "critic", "stopped")
    )
    dead = submitter.played("submit_ppo.sh", "dead", "--actor", "play=serve", "--critic", "play=2")
    dead.end(critic="FAILED", actor="FAILED")
    assert dead.started("train_ppo_actor") <= 1 and cluster.job(dead.jobs["actor"])["ExitCode"] == "3:0"
    sentence = f"error: job {dead.jobs['critic']}, which this one needs, has ended"
    assert sentence in dead.log("actor")

    for submitted in (actor, critic, stopped):
        submitted.until(lambda submitted=submitted: len(submitted.starts) == 2)
    actor.cancel("actor")
    critic.cancel("critic")
    stopped.signal("INT", "actor")
    actor.end(actor="CANCELLED")  # and not requeued, though its ranks ended with 85
    critic.end(critic="CANCELLED", actor="FAILED")
    assert "which this one needs, has ended: submit both again" in critic.log("actor")
    stopped.end()
    assert "requeueing" not in stopped.log("actor") + stopped.log("critic")
    assert all(submitted.started("train_ppo_actor") == 1 for submitted in (actor, critic, stopped))


@pytest.mark.slurm
def test_parts_of_one_job(submitter, cluster):
    """As heterogeneous jobs: a part that died comes back beside the others, one that was refused ends them, a signal reaches all."""
    how = ("--together", "--critic-tasks-per-node", "2")
    died = submitter.played("submit_ppo.sh", "died", *how, "--actor", "play=saves,0", "--critic", "play=killed,serve")
    refused = submitter.played("submit_ppo.sh", "refused", *how, "--actor", "play=serve", "--critic", "play=4")
    cancelled = submitter.played("submit_ppo.sh", "cancelled", *how, "--actor", "play=serve", "--critic", "play=serve")
    cancelled.until(lambda: len(cancelled.starts) == 3)
    cancelled.cancel("together")
    died.until(lambda: died.started("serve_ppo_critic") == 2 and died.started("train_ppo_actor") == 1)
    died.signal("USR1", "together")
    refused.end(together="FAILED")
    assert cluster.job(refused.jobs["together"])["ExitCode"] == "4:0"
    assert "the critic failed for good: the actor ends too" in refused.log("together")
    died.end()
    assert died.started("train_ppo_actor") == 2 and died.started("serve_ppo_critic") == 3
    assert cluster.job(died.jobs["together"])["Restarts"] == "1"
    cancelled.end(together="CANCELLED")
    assert cancelled.started("train_ppo_actor") == 1


@pytest.mark.slurm
def test_nodes_are_given_back_while_the_other_job_waits(submitter, cluster):
    """The actor ends for want of its critic, which has no nodes: it lets its own go, and both go on when there are some."""
    nodes = ("--critic-sbatch-arg=-wnode1", "--critic-sbatch-arg=--exclusive", "--actor-sbatch-arg=-wnode2")
    submitted = submitter.played("submit_ppo.sh", "waits", *nodes, "--actor", "play=serve,0", "--critic", "play=serve")
    submitted.until(lambda: len(submitted.starts) == 2)
    taken = cluster.run(
        "sbatch", "--parsable", "-phigh", "-wnode1", "--exclusive", "-o/dev/null", "--wrap=sleep 600"
    ).strip()
    submitted.until_state("critic", "PENDING")
    rank = next(start["pid"] for start in submitted.starts if start["script"] == "train_ppo_actor")
    subprocess.run(["kill", "-KILL", str(rank)], check=True)
    submitted.until_state("actor", "PENDING")
    assert cluster.job(submitted.jobs["actor"])["Priority"] == "0"  # held
    cluster.run("scancel", taken)
    submitted.end()
    assert f"job {submitted.jobs['actor']} is released: it waited for this one" in submitted.log("critic")


def test_a_half_that_is_refused_leaves_nothing(submitter, cluster):
    how = ("--no-check", "--python", str(submitter.stand_in()), "--name", "half", "--runs", str(submitter.runs))
    words = [str(REPO / "launch/slurm/submit_ppo.sh"), *how, "--actor-partition", "none", "--critic", "play=serve"]
    done = subprocess.run(words, env=cluster.environment, capture_output=True, text=True)
    assert done.returncode == 2 and "sbatch refused a job" in done.stderr
    job = max(cluster.states())
    until(lambda: cluster.states()[job] == "CANCELLED")


@pytest.mark.slurm
def test_a_real_time_limit(submitter, cluster):
    """Slurm counts in minutes, and sends the signal up to one early."""
    limit = ("--time", "2", "--signal-before", "40")
    single = submitter.played("submit_job.sh", "minutes", *limit, "train_ppo_actor.py", "play=saves,0")
    plays = ("--actor", "play=saves,0", "--critic", "play=serve")
    together = submitter.played("submit_ppo.sh", "together", "--together", *limit, *plays)
    for submitted, name in ((single, "job"), (together, "together")):
        submitted.end()
        assert submitted.started("train_ppo_actor") == 2 and cluster.job(submitted.jobs[name])["Restarts"] == "1"
        assert "told to stop (limit)" in submitted.log(name)


@pytest.mark.slurm
def test_a_signal_before_there_are_ranks(submitter, cluster):
    """srun dies of a signal that comes before it has started them: the job is requeued all the same."""
    how = ("train_ppo_actor.py", "play=saves")
    early = [submitter.played("submit_job.sh", f"early{i}", *how, STAND_IN_SECONDS="15") for i in range(4)]
    for i, submitted in enumerate(early):
        submitted.until_state("job", "RUNNING")
        submitted.until(lambda s=submitted: (submitter.runs / s.run.path.name / "slurm").exists())
        time.sleep(0.05 * i)
        submitted.signal("USR1", "job")
    for submitted in early:
        submitted.end()
        assert cluster.job(submitted.jobs["job"])["Restarts"] == "1", submitted.tail()


@pytest.mark.slurm
def test_one_job_is_preempted(submitter, cluster):
    """Of a heterogeneous job one part's node is taken: all parts are requeued."""
    plays = ("--actor", "play=saves,0", "--critic", "play=serve")
    places = ("--critic-sbatch-arg=-wnode1", "--actor-sbatch-arg=-wnode2")
    submitted = submitter.played("submit_ppo.sh", "preempted", "--together", *places, *plays)
    submitted.until(lambda: len(submitted.starts) == 2)
    cluster.run("sbatch", "-phigh", "-wnode2", "--exclusive", "-o/dev/null", "--wrap=sleep 30")
    submitted.end()
    assert cluster.job(submitted.jobs["together"])["Restarts"] == "1"
