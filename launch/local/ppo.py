"""Run both jobs of a PPO run on this machine: the critic job and the actor job, two separately launched process trees.

    python launch/local/ppo.py --actor-config demo_actor --critic-config demo_critic --actor-ranks 2 --actor parallel.pipeline=2

Overrides after --actor go to train_ppo_actor.py, after --critic to serve_ppo_critic.py, after --both to both. Where the actor's settings
ask for no critic job (a critic-free ppo.advantage, or critic.place=local) there is none. --reward-ranks starts a reward job too
(reward.place=server), with the overrides after --reward and --both. A job that died (killed, or by an error that no setting explains) is
started again, --restarts times at most each: the others wait for it, and the run goes on. The exit code is the actor's."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Optional, Sequence

import psutil

ROOT = Path(__file__).resolve().parents[2]
REFUSALS = (2, 3, 4)  # exit codes of aligner/runtime/exit_codes.py: starting again as it was would not help
ENDED = (0, 130)  # done, or stopped by Ctrl-C
SAVING = 600  # seconds that ranks get after Ctrl-C to end their step and save; torchrun's own limit is 30
GRACE = 30.0  # seconds a job gets to end by itself before it is killed


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actor-config", default="ppo_actor", help="configuration in conf/ of the actor job")
    parser.add_argument("--critic-config", default="ppo_critic", help="configuration in conf/ of the critic job")
    parser.add_argument("--actor-ranks", type=positive, default=1)
    parser.add_argument("--critic-ranks", type=positive, default=1)
    parser.add_argument("--restarts", type=int, default=2, help="how often each job is started again (default: 2)")
    parser.add_argument("--critic-log", type=Path, help="file for the critic job's output; default: this terminal")
    parser.add_argument("--reward-config", default="reward_model", help="configuration in conf/ of the reward job")
    parser.add_argument("--reward-ranks", type=int, default=0, help="0: there is no reward job")
    parser.add_argument("--reward-log", type=Path, help="file for the reward job's output; default: this terminal")
    for job in ("actor", "critic", "reward", "both"):
        parser.add_argument(f"--{job}", nargs="*", default=[], metavar="OVERRIDE")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    """A number of ranks, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return int(text)


def command(script: str, ranks: int, config: str, overrides: list[str]) -> list[str]:
    """One rank runs as plain python, several under torchrun."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "aligner.runtime.torchrun", "--standalone", "--nproc-per-node", str(ranks)]
        launcher += ["--shutdown-timeout", str(SAVING)]
    return [*launcher, str(ROOT / script), "--config-name", config, *overrides]


def wants_critic_job(config: str, overrides: list[str]) -> bool:
    """Whether the actor's settings ask for a critic job. Raises ConfigError where they are wrong."""
    sys.path.insert(0, str(ROOT))
    from aligner.config.groups import CriticPlace
    from aligner.config.jobs import ActorConfig
    from aligner.config.load import load

    return load(ActorConfig, ["--config-name", config, *overrides]).critic.place is CriticPlace.remote


def training_share(cores: int, ranks: int) -> list[str]:
    """Overrides of both jobs: they train at the same time, and divide this machine's cores between their ranks then. Otherwise one
    waits for the other, which may use them all (parallel.threads). Nothing where OMP_NUM_THREADS says what is wished."""
    return [] if "OMP_NUM_THREADS" in os.environ else [f"parallel.training_threads={max(1, cores // ranks)}"]


@dataclass
class Job:
    """One job and its present process. restarts: how often it may still be started again."""

    name: str
    command: list[str]
    restarts: int
    log: Optional[Path] = None
    process: subprocess.Popen = field(init=False)
    _output: Optional[IO] = None

    def start(self) -> None:
        if self.log and self._output is None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self._output = self.log.open("w")
        # Threads that spin while they wait would starve the other job where both share the cores.
        environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
        output = {"stdout": self._output, "stderr": self._output and subprocess.STDOUT}
        self.process = subprocess.Popen(self.command, env=environment, start_new_session=True, **output)

    @property
    def code(self) -> Optional[int]:
        """Exit code; None while it runs."""
        return self.process.poll()

    def starts_again(self) -> bool:
        """Whether it died and could be started again, which is done."""
        if self.code in ENDED or self.code in REFUSALS or not self.restarts:
            return False
        self.restarts -= 1
        self.tell(f"starting it again ({self.restarts} more times at most)")
        self.start()
        return True

    def tell(self, what: str) -> None:
        where = f"; the end of {self.log}:\n{tail(self.log)}" if self.log else ""
        print(f"the {self.name} job ended with exit code {self.code}: {what}{where}", file=sys.stderr, flush=True)


def stop(process: subprocess.Popen) -> None:
    """Wait for a job that was sent SIGTERM, which ends its own tree; SIGKILL to what is left of the tree after the grace."""
    if process.poll() is None:
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            kill(process)


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to a job's tree. Not to its process group: torchrun's workers and Triton have sessions of their own."""
    for member in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def main() -> int:
    args = parse(sys.argv[1:])
    try:
        with_critic = wants_critic_job(args.actor_config, args.both + args.actor)
    except ValueError as error:  # ConfigError: what the actor job would say
        print(f"error: {error}", file=sys.stderr)
        return REFUSALS[0]
    jobs: list[Job] = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    try:
        ranks = args.actor_ranks + (args.critic_ranks if with_critic else 0)
        both = training_share(len(os.sched_getaffinity(0)), ranks) + args.both
        actor_command = command("train_ppo_actor.py", args.actor_ranks, args.actor_config, both + args.actor)
        planned = []
        if with_critic:
            critic = command("serve_ppo_critic.py", args.critic_ranks, args.critic_config, both + args.critic)
            planned.append(Job("critic", critic, args.restarts, args.critic_log))
        if args.reward_ranks:  # if it fails for good, the actor ends with what it was told
            reward = command("serve_reward_model.py", args.reward_ranks, args.reward_config, both + args.reward)
            planned.append(Job("reward", reward, args.restarts, args.reward_log))
        planned.append(Job("actor", actor_command, args.restarts))
        for job in planned:
            job.start()
            jobs.append(job)
        *others, actor = jobs
        return watch(actor=actor, critic=others.pop(0) if with_critic else None, others=others)
    except KeyboardInterrupt:
        print("stopping: the step that runs is ended and saved first; Ctrl-C again ends it at once", file=sys.stderr)
        return interrupted(jobs)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # another Ctrl-C must not leave a job behind
        for job in reversed(jobs):  # the actor first: it saves with the critic's help
            if job.code is None:
                job.process.terminate()
            stop(job.process)


def interrupted(jobs: list[Job]) -> int:
    """Ask the actor to stop as Ctrl-C asks a job, and wait for it, with the critic alive. Another Ctrl-C kills it."""
    actor = jobs[-1].process
    try:
        if len(jobs) > 1 and actor.poll() is None:
            actor.send_signal(signal.SIGINT)
            actor.wait()
    except KeyboardInterrupt:
        kill(actor)
    return 130


def watch(*, actor: Job, critic: Optional[Job], others: Sequence[Job] = ()) -> int:
    """The actor's exit code, once it has ended for good and the critic with it, where there is one. A critic that fails for good ends the
    actor too."""
    critic_failed_at = None
    while actor.code is None or actor.starts_again():
        time.sleep(0.2)
        for job in others:
            if job.code not in (None, 0):
                job.starts_again()
        if critic is None:
            continue
        if critic_failed_at is not None:
            if time.monotonic() - critic_failed_at > GRACE:
                return critic.code
        elif critic.code not in (None, 0) and not critic.starts_again():
            critic_failed_at = time.monotonic()
            critic.tell("the actor job ends too")
            if critic.code in REFUSALS:  # the actor would wait for it in vain
                return critic.code
    if critic is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):  # `stop` ends it then
            critic.process.wait(GRACE if actor.code == 0 else 0.1)
    return actor.code


def tail(file: Path, lines: int = 8) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-lines:])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
