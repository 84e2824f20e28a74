"""Files that a crash of the machine leaves whole or absent."""

import os
from pathlib import Path
from typing import Union


def write_durably(path: Path, *parts: Union[bytes, memoryview]) -> None:
    """Write beside, sync, rename, sync the folder."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """What was made, renamed or removed in the folder outlives a crash from now on."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
