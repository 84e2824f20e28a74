"""How far a command of many equal parts is: a bar on a terminal, a line at every tenth elsewhere. On stderr."""

import contextlib
import sys
from typing import Callable, Iterator, Optional


@contextlib.contextmanager
def bar(label: str, total: int, *, live: Optional[bool] = None) -> Iterator[Callable[[], None]]:
    """Yields what to call after each of the `total` parts. live: None asks whether stderr is a terminal."""
    if sys.stderr.isatty() if live is None else live:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(label, total=total)
            yield lambda: progress.advance(task)
        return
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if done * 10 // total > (done - 1) * 10 // total:
            print(f"{label}: {done}/{total}", file=sys.stderr, flush=True)

    yield advance
