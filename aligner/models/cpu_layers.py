"""Layers for megatron-core's local spec: what the Transformer Engine spec brings on a GPU, from torch's own functions."""

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class SDPAttention(MegatronModule):
    """Causal core attention on torch's scaled_dot_product_attention; the constructor and forward of megatron's DotProductAttention."""

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
        """query [S, B, heads, D], key and value [S, B, groups, D] -> [S, B, heads * D]; attention_mask True = not seen, None = causal."""
        if attention_bias is not None or packed_seq_params is not None:
            raise ValueError("attention_bias and packed sequences are not supported by SDPAttention")
        # Copied, so that a head's rows lie together: strided ones (S outside B) cost this kernel 40 % of its time and more.
        query, key, value = (x.permute(1, 2, 0, 3).contiguous() for x in (query, key, value))
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
