"""Which token a uniform stands for. Legend: n rows, V logits a row."""

import torch
from torch import Tensor


@torch.inference_mode()
def sample(
    logits: Tensor, *, uniforms: Tensor, temperature: Tensor, vocab_size: int, any_greedy: bool = True
) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling: the first real id whose cumulative probability exceeds u * total. `logits` is OVERWRITTEN.

    logits [n, >= V] float32, ids from vocab_size on are padding and never chosen; uniforms [n] float32 in [0, 1); temperature [n]
    float32, 0 is greedy; any_greedy False promises that no temperature is 0 (saves an argmax).
    Returns tokens [n] int64 and their log-probs [n] float32 under the tempered distribution (greedy rows: at temperature 1).
    A row with a NaN gets some id below vocab_size and a NaN log-prob."""
    logits = logits[:, :vocab_size]
    best = logits.argmax(-1, keepdim=True) if any_greedy else None
    greedy = (temperature == 0)[:, None]
    probabilities = logits.div_(torch.where(greedy, 1.0, temperature[:, None])).softmax(-1)
    # The CPU kernel accumulates float32 in double and rounds; asking CUDA for double keeps its parallel scan monotone too,
    # which is what makes an id of probability 0 unreachable.
    cumulative = probabilities.cumsum(-1, dtype=torch.float64 if logits.is_cuda else None).float()
    total = cumulative[:, -1:].contiguous()
    token = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True)
    # Should rounding lift u * total to the total: the last id that raised the sum, never a tail of probability 0.
    token = token.minimum(torch.searchsorted(cumulative, total)).clamp_(max=vocab_size - 1)
    if best is not None:
        token = torch.where(greedy, best, token)
    return token[:, 0], probabilities.gather(1, token).log_()[:, 0]
