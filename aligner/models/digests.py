"""digests.json: the sha256 of every file of a saved model, so that a byte that changed on the disk is found before it is trained on."""

import hashlib
import json
from pathlib import Path
from typing import Optional

from aligner.parallel.collectives import agree, gather_objects
from aligner.parallel.topology import Topology
from aligner.runtime.durable import write_durably

DIGESTS = "digests.json"
CHUNK = 2**20


def write_digests(folder: Path, topology: Topology, *, known: dict[str, str]) -> None:
    """Write the list of all files under `folder`, once they are written. Collective. known: those of the files that this rank wrote, by
    their names in `folder`; rank 0 adds the small ones."""
    every = {name: digest for part in gather_objects(known, topology.cpu_group) for name, digest in part.items()}
    error: Optional[Exception] = None
    if topology.is_reporter:
        try:
            found = {name: every.get(name) or sha256_of(folder / name) for name in _files(folder)}
            write_durably(folder / DIGESTS, json.dumps(found, indent=1).encode())
        except OSError as problem:
            error = problem
    agree(error, topology)


def check_digests(folder: Path, topology: Topology) -> None:
    """Raises ValueError, on every rank, naming the files that are missing or changed. Collective. Nothing where there is no list: a
    converted model has none."""
    listed = _read(folder, topology)
    if listed is None:
        return
    there = [name for name in sorted(listed) if (folder / name).is_file()]
    found = _digests(there, folder, topology)
    bad = [name for name, digest in sorted(listed.items()) if found.get(name) != digest]
    if bad:
        said = ", ".join(f"{name} ({'damaged' if name in found else 'missing'})" for name in bad[:5])
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ValueError(
            f"the checkpoint {folder} is not what was saved: {said}{more}; restore the files, or remove {folder.parent} to continue from "
            "an older pair"
        )


def _files(folder: Path) -> list[str]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path.relative_to(folder).as_posix() for path in paths if path.name != DIGESTS]


def _digests(names: list[str], folder: Path, topology: Topology) -> dict[str, str]:
    """Of all the files, on every rank."""
    mine: dict[str, str] = {}
    error: Optional[Exception] = None
    try:
        mine = {name: sha256_of(folder / name) for name in names[topology.rank :: topology.world_size]}
    except OSError as problem:
        error = problem
    agree(error, topology)
    return {name: digest for part in gather_objects(mine, topology.cpu_group) for name, digest in part.items()}


def sha256_of(file: Path) -> str:
    """Of a file's content, in hexadecimal digits."""
    digest = hashlib.sha256()
    with file.open("rb") as data:
        while chunk := data.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _read(folder: Path, topology: Topology) -> Optional[dict[str, str]]:
    """The list as rank 0 reads it, so that all ranks check the same."""
    found, error = None, None
    if topology.is_reporter and (folder / DIGESTS).exists():
        try:
            found = json.loads((folder / DIGESTS).read_text())
        except (OSError, ValueError) as problem:
            error = ValueError(f"{folder / DIGESTS} cannot be read ({problem}): the checkpoint {folder} is damaged")
    agree(error, topology)
    return gather_objects(found, topology.cpu_group)[0]
