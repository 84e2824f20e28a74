"""Plays an entry script's rank without a model: what launch/slurm does with jobs can be seen in a second.

Started as `python` by the batch scripts, with an entry script and its overrides. Each start is a line of RUN/starts.jsonl. What it does
then is told by the override play=A,B,...: the word for its first start, the second ... (the last one stays).
A number: end with that exit code. killed: SIGKILL. serve: until it is told to stop. saves: the same, and leave a new checkpoint. deaf: do
not stop. Without the override: 0, of a server once an actor has started."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from aligner.runtime.errors import run_main
from aligner.runtime.signals import StopSignals

stop = StopSignals.install()
run = Path(os.environ["ALIGNER_RUN"])


def main() -> int:
    name, words = Path(sys.argv[1]).stem, sys.argv[2:]
    plays = [word.removeprefix("play=").split(",") for word in words if word.startswith("play=")]
    facts = {"rank": int(os.environ["SLURM_PROCID"]), "ranks": int(os.environ["SLURM_NTASKS"]), "pid": os.getpid()}
    facts |= {"script": name, "words": words, "host": os.uname().nodename, "job": os.environ["SLURM_JOB_ID"]}
    with (run / "starts.jsonl").open("a") as file:
        file.write(json.dumps({**facts, "folder": os.getcwd()}) + "\n")
    if not plays:
        until = time.monotonic() + 120
        while name.startswith("serve_") and not starts_of("train_ppo_actor") and time.monotonic() < until:
            time.sleep(0.05)
        return 0
    starts = [line for line in starts_of(name) if line["rank"] == facts["rank"]]
    return play(plays[0][min(len(starts), len(plays[0])) - 1], len(starts))


def starts_of(script: str) -> list[dict]:
    """The starts so far; a line that is being written does not count."""
    lines = (run / "starts.jsonl").read_text().splitlines(keepends=True)
    return [start for line in lines if line.endswith("\n") and (start := json.loads(line))["script"] == script]


def play(word: str, start: int) -> int:
    if word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if word.isdecimal():
        return int(word)
    until = time.monotonic() + float(os.environ.get("STAND_IN_SECONDS", "300"))
    while (not stop.stopping or word == "deaf") and time.monotonic() < until:
        time.sleep(0.05)
    if word == "saves":
        marker = run / "checkpoints" / f"step_{start:06d}" / "COMMITTED"
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    return int(stop.exit_code)


run_main(main)
