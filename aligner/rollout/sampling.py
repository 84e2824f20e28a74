"""Which token a uniform stands for. Legend: n rows, V logits a row, L ids of a row's history."""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

CANDIDATES = 1024  # likeliest ids that are sorted to find a top-p set; all ids are, where these are not enough


@dataclass(frozen=True)
class Truncation:
    """Which ids a row may choose from, [n] each: top_k int64 (0: all), top_p and min_p float32 (1 and 0: all). See data.batch.Request."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@torch.inference_mode()
def sample(
    logits: Tensor,
    *,
    uniforms: Tensor,
    temperature: Tensor,
    vocab_size: int,
    any_greedy: bool = True,
    truncation: Optional[Truncation] = None,
) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling: the first real id whose cumulative probability exceeds u * total. `logits` is OVERWRITTEN.

    logits [n, >= V] float32, ids from vocab_size on are padding and never chosen; uniforms [n] float32 in [0, 1); temperature [n]
    float32, 0 is greedy; any_greedy False promises that no temperature is 0 (saves an argmax).
    Returns tokens [n] int64 and their log-probs [n] float32 under the tempered and truncated distribution (greedy rows: at
    temperature 1, whole). A row with a NaN gets some id below vocab_size and a NaN log-prob."""
    logits = logits[:, :vocab_size]
    best = logits.argmax(-1, keepdim=True) if any_greedy else None
    greedy = (temperature == 0)[:, None]
    probabilities = logits.div_(torch.where(greedy, 1.0, temperature[:, None])).softmax(-1)
    if truncation is not None:
        smallest = torch.where(greedy, 0.0, smallest_kept(probabilities, truncation))
        probabilities = torch.where(probabilities >= smallest, probabilities, probabilities * 0)  # NaN stays NaN
    # The CPU kernel accumulates float32 in double and rounds; asking CUDA for double keeps its parallel scan monotone too,
    # which is what makes an id of probability 0 unreachable.
    cumulative = probabilities.cumsum(-1, dtype=torch.float64 if logits.is_cuda else None).float()
    total = cumulative[:, -1:].contiguous()
    token = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True)
    # Should rounding lift u * total to the total: the last id that raised the sum, never a tail of probability 0.
    token = token.minimum(torch.searchsorted(cumulative, total)).clamp_(max=vocab_size - 1)
    if best is not None:
        token = torch.where(greedy, best, token)
    return token[:, 0], probabilities.gather(1, token).div_(total).log_()[:, 0]


def smallest_kept(probabilities: Tensor, truncation: Truncation) -> Tensor:
    """[n, 1]: the least probability that stays. Ids that tie with it stay too, so that the set does not depend on a sort's order."""
    vocab_size = probabilities.size(1)
    most = int(truncation.top_k.max())
    width = min(vocab_size, max(most, CANDIDATES))
    ordered = probabilities.topk(width).values
    found, whole = _smallest_of(ordered, probabilities, truncation)
    if width < vocab_size and not bool(whole.all()):
        found, _ = _smallest_of(probabilities.sort(-1, descending=True).values, probabilities, truncation)
    return found


def _smallest_of(ordered: Tensor, probabilities: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    """From the likeliest ids, ordered [n, w]: the least probability kept [n, 1], and whether w ids were enough to know it [n, 1]."""
    width = ordered.size(1)
    top_k, top_p, min_p = truncation.top_k[:, None], truncation.top_p[:, None], truncation.min_p[:, None]
    last = ordered.gather(1, (top_k - 1).clamp(0, width - 1))
    smallest = torch.where(top_k > 0, last, 0.0)
    kept = torch.where(ordered >= smallest, ordered, 0.0)
    total = torch.where(top_k > 0, kept.sum(-1, keepdim=True), probabilities.sum(-1, keepdim=True))
    before = kept.cumsum(-1) - kept  # the share of everything likelier: an id stays while that has not reached top_p
    needed = ((before < top_p * total) & (kept > 0)).sum(-1, keepdim=True)
    reached = (needed < width) | (top_p >= 1) | (top_k > 0)
    nucleus = ordered.gather(1, (needed - 1).clamp(0, width - 1))
    smallest = torch.where(top_p < 1, smallest.maximum(nucleus), smallest)
    return smallest.maximum(min_p * ordered[:, :1]), reached


@torch.inference_mode()
def penalise(logits: Tensor, *, history: Tensor, penalty: Tensor) -> None:
    """Repetition penalty (Keskar et al. 2019) in place. history [n, L] int64: ids that a row holds, any of them repeated as padding;
    penalty [n] float32, 1 is none."""
    held = logits.gather(1, history)
    penalty = penalty[:, None]
    logits.scatter_(1, history, torch.where(held > 0, held / penalty, held * penalty))
