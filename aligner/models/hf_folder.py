"""A Hugging Face folder on disk: its safetensors read lazily and written in shards, its tokenizer files copied."""

import json
import shutil
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000

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

    def __init__(self, folder: Path):
        """Raises ValueError where there are no safetensors, or one that the index names is not there."""
        self.folder = folder
        files = sorted(folder.glob("*.safetensors"))
        if (folder / INDEX).is_file():
            listed = json.loads((folder / INDEX).read_text())["weight_map"]
            files = [folder / name for name in sorted(set(listed.values()))]
        if missing := [f.name for f in files if not f.is_file()]:
            raise ValueError(f"{folder} lacks {', '.join(missing)}, which its {INDEX} names; copy the whole folder")
        if not files:
            raise ValueError(
                f"{folder} has no *.safetensors; pickled weights (*.bin) are not read, save them as safetensors"
            )
        self._opened = [safe_open(file, framework="pt") for file in files]
        self._of = {name: file for file in self._opened for name in file.keys()}  # noqa: SIM118 - it is no dict

    def __getitem__(self, name: str) -> Tensor:
        return self._of[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, name: object) -> bool:
        return name in self._of  # Mapping's own would read the tensor

    def dtypes(self) -> set[str]:
        """safetensors' names of the types in use: F32, BF16 ..."""
        return {file.get_slice(name).get_dtype() for name, file in self._of.items()}


def write_safetensors(tensors: Iterable[tuple[str, Tensor]], folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write model-00001-of-N.safetensors of about shard_bytes each and their index, or one model.safetensors where all fit."""
    files: list[Path] = []
    held: dict[str, Tensor] = {}
    where: dict[str, int] = {}
    size = total = 0

    def flush() -> None:
        nonlocal held, size
        files.append(folder / f"part-{len(files)}.safetensors")
        save_file(held, files[-1], metadata={"format": "pt"})
        held, size = {}, 0

    for name, tensor in tensors:
        held[name] = tensor.detach().cpu().clone()  # export yields views, whose storages safetensors refuses to share
        where[name] = len(files)
        bytes_ = tensor.numel() * tensor.element_size()
        size, total = size + bytes_, total + bytes_
        if size >= shard_bytes:
            flush()
    if held:
        flush()
    _name_shards(files, where, total, folder)


def _name_shards(files: list[Path], where: Mapping[str, int], total: int, folder: Path) -> None:
    if len(files) == 1:
        files[0].rename(folder / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for file, name in zip(files, names):
        file.rename(folder / name)
    index = {"metadata": {"total_size": total}, "weight_map": {name: names[i] for name, i in where.items()}}
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises ValueError where the folder or the file is not there."""
    if not folder.is_dir():
        raise ValueError(f"--hf_checkpoint {folder} is not a folder; a model of a hub must be downloaded first")
    if not (folder / "config.json").is_file():
        raise ValueError(f"--hf_checkpoint {folder} has no config.json: it is not a Hugging Face model")
    return json.loads((folder / "config.json").read_text())


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
