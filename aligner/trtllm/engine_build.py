"""The shapes that a TensorRT-LLM engine is built for: what is refused, what follows from them, and the command that builds it."""

import shlex
from dataclasses import asdict, dataclass
from typing import Any

from aligner.models.model_config import ModelShape
from aligner.rollout.engine import BuildLimits
from aligner.trtllm.layout import Grid

TOKENS_A_PASS = 8192  # prompt and decode tokens that one forward pass takes at most, TensorRT-LLM's own default
WEIGHT_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class EngineBuild:
    """Lengths in tokens. dtype: of weights and activations; quantization: none, int8 or int4 (of weights)."""

    dtype: str
    max_batch_size: int
    max_input_len: int
    max_output_len: int
    quantization: str = "none"

    @property
    def max_seq_len(self) -> int:
        return self.max_input_len + self.max_output_len

    @property
    def max_num_tokens(self) -> int:
        """Room in one pass for the longest prompt, and for one token of every sequence."""
        return max(TOKENS_A_PASS, self.max_input_len, self.max_batch_size)

    def settings(self, grid: Grid) -> dict[str, Any]:
        """What build.json says."""
        return {
            **asdict(self),
            "max_seq_len": self.max_seq_len,
            "max_num_tokens": self.max_num_tokens,
            "tp_size": grid.tensor,
            "pp_size": grid.pipeline,
            "world_size": grid.world,
            "command": self.command(),
        }

    def command(self) -> list[str]:
        """trtllm-build, to be run where config.json is. Prompts beyond max_input_len would be dropped silently: it is always said."""
        sizes = {
            name: getattr(self, name) for name in ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens")
        }
        flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
        return ["trtllm-build", "--checkpoint_dir", ".", "--output_dir", "engine", "--gemm_plugin", "auto", *flags]

    def script(self) -> str:
        return (
            "#!/bin/sh\n"
            "# Builds the TensorRT engine in ./engine. Needs a TensorRT-LLM that has the TensorRT backend (up to 1.3.0rc20) and a GPU;\n"
            "# newer releases read the Hugging Face folder ./hf themselves.\n"
            'set -e\ncd "$(dirname "$0")"\n'
            f"exec {shlex.join(self.command())}\n"
        )

    def problems(self, shape: ModelShape, grid: Grid) -> list[str]:
        """What TensorRT-LLM could not build, each with the rule and its numbers."""
        found = []
        try:
            limits = BuildLimits(self.max_batch_size, self.max_input_len, self.max_output_len, shape.vocab_size)
            limits.check_context(shape.max_position_embeddings)
        except ValueError as error:
            found.append(str(error).replace("engine.", "--"))
        return found + (self._quantization_problems(shape, grid) if self.quantization != "none" else [])

    def _quantization_problems(self, shape: ModelShape, grid: Grid) -> list[str]:
        """The weight-only kernels multiply 16-bit activations, and tile the weight: rows by 128 / bits, columns by 8."""
        if self.dtype == "float32":
            return [
                f"--quantization {self.quantization} needs 16-bit activations: --dtype bfloat16 or float16, not float32"
            ]
        t, rows = grid.tensor, 128 // WEIGHT_BITS[self.quantization]
        heads = shape.num_attention_heads * shape.kv_channels // t
        kv = max(shape.num_query_groups, t) * shape.kv_channels // t
        products = {  # inputs, outputs a rank
            "qkv": (shape.hidden_size, heads + 2 * kv),
            "dense": (heads, shape.hidden_size),
            "mlp.fc": (shape.hidden_size, shape.ffn_hidden_size // t),
            "mlp.proj": (shape.ffn_hidden_size // t, shape.hidden_size),
        }
        return [
            f"--quantization {self.quantization} needs inputs in multiples of {rows} and outputs in multiples of 8 on each of "
            f"--tp_size {t} ranks: {name} has {inputs} inputs and {outputs} outputs"
            for name, (inputs, outputs) in products.items()
            if inputs % rows or outputs % 8
        ]
