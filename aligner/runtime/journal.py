"""journal/step_N: what was asked of the critic since the last pair of checkpoints, so that a critic that died can be brought back.

A file is one line of JSON (step, run, sha256 and size of the rest) and a numpy archive. Nothing in it is pickled."""

import hashlib
import io
import json
from pathlib import Path
from typing import Any, Mapping

import numpy as np

from aligner.runtime.durable import write_durably


class JournalError(ValueError):
    """A file of the journal that is missing or damaged; the message is one sentence."""


class Journal:
    """The journal of one run. The actor's rank 0 alone writes and reads it."""

    def __init__(self, path: Path, *, run_id: str) -> None:
        self.path, self.run_id = path, run_id

    def file(self, step: int) -> Path:
        return self.path / f"step_{step}"

    def steps(self) -> list[int]:
        """Steps whose request is there, in order."""
        names = (file.name.removeprefix("step_") for file in self.path.glob("step_*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def write(self, step: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep the request of a step; on return it outlives a crash of the machine. Written again, it is replaced."""
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        body = buffer.getbuffer()
        head = {"step": step, "run_id": self.run_id, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
        self.path.mkdir(parents=True, exist_ok=True)
        write_durably(self.file(step), json.dumps(head).encode() + b"\n", body)

    def read(self, step: int) -> dict[str, np.ndarray]:
        """The arrays of a step. Raises JournalError where the file is missing, of another run or step, or damaged."""
        file = self.file(step)
        try:
            head, _, body = file.read_bytes().partition(b"\n")
            said: dict[str, Any] = json.loads(head)
            known = (said["step"], said["run_id"], said["bytes"], said["sha256"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise JournalError(f"{file} cannot be read ({error})") from None
        found = (step, self.run_id, len(body), hashlib.sha256(body).hexdigest())
        if found != known:
            raise JournalError(f"{file} is damaged or of another run: it says {known}, and is {found}")
        with np.load(io.BytesIO(body), allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}

    def forget(self, *, through: int) -> None:
        """A pair of checkpoints holds these steps now."""
        for step in self.steps():
            if step <= through:
                self.file(step).unlink(missing_ok=True)

    def clear(self) -> None:
        """The run goes back to its newest pair: what was asked since is asked anew."""
        for file in self.path.glob("step_*"):
            file.unlink(missing_ok=True)
