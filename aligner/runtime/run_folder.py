"""What a run leaves: the layout of run.dir/run.name. Rank 0 of each job alone creates and writes; other ranks know the paths."""

import json
import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Mapping, Optional

from aligner.config.groups import RunConfig
from aligner.runtime.checkpoint_folder import CheckpointFolder
from aligner.runtime.errors import StorageError
from aligner.runtime.journal import Journal
from aligner.runtime.lock import RunLock
from aligner.runtime.metrics import one_line

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run. Making one touches nothing on disk."""

    path: Path

    @classmethod
    def of(cls, run: RunConfig) -> "RunFolder":
        return cls(Path(run.dir).absolute() / run.name)

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def stacks(self, job: str, rank: int) -> Path:
        """Where a rank writes what its threads do when nothing moves."""
        return self.logs / f"{job}_rank{rank}.stacks"

    @property
    def endpoints(self) -> Path:
        return self.path / "endpoints"

    @property
    def journal(self) -> Journal:
        """Train requests since the newest pair."""
        return Journal(self.path / "journal", run_id=self.path.name)

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(self.path / "checkpoints")

    def config(self, job: str) -> Path:
        """Resolved settings of a job: config.yaml of the actor, config_critic.yaml of the critic."""
        return self.path / ("config.yaml" if job == "actor" else f"config_{job}.yaml")

    def rollouts(self, step: int) -> Path:
        """Samples that trained step N."""
        return self.path / "rollouts" / f"step_{step}.jsonl"

    def validation(self, step: int) -> Path:
        """Validation responses after step N (0: before training)."""
        return self.path / "validation" / f"step_{step}.jsonl"

    def record(self, job: str) -> Path:
        """Where a job says what and where it is (pid, host, grid, endpoint): run.json of the actor, run_critic.json of the critic."""
        return self.path / ("run.json" if job == "actor" else f"run_{job}.json")

    def lock(self, job: str) -> RunLock:
        """Create the folder and hold it for a job. UserError where a live job has it (named); StorageError where it cannot be made."""
        try:
            return RunLock(self.path / "locks" / f"{job}.json", what=f"the {job} of run {self.path}")
        except OSError as error:
            raise StorageError(
                f"the run folder {self.path} cannot be made or written ({error.strerror}): change run.dir or run.name"
            ) from error

    def write_config(self, job: str, yaml: str) -> None:
        self.config(job).write_text(yaml)

    @property
    def calibration(self) -> Path:
        """A reward model's reliability on held-out responses, at the last validation."""
        return self.path / "calibration.json"

    def write_calibration(self, table: Mapping[str, Any]) -> None:
        self.calibration.write_text(json.dumps(table, indent=1) + "\n")

    def write_record(self, job: str, **facts: Any) -> None:
        """Write the job's record (JSON values). `started` and `job` are added."""
        known = {"job": job, "started": time.strftime("%Y-%m-%d %H:%M:%S"), **facts}
        self.record(job).write_text(json.dumps(known, indent=1) + "\n")

    def amend_record(self, job: str, **facts: Any) -> None:
        """Add to the job's record what became true later."""
        known = json.loads(self.record(job).read_text())
        self.record(job).write_text(json.dumps({**known, **facts}, indent=1) + "\n")

    def write_samples(self, path: Path, samples: Iterable[dict[str, Any]]) -> None:
        """Write one JSON object a line to rollouts(step) or validation(step), whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".tmp")
        beside.write_text("".join(one_line(sample) + "\n" for sample in samples), encoding="utf-8")
        beside.replace(path)

    def keep_batch(self, name: str, tensors: Mapping[str, Any]) -> str:
        """Save a batch that could not be trained on to skipped/NAME.pt. Returns where, for a message."""
        import torch

        path = self.path / "skipped" / f"{name}.pt"
        path.parent.mkdir(exist_ok=True)
        torch.save(dict(tensors), path)
        return f"; the batch is in {path}"

    def rewind(self, step: Optional[int]) -> None:
        """Delete what comes after the checkpoint of `step` that the run continues from (None: it begins): later samples,
        the journal and uncommitted checkpoints, and for a run that begins the event files.

        Metrics are rewound by MetricsWriter."""
        for folder in (self.path / "rollouts", self.path / "validation"):
            for file in folder.glob("step_*.jsonl"):
                if step is None or int(file.stem.removeprefix("step_")) > step:
                    file.unlink()
        self.checkpoints.discard_uncommitted()
        self.journal.clear()
        if step is None and self.metrics.exists():
            log.warning("%s holds no checkpoint: the run begins anew, and its earlier records are deleted", self.path)
        if step is None:
            shutil.rmtree(self.path / "tensorboard", ignore_errors=True)
