"""Named points at which a test makes a process die, or stand still, as if its machine had. Without ALIGNER_FAULT nothing happens."""

import os
import signal

VARIABLE = "ALIGNER_FAULT"


def reach(point: str, step: int) -> None:
    """SIGKILL this process where ALIGNER_FAULT is `point:step` (for example `generated:3`) or `point:step@rank`; SIGSTOP it, until
    somebody continues it, where it is `pause point:step`: once, as a step may have several requests that reach a point."""
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return
    place, _, rank = wanted.removeprefix("pause ").partition("@")
    if place == f"{point}:{step}" and rank in ("", os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")):
        del os.environ[VARIABLE]
        os.kill(os.getpid(), signal.SIGSTOP if wanted.startswith("pause ") else signal.SIGKILL)
