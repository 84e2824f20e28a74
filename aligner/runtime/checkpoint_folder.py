"""checkpoints/step_000010/{actor,critic}/ and COMMITTED, which alone makes a pair of checkpoints valid."""

import json
import shutil
import time
from pathlib import Path
from typing import Optional

from aligner.config.groups import Resume
from aligner.runtime.durable import write_durably
from aligner.runtime.errors import ConfigError, StorageError, UserError

MARKER = "COMMITTED"


def remove_folder(folder: Path, patience: float = 10.0) -> None:
    """Again for some seconds where it fails: a critic job whose actor died may still be writing there. Raises OSError after that."""
    until = time.monotonic() + patience
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def empty_folder(folder: Path) -> None:
    """Make the folder, without what a save that did not end has left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files under a folder."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


class CheckpointFolder:
    """The checkpoints of a run. Only rank 0 of the actor changes anything here; both jobs read."""

    def __init__(self, path: Path):
        self.path = path

    def step(self, step: int) -> Path:
        """Folder of the pair saved after a step."""
        return self.path / f"step_{step:06d}"

    def committed(self) -> list[int]:
        """Steps of valid pairs, oldest first."""
        return sorted(int(marker.parent.name.removeprefix("step_")) for marker in self.path.glob(f"step_*/{MARKER}"))

    def newest(self) -> Optional[int]:
        return max(self.committed(), default=None)

    def validation(self, step: int) -> Optional[float]:
        """What validation said of the policy in a valid pair; None where it was not validated."""
        marker = self.step(step) / MARKER
        try:
            return json.loads(marker.read_text())["validation"]
        except (ValueError, KeyError, TypeError):  # written by hand: a save writes it whole or not at all
            raise UserError(f"{marker} is no record of a save: restore it, or delete {marker.parent}") from None

    def best(self) -> Optional[int]:
        """Step of the valid pair with the best validation (the newest of equals); None where none was validated."""
        scores = {step: self.validation(step) for step in self.committed()}
        validated = [(score, step) for step, score in scores.items() if score is not None]
        return max(validated)[1] if validated else None

    def commit(self, step: int, *, validation: Optional[float] = None) -> None:
        """Make a pair valid. Everything under its folder must be written, by both jobs."""
        record = {"step": step, "validation": validation, "time": time.strftime("%Y-%m-%d %H:%M:%S")}
        write_durably(self.step(step) / MARKER, json.dumps(record).encode() + b"\n")

    def discard_uncommitted(self) -> list[Path]:
        """Delete what a save that did not end has left. Returns what was deleted."""
        left = [folder for folder in self.path.glob("step_*") if not (folder / MARKER).exists()]
        for folder in left:
            remove_folder(folder)
        return left

    def prune(self, *, keep_last: int, keep_best: bool) -> list[int]:
        """Delete valid pairs but the newest `keep_last` (at least 1) and, if asked, the best. Returns the steps deleted."""
        steps = self.committed()
        kept = set(steps[-max(1, keep_last) :]) | ({self.best()} if keep_best else set())
        gone = [step for step in steps if step not in kept]
        for step in gone:
            (self.step(step) / MARKER).unlink()  # first, so that a pair that is half deleted is never valid
            shutil.rmtree(self.step(step))
        return gone

    def check_space(self, needed: int) -> None:
        """Raise StorageError where the file system has less than `needed` bytes free."""
        self.path.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise StorageError(
                f"a checkpoint needs about {needed / 2**20:.0f} MiB and {self.path} has {free / 2**20:.0f} MiB free: "
                "free space, lower checkpoint.keep_last, or point run.dir at a larger file system"
            )

    def resume_step(self, policy: Resume) -> Optional[int]:
        """Step to continue after, or None to begin. ConfigError where run.resume forbids what is there."""
        newest = self.newest()
        self.best()  # reads the record of every pair now, not at the next save
        if policy is Resume.never and newest is not None:
            raise ConfigError(
                f"run.resume=never, but {self.path} holds a checkpoint of step {newest}: choose another run.name, or auto"
            )
        if policy is Resume.must and newest is None:
            raise ConfigError(
                f"run.resume=must, but {self.path} holds no committed checkpoint: choose another run.name, or auto"
            )
        return newest
