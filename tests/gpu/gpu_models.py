"""Models with random weights for the sections of check.py, and the settings that they share."""

import importlib.util
import json
from pathlib import Path

import torch

from aligner.config.groups import ParallelConfig

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("llama", "qwen3")
VOCABULARY = 32000  # of the half-billion model: logits must cost what they cost in earnest


def one_rank() -> ParallelConfig:
    return ParallelConfig(timeout=60.0)


def write_tokenizer(folder: Path, size: int = 0) -> int:
    """The byte-level tokenizer of tests/tiny.py, with unreachable tokens up to `size`. Returns the size of its vocabulary."""
    spec = importlib.util.spec_from_file_location("aligner_tests_tiny", ROOT / "tests" / "tiny.py")
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    count = tiny.write_tokenizer(folder)
    if size <= count:
        return count
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] |= {f"<{i}>": i for i in range(count, size)}
    file.write_text(json.dumps(content))
    return size


def tiny_hf(family: str, vocabulary: int, seed: int = 0) -> torch.nn.Module:
    """A transformers model on the CPU, float32, with norms that are not all ones; Qwen3's embeddings are tied, Llama's are not."""
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[family]
    config = config_class(
        num_hidden_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=192,
        vocab_size=vocabulary,
        max_position_embeddings=256,
        tie_word_embeddings=family == "qwen3",
        rms_norm_eps=1e-5,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        head_dim=32,
    )
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors under the names of a checkpoint; a tied lm head is named once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def tiny_checkpoint(work: Path, family: str) -> tuple[Path, Path]:
    """(Hugging Face folder, converted checkpoint), made where they are not there yet."""
    source, converted = work / f"{family}-hf", work / f"{family}-nemo"
    if not converted.exists():
        vocabulary = write_tokenizer(source)
        tiny_hf(family, vocabulary).save_pretrained(source, safe_serialization=True)
        convert(source, converted)
    return source, converted


def half_billion_checkpoint(work: Path, *, on_gpu: bool) -> Path:
    """A converted Llama of 0.5 billion parameters in bfloat16 (0.2 million on a CPU)."""
    import transformers

    source, converted = work / "half-hf", work / "half-nemo"
    if converted.exists():
        return converted
    vocabulary = write_tokenizer(source, VOCABULARY if on_gpu else 0)
    config = transformers.LlamaConfig(
        num_hidden_layers=24 if on_gpu else 2,
        hidden_size=1280 if on_gpu else 64,
        num_attention_heads=20 if on_gpu else 4,
        num_key_value_heads=4,
        intermediate_size=4096 if on_gpu else 128,
        vocab_size=vocabulary,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=2,
        bos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("cuda" if on_gpu else "cpu"):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16 if on_gpu else torch.float32)
    model.save_pretrained(source, safe_serialization=True)
    del model
    convert(source, converted)
    return converted


def convert(source: Path, output: Path) -> None:
    """What convert_hf_to_nemo.py does, in this process."""
    from aligner.models.convert import hf_to_nemo
    from aligner.parallel.device import empty_cache

    hf_to_nemo(source, output, progress=print)
    empty_cache()
