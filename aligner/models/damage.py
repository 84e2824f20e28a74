"""Which torch_dist file is damaged, and how: asked once reading has failed, in libraries whose own words do not say it."""

import contextlib
import json
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

ZIP = b"PK\x03\x04"  # what each tensor in a .distcp file begins with: torch.save wrote it


@contextlib.contextmanager
def damage_is_named(folder: Path) -> Iterator[None]:
    """Turn an error of reading the torch_dist files in `folder` into a ValueError that names the damaged file, where there is one."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        said = damage(folder)
        if said is None:
            raise
        raise ValueError(f"{said}: copy or save the checkpoint again, or take an earlier one") from error


def damage(folder: Path) -> Optional[str]:
    """The first missing, cut or unreadable file; None where names, sizes and formats are as they were written."""
    readers: dict[str, Callable[[Path], Any]] = {
        "metadata.json": lambda path: json.loads(path.read_text(encoding="utf-8")),
        "common.pt": lambda path: torch.load(path, map_location="cpu", weights_only=False),
        ".metadata": lambda path: FileSystemReader(path.parent).read_metadata(),
    }
    for name, read in readers.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        try:
            found = read(path)
        except Exception:
            return f"{path} cannot be read ({path.stat().st_size} bytes): it was cut or overwritten"
    return _damaged_tensors(folder, found.storage_data.values())


def _damaged_tensors(folder: Path, entries: Any) -> Optional[str]:
    by_file: dict[str, list[Any]] = {}
    for entry in entries:
        by_file.setdefault(entry.relative_path, []).append(entry)
    for name, inside in sorted(by_file.items()):
        path, size = folder / name, max(entry.offset + entry.length for entry in inside)
        if not path.is_file():
            return f"{path} is missing"
        if (found := path.stat().st_size) < size:
            return f"{path} has {found} of its {size} bytes: it was cut"
        with path.open("rb") as file:
            for entry in inside:
                file.seek(entry.offset)
                if file.read(len(ZIP)) != ZIP:
                    return f"{path} holds no tensor at byte {entry.offset}, where one was written: it was overwritten"
    return None
