"""The forward pass of the torch engine: Llama, Qwen2, Qwen3 and GPT-2, inference only.

Legend: n rows of a decode step or tokens of a prefill, u pieces of prompts, T the longest of them, H query heads, K KV heads, D head size,
G = H / K, V vocabulary, f the MLP's width."""

import math
from functools import partial
from typing import Optional

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.model_config import ModelShape
from aligner.rollout.cache import KVCache, round_up
from aligner.rollout.rope import rope_tables, rotate
from aligner.rollout.weights import Layer, Weights


class Transformer:
    """Next-token logits over a Weights and a KVCache. Rows of the cache are sequences; active ones come first."""

    prefill_tokens = 4096  # right-padded tokens a prefill pass: bounds its activations

    def __init__(self, shape: ModelShape, weights: Weights, cache: KVCache):
        self.shape, self.weights, self.cache = shape, weights, cache
        self.device = weights.device
        if not shape.gpt2_style:
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

    def bind(self) -> None:
        """Weights or cache have been given back and restored: nothing to do, the tensors are the same."""

    @torch.inference_mode()
    def decode(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        """Append one token to each of the first n rows; logits [n, V] float32 for the next ones.

        tokens [n] int64, positions [n] int64 where they go."""
        window = round_up(int(positions.max()) + 1)
        tokens, positions = (torch.from_numpy(x).to(self.device) for x in (tokens, positions))
        n = tokens.size(0)
        x, rotation = self._embed(tokens, positions)
        hidden = self.at[:window] > positions[:, None]
        mask = torch.zeros(n, 1, 1, window, dtype=x.dtype, device=self.device).masked_fill_(
            hidden[:, None, None], -math.inf
        )
        index = (torch.arange(n, device=self.device)[:, None], self.kv_heads, positions[:, None])
        for layer, keys, values in zip(self.weights.layers, self.cache.keys, self.cache.values):
            query_key, value = self._qkv(layer, x, rotation)
            keys.index_put_(index, query_key[:, self.heads :])
            values.index_put_(index, value)
            query = query_key[:, : self.heads].reshape(n, self.groups, -1, self.dim)
            attended = self._attend(query, keys[:n, :, :window], values[:n, :, :window], mask)
            x = self._finish(layer, x, attended.reshape(n, -1))
        return self._logits(x)

    @torch.inference_mode()
    def prefill(
        self, tokens: list[np.ndarray], *, rows: np.ndarray, starts: np.ndarray, final: bool = True
    ) -> Optional[Tensor]:
        """Write pieces of sequences into the cache; logits [u, V] float32 after each one's last token, None where not `final`.

        tokens: u arrays [t] int64. rows [u] int64: of the cache, each of which holds everything before starts [u] int64.
        Linear layers see the tokens packed, without padding; attention sees them right-padded to [u, T]."""
        layout = PrefillLayout(tokens, rows, starts, self.device)
        x, rotation = self._embed(torch.from_numpy(np.concatenate(tokens)).to(self.device), layout.positions)
        index = (layout.row_of_token[:, None], self.kv_heads, layout.positions[:, None])
        last_layer = self.weights.layers[-1]
        for layer, keys, values in zip(self.weights.layers, self.cache.keys, self.cache.values):
            query_key, value = self._qkv(layer, x, rotation)
            query, key = query_key[:, : self.heads], query_key[:, self.heads :]
            keys.index_put_(index, key)
            values.index_put_(index, value)
            if layer is last_layer and not final:
                return None
            attended = layout.attend(query, key, value, keys, values, scale=self.scale)
            if layer is last_layer:  # only each piece's last token is asked for: the rest of the block is not needed
                x, attended = x[layout.last], attended[layout.last]
            x = self._finish(layer, x, attended)
        return self._logits(x)

    def _embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Optional[tuple[Tensor, Tensor]]]:
        """tokens and positions [n] -> x [n, h], and what rotates queries and keys there: None where positions are learned."""
        x = F.embedding(tokens, self.weights.embedding)
        if self.weights.positions is not None:
            return x.add_(F.embedding(positions, self.weights.positions)), None
        return x, (self.cos[positions][:, None], self.sin[positions][:, None])

    def _qkv(self, layer: Layer, x: Tensor, rotation: Optional[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """x [n, h] -> queries and keys [n, H + K, D], rotated unless positions are learned; values [n, K, D]."""
        qkv = layer.qkv(layer.attention_norm(x)).view(x.size(0), -1, self.dim)
        query_key, value = qkv[:, : self.heads + self.groups], qkv[:, self.heads + self.groups :]
        if layer.qk_norms is not None:
            query_key = F.rms_norm(query_key, (self.dim,), None, self.shape.layernorm_epsilon) * layer.qk_norms
        return query_key if rotation is None else rotate(query_key, *rotation), value

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
        gate_up = layer.gate_up(layer.mlp_norm(x))
        if self.shape.gpt2_style:
            return layer.down(F.gelu(gate_up, approximate="tanh")).add_(x)
        half = gate_up.size(-1) // 2
        return layer.down(F.silu(gate_up[:, :half]).mul_(gate_up[:, half:])).add_(x)

    def _logits(self, x: Tensor) -> Tensor:
        return self.weights.head(self.weights.final_norm(x)).float()


class PrefillLayout:
    """Where the packed tokens of u pieces lie in a right-padded [u, T], and what they attend to."""

    def __init__(self, tokens: list[np.ndarray], rows: np.ndarray, starts: np.ndarray, device: torch.device):
        lengths = np.array([len(piece) for piece in tokens])
        ends = np.cumsum(lengths)
        first = ends - lengths
        self.count, self.width = len(lengths), int(lengths.max())
        self.even = bool((lengths == self.width).all())
        self.fresh = not starts.any()  # nothing lies before: the pieces attend to themselves alone
        piece = np.repeat(np.arange(self.count), lengths)
        column = np.arange(int(ends[-1])) - first[piece]
        # Padding repeats a piece's last token: finite, after every real position, and dropped afterwards.
        padded = first[:, None] + np.minimum(np.arange(self.width), lengths[:, None] - 1)
        to_device = lambda array: torch.from_numpy(array).to(device)  # noqa: E731
        self.piece, self.column, self.padded, self.last = map(to_device, (piece, column, padded, ends - 1))
        self.rows, self.row_of_token, self.positions = map(to_device, (rows, rows[piece], starts[piece] + column))
        self.window = round_up(int((starts + lengths).max()))
        if not self.fresh:
            at = torch.arange(self.window, device=device)
            self.seen = at <= (self.positions[self.padded])[:, :, None]  # [u, T, window]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, *, scale: float
    ) -> Tensor:
        """query [n, H, D], key and value [n, K, D] of the pieces, keys and values of the cache's layer -> [n, H * D]."""
        grouped = query.size(1) != key.size(1)
        attention = partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=grouped)
        query = self.pad(query)
        if self.fresh:
            attended = attention(query, self.pad(key), self.pad(value), is_causal=True)
        else:
            keys, values = (cached[self.rows, :, : self.window] for cached in (keys, values))
            attended = attention(query, keys, values, attn_mask=self.seen[:, None])
        return self.unpad(attended.transpose(1, 2)).flatten(1)

    def pad(self, packed: Tensor) -> Tensor:
        """[n, heads, D] -> [u, heads, T, D]"""
        padded = packed.unflatten(0, (self.count, self.width)) if self.even else packed[self.padded]
        return padded.transpose(1, 2)

    def unpad(self, padded: Tensor) -> Tensor:
        """[u, T, heads, D] -> [n, heads, D]"""
        return padded.flatten(0, 1) if self.even else padded[self.piece, self.column]
