"""Forward and backward passes over Megatron's schedules (none, 1F1B, interleaved): the one place that has a forward_step.

Losses come back already divided by the denominator of the whole mini-batch and are only summed from there on (over micro-batches and
data-parallel ranks): `calculate_per_token_loss` is set and finalize_model_grads is called without a token count, since Megatron's other
path divides by the number of micro-batches, and its DDP by the data-parallel degree."""

from functools import partial
from typing import Any, Callable, Iterator, Mapping, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.models import micro_batches as cutting
from aligner.models.build import unwrap
from aligner.models.micro_batches import MicroBatch
from aligner.parallel.balance import balance_rows
from aligner.parallel.collectives import broadcast_object, from_last_stage
from aligner.parallel.device import DEVICE, ON_GPU
from aligner.parallel.topology import Topology

from megatron.core.distributed import finalize_model_grads  # isort: skip  (after aligner.parallel, which adapts it to a CPU)
from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip
from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip

Chunks = list[torch.nn.Module]
Positions = Callable[[MicroBatch], Tensor]
"""Flat indices b * W + t of the hidden states that the head is wanted at."""
Read = Callable[[MicroBatch, Tensor], Any]
"""(micro-batch, output of the last stage) -> what is kept of it."""
Loss = Callable[[MicroBatch, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, output of the last stage) -> (scalar share of the mini-batch's loss, sums to be added up)."""


def micro_batches(
    tokens: Tensor,
    lengths: Tensor,
    fields: Mapping[str, Tensor],
    *,
    micro_batch_size: int,
    micro_batch_tokens: Optional[int] = None,
    packed_tokens: Optional[int] = None,
    together: Optional[Tensor] = None,
    topology: Topology,
) -> list[MicroBatch]:
    """The micro-batches of this rank: of micro_batch_size rows, or of as many as micro_batch_tokens hold where that is given, or of
    rows packed into one of packed_tokens at most (fields [B, S] alone then). tokens [B, S] int64, lengths [B] int64, fields [B, S] or
    [B], the same on every rank. together [B] int64: rows of equal id go into one micro-batch, however many they are.

    Raises ValueError for packing or a budget of tokens in the interleaved schedule."""
    sizes = lengths.tolist()
    # The interleaved schedule needs one shape: with two stages, where the previous and the next rank are the same, Megatron sends the
    # shapes of both directions in an order that the receiver takes for the other one.
    interleaved = topology.virtual_pipeline is not None
    multiple = cutting.width_multiple(topology.tensor, ON_GPU)
    if packed_tokens is not None:
        if interleaved:
            raise ValueError("packed rows do not go with parallel.virtual_pipeline: leave one out")
        dealt = balance_rows(sizes, topology.data), topology.data_rank
        cut = {"multiple": multiple, "device": DEVICE}
        bins = cutting.plan_packed(sizes, *dealt, budget=packed_tokens).micro_batches
        return [cutting.build_packed(rows, tokens, lengths, fields, **cut) for rows in bins]
    if micro_batch_tokens is not None and interleaved:
        raise ValueError("a budget of tokens a micro-batch does not go with parallel.virtual_pipeline: leave one out")
    count_multiple = topology.pipeline if interleaved else 1
    if together is None and micro_batch_tokens is None:
        dealt = balance_rows(sizes, topology.data), topology.data_rank
        plan = cutting.plan(sizes, *dealt, micro_batch_size=micro_batch_size, count_multiple=count_multiple)
    else:
        units = cutting.units_of(range(len(sizes)) if together is None else together.tolist())
        parts = balance_rows([sum(sizes[row] for row in unit) for unit in units], topology.data)
        plan = cutting.plan_units(
            sizes,
            [[units[i] for i in part] for part in parts],
            topology.data_rank,
            **(
                {"micro_batch_tokens": micro_batch_tokens}
                if micro_batch_tokens
                else {"micro_batch_size": micro_batch_size}
            ),
            multiple=multiple,
            filled=interleaved,
            count_multiple=count_multiple,
        )
    widths = cutting.widths(plan, sizes, multiple=multiple, uniform=interleaved)
    return [
        cutting.build(rows, tokens, lengths, fields, rows_each=plan.height(i), width=width, device=DEVICE)
        for i, (rows, width) in enumerate(zip(plan.micro_batches, widths, strict=True))
    ]


def forward(
    chunks: Chunks, micro: list[MicroBatch], topology: Topology, *, read: Read, positions: Optional[Positions] = None
) -> list[Any]:
    """Forward pass without gradients. On the last stage: what `read` returned for each micro-batch, in order; elsewhere []."""
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        return _schedule(chunks, micro, topology, finish=partial(_read, read), positions=positions, forward_only=True)


def forward_backward(
    chunks: Chunks, micro: list[MicroBatch], topology: Topology, *, loss: Loss, positions: Optional[Positions] = None
) -> dict[str, float]:
    """Forward and backward pass; gradients are added to the DDP buffers and reduced over data-parallel ranks.

    Returns on every rank the sums of `loss`'s metrics over the whole mini-batch, with `loss` itself among them. `loss` must not raise on
    one rank alone (the others would wait in a collective): it returns a loss that is not finite instead."""
    for chunk in chunks:
        chunk.train()
    told = _schedule(chunks, micro, topology, finish=partial(_with_loss, loss), positions=positions, forward_only=False)
    return _total(told, topology)


def forward_sums(
    chunks: Chunks, micro: list[MicroBatch], topology: Topology, *, loss: Loss, positions: Optional[Positions] = None
) -> dict[str, float]:
    """What forward_backward returns, without gradients and with nothing changed."""
    read = partial(_told, loss)
    return _total(forward(chunks, micro, topology, read=read, positions=positions), topology)


def to_global(parts: list[Tensor], micro: list[MicroBatch], shape: tuple[int, ...], topology: Topology) -> Tensor:
    """The global tensor ([B, S] or [B], float32, on the CPU of every rank) of the last stage's parts, one a micro-batch."""
    whole = None
    if topology.is_last_stage:
        whole = cutting.scatter(parts, micro, shape).to(DEVICE)
        if topology.data > 1:
            dist.all_reduce(whole, group=topology.data_group)
    return from_last_stage(whole, shape, torch.float32, topology).cpu()


def finalize(chunks: Chunks, num_tokens: Optional[Tensor] = None, **kwargs) -> None:
    """Megatron's finalize_model_grads without its scaling by tokens: losses are divided already."""
    del num_tokens
    finalize_model_grads(chunks, None, **kwargs)


def _schedule(
    chunks: Chunks,
    micro: list[MicroBatch],
    topology: Topology,
    *,
    finish: Callable,
    positions: Optional[Positions],
    forward_only: bool,
) -> list[Any]:
    run = get_forward_backward_func(topology.pipeline, topology.virtual_pipeline)
    iterators = [iter(micro) for _ in chunks]
    several = len(chunks) > 1
    return run(
        forward_step_func=partial(_forward_step, positions=positions, finish=finish),
        data_iterator=iterators if several else iterators[0],
        model=chunks if several else chunks[0],
        num_microbatches=len(micro),
        # Where the shapes that stages exchange are sent with the tensors (variable_seq_lengths), this is not looked at.
        seq_length=max(m.tokens.size(1) for m in micro),
        micro_batch_size=micro[0].tokens.size(0),
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _forward_step(
    iterator: Iterator[MicroBatch], chunk: torch.nn.Module, *, positions: Optional[Positions], finish: Callable
) -> tuple[Tensor, Callable]:
    micro = next(iterator)
    model = unwrap(chunk)
    if model.post_process and positions is not None:
        model.output_layer.select(positions(micro))
    # No attention mask: it is causal, and padding is on the right, where no real token looks.
    output = chunk(micro.tokens, micro.position_ids, None, packed_seq_params=_packing(micro))
    return output, partial(finish, micro)


def _packing(micro: MicroBatch) -> Optional[PackedSeqParams]:
    if micro.bounds is None:
        return None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=micro.bounds,
        cu_seqlens_kv=micro.bounds,
        max_seqlen_q=micro.longest,
        max_seqlen_kv=micro.longest,
    )


def _read(read: Read, micro: MicroBatch, output: Tensor, non_loss_data: bool = True) -> Any:
    assert non_loss_data
    return read(micro, output)


def _with_loss(loss: Loss, micro: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    value, sums = loss(micro, output)
    tokens = torch.zeros((), dtype=torch.int, device=value.device)
    return value, tokens, {"loss": value.detach(), **sums}


def _told(loss: Loss, micro: MicroBatch, output: Tensor) -> dict[str, Tensor]:
    value, sums = loss(micro, output)
    return {"loss": value, **sums}


def _total(told: list[dict[str, Tensor]], topology: Topology) -> dict[str, float]:
    """Sum dicts of scalars over micro-batches and data-parallel ranks, and tell the other stages."""
    sums: dict[str, float] = {}
    if topology.is_last_stage:
        names = sorted(told[0])
        stacked = torch.stack([torch.stack([one[name].double() for name in names]) for one in told]).sum(0)
        if topology.data > 1:
            dist.all_reduce(stacked, group=topology.data_group)
        sums = dict(zip(names, stacked.tolist(), strict=True))
    if topology.pipeline == 1:
        return sums
    return broadcast_object(sums, topology.last_stage_rank, topology.pipeline_group)
