"""The forward pass of the torch engine: Llama, Qwen2 and Qwen3, inference only.

Legend: n rows of a decode step or tokens of a prefill, u prompts, T the longest of them, H query heads, K KV heads, D head size,
G = H / K, V vocabulary, f the MLP's width."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.model_config import ModelShape
from aligner.rollout.cache import KVCache
from aligner.rollout.rope import rope_tables, rotate
from aligner.rollout.weights import Layer, Weights


class Transformer:
    """Next-token logits over a Weights and a KVCache. Rows of the cache are sequences; active ones come first."""

    def __init__(self, shape: ModelShape, weights: Weights, cache: KVCache):
        self.shape, self.weights, self.cache = shape, weights, cache
        self.device = weights.device
        self.cos, self.sin = rope_tables(
            cache.length,
            shape.kv_channels,
            base=shape.rotary_base,
            scaling=shape.rope_scaling,
            dtype=weights.dtype,
            device=self.device,
        )
        self.heads, self.groups, self.dim = shape.num_attention_heads, shape.num_query_groups, shape.kv_channels
        self.scale = 1 / math.sqrt(self.dim)
        self.kv_heads = torch.arange(self.groups, device=self.device)[None]
        self.at = torch.arange(cache.length, device=self.device)

    @torch.inference_mode()
    def decode(self, tokens: np.ndarray, positions: np.ndarray, *, window: int) -> Tensor:
        """Append one token to each of the first n rows; logits [n, V] float32 for the next ones.

        tokens [n] int64, positions [n] int64 where they go; window: a multiple of 16 above every position."""
        tokens, positions = (torch.from_numpy(x).to(self.device) for x in (tokens, positions))
        n = tokens.size(0)
        x = F.embedding(tokens, self.weights.embedding)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        hidden = self.at[:window] > positions[:, None]
        mask = torch.zeros(n, 1, 1, window, dtype=x.dtype, device=self.device).masked_fill_(
            hidden[:, None, None], -math.inf
        )
        index = (torch.arange(n, device=self.device)[:, None], self.kv_heads, positions[:, None])
        for layer, keys, values in zip(self.weights.layers, self.cache.keys, self.cache.values):
            query_key, value = self._qkv(layer, x, cos, sin)
            keys.index_put_(index, query_key[:, self.heads :])
            values.index_put_(index, value)
            query = query_key[:, : self.heads].reshape(n, self.groups, -1, self.dim)
            attended = self._attend(query, keys[:n, :, :window], values[:n, :, :window], mask)
            x = self._finish(layer, x, attended.reshape(n, -1))
        return self._logits(x)

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]], *, prompt_of_row: np.ndarray, first_row: int) -> Tensor:
        """Write prompts into the rows from first_row on; logits [rows, V] float32 for the token after each row's prompt.

        prompts: u lists of token ids. prompt_of_row [rows] int64: which prompt a row gets (several may share one).
        Linear layers see the tokens packed, without padding; attention sees them right-padded to [u, T]."""
        lengths = np.array([len(prompt) for prompt in prompts])
        layout = PrefillLayout(lengths, self.device)
        rows = slice(first_row, first_row + len(prompt_of_row))
        copies = (
            None
            if np.array_equal(prompt_of_row, np.arange(len(prompts)))
            else torch.from_numpy(prompt_of_row).to(self.device)
        )
        x = F.embedding(torch.from_numpy(np.concatenate(prompts)).to(self.device), self.weights.embedding)
        cos, sin = self.cos[layout.positions][:, None], self.sin[layout.positions][:, None]
        final = self.weights.layers[-1]
        for layer, keys, values in zip(self.weights.layers, self.cache.keys, self.cache.values):
            query, key, value = (
                layout.pad(part).transpose(1, 2) for part in self._split(*self._qkv(layer, x, cos, sin))
            )
            keys[rows, :, : layout.width] = key if copies is None else key[copies]
            values[rows, :, : layout.width] = value if copies is None else value[copies]
            attended = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self.scale, enable_gqa=self.groups != self.heads
            )
            attended = layout.unpad(attended.transpose(1, 2)).flatten(1)
            if (
                layer is final
            ):  # only the last token of each prompt is asked for: the rest of the last block is not needed
                x, attended = x[layout.last], attended[layout.last]
            x = self._finish(layer, x, attended)
        logits = self._logits(x)
        return logits if copies is None else logits[copies]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.size(-1),), weight, self.shape.layernorm_epsilon)

    def _qkv(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [n, h] -> rotated queries and keys [n, H + K, D], values [n, K, D]."""
        qkv = layer.qkv(self._norm(x, layer.attention_norm)).view(x.size(0), -1, self.dim)
        query_key, value = qkv[:, : self.heads + self.groups], qkv[:, self.heads + self.groups :]
        if layer.qk_norms is not None:
            query_key = F.rms_norm(query_key, (self.dim,), None, self.shape.layernorm_epsilon) * layer.qk_norms
        return rotate(query_key, cos, sin), value

    def _split(self, query_key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query_key[:, : self.heads], query_key[:, self.heads :], value

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """query [n, K, G, D], keys and values [n, K, window, D], mask [n, 1, 1, window] added -> [n, K, G, D].

        The heads of a group are the rows of one small matrix, so keys are read once a group. In float32 plain matmuls take a
        third to three quarters of the fused kernel's time on a CPU; in bfloat16 only the fused one keeps scores in float32."""
        if query.dtype == torch.float32:
            scores = torch.matmul(query * self.scale, keys.transpose(-1, -2)).add_(mask)
            return torch.matmul(scores.softmax(-1), values)
        mask = mask.expand(*query.shape[:3], -1)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=self.scale)

    def _finish(self, layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
        """Output projection and MLP, each added to its input."""
        x = layer.out(attended).add_(x)
        gate_up = layer.gate_up(self._norm(x, layer.mlp_norm))
        half = gate_up.size(-1) // 2
        return layer.down(F.silu(gate_up[:, :half]).mul_(gate_up[:, half:])).add_(x)

    def _logits(self, x: Tensor) -> Tensor:
        return self.weights.head(self._norm(x, self.weights.final_norm)).float()


class PrefillLayout:
    """Where the packed tokens of u prompts lie in a right-padded [u, T], and back."""

    def __init__(self, lengths: np.ndarray, device: torch.device):
        starts = np.cumsum(lengths) - lengths
        self.count, self.width = len(lengths), int(lengths.max())
        self.even = bool((lengths == self.width).all())
        prompt = np.repeat(np.arange(self.count), lengths)
        positions = np.arange(int(lengths.sum())) - starts[prompt]
        # Padding repeats a prompt's last token: finite, after every real position, and overwritten or masked later on.
        padded = starts[:, None] + np.minimum(np.arange(self.width), lengths[:, None] - 1)
        to_device = lambda array: torch.from_numpy(array).to(device)  # noqa: E731
        self.prompt, self.positions, self.padded = to_device(prompt), to_device(positions), to_device(padded)
        self.last = to_device(starts + lengths - 1)

    def pad(self, packed: Tensor) -> Tensor:
        """[n, heads, D] -> [u, T, heads, D]"""
        return packed.unflatten(0, (self.count, self.width)) if self.even else packed[self.padded]

    def unpad(self, padded: Tensor) -> Tensor:
        """[u, T, heads, D] -> [n, heads, D]"""
        return padded.flatten(0, 1) if self.even else padded[self.prompt, self.positions]
