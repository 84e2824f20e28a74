"""Named points at which a test makes a process die as if its machine had. Without ALIGNER_FAULT nothing happens."""

import os
import signal

VARIABLE = "ALIGNER_FAULT"


def reach(point: str, step: int) -> None:
    """SIGKILL this process where ALIGNER_FAULT is `point:step` (for example `generated:3`)."""
    if os.environ.get(VARIABLE) == f"{point}:{step}":
        os.kill(os.getpid(), signal.SIGKILL)
