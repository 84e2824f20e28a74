"""The torch engine's weights: fused buffers, and for every Hugging Face tensor the part of a buffer that holds it."""

from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.model_config import ModelShape
from aligner.rollout.linear import Kernel, Linear


class Norm:
    """RMSNorm, or LayerNorm where there is a bias; weight and bias [hidden]."""

    def __init__(self, weight: Tensor, bias: Optional[Tensor], epsilon: float):
        self.weight, self.bias, self.epsilon = weight, bias, epsilon

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


@dataclass(frozen=True)
class Layer:
    """One block. qkv stacks the rows of q, k and v; gate_up those of gate and up, or is GPT-2's first MLP product.
    qk_norms [heads + kv_heads, D]."""

    attention_norm: Norm
    qkv: Linear
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    qk_norms: Optional[Tensor] = None


class Weights:
    """`views`: Hugging Face name -> writable view, the only way in. The vocabulary is the real one, without padding."""

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device, kernel: Kernel = Kernel.plain):
        self.shape, self.dtype, self.device, self.kernel = shape, dtype, device, kernel
        self._buffers: list[Tensor] = []
        self.views: dict[str, Tensor] = {}
        gpt2 = shape.gpt2_style
        self.embedding = self._zeros(shape.vocab_size, shape.hidden_size)
        self.views["transformer.wte.weight" if gpt2 else "model.embed_tokens.weight"] = self.embedding
        self.positions = self._zeros(shape.max_position_embeddings, shape.hidden_size) if gpt2 else None
        if self.positions is not None:
            self.views["transformer.wpe.weight"] = self.positions
        self.layers = [(self._gpt2_layer if gpt2 else self._layer)(index) for index in range(shape.num_layers)]
        self.final_norm = self._norm("transformer.ln_f" if gpt2 else "model.norm")
        head = self.embedding if shape.tied else self._zeros(shape.vocab_size, shape.hidden_size)
        if not shape.tied:
            self.views["lm_head.weight"] = head
        self.head = self._linear(head, None)

    def _zeros(self, *size: int) -> Tensor:
        self._buffers.append(torch.zeros(*size, dtype=self.dtype, device=self.device))
        return self._buffers[-1]

    def _linear(self, weight: Tensor, bias: Optional[Tensor]) -> Linear:
        return Linear(weight, bias, self.kernel)

    def _norm(self, name: str) -> Norm:
        weight = self.views[f"{name}.weight"] = self._zeros(self.shape.hidden_size)
        bias = self._zeros(self.shape.hidden_size) if self.shape.gpt2_style else None
        if bias is not None:
            self.views[f"{name}.bias"] = bias
        return Norm(weight, bias, self.shape.layernorm_epsilon)

    def _gpt2_layer(self, index: int) -> Layer:
        """Hugging Face keeps GPT-2's matrices as [in, out], with the columns of q, k and v one after the other: their views are
        transposed."""
        s, prefix = self.shape, f"transformer.h.{index}."
        attended = s.num_attention_heads * s.kv_channels

        def product(name: str, out_features: int, in_features: int) -> Linear:
            weight, bias = self._zeros(out_features, in_features), self._zeros(out_features)
            self.views[f"{prefix}{name}.weight"], self.views[f"{prefix}{name}.bias"] = weight.t(), bias
            return self._linear(weight, bias)

        return Layer(
            attention_norm=self._norm(f"{prefix}ln_1"),
            qkv=product("attn.c_attn", 3 * attended, s.hidden_size),
            out=product("attn.c_proj", s.hidden_size, attended),
            mlp_norm=self._norm(f"{prefix}ln_2"),
            gate_up=product("mlp.c_fc", s.ffn_hidden_size, s.hidden_size),
            down=product("mlp.c_proj", s.hidden_size, s.ffn_hidden_size),
        )

    def _layer(self, index: int) -> Layer:
        s, prefix = self.shape, f"model.layers.{index}."
        heads, groups, dim = s.num_attention_heads, s.num_query_groups, s.kv_channels
        qkv, out = self._zeros((heads + 2 * groups) * dim, s.hidden_size), self._zeros(s.hidden_size, heads * dim)
        bias = self._zeros((heads + 2 * groups) * dim) if s.qkv_bias else None
        gate_up, down = self._zeros(2 * s.ffn_hidden_size, s.hidden_size), self._zeros(s.hidden_size, s.ffn_hidden_size)
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
        return Layer(
            attention_norm=self._norm(f"{prefix}input_layernorm"),
            qkv=self._linear(qkv, bias),
            out=self._linear(out, None),
            mlp_norm=self._norm(f"{prefix}post_attention_layernorm"),
            gate_up=self._linear(gate_up, None),
            down=self._linear(down, None),
            qk_norms=qk_norms,
        )

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
