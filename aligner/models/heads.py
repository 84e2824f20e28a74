"""What stands in the place of GPTModel.output_layer: logits at chosen positions only, or one value a token.

Legend: B rows, S columns, H hidden size, V/tp this rank's part of the padded vocabulary, n chosen positions."""

from typing import Optional

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.ops.value_scale import HeadChange
from aligner.parallel.cpu_linear import linear

# On-disk name of the value or score head: NeMo's, and unlike the lm head's, so that neither can be loaded as the other.
HEAD_KEY = "rm_head.weight"
HEAD_BIAS_KEY = "rm_head.bias"


class ResponseOutput(torch.nn.Module):
    """The lm head, which computes logits only where they are wanted: prompts and padding cost nothing.

    Takes over the weight of the ColumnParallelLinear that GPTModel made (None where it is tied to the embedding of this stage)."""

    def __init__(self, weight: Optional[torch.nn.Parameter], *, sequence_parallel: bool, tensor_group: ProcessGroup):
        super().__init__()
        self.register_parameter("weight", weight)
        self.sequence_parallel = sequence_parallel
        self.tensor_group = tensor_group
        self.positions: Optional[Tensor] = None

    def select(self, positions: Optional[Tensor]) -> None:
        """For the next forward: the flat indices b * S + t [n] int64 of the hidden states to score; None scores all of them."""
        self.positions = positions

    def forward(
        self, hidden: Tensor, weight: Optional[Tensor] = None, runtime_gather_output=None
    ) -> tuple[Tensor, None]:
        """hidden [S, B, H] ([S/tp, B, H] with sequence parallelism) -> logits [n, 1, V/tp], or [S, B, V/tp] with no selection.

        GPTModel transposes the first two, so its caller sees [1, n, V/tp] or [B, S, V/tp]."""
        weight = self.weight if weight is None else weight
        if (
            self.sequence_parallel
        ):  # its backward sums over the tensor-parallel ranks, as the copy below does without it
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=self.tensor_group
            )
        chosen = self._chosen(hidden)
        if not self.sequence_parallel:
            chosen = copy_to_tensor_model_parallel_region(chosen, group=self.tensor_group)
        return linear(chosen, weight), None

    def _chosen(self, hidden: Tensor) -> Tensor:
        if self.positions is None:
            return hidden
        columns, rows, size = hidden.shape
        index = (self.positions % columns) * rows + self.positions // columns
        return hidden.reshape(columns * rows, size).index_select(0, index)[:, None]

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return _sharded(self, prefix, {"weight": 0}, sharded_offsets, metadata, self.tensor_group)


class ValueHead(torch.nn.Module):
    """Numbers of a token, in float32: hidden -> outputs (1 of a critic), zero at first, a whole copy on every tensor-parallel rank.

    A score head is the same module, read at the last token. biased: values that are normalised need a bias (ops/value_scale.py)."""

    def __init__(
        self,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        sequence_parallel: bool,
        tensor_group: ProcessGroup,
        outputs: int = 1,
        biased: bool = False,
    ):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(outputs, hidden_size, dtype=dtype, device=device))
        bias = torch.nn.Parameter(torch.zeros(1, dtype=dtype, device=device)) if biased else None
        self.register_parameter("bias", bias)
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel  # its gradient is then a part, to be summed
        self.sequence_parallel = sequence_parallel
        self.tensor_group = tensor_group

    def forward(self, hidden: Tensor, weight=None, runtime_gather_output=None) -> tuple[Tensor, None]:
        """hidden [S, B, H] -> [S, B, outputs] float32, of all S positions with sequence parallelism too."""
        values = F.linear(hidden.float(), self.weight.float(), None if self.bias is None else self.bias.float())
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tensor_group
            )
        return values, None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        found = _sharded(self, prefix, {}, sharded_offsets, metadata, self.tensor_group)
        for name, key in (("weight", HEAD_KEY), ("bias", HEAD_BIAS_KEY)):
            if f"{prefix}{name}" in found:
                found[f"{prefix}{name}"].key = key
        return found

    @torch.no_grad()
    def rescale(self, change: HeadChange) -> tuple[float, float]:
        """Weight and bias, the optimizer's float32 copies included, become what `change` says. Returns the bias before and after."""
        before = float(self.bias)
        for parameter, shift in ((self.weight, 0.0), (self.bias, change.shift)):
            parameter.copy_((parameter.double() * change.ratio + shift).to(parameter.dtype))
            master = getattr(parameter, "main_param", None)
            if master is not None:  # with ZeRO-1 the part that this rank updates
                master.copy_(master.double() * change.ratio + shift)
        return before, float(self.bias)


def _sharded(module, prefix, axes, sharded_offsets, metadata, tensor_group):
    return make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        axes,
        sharded_offsets,
        tp_group=tensor_group,
        dp_cp_group=metadata["dp_cp_group"],
    )
