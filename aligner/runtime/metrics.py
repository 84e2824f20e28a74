"""Metrics of a run: one JSON object a step in metrics.jsonl, TensorBoard, and Weights & Biases where configured."""

import json
import math
import numbers
from pathlib import Path
from typing import Any, Mapping, Optional

from aligner.config.groups import LoggingConfig
from aligner.runtime.errors import UserError


def plain_number(key: str, value: Any) -> float | int:
    """A finite int or float of a Python, numpy or one-element torch number.

    FloatingPointError: not finite. TypeError: not a number. Both name the key."""
    if hasattr(value, "item") and not isinstance(value, numbers.Number):
        value = value.item()
    if isinstance(value, numbers.Integral):  # bool and numpy's integers too
        return int(value)
    if not isinstance(value, numbers.Real):
        raise TypeError(f"metric {key} is {value!r}, not a number")
    if not math.isfinite(value):
        raise FloatingPointError(f"metric {key} is {float(value)}, not a finite number")
    return float(value)


def plain_row(metrics: Mapping[str, Any]) -> dict[str, float | int]:
    """All metrics as plain numbers. Raises as plain_number does."""
    return {key: plain_number(key, value) for key, value in metrics.items()}


# JSON allows them in a string as they are, and readers that split a text into lines, as str.splitlines does, break there.
_LINE_BREAKS = str.maketrans({mark: f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"})


def one_line(value: Mapping[str, Any]) -> str:
    """JSON that is one line for every reader, with other scripts' letters as they are."""
    text = json.dumps(value, ensure_ascii=False).translate(_LINE_BREAKS)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")  # half of a surrogate pair: \udXXX, as JSON has it


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one a line. A last line that a killed process left unfinished is dropped."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    if lines and not lines[-1]:
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise ValueError(f"{path}:{number} is not JSON: {line[:80]!r}") from None
    return rows


def _rewind(path: Path, keep_through: Optional[int]) -> None:
    """Keep the rows up to a step (none where None), so that a resumed run never has two rows of one step."""
    kept = [] if keep_through is None else [row for row in read_jsonl(path) if row["step"] <= keep_through]
    beside = path.with_suffix(".tmp")
    beside.write_text("".join(json.dumps(row) + "\n" for row in kept))
    beside.replace(path)


def _start_wandb(folder: Path, project: str, config: Optional[Mapping[str, Any]]) -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError(
            f"logging.wandb_project={project} needs the package wandb: "
            "pip install 'megatron-aligner[wandb]', or remove the setting"
        ) from None
    id_file = folder / "wandb_id"
    if not id_file.exists():
        id_file.write_text(wandb.util.generate_id())
    return wandb.init(
        project=project,
        name=folder.name,
        id=id_file.read_text().strip(),
        resume="allow",
        dir=str(folder),
        config=config,
    )


class MetricsWriter:
    """Writes the metrics of a run; rank 0 alone has one.

    keep_through: last step of the checkpoint that the run resumes from; later rows are dropped. None: a new run, all are.
    config: settings to show beside the run in Weights & Biases."""

    def __init__(
        self,
        folder: Path,
        logging: LoggingConfig,
        *,
        keep_through: Optional[int] = None,
        config: Optional[Mapping[str, Any]] = None,
    ):
        self.path = folder / "metrics.jsonl"
        self._wandb = _start_wandb(folder, logging.wandb_project, config) if logging.wandb_project else None
        _rewind(self.path, keep_through)
        self._file = self.path.open("a")
        self._tensorboard = None
        if logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            purge = None if keep_through is None else keep_through + 1
            self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One row. Raises FloatingPointError where a value is not finite and TypeError where it is no number; nothing is written then."""
        row = plain_row(metrics)
        self._file.write(json.dumps({"step": step, **row}, allow_nan=False) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for key, value in row.items():
                self._tensorboard.add_scalar(key, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(row, step=step)

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
