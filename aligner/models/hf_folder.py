"""A Hugging Face folder on disk: its safetensors read lazily, its tokenizer files copied."""

import json
import shutil
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Optional

from safetensors import SafetensorError, safe_open
from torch import Tensor

from aligner.models.tensor_file import INDEX

# What goes with a tokenizer, wherever it goes; generation_config.json names the end tokens.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


class SafeTensors(Mapping[str, Tensor]):
    """The tensors of a folder under their names, each read when asked for."""

    def __init__(self, folder: Path, *, rename: Callable[[str], Optional[str]] = lambda name: name):
        """rename: the name in a file -> the one that it is given here; None leaves the tensor out.

        Raises ValueError where there are no safetensors, or one that the index names is not there."""
        self.folder = folder
        files = sorted(folder.glob("*.safetensors"))
        if (folder / INDEX).is_file():
            files = [folder / name for name in _indexed(folder / INDEX)]
        if missing := [f.name for f in files if not f.is_file()]:
            raise ValueError(f"{folder} lacks {', '.join(missing)}, which its {INDEX} names; copy the whole folder")
        if not files:
            raise ValueError(
                f"{folder} has no *.safetensors; pickled weights (*.bin) are not read, save them as safetensors"
            )
        self._opened = [_open(file) for file in files]
        inside = ((rename(name), (file, name)) for file in self._opened for name in file.keys())  # noqa: SIM118 - it is no dict
        self._of = {name: place for name, place in inside if name is not None}

    def __getitem__(self, name: str) -> Tensor:
        file, inside = self._of[name]
        return file.get_tensor(inside)

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, name: object) -> bool:
        return name in self._of  # Mapping's own would read the tensor

    def dtypes(self) -> set[str]:
        """safetensors' names of the types in use: F32, BF16 ..."""
        return {file.get_slice(inside).get_dtype() for file, inside in self._of.values()}


def _indexed(index: Path) -> list[str]:
    """The files that an index names."""
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if not files or not all(isinstance(name, str) and Path(name).name == name for name in files):
            raise ValueError(f"its weight_map names {sorted(map(str, files))[:3]}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # JSON's and Unicode's errors are ValueErrors
        raise ValueError(
            f"{index} is no index of safetensors files ({type(error).__name__}: {error}); copy it again, or delete it where the folder "
            "holds all *.safetensors"
        ) from None
    return sorted(files)


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is no whole safetensors file ({error}); copy it again") from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises ValueError where the folder or the file is not there, or it holds something else."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; a model of a hub must be downloaded first")
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no config.json: it is not a Hugging Face model")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no object: it is not the configuration of a model")
    return found


def copy_tokenizer_files(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer's files that there are; returns their names. Raises ValueError where there is no tokenizer.json."""
    if not (source / "tokenizer.json").is_file():
        raise ValueError(
            f"{source} has no tokenizer.json; save the tokenizer with transformers' save_pretrained (fast tokenizer)"
        )
    target.mkdir(parents=True, exist_ok=True)
    names = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names


def special_ids(tokenizer: Path) -> dict[str, Any]:
    """bos_token_id, eos_token_id and pad_token_id as far as generation_config.json, or the tokenizer's own names, tell."""
    found: dict[str, Any] = {}
    if (tokenizer / "tokenizer_config.json").is_file() and (tokenizer / "tokenizer.json").is_file():
        named = json.loads((tokenizer / "tokenizer_config.json").read_text())
        added = {t["content"]: t["id"] for t in json.loads((tokenizer / "tokenizer.json").read_text())["added_tokens"]}
        for role in ("bos", "eos", "pad"):
            token = named.get(f"{role}_token")
            text = token["content"] if isinstance(token, dict) else token
            if text in added:
                found[f"{role}_token_id"] = added[text]
    if (tokenizer / "generation_config.json").is_file():
        said = json.loads((tokenizer / "generation_config.json").read_text())
        found |= {k: said[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if said.get(k) is not None}
    return found
