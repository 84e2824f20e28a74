"""The torch engine's weights: fused buffers, and for every Hugging Face tensor the part of a buffer that holds it."""

from typing import Optional

import torch
from torch import Tensor

from aligner.models.model_config import ModelShape
from aligner.rollout.linear import Kernel, Linear


class Layer:
    """One block. qkv stacks the rows of q, k and v; gate_up those of gate and up. norms [2, hidden]; qk_norms
    [heads + kv_heads, D]."""

    def __init__(
        self, qkv: Linear, out: Linear, gate_up: Linear, down: Linear, norms: Tensor, qk_norms: Optional[Tensor]
    ):
        self.qkv, self.out, self.gate_up, self.down = qkv, out, gate_up, down
        self.attention_norm, self.mlp_norm = norms[0], norms[1]
        self.qk_norms = qk_norms


class Weights:
    """`views`: Hugging Face name -> writable view, the only way in. The vocabulary is the real one, without padding."""

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device, kernel: Kernel = Kernel.plain):
        if shape.gpt2_style:
            raise ValueError("the torch engine does not generate with GPT-2-style models yet")
        self.shape, self.dtype, self.device, self.kernel = shape, dtype, device, kernel
        self._buffers: list[Tensor] = []
        self.views: dict[str, Tensor] = {}
        self.embedding = self._zeros(shape.vocab_size, shape.hidden_size)
        self.views["model.embed_tokens.weight"] = self.embedding
        self.layers = [self._layer(index) for index in range(shape.num_layers)]
        self.final_norm = self._zeros(shape.hidden_size)
        self.views["model.norm.weight"] = self.final_norm
        head = self.embedding if shape.tied else self._zeros(shape.vocab_size, shape.hidden_size)
        if not shape.tied:
            self.views["lm_head.weight"] = head
        self.head = self._linear(head, None)

    def _zeros(self, *size: int) -> Tensor:
        self._buffers.append(torch.zeros(*size, dtype=self.dtype, device=self.device))
        return self._buffers[-1]

    def _linear(self, weight: Tensor, bias: Optional[Tensor]) -> Linear:
        return Linear(weight, bias, self.kernel)

    def _layer(self, index: int) -> Layer:
        s, prefix = self.shape, f"model.layers.{index}."
        heads, groups, dim = s.num_attention_heads, s.num_query_groups, s.kv_channels
        qkv, out = self._zeros((heads + 2 * groups) * dim, s.hidden_size), self._zeros(s.hidden_size, heads * dim)
        bias = self._zeros((heads + 2 * groups) * dim) if s.qkv_bias else None
        gate_up, down = self._zeros(2 * s.ffn_hidden_size, s.hidden_size), self._zeros(s.hidden_size, s.ffn_hidden_size)
        norms = self._zeros(2, s.hidden_size)
        qk_norms = self._zeros(heads + groups, dim) if s.qk_norm else None
        for name, at, count in (("q", 0, heads), ("k", heads, groups), ("v", heads + groups, groups)):
            rows = slice(at * dim, (at + count) * dim)
            self.views[f"{prefix}self_attn.{name}_proj.weight"] = qkv[rows]
            if bias is not None:
                self.views[f"{prefix}self_attn.{name}_proj.bias"] = bias[rows]
            if qk_norms is not None and name != "v":
                self.views[f"{prefix}self_attn.{name}_norm.weight"] = qk_norms[at : at + count]
        self.views[f"{prefix}self_attn.o_proj.weight"] = out
        self.views[f"{prefix}mlp.gate_proj.weight"] = gate_up[: s.ffn_hidden_size]
        self.views[f"{prefix}mlp.up_proj.weight"] = gate_up[s.ffn_hidden_size :]
        self.views[f"{prefix}mlp.down_proj.weight"] = down
        self.views[f"{prefix}input_layernorm.weight"] = norms[0]
        self.views[f"{prefix}post_attention_layernorm.weight"] = norms[1]
        linear = self._linear
        return Layer(linear(qkv, bias), linear(out, None), linear(gate_up, None), linear(down, None), norms, qk_norms)

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor that a refit brings. q_norm and k_norm come as [D] and are spread over the heads."""
        return {name: tuple(self.read(name).shape) for name in self.views}

    def read(self, name: str) -> Tensor:
        """The tensor as Hugging Face shapes it, read back from the buffers."""
        view = self.views[name]
        return view[0] if name.endswith(("q_norm.weight", "k_norm.weight")) else view

    @torch.no_grad()
    def write(self, name: str, tensor: Tensor) -> None:
        """In place, converted to the engine's dtype and device."""
        self.views[name].copy_(tensor)

    def release(self) -> None:
        """Give the memory back; tensors and views stay, without contents."""
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Memory again, with undefined contents: a refit must follow."""
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(buffer.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes while in use."""
        return sum(buffer.nbytes for buffer in self._buffers)
