"""Either job dies, stands still or cannot be heard, in any phase: the run ends as the undisturbed one did (*exact* on the same grid,
*close* on another), or with a clear error where nobody comes back.

Real processes are killed or stopped at named points (aligner/runtime/faults.py). Oracle: the same run, served and not disturbed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from aligner.runtime.exit_codes import ExitCode
from tests.jobs.harness import (
    ACTOR_SETTINGS,
    CRITIC_SETTINGS,
    DEADLINE,
    MARK,
    REPO,
    Job,
    Launcher,
    Run,
    environment,
    leftovers,
    processes,
)
from tests.jobs.proxy import HARM, Proxy
from tests.jobs.test_layouts import assert_close
from tests.jobs.test_resume import assert_exact, settings

STEPS, EVERY = 5, 2
STANDSTILL = 5.0  # seconds; heartbeats come every second


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """With deadlines for a machine that is busy: a critic job may be started several times before it answers."""
    actor, critic = settings(tmp_path_factory.mktemp("data"), steps=STEPS, every=EVERY)
    patient = ("critic.connect_timeout=600", "critic.reconnect_timeout=300", "parallel.timeout=400")
    return (*actor, *patient), (*critic, "serving.heartbeat=1", "parallel.timeout=400")


@pytest.fixture(scope="module")
def undisturbed(shared_jobs: Launcher, overrides) -> Run:
    actor, critic = overrides
    serving = shared_jobs.critic("whole", *critic)
    shared_jobs.actor("whole", *actor).finish()
    serving.finish()
    return shared_jobs.run("whole")


class Scene:
    """One run: its actor, and one critic after another."""

    def __init__(self, jobs: Launcher, overrides, name: str, *actor: str, ranks: int = 1, **how) -> None:
        self.jobs, self.name, self.run = jobs, name, jobs.run(name)
        self.actor_settings, self.critic_settings = (*overrides[0], *actor), overrides[1]
        self.training = self.start_actor(ranks=ranks, **how)
        self.serving: Job

    def start_actor(self, **how) -> Job:
        return self.jobs.actor(self.name, *self.actor_settings, **how)

    def serve(self, fault: str | None = None, *more: str, ranks: int = 1) -> Job:
        self.serving = self.jobs.critic(self.name, *self.critic_settings, *more, fault=fault, ranks=ranks)
        return self.serving

    def die(self, fault: str, *more: str, ranks: int = 1) -> None:
        """A critic job of which one rank kills itself: the others end by themselves, and nothing else of it is left."""
        codes = self.serve(fault, *more, ranks=ranks).wait()
        assert codes.count(-signal.SIGKILL) == 1, f"{fault}: {codes}\n{self.serving.tail()}"
        self.nothing_left()

    def nothing_left(self) -> None:
        assert self.serving.leftovers(30) == []
        for pid in self.serving.pids:
            left = [*Path("/dev/shm").glob(f"pytrtion{pid}-*"), *Path("/tmp").glob(f"aligner-triton-{pid}-*")]
            assert left == []

    def finish(self) -> Run:
        self.training.finish()
        self.serving.finish()
        self.nothing_left()
        return self.run


# ---- in every run of the tests


def test_a_critic_that_dies_in_every_phase(shared_jobs: Launcher, overrides, undisturbed):
    """While its server loads, half-way in training, trained but not acknowledged, with its half of a pair written; its server dies; it
    stands still for longer than its heartbeat."""
    scene = Scene(shared_jobs, overrides, "killed_critic")
    loading = scene.serve()
    loading.children("tritonserver")
    loading.kill_rank(0)
    assert loading.wait() == [-signal.SIGKILL]
    scene.nothing_left()

    serverless = scene.serve("pause critic_infer:1")
    rank = serverless.paused()
    for pid in serverless.children("tritonserver"):
        with contextlib.suppress(ProcessLookupError):  # its backends end with it
            os.kill(pid, signal.SIGKILL)
    os.kill(rank, signal.SIGCONT)
    assert serverless.wait() == [ExitCode.FAULT] and "the Triton server process died" in serverless.stderr
    scene.nothing_left()

    for fault in ("critic_train:2", "critic_trained:3", "critic_saved:4"):
        scene.die(fault)
    rank = scene.serve("pause critic_train:5").paused()
    time.sleep(STANDSTILL)
    os.kill(rank, signal.SIGCONT)
    run = scene.finish()
    assert_exact(run, undisturbed)
    assert run.pairs == undisturbed.pairs
    said = scene.training.stderr
    assert "is at step 1 again: it took its initial weights, then replayed 1 from the journal" in said
    assert "is at step 4 again: it took the pair of step 2, then replayed 3, 4 from the journal" in said
    assert not list((run.path / "journal").iterdir())


def test_a_network_that_loses_things(shared_jobs: Launcher, overrides, undisturbed):
    """Every other request or answer is cut, lost, delivered twice, late, refused or never answered. Pairs are written beside training."""
    proxy = Proxy(shared_jobs.run("lossy").path / "endpoints" / "critic.json")
    patience = ("critic.request_timeout=4", "critic.reconnect_timeout=60", "critic.heartbeat=0.3")
    patience += ("checkpoint.asynchronous=true",)
    serving = shared_jobs.critic("lossy", *overrides[1])
    try:
        wait_until(proxy.endpoint_file.exists)
        shared_jobs.actor("lossy", *overrides[0], f"critic.endpoint=127.0.0.1:{proxy.port}", *patience).finish()
        serving.finish()
    finally:
        proxy.close()
    assert_exact(shared_jobs.run("lossy"), undisturbed)
    assert shared_jobs.run("lossy").pairs[-2:] == undisturbed.pairs[-2:]
    assert {harm for endpoint, harm in proxy.done if endpoint == "infer"} >= set(HARM)
    assert len({harm for endpoint, harm in proxy.done if endpoint == "train"} - {"none"}) >= 2


# ---- longer ones


KILLS = ["critic_infer:1", "critic_infer:4", "critic_train:1", "critic_save:2", "critic_saved:2", "critic_commit:2"]


@pytest.mark.faults
@pytest.mark.parametrize("fault", KILLS)
def test_a_critic_that_dies_once(shared_jobs, overrides, undisturbed, fault):
    scene = Scene(shared_jobs, overrides, fault.replace(":", "_"))
    scene.die(fault)
    scene.serve()
    assert_exact(scene.finish(), undisturbed)
    assert scene.run.pairs == undisturbed.pairs


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["critic_copied:2", "critic_saved:2", "critic_train:3", "critic_commit:2"])
def test_a_critic_that_dies_while_it_writes_beside_training(shared_jobs, overrides, undisturbed, fault):
    scene = Scene(shared_jobs, overrides, "beside_" + fault.replace(":", "_"), "checkpoint.asynchronous=true")
    scene.die(fault)
    scene.serve()
    assert_exact(scene.finish(), undisturbed)
    assert scene.run.pairs[-1] == undisturbed.pairs[-1]


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["copied:2", "trained:3", "before_commit:2"])
def test_an_actor_that_dies_while_it_writes_beside_training(shared_jobs, overrides, undisturbed, fault):
    how = ("checkpoint.asynchronous=true",)
    scene = Scene(shared_jobs, overrides, "actor_beside_" + fault.replace(":", "_"), *how, fault=fault)
    scene.serve()
    assert scene.training.wait() == [-signal.SIGKILL]
    scene.training = scene.start_actor()
    assert_exact(scene.finish(), undisturbed)


@pytest.mark.faults
def test_a_critic_that_dies_while_it_is_brought_back(shared_jobs, overrides, undisturbed):
    scene = Scene(shared_jobs, overrides, "killed_twice")
    scene.die("critic_train:4")
    scene.die("critic_restore:2")
    scene.die("critic_train:3")  # replayed
    scene.serve()
    assert_exact(scene.finish(), undisturbed)


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["critic_infer:2@1", "critic_train:3@1", "critic_save:4@1", "critic_trained:3@0"])
def test_a_rank_of_two_dies_and_the_critic_comes_back_on_another_grid(shared_jobs, overrides, undisturbed, fault):
    scene = Scene(shared_jobs, overrides, "rescaled_" + fault.translate(str.maketrans(":@", "__")))
    scene.die(fault, "parallel.tensor=2", ranks=2)
    scene.die("critic_train:4@0")  # on one rank
    scene.serve(None, ranks=2)  # data-parallel
    assert_close(scene.finish(), undisturbed, steps=tuple(range(1, STEPS + 1)))


@pytest.mark.faults
@pytest.mark.parametrize("point", ["critic_infer:2", "critic_train:3", "critic_save:4"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stands_still(shared_jobs, overrides, undisturbed, point, rank):
    scene = Scene(shared_jobs, overrides, f"still_{point.replace(':', '_')}_{rank}")
    pid = scene.serve(f"pause {point}@{rank}", ranks=2).paused(rank)
    time.sleep(STANDSTILL)
    os.kill(pid, signal.SIGCONT)
    assert_close(scene.finish(), undisturbed, steps=tuple(range(1, STEPS + 1)))


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["generated:1", "trained:3", "saving:4", "before_commit:4"])
def test_an_actor_that_dies_and_comes_back(shared_jobs, overrides, undisturbed, fault):
    """The critic job lives on: it is told to go back to the pair."""
    scene = Scene(shared_jobs, overrides, "actor_" + fault.replace(":", "_"), fault=fault)
    scene.serve(None, "serving.silence=2")
    assert scene.training.wait() == [-signal.SIGKILL]
    time.sleep(4)
    scene.training = scene.start_actor()
    assert_exact(scene.finish(), undisturbed)
    assert "the actor job has said nothing for" in scene.serving.stderr


@pytest.mark.faults
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_the_actor_dies(shared_jobs, overrides, undisturbed, rank):
    scene = Scene(shared_jobs, overrides, f"actor_rank_{rank}", ranks=2, fault=f"trained:3@{rank}")
    scene.serve()
    codes = scene.training.wait(120)
    assert codes.count(-signal.SIGKILL) == 1 and codes[rank] == -signal.SIGKILL, scene.training.tail()
    assert scene.training.leftovers(30) == []
    scene.training = scene.start_actor(ranks=2)
    assert_close(scene.finish(), undisturbed, steps=tuple(range(1, STEPS + 1)))


@pytest.mark.faults
def test_an_actor_that_stands_still(shared_jobs, overrides, undisturbed):
    scene = Scene(shared_jobs, overrides, "actor_still", fault="pause generated:3")
    scene.serve(None, "serving.silence=1")
    pid = scene.training.paused()
    time.sleep(STANDSTILL)
    os.kill(pid, signal.SIGCONT)
    assert_exact(scene.finish(), undisturbed)
    assert "the actor job speaks again" in (scene.run.path / "logs" / "critic_rank0.log").read_text()


@pytest.mark.faults
def test_the_launcher_starts_again_what_died(shared_jobs, overrides, undisturbed):
    """launch/local/ppo.py, with the critic under torchrun: a rank of the critic is killed in step 2, the actor in step 3."""
    run, mark = shared_jobs.run("launched_again"), uuid.uuid4().hex
    both = shared_jobs.both("launched_again")
    command = [sys.executable, str(REPO / "launch/local/ppo.py"), "--critic-ranks", "2", "--both", *both]
    command += ["--actor", *ACTOR_SETTINGS, *overrides[0], "--critic", *CRITIC_SETTINGS, *overrides[1]]
    output = (shared_jobs.runs / "launched_again.out").open("w")
    launched = subprocess.Popen(command, env=environment(**{MARK: mark}), stdout=output, stderr=output)
    try:
        for step, record in ((1, "run_critic.json"), (2, "run.json")):
            wait_until(lambda step=step: run.steps_so_far[-1:] >= [step])
            os.kill(json.loads((run.path / record).read_text())["pid"], signal.SIGKILL)
        assert launched.wait(DEADLINE) == 0, Path(output.name).read_text()[-4000:]
    finally:
        launched.terminate()
        launched.wait(90)
    said = Path(output.name).read_text()
    assert "the critic job ended with exit code 1: starting it again" in said
    assert "the actor job ended with exit code -9: starting it again" in said
    assert_close(run, undisturbed, steps=tuple(range(1, STEPS + 1)))
    assert leftovers(lambda: processes(mark=mark)) == []


def wait_until(what, deadline: float = DEADLINE) -> None:
    until = time.monotonic() + deadline
    while not what():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.faults
def test_a_critic_that_is_told_to_go_waits_for_a_pair(shared_jobs, overrides, undisturbed):
    scene = Scene(shared_jobs, overrides, "drained", fault="pause generated:3")
    first = scene.serve()
    pid = scene.training.paused()
    first.signal(signal.SIGTERM)
    time.sleep(2)
    os.kill(pid, signal.SIGCONT)
    assert first.wait(60) == [ExitCode.REQUEUE] and "the actor job has saved a pair" in first.stderr
    assert "step_000003" in scene.run.pairs
    scene.serve()
    assert_exact(scene.finish(), undisturbed)


@pytest.mark.faults
def test_nobody_comes_back(shared_jobs, overrides):
    scene = Scene(shared_jobs, overrides, "alone", "critic.reconnect_timeout=5")
    scene.die("critic_train:2")
    began = time.monotonic()
    assert scene.training.wait(60) == [ExitCode.FAULT]
    assert time.monotonic() - began < 40
    last = scene.training.stderr.strip().splitlines()
    assert any("error: " in line and "the critic" in line and "critic.reconnect_timeout" in line for line in last)
    assert "Traceback" not in scene.training.stderr
    assert (
        "critic train 0" in (scene.run.path / "logs" / "actor_rank0.stacks").read_text()
        or "_persist" in (scene.run.path / "logs" / "actor_rank0.stacks").read_text()
    )


@pytest.mark.faults
def test_no_actor_comes_back(shared_jobs, overrides):
    scene = Scene(shared_jobs, overrides, "left", fault="generated:2")
    scene.serve(None, "serving.idle_timeout=6", "serving.silence=2")
    assert scene.training.wait() == [-signal.SIGKILL]
    assert scene.serving.wait(60) == [0] and "serving.idle_timeout=6" in scene.serving.stderr
    assert not (scene.run.path / "endpoints" / "critic.json").exists()
    scene.nothing_left()


@pytest.mark.faults
def test_a_flipped_byte_of_a_pair_is_refused_by_name(shared_jobs, overrides):
    scene = Scene(shared_jobs, overrides, "flipped")
    scene.die("critic_train:4")
    file = max((scene.run.path / "checkpoints" / "step_000002" / "critic" / "model_weights").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    serving = scene.serve()
    assert scene.training.wait(120) == [ExitCode.FAULT]
    assert f"model_weights/{file.name} (damaged)" in scene.training.stderr
    serving.kill()
