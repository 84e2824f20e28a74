"""The KV cache of the torch engine: one tensor, fixed at build."""

import torch
from torch import Tensor

WINDOW_STEP = 16  # attended windows are multiples of this: few shapes, and vector loads stay aligned


def round_up(length: int) -> int:
    return -(-length // WINDOW_STEP) * WINDOW_STEP


class KVCache:
    """`keys` and `values`: [layers, rows, kv_heads, length, head_dim]. Active sequences are the first rows."""

    def __init__(
        self,
        *,
        layers: int,
        rows: int,
        kv_heads: int,
        length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.length = round_up(length)
        self.tensor = torch.zeros(2, layers, rows, kv_heads, self.length, head_dim, dtype=dtype, device=device)
        self.keys, self.values = self.tensor[0], self.tensor[1]
        self.nbytes = self.tensor.nbytes

    def move(self, target: Tensor, source: Tensor, length: int) -> None:
        """Rows `source` over rows `target` (int64 [m] each), their first `length` positions; one layer of copies at a time."""
        for layer in self.tensor.flatten(0, 1):
            layer[target, :, :length] = layer[source, :, :length]

    def release(self) -> None:
        self.tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        self.tensor.untyped_storage().resize_(self.nbytes)
        self.clear()

    def clear(self) -> None:
        """What lies beyond a row's length is masked by adding -inf, which a NaN would survive."""
        self.tensor.zero_()
