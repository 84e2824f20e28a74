"""How much of the returns the values explain: overall, by position in the response, and by its length."""

import torch
from torch import Tensor

from aligner.ops.masks import clean, masked_moments, same_shapes

POSITIONS = 4
LEAST = 1e-12
SHARE = 1e-3  # of the whole variance: a part that varies less would tell of rounding


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, *, least: float = LEAST) -> float:
    """1 - Var(returns - values) / Var(returns) over mask; 0 where the returns do not vary (by `least`), since nothing is there to explain.

    values, returns: [B, S]. Give Monte-Carlo returns: GAE targets contain V and flatter it."""
    same_shapes(mask, values=values, returns=returns)
    values, returns = clean(values, mask, "values"), clean(returns, mask, "returns")
    _, total = masked_moments(returns, mask)
    _, rest = masked_moments(returns - values, mask)
    return 1.0 - (rest / total).item() if total > least else 0.0


def explained_variance_parts(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    """The same within parts of the mask: `position_1` to `position_4`, the quarters of each response (chosen token i of n is in
    quarter 4 i // n + 1), and `tokens_5-8` and its kind, the responses of so many tokens (powers of two; those that there are). 0 where
    the returns of a part vary by less than a thousandth of what they vary by overall."""
    lengths = mask.sum(1)
    quarter = POSITIONS * (mask.cumsum(1) - 1) // lengths.clamp_min(1)[:, None]
    parts = {f"position_{q + 1}": mask & (quarter == q) for q in range(POSITIONS)}
    top = torch.pow(2, lengths.clamp_min(1).double().log2().ceil()).long()
    for most in top[lengths > 0].unique().tolist():
        name = f"tokens_{most // 2 + 1}-{most}" if most > 2 else f"tokens_{most}"
        parts[name] = mask & (top == most)[:, None]
    _, total = masked_moments(returns, mask)
    least = max(LEAST, SHARE * float(total))
    return {name: explained_variance(values, returns, part, least=least) for name, part in parts.items()}
