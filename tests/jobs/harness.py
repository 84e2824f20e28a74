"""Launching the real entry scripts from tests: ranks forked from a warm process, outcomes with deadlines, and nothing left behind."""

import contextlib
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

REPO = Path(__file__).resolve().parents[2]
ACTOR, CRITIC = "train_ppo_actor.py", "serve_ppo_critic.py"
DEADLINE = 240.0  # seconds for any job of these tests; a passing one takes a tenth of it

# One thread and no GPU: the same arithmetic on every machine that runs the tests.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "passive"}
MARK = "ALIGNER_TEST_JOB"  # in the environment of whatever a job starts
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID")


def environment(**more: str) -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if k not in LAUNCHERS}, **ENVIRONMENT, **more}


class ForkServer:
    """The warm process (forkserver.py), and the exit codes of what it started."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forkserver.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(PYTHONPATH=str(REPO)),
            start_new_session=True,
        )
        self._started: queue.Queue[int] = queue.Queue()
        self._codes: dict[int, int] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            message = json.loads(line)
            if "started" in message:
                with self._changed:
                    self._codes.pop(message["started"], None)  # of an earlier rank: the system gives its pid again
                self._started.put(message["started"])
            elif "ended" in message:
                with self._changed:
                    self._codes[message["ended"]] = message["code"]
                    self._changed.notify_all()
        self._started.put(0)  # it has ended: nobody waits for a start that never comes

    def start(self, request: dict[str, Any]) -> int:
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        pid = self._started.get(timeout=DEADLINE)
        assert pid, f"the warm process {self._process.pid} ended; what it said is on this terminal"
        return pid

    def code(self, pid: int) -> Optional[int]:
        with self._changed:
            return self._codes.get(pid)

    def wait(self, pid: int, until: float) -> Optional[int]:
        """Exit code (negative: the signal that killed it); None where it still runs at `until` (time.monotonic)."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._codes, timeout=max(0.0, until - time.monotonic()))
            return self._codes.get(pid)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)


@dataclass
class Job:
    """The ranks of one started job. Output of all ranks together."""

    server: ForkServer
    pids: list[int]
    output: Path  # stdout
    errors: Path  # stderr
    began: float = field(default_factory=time.monotonic)

    @property
    def stdout(self) -> str:
        return self.output.read_text()

    @property
    def stderr(self) -> str:
        return self.errors.read_text()

    def wait(self, deadline: float = DEADLINE) -> list[int]:
        """Exit code of each rank. As torchrun does, ranks are ended where one of them failed."""
        until, failed = time.monotonic() + deadline, False
        while (codes := [self.server.code(pid) for pid in self.pids]).count(None):
            if not failed and any(code not in (None, 0) for code in codes):
                failed = True
                self.signal(signal.SIGTERM)
                until = min(until, time.monotonic() + 30)
            if time.monotonic() > until:
                still = [pid for pid, code in zip(self.pids, codes) if code is None]
                self.kill()
                assert failed, (
                    f"{len(still)} of {len(self.pids)} ranks still ran after {deadline:.0f} s:\n{self.tail()}"
                )
                break
            time.sleep(0.05)
        return [self.server.wait(pid, time.monotonic() + 10) for pid in self.pids]

    def finish(self, deadline: float = DEADLINE) -> "Job":
        """Wait, and expect every rank to end well."""
        codes = self.wait(deadline)
        assert set(codes) == {0}, f"exit codes {codes}:\n{self.tail()}"
        return self

    def signal(self, number: int) -> None:
        for pid in self.pids:
            if self.server.code(pid) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def kill(self) -> None:
        """SIGKILL to all ranks and to what they started in their sessions."""
        groups = set()
        for pid in marked_processes(self):
            with contextlib.suppress(ProcessLookupError):
                groups.add(os.getpgid(pid))
        for pid in self.pids:
            # One that has ended, and left nothing: its pid may be somebody else's by now
            if self.server.code(pid) is None or pid in groups:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def kill_rank(self, rank: int) -> None:
        """SIGKILL to one rank, and to nothing that it started."""
        os.kill(self.pids[rank], signal.SIGKILL)

    def paused(self, rank: int = 0, deadline: float = DEADLINE) -> int:
        """pid of the rank, once it stands still at the point that `fault` named."""
        pid, until = self.pids[rank], time.monotonic() + deadline
        while state_of(pid) != "T":
            assert time.monotonic() < until and self.server.code(pid) is None, (
                f"rank {rank} does not stand still\n{self.tail()}"
            )
            time.sleep(0.05)
        return pid

    def children(self, name: str, deadline: float = DEADLINE) -> list[int]:
        """pids of the job's processes with `name` in their command, once there are some."""
        until = time.monotonic() + deadline
        while not (found := [pid for pid, command in marked_processes(self).items() if name in command]):
            assert time.monotonic() < until, f"no process {name}\n{self.tail()}"
            time.sleep(0.05)
        return found

    def leftovers(self, patience: float = 20.0) -> list[str]:
        """Command lines of processes that the job's ranks started and that still live after `patience` seconds."""
        return leftovers(lambda: marked_processes(self), patience)

    def tail(self) -> str:
        return f"--- stdout\n{self.stdout[-2000:]}\n--- stderr\n{self.stderr[-6000:]}"


class Launcher:
    """Starts jobs in a folder of runs, and kills those that a test leaves."""

    def __init__(self, server: ForkServer, folder: Path, model: Path) -> None:
        self.server, self.runs, self.model = server, folder, model
        folder.mkdir(parents=True, exist_ok=True)
        self.jobs: list[Job] = []

    def start(
        self,
        script: str,
        *overrides: str,
        ranks: int = 1,
        fault: Optional[str] = None,
        largest_file: Optional[int] = None,
        folder: Path = REPO,
        stdin: str = os.devnull,
        stdout: Optional[Path] = None,
        packages: Optional[Path] = None,
    ) -> Job:
        """A job with exactly these arguments. fault: `point:step` at which its ranks kill themselves. stdout: a file or a FIFO. packages:
        a folder to import from."""
        name = f"job{len(self.jobs)}_{Path(script).stem}"
        output, errors = self.runs / f"{name}.out", self.runs / f"{name}.err"
        for file in (output, errors):
            file.write_text("")
        output = stdout or output
        more = {MARK: str(errors)} | ({} if fault is None else {"ALIGNER_FAULT": fault})
        port = free_port()
        pids = []
        for rank in range(ranks):
            if ranks > 1:
                more |= launch_variables(rank, ranks, port)
            request = {
                "argv": [str(REPO / script), *overrides],
                "environment": environment(PYTHONPATH=str(REPO), **more),
                "stdin": str(stdin),
                "stdout": str(output),
                "stderr": str(errors),
                "folder": str(folder),
                "largest_file": largest_file,
                "packages": packages and str(packages),
            }
            pids.append(self.server.start(request))
        self.jobs.append(Job(self.server, pids, output, errors))
        return self.jobs[-1]

    def actor(self, name: str, *overrides: str, **how) -> Job:
        return self.start(ACTOR, *self.both(name), *ACTOR_SETTINGS, *overrides, **how)

    def critic(self, name: str, *overrides: str, **how) -> Job:
        return self.start(CRITIC, *self.both(name), *CRITIC_SETTINGS, *overrides, **how)

    def alone(self, name: str, *overrides: str, critic: tuple[str, ...] = (), **how) -> Job:
        """An actor with its critic in its own process."""
        inner = ",".join(f"'{override}'" for override in [*self.both(name), *CRITIC_SETTINGS, *critic])
        return self.actor(name, "critic.place=local", f"critic.local_overrides=[{inner}]", *overrides, **how)

    def both(self, name: str) -> list[str]:
        return [
            f"run.dir={self.runs}",
            f"run.name={name}",
            f"model.checkpoint={self.model}",
            "model.dtype=float32",
            "parallel.threads=1",
            "tasks=chain_sum",
        ]

    def run(self, name: str) -> "Run":
        return Run(self.runs / name)

    def end(self) -> None:
        for job in self.jobs:
            job.kill()
        for job in self.jobs:
            for pid in job.pids:
                self.server.wait(pid, time.monotonic() + 20)


# Three steps of eight short responses: one of critic warm-up, two of the policy with two mini-batches each.
ACTOR_SETTINGS = (
    "data.chat=false",
    "data.system=null",
    "data.template='{expression}='",
    "data.task_size=300",
    "engine.max_input_len=16",
    "engine.max_output_len=8",
    "ppo.rollout_batch_size=8",
    "ppo.mini_batch_size=4",
    "ppo.critic_warmup_steps=1",
    "optim.lr=1e-3",
    "run.max_steps=3",
    "validation.every=3",
    "validation.max_prompts=8",
    "critic.infer_batch_size=4",
    "critic.connect_timeout=120",
    "critic.request_timeout=60",
    "critic.reconnect_timeout=60",
    "critic.heartbeat=1",
    "parallel.timeout=120",
    "logging.tensorboard=false",
)
CRITIC_SETTINGS = (
    "critic.mini_batch_size=4",
    "optim.lr=1e-3",
    "reward.format_credit=0.3",
    "serving.deterministic=true",
    "parallel.timeout=120",
)


REWARD = '''
def vowels(response: str, sample: dict) -> dict:
    """The share of vowels and digits, plus what the prompt's line says."""
    return {"reward": sum(c in "aeiou0123456789" for c in response) / 8 + sample["bonus"], "characters": len(response)}


def raises(response: str, sample: dict) -> float:
    raise LookupError("no such answer")
'''


def user_data(folder: Path, *, prompts: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Files of a user's: JSONL prompts (texts and conversations) and a reward function. Returns overrides for data and for reward."""
    lines = [{"prompt": f"Say {n}", "bonus": n % 3 / 10} for n in range(prompts - 1)]
    lines.append({"messages": [{"role": "user", "content": "Sing"}], "bonus": 0.0})
    held_out = [{"prompt": f"Hum {n}", "bonus": 0.0} for n in range(4)]
    for name, rows in (("train.jsonl", lines), ("held_out.jsonl", held_out)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    data = (
        "data.task=null",
        "data.task_config={}",
        "data.task_key=question",
        f"data.prompts={folder}/train.jsonl",
        f"data.validation_prompts={folder}/held_out.jsonl",
        "data.chat=true",
        "data.template='{prompt}'",
        "engine.max_input_len=64",
    )
    return data, ("reward.kind=function", f"reward.function={folder}/reward.py:vowels", "reward.format_credit=0.0")


@dataclass(frozen=True)
class Run:
    """What a run left."""

    path: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_jsonl(self.path / "metrics.jsonl")

    def samples(self, step: int) -> list[dict[str, Any]]:
        return read_jsonl(self.path / "rollouts" / f"step_{step}.jsonl")

    def validation(self, step: int) -> list[dict[str, Any]]:
        return read_jsonl(self.path / "validation" / f"step_{step}.jsonl")

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows]

    @property
    def steps_so_far(self) -> list[int]:
        """Of a run that goes on."""
        return [json.loads(line)["step"] for line in whole_lines(self.path / "metrics.jsonl")]

    @property
    def pairs(self) -> list[str]:
        """Names of the committed pairs."""
        return sorted(marker.parent.name for marker in self.path.glob("checkpoints/*/COMMITTED"))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def whole_lines(path: Path) -> list[bytes]:
    """Of a file that is being written, and may not be there yet."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def state_of(pid: int) -> str:
    """One letter of /proc: R, S, T (stopped), Z ...; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def leftovers(look: Callable[[], dict[int, str]], patience: float = 20.0) -> list[str]:
    """Command lines of the processes that look() still finds after `patience` seconds: what was killed takes a moment to go."""
    until = time.monotonic() + patience
    while (found := look()) and time.monotonic() < until:
        time.sleep(0.1)
    return list(found.values())


def marked_processes(job: Job) -> dict[int, str]:
    """Command lines, by pid, of living processes with the job's mark in their environment, or that name one of its ranks as their
    parent."""
    return processes(mark=str(job.errors), parents=job.pids)


def processes(*, mark: str, parents: Sequence[int] = ()) -> dict[int, str]:
    """Command lines, by pid, of living processes with a mark in their environment, or that name one of `parents` as their parent."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
            marked = f"{MARK}={mark}\0" in (folder / "environ").read_text(errors="replace")
            if marked or any(f'"parent": {pid}}}' in command for pid in parents):
                found[int(folder.name)] = command
    return found


_next_ports = itertools.count(os.getpid())


def free_port() -> int:
    """A port that nobody listens on now, of those that Linux gives to nobody who does not name one (32768 and up): it stays free until
    it is used, which may be seconds later. Slurm and its jobs have 20000 and up."""
    while True:
        port = 10000 + next(_next_ports) % 10000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def launch_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun gives a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in numbers.items()}}
