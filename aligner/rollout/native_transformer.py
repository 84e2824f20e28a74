"""The forward pass of the torch engine by the compiled kernels of kernels/: the same calls as transformer.Transformer, on a CPU."""

import math
import os
from ctypes import byref
from typing import Optional

import numpy as np
import torch
from torch import Tensor

from aligner.models.model_config import ModelShape
from aligner.rollout import native
from aligner.rollout.cache import KVCache
from aligner.rollout.rope import rope_tables
from aligner.rollout.weights import Layer, Weights

PASS_TOKENS = 1024  # of a prefill: bounds the work space; the kernels are no faster with more


def work_space(shape: ModelShape, *, rows: int, length: int) -> dict[str, int]:
    """float32 elements of each buffer for activations; length: positions of the cache."""
    tokens = max(PASS_TOKENS, rows)
    attended, up = shape.num_attention_heads * shape.kv_channels, 2 * shape.ffn_hidden_size
    return {
        "x": tokens * shape.hidden_size,
        "normed": tokens * shape.hidden_size,
        "qkv": tokens * (attended + 2 * shape.num_query_groups * shape.kv_channels),
        "attended": tokens * attended,
        "up": tokens * up,
        "panel": native.PANEL_TOKENS * max(shape.hidden_size, attended, up),
        "scores": max(os.cpu_count() or 1, torch.get_num_threads()) * length,  # threads may be set later
        "logits": rows * shape.vocab_size,
    }


class NativeTransformer:
    """Next-token logits over a Weights and a KVCache, both on the CPU, in float32 or bfloat16; activations are float32."""

    prefill_tokens = PASS_TOKENS

    def __init__(self, shape: ModelShape, weights: Weights, cache: KVCache):
        self.shape, self.weights, self.cache = shape, weights, cache
        self.rows = cache.tensor.size(2)
        sizes = work_space(shape, rows=self.rows, length=cache.length)
        self.space = {name: torch.zeros(size) for name, size in sizes.items()}
        self.logits = self.space.pop("logits").view(self.rows, shape.vocab_size)
        self.cos = self.sin = None
        if not shape.gpt2_style:
            self.cos, self.sin = rope_tables(
                cache.length,
                shape.kv_channels,
                base=shape.rotary_base,
                scaling=shape.rope_scaling,
                dtype=torch.float32,
                device=torch.device("cpu"),
            )
        self.at = np.arange(self.rows)
        self.sample = native.Sampler(self.rows, shape.vocab_size)
        self.given = np.zeros((4, max(PASS_TOKENS, self.rows)), np.int64)  # tokens, rows, positions, wanted
        self.addresses = [row.ctypes.data for row in self.given]
        self.bind()

    def bind(self) -> None:
        """Where weights and cache lie; again after either has been given back and restored."""
        s, w = self.shape, self.weights
        self.layers = (native.CLayer * s.num_layers)(*map(self._layer, w.layers))
        self.model = native.CModel(
            layers=s.num_layers,
            hidden=s.hidden_size,
            heads=s.num_attention_heads,
            groups=s.num_query_groups,
            dim=s.kv_channels,
            ffn=s.ffn_hidden_size,
            vocab=s.vocab_size,
            rows=self.rows,
            length=self.cache.length,
            use_bf16=w.dtype == torch.bfloat16,
            gated=not s.gpt2_style,
            eps=s.layernorm_epsilon,
            scale=1 / math.sqrt(s.kv_channels),
            layer=self.layers,
            head=native.c_linear(w.head.weight, w.head.bias),
            embedding=native.pointer(w.embedding),
            positions=native.pointer(w.positions),
            final_norm=native.pointer(w.final_norm.weight),
            final_shift=native.pointer(w.final_norm.bias),
            cosines=native.pointer(self.cos),
            sines=native.pointer(self.sin),
            keys=native.pointer(self.cache.keys),
            values=native.pointer(self.cache.values),
            capacity=max(PASS_TOKENS, self.rows),
            **{name: native.pointer(tensor) for name, tensor in self.space.items()},
        )

    def _layer(self, layer: Layer) -> native.CLayer:
        linears = {"qkv": layer.qkv, "out": layer.out, "up": layer.gate_up, "down": layer.down}
        return native.CLayer(
            **{name: native.c_linear(linear.weight, linear.bias) for name, linear in linears.items()},
            attention_norm=native.pointer(layer.attention_norm.weight),
            attention_shift=native.pointer(layer.attention_norm.bias),
            mlp_norm=native.pointer(layer.mlp_norm.weight),
            mlp_shift=native.pointer(layer.mlp_norm.bias),
            qk_norms=native.pointer(layer.qk_norms),
        )

    def decode(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        """As Transformer.decode. The logits are a buffer that the next call overwrites."""
        rows = self.at[: len(tokens)]
        return self._forward(tokens, rows, positions, rows)

    def prefill(
        self, tokens: list[np.ndarray], *, rows: np.ndarray, starts: np.ndarray, final: bool = True
    ) -> Optional[Tensor]:
        """As Transformer.prefill; at most max(prefill_tokens, rows) tokens in all."""
        lengths = np.array([len(piece) for piece in tokens])
        ends = np.cumsum(lengths)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
        wanted = ends - 1 if final else ends[:0]
        logits = self._forward(np.concatenate(tokens), np.repeat(rows, lengths), positions, wanted)
        return logits if final else None

    def _forward(self, tokens: np.ndarray, rows: np.ndarray, positions: np.ndarray, wanted: np.ndarray) -> Tensor:
        n, count = len(tokens), len(wanted)
        assert n <= self.given.shape[1] and count <= self.rows
        for kept, array in zip(self.given, (tokens, rows, positions, wanted)):
            kept[: len(array)] = array
        at = self.addresses
        native.library().forward(byref(self.model), at[0], at[1], at[2], n, at[3], count, self.logits.data_ptr())
        return self.logits[:count]
