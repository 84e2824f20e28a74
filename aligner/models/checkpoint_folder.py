"""What a weight checkpoint is on disk: a folder with model_config.yaml, model_weights/ and tokenizer/, or a .nemo archive of one."""

import contextlib
import gzip
import hashlib
import lzma
import secrets
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import Iterator

from aligner.models.model_config import ModelShape, read_model_config
from aligner.parallel.collectives import agree, broadcast_object
from aligner.parallel.topology import Topology

WEIGHTS = "model_weights"
TOKENIZER = "tokenizer"

_BROKEN = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError)


def is_archive(path: Path) -> bool:
    return path.suffix == ".nemo" and path.is_file()


def checkpoint_shape(path: Path | str) -> ModelShape:
    """The shape of the model in a folder or .nemo archive, without its weights. Raises ValueError where it is neither."""
    path = Path(path)
    if not is_archive(path):
        if not path.is_dir():
            raise ValueError(f"{path} is neither a folder nor a .nemo archive")
        return read_model_config(path)
    with tempfile.TemporaryDirectory() as folder:
        unpack(path, Path(folder), only="model_config.yaml")
        return read_model_config(folder)


def unpack(archive: Path, folder: Path, *, only: str | None = None, optional: bool = False) -> None:
    """Extract a .nemo archive (tar, compressed or not), or one file or folder of it.

    Raises ValueError where it is damaged or cut off, has a member that would leave the folder, or lacks `only` (unless that is
    optional)."""
    try:
        with tarfile.open(archive) as tar:
            members = list(_members(tar, only))
            if not members and not optional:
                raise ValueError(f"{archive} has no {only or 'files'}: it is not a model of this toolkit or of NeMo")
            tar.extractall(folder, members=members, filter="data")
    except tarfile.FilterError as error:
        raise ValueError(f"{archive} is refused, it would write outside of its folder: {error}") from error
    except _BROKEN as error:
        said = str(error).partition("\n")[0].rstrip(":")  # tarfile lists every compression that it tried
        raise ValueError(f"{archive} is no whole tar archive ({said}); copy it again") from error


def _members(tar: tarfile.TarFile, only: str | None) -> Iterator[tarfile.TarInfo]:
    """All members, or those of `only`; a file is the first of its name, so that what follows (the weights) is not read."""
    for member in tar:
        name = member.name.removeprefix("./")
        if only is None or name.split("/")[0] == only:
            yield member
        if name == only and member.isfile():
            return


@contextlib.contextmanager
def opened(path: Path, topology: Topology, *, only: str | None = None) -> Iterator[Path]:
    """The checkpoint as a folder; an archive (or `only` of it) is unpacked once a node and removed afterwards. Collective."""
    if not is_archive(path):
        yield path
        return
    stat = path.stat()
    mark = hashlib.sha256(f"{path.resolve()} {stat.st_mtime_ns} {stat.st_size}".encode()).hexdigest()[:16]
    # The nonce keeps two jobs on a node from sharing an unpacked folder.
    nonce = broadcast_object(secrets.token_hex(4), 0, topology.cpu_group)
    folder = Path(tempfile.gettempdir()) / f"aligner-{mark}-{nonce}"
    try:
        agree(_unpacked(path, folder, only) if topology.local_rank == 0 else None, topology)
        yield folder
    finally:
        if topology.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _unpacked(archive: Path, folder: Path, only: str | None) -> Exception | None:
    try:
        folder.mkdir(mode=0o700)
        unpack(archive, folder, only=only)
    except (OSError, ValueError) as error:
        return error
    return None


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy tokenizer/ of a checkpoint (folder or archive) into `folder`; nothing where `source` has none."""
    if is_archive(source):
        with tempfile.TemporaryDirectory() as unpacked:
            unpack(source, Path(unpacked), only=TOKENIZER, optional=True)
            copy_tokenizer(Path(unpacked), folder)
    elif (source / TOKENIZER).is_dir():
        shutil.copytree(source / TOKENIZER, folder / TOKENIZER, dirs_exist_ok=True)
