"""What TensorRT-LLM reads a model's architecture from: a Hugging Face folder without weights."""

import json
from pathlib import Path

from aligner.models.convert import flat_tokenizer
from aligner.models.hf_config import config_of
from aligner.models.hf_folder import special_ids
from aligner.models.model_config import ModelShape


def write_engine_folder(shape: ModelShape, checkpoint: Path, folder: Path, *, dtype: str) -> None:
    """config.json of the model, and the files of the checkpoint's tokenizer."""
    flat_tokenizer(checkpoint, folder)
    described = config_of(shape, dtype=dtype, special=special_ids(folder))
    (folder / "config.json").write_text(json.dumps(described, indent=1))
