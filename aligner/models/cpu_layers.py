"""Layers for megatron-core's local spec: what the Transformer Engine spec brings on a GPU, from torch's own functions."""

import functools
from typing import Optional

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

# Up to this many tokens the plain products are faster than the fused kernel, whose backward pass takes 1.3 to 3.5 times theirs with rows
# this short; the probabilities that they keep for it are then no larger than the other activations.
_SHORT = 128


class SDPAttention(MegatronModule):
    """Causal core attention from torch's own functions; the constructor and forward of megatron's DotProductAttention."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
    ):
        super().__init__(config=config)
        if config.attention_dropout or attention_dropout:
            raise ValueError(
                f"attention dropout is not supported here, got {attention_dropout or config.attention_dropout}"
            )
        self.scale = softmax_scale

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ) -> Tensor:
        """query [S, B, heads, D], key and value [S, B, groups, D] -> [S, B, heads * D]; attention_mask True = not seen, None = causal.

        With packed_seq_params (thd) all three are without B, S is that of all sequences together, and the result is [S, heads * D]:
        each sequence sees itself alone."""
        if attention_bias is not None:
            raise ValueError("attention_bias is not supported by SDPAttention")
        if packed_seq_params is None:
            return self._attend(query, key, value, attention_mask)
        sizes = packed_seq_params.cu_seqlens_q.diff().tolist()
        each = zip(*(x[:, None].split(sizes) for x in (query, key, value)), strict=True)
        return torch.cat([self._attend(*parts, None) for parts in each])[:, 0]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Optional[Tensor]) -> Tensor:
        # Copied, so that a head's rows lie together: strided ones (S outside B) cost this kernel 40 % of its time and more.
        query, key, value = (x.permute(1, 2, 0, 3).contiguous() for x in (query, key, value))
        if attention_mask is None and query.size(2) <= _SHORT and query.dtype == torch.float32:
            out = short_causal_attention(query, key, value, scale=self.scale)
        else:
            out = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=None if attention_mask is None else ~attention_mask,
                is_causal=attention_mask is None and query.size(2) > 1,
                scale=self.scale,
                enable_gqa=query.size(1) != key.size(1),
            )
        return out.permute(2, 0, 1, 3).reshape(out.size(2), out.size(0), -1)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return {}


def short_causal_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
    """scaled_dot_product_attention(is_causal=True, enable_gqa=True) as two batched products: query [B, heads, S, D], key and value
    [B, groups, S, D], all contiguous -> [B, heads, S, D]. The heads of a group are further rows of one product."""
    rows, heads, columns, size = query.shape
    together = heads // key.size(1)
    scores = torch.baddbmm(
        _causal_mask(columns, together, query.dtype),
        query.view(-1, together * columns, size),
        key.view(-1, columns, size).transpose(1, 2),
        alpha=size**-0.5 if scale is None else scale,
    )
    return torch.bmm(scores.softmax(-1), value.view(-1, columns, size)).view(rows, heads, columns, size)


@functools.lru_cache(maxsize=16)
def _causal_mask(columns: int, repeats: int, dtype: torch.dtype) -> Tensor:
    """[repeats * S, S]: -inf where a key comes after its query, 0 elsewhere."""
    return torch.full((columns, columns), -torch.inf, dtype=dtype).triu(1).repeat(repeats, 1)


class RMSNorm(torch.nn.Module):
    """RMS normalisation whose weight takes part in sequence parallelism's gradient sum (megatron's torch norm refuses that)."""

    def __init__(self, config, hidden_size, eps=1e-5, **unused):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)


class LayerNorm(torch.nn.LayerNorm):
    """Layer normalisation with a bias; weight and bias take part in sequence parallelism's gradient sum."""

    def __init__(self, config, hidden_size, eps=1e-5, **unused):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel
