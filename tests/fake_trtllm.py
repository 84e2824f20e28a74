"""The stand-in for TensorRT-LLM (tests/fake_tensorrt_llm) on the import path, and engines of tiny models on it."""

import contextlib
import json
import sys
from pathlib import Path

from aligner.config.groups import Certify
from aligner.trtllm.engine import TrtllmEngine
from aligner.trtllm.engine_build import EngineBuild
from aligner.trtllm.group import GenerationGroup
from tests.tiny import write_tokenizer

FAKE = Path(__file__).with_name("fake_tensorrt_llm")
ALONE = GenerationGroup(size=1, first=0, rank=0, local_rank=0, group=None)


@contextlib.contextmanager
def fake_package():
    """Inside, `import tensorrt_llm` finds the stand-in; afterwards nothing does."""
    sys.path.insert(0, str(FAKE))
    try:
        yield
    finally:
        sys.path.remove(str(FAKE))
        for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
            del sys.modules[name]


def checkpoint_with_tokenizer(folder: Path) -> Path:
    """A folder with nothing but tokenizer/, which is all of a checkpoint that an engine reads."""
    write_tokenizer(folder / "tokenizer")
    (folder / "tokenizer" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    return folder


def fake_engine(shape, folder: Path, *, group: GenerationGroup = ALONE, **changes) -> TrtllmEngine:
    """An engine of 5 sequences, prompts of 24 and responses of 40 tokens, whose buckets hold 4 KB. Inside fake_package()."""
    settings = {
        "build": EngineBuild(dtype="float32", max_batch_size=5, max_input_len=24, max_output_len=40),
        "memory_fraction": 0.5,
        "bucket_bytes": 4096,
        "timeout": 60.0,
        "certify": Certify.full,
        "pad_id": 0,
    }
    return TrtllmEngine(shape, group=group, checkpoint=folder, **{**settings, **changes})
