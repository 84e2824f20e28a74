"""Submitting runs by launch/slurm, and watching what becomes of them."""

import json
import re
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Sequence

from tests.jobs.harness import REPO, Run, whole_lines
from tests.slurm.cluster import Cluster

DEADLINE = 400.0  # seconds for anything to come; a machine that is idle needs a tenth of it
# Looks and waits of launch/slurm in seconds instead of minutes.
FAST = {"ALIGNER_PEER_POLL": "2", "ALIGNER_PEER_WAIT": "60", "ALIGNER_END_WAIT": "10"}


def until(what: Callable[[], Any], *, deadline: float = DEADLINE, said: Callable[[], str] = str) -> Any:
    """The first true answer."""
    end = time.monotonic() + deadline
    while not (answer := what()):
        assert time.monotonic() < end, f"it has not come within {deadline:.0f} s\n{said()}"
        time.sleep(0.1)
    return answer


@dataclass
class Submitted:
    """A run's jobs, by name: critic, actor, reward, together, job; in a chain those of its first link."""

    cluster: Cluster
    run: Run
    jobs: dict[str, int]
    every: list[int]
    said: str

    def state(self, name: str) -> str:
        return self.cluster.states().get(self.jobs[name], "forgotten")

    def log(self, name: str) -> str:
        file = self.run.path / "logs" / f"slurm-{name}-{self.jobs[name]}.out"
        return file.read_text() if file.exists() else ""

    def signal(self, number: str, *names: str) -> None:
        """To the batch scripts alone, of several jobs at once, as Slurm's warning before the time limit."""
        self.cluster.run("scancel", "--batch", f"--signal={number}", *(str(self.jobs[name]) for name in names))

    def cancel(self, name: str) -> None:
        self.cluster.run("scancel", str(self.jobs[name]))

    def tail(self) -> str:
        logs = "\n".join(f"--- {name}\n{self.log(name)[-5000:]}" for name in self.jobs)
        return f"{self.cluster.states()}\n{logs}"

    def until(self, what: Callable[[], Any], deadline: float = DEADLINE) -> Any:
        return until(what, deadline=deadline, said=self.tail)

    def until_said(self, name: str, text: str) -> None:
        self.until(lambda: text in self.log(name))

    def until_state(self, name: str, *states: str) -> str:
        return self.until(lambda: self.state(name) in states and self.state(name))

    def end(self, **states: str) -> "Submitted":
        """Wait until all its jobs have ended, and expect these states of them (COMPLETED where none is given)."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "forgotten")
        for name in self.jobs:
            self.until_state(name, *ended)
        found = {name: self.state(name) for name in self.jobs}
        assert found == {**dict.fromkeys(self.jobs, "COMPLETED"), **states}, self.tail()
        return self

    @property
    def starts(self) -> list[dict[str, Any]]:
        """What stand_in.py noted."""
        return [json.loads(line) for line in whole_lines(self.run.path / "starts.jsonl")]

    def started(self, script: str) -> int:
        """How often rank 0 of a script was."""
        return len([start for start in self.starts if start["script"] == script and start["rank"] == 0])


@dataclass
class Submitter:
    cluster: Cluster
    runs: Path

    def stand_in(self) -> Path:
        """An executable that is called in Python's place."""
        file = self.runs / "python with a space"
        file.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{REPO}/tests/slurm/stand_in.py" "$@"\n')
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        return file

    def submit(self, command: Sequence[str], name: str, **environment: str) -> Submitted:
        """command: a script of launch/slurm and its arguments, beside --name and --runs."""
        script, *arguments = command
        words = [str(REPO / "launch/slurm" / script), "--name", name, "--runs", str(self.runs), *arguments]
        said = self.cluster.run(*words, **{**FAST, **environment})
        told = re.findall(r"^(\w+) +job (\d+) ", said, flags=re.MULTILINE)
        jobs: dict[str, int] = {}
        for job, number in told:
            jobs.setdefault(job, int(number))
        return Submitted(self.cluster, Run(self.runs / name), jobs, [int(number) for _, number in told], said)

    def played(self, script: str, name: str, *arguments: str, **environment: str) -> Submitted:
        """With ranks that stand_in.py plays."""
        how = ("--no-check", "--python", str(self.stand_in()))
        return self.submit((script, *how, *arguments), name, **environment)


def shellcheck(*files: Path) -> str:
    """What it says of these files."""
    done = subprocess.run(["shellcheck", "-x", *map(str, files)], cwd=REPO, capture_output=True, text=True)
    return done.stdout + done.stderr
