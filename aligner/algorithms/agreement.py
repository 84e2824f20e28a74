"""Work that may fail on one rank: every rank then raises, and none waits in the next collective for one that left."""

from typing import Callable, Optional, TypeVar

from aligner.parallel.collectives import agree
from aligner.parallel.topology import Topology

T = TypeVar("T")


def on_all(act: Callable[[], T], topology: Topology) -> T:
    """Do it on every rank; returns this rank's result. `act` must have left its own collectives, or none, when it raises."""
    result, error = None, None
    try:
        result = act()
    except Exception as problem:
        error = problem
    agree(error, topology)
    return result


def on_reporter(act: Callable[[], T], topology: Topology) -> Optional[T]:
    """Do it on the one rank that writes files and talks to the critic; None elsewhere."""
    return on_all(act if topology.is_reporter else lambda: None, topology)
