"""Logging: every rank has its own file, rank 0 alone speaks on the terminal."""

import logging
import sys
from pathlib import Path
from typing import Optional

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def _for_terminal(record: logging.LogRecord) -> bool:
    """What this package says, and errors of others; megatron-core raises the errors that it logs, and they are told once."""
    theirs = record.levelno >= logging.ERROR and not record.name.startswith("megatron.")
    ours = record.name == "aligner" or record.name.startswith("aligner.")
    return (ours or theirs) and not getattr(record, "file_only", False)


def _terminal_handler() -> logging.Handler:
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        handler: logging.Handler = RichHandler(
            console=Console(stderr=True), show_path=False, show_time=False, markup=False
        )
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    handler.addFilter(_for_terminal)
    return handler


def setup_logging(logs: Optional[Path], *, job: str, rank: int, level: int = logging.INFO) -> logging.Logger:
    """Log to `logs`/JOB_rankN.log (appended to; None: to no file) and, on rank 0, to the terminal. Returns the package's logger.

    Handlers of an earlier call are replaced. Python warnings go to the file alone."""
    root = logging.getLogger()
    for old in [h for h in root.handlers if getattr(h, "aligner", False)]:
        root.removeHandler(old)
        old.close()
    handlers: list[logging.Handler] = []
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(logs / f"{job}_rank{rank}.log"))
        handlers[0].setFormatter(logging.Formatter(FORMAT))
    if rank == 0:
        handlers.append(_terminal_handler())
    for handler in handlers:
        handler.aligner = True  # type: ignore[attr-defined]
        root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(True)
    return logging.getLogger("aligner")
