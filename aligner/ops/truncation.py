"""What is done about a response that was cut at its length: truncated is not terminated."""

import torch
from torch import Tensor

from aligner.config.ppo import Truncation


def handle_truncation(
    scores: Tensor, bootstrap: Tensor, mask: Tensor, truncated: Tensor, *, truncation: Truncation, penalty: float
) -> tuple[Tensor, Tensor, Tensor]:
    """scores, bootstrap [B] float32; mask [B, S] bool; truncated [B] bool -> (scores, bootstrap, mask) as advantages need them.

    A terminated response has bootstrap 0 whatever was given. For a truncated one: `bootstrap` keeps V of the state after the last
    token; `mask` empties the row's mask, so that it leaves both losses and the whitening; `penalise` subtracts penalty from the
    score; `ignore` takes it for terminated. All but `bootstrap` set its bootstrap to 0. Nothing is changed in place."""
    rows = mask.shape[:1]
    shapes = {"scores": scores.shape, "bootstrap": bootstrap.shape, "truncated": truncated.shape}
    assert all(shape == rows for shape in shapes.values()), f"shapes differ: mask {tuple(mask.shape)}, {shapes}"
    assert mask.dtype == torch.bool and truncated.dtype == torch.bool, f"mask {mask.dtype}, truncated {truncated.dtype}"
    keeps_value = truncated if truncation is Truncation.bootstrap else torch.zeros_like(truncated)
    bootstrap = torch.where(keeps_value, bootstrap, 0.0)
    if truncation is Truncation.mask:
        mask = mask & ~truncated[:, None]
    if truncation is Truncation.penalise:
        scores = torch.where(truncated, scores - penalty, scores)
    return scores, bootstrap, mask


def soft_overlong_penalty(lengths: Tensor, *, whole: int, cache: int) -> Tensor:
    """[B] float32, from 0 to -1: 0 for responses of up to whole - cache tokens, then falling linearly to -1 at `whole` and beyond (DAPO,
    Yu et al. 2025, equation 13: there L_max and L_cache). lengths [B]: tokens of each response."""
    assert 0 < cache <= whole, f"cache {cache} must be from 1 to whole {whole}"
    return ((whole - cache - lengths).float() / cache).clamp(-1.0, 0.0)
