"""Log-probabilities and entropies of logits that are split over the tensor-parallel ranks.

Legend: n positions, V the padded vocabulary, V/tp this rank's columns, starting at rank * V/tp."""

from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# Elements of a float32 working copy of the logits; whole batches would double the memory of the largest tensor there is.
_BLOCK_ELEMENTS = 1 << 24


def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    group: ProcessGroup,
    vocab_size: Optional[int] = None,
    temperature: float = 1.0,
) -> Tensor:
    """log softmax(logits / temperature) at the targets: logits [n, V/tp] of any float type, targets [n] int64 -> [n] float32.

    vocab_size: the real vocabulary; logits of padded ids beyond it count as -inf (None: there are none). The logits are read only.
    Raises ValueError for a temperature that is not positive, and on a CPU for a target outside the vocabulary."""
    return _checked(logits, targets, group, vocab_size, temperature, with_entropy=False)[0]


def vocab_parallel_logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    group: ProcessGroup,
    vocab_size: Optional[int] = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """As vocab_parallel_logprobs, and the entropy in nats of each tempered distribution: ([n], [n]) float32."""
    return _checked(logits, targets, group, vocab_size, temperature, with_entropy=True)


def _checked(logits, targets, group, vocab_size, temperature, *, with_entropy: bool) -> tuple[Tensor, Tensor]:
    if not temperature > 0:
        raise ValueError(f"log-probabilities need a temperature above 0, got {temperature}")
    vocab_size = logits.size(-1) * dist.get_world_size(group) if vocab_size is None else vocab_size
    # Not on a GPU: it would wait for the device at every micro-batch.
    if not targets.is_cuda and targets.numel() and not (int(targets.min()) >= 0 and int(targets.max()) < vocab_size):
        raise ValueError(f"targets must be in [0, {vocab_size}), found {int(targets.min())} to {int(targets.max())}")
    return _VocabParallel.apply(logits, targets, group, vocab_size, temperature, with_entropy)


def _blocks(logits: Tensor):
    rows = max(1, _BLOCK_ELEMENTS // max(1, logits.size(1)))
    return [slice(start, start + rows) for start in range(0, logits.size(0), rows)]


class _VocabParallel(torch.autograd.Function):
    """With l = logits / T, z = logsumexp l, p = exp(l - z): log-prob = l[target] - z, entropy H = z - sum p l.

    d log-prob / d l_j = [j = target] - p_j;  d H / d l_j = -p_j (l_j - z + H)."""

    @staticmethod
    def forward(ctx, logits, targets, group, vocab_size, temperature, with_entropy):
        ctx.set_materialize_grads(False)  # an entropy that is only reported has no gradient, which saves three passes
        columns = logits.size(1)
        first = dist.get_rank(group) * columns
        real = min(max(vocab_size - first, 0), columns)
        here = targets - first
        mine = (here >= 0) & (here < real)
        local = _local_terms(logits[:, :real], here.clamp(0, max(real - 1, 0)), mine, temperature, with_entropy)
        norm, chosen, entropy = _combine(local, group)
        ctx.save_for_backward(logits, here, mine, norm, entropy)
        ctx.real, ctx.temperature = real, temperature
        return chosen - norm, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        logits, here, mine, norm, entropy = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(norm)
        out = torch.empty_like(logits)
        out[:, ctx.real :] = 0.0
        for rows in _blocks(logits):
            # In place where it can be: on a CPU every pass over this block costs what a tenth of its matrix product does.
            log_p = _tempered(logits[rows, : ctx.real], ctx.temperature) - norm[rows, None]
            if grad_entropy is None:
                grad = log_p.exp_().mul_(-grad_logprobs[rows, None])
            else:
                p = log_p.exp()
                grad = log_p.add_(entropy[rows, None]).mul_(-grad_entropy[rows, None]).sub_(grad_logprobs[rows, None])
                grad.mul_(p)
            at = mine[rows].nonzero()[:, 0]
            grad[at, here[rows][at]] += grad_logprobs[rows][at]
            out[rows, : ctx.real] = grad if ctx.temperature == 1.0 else grad.div_(ctx.temperature)
        return out, None, None, None, None, None


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    """float32 logits / temperature; the logits themselves where there is nothing to do."""
    return logits.float() if temperature == 1.0 else logits.float() / temperature


def _local_terms(logits, here, mine, temperature: float, with_entropy: bool) -> Tensor:
    """[3, n] float32 of this rank's columns alone: logsumexp, the target's logit (0 if elsewhere), the entropy."""
    terms = torch.zeros(3, logits.size(0), device=logits.device)
    terms[0] = -torch.inf
    if logits.size(1) == 0:  # every column of this rank is padding
        return terms
    for rows in _blocks(logits):
        scaled = _tempered(logits[rows], temperature)
        peak = scaled.amax(-1)
        below = scaled - peak[:, None]
        weight = below.exp()
        total = weight.sum(-1)
        log_total = total.log()
        terms[0, rows] = peak + log_total
        terms[1, rows] = torch.where(mine[rows], scaled.gather(1, here[rows, None])[:, 0], 0.0)
        if with_entropy:
            terms[2, rows] = log_total - weight.mul_(below).sum(-1) / total
    return terms


def _combine(local: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """The same three terms over all columns, each [n].

    With z_r and H_r of rank r and w_r = exp(z_r - z): H = sum_r w_r (H_r + z - z_r)."""
    if dist.get_world_size(group) == 1:
        return local[0], local[1], local[2]
    peak = local[0].clone()
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    below = (peak - local[0]).nan_to_num(posinf=0.0)  # a rank of padding alone: its weight is 0 anyway
    weight = (local[0] - peak).exp()
    sums = torch.stack([weight, local[1], weight * (local[2] + below)])
    dist.all_reduce(sums, group=group)
    total, chosen, entropy = sums
    return peak + total.log(), chosen, entropy / total + total.log()


@torch.no_grad()
def vocab_parallel_is_best(logits: Tensor, targets: Tensor, *, group: ProcessGroup, vocab_size: int) -> Tensor:
    """[n] bool: whether the target is a likeliest id of its distribution. logits [n, V/tp], targets [n] int64, as above."""
    columns = logits.size(1)
    first = dist.get_rank(group) * columns
    real = min(max(vocab_size - first, 0), columns)
    here = targets - first
    mine = (here >= 0) & (here < real)
    terms = torch.full((2, logits.size(0)), -torch.inf, device=logits.device)
    if real:
        terms[0] = logits[:, :real].amax(-1).float()
        chosen = logits.gather(1, here.clamp(0, real - 1)[:, None])[:, 0].float()
        terms[1] = torch.where(mine, chosen, -torch.inf)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(terms, op=dist.ReduceOp.MAX, group=group)
    return terms[1] >= terms[0]
