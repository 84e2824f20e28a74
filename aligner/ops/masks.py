"""Masked reductions. What lies under a False mask never changes a result, NaN included; a NaN or inf under a True mask raises."""

import torch
from torch import Tensor


def same_shapes(mask: Tensor, **tensors: Tensor) -> None:
    """Assert that mask is bool and that every tensor has its shape: [B] against [B, 1] would broadcast silently to [B, B]."""
    assert mask.dtype == torch.bool, f"mask must be bool, is {mask.dtype}"
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    assert all(shape == tuple(mask.shape) for shape in shapes.values()), (
        f"shapes differ: mask {tuple(mask.shape)}, {shapes}"
    )


def clean(x: Tensor, mask: Tensor, name: str = "tensor") -> Tensor:
    """x where mask is True, 0 elsewhere; same shape, float32 (float64 stays). Gradients outside the mask are 0.

    Raises FloatingPointError that names the tensor and the first row where a NaN or inf lies under a True mask."""
    same_shapes(mask, **{name: x})
    kept = torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))
    bad = ~torch.isfinite(kept)
    if bad.any():
        where = bad.nonzero()[0].tolist()
        raise FloatingPointError(
            f"{name} is {kept[tuple(where)].item()} at row {where[0]}, index {where} (of {int(bad.sum())} such entries under the mask)"
        )
    return kept if kept.dtype == torch.float64 else kept.float()


def masked_sum(x: Tensor, mask: Tensor, name: str = "tensor") -> Tensor:
    """Scalar sum of x over mask; 0 where the mask is empty."""
    return clean(x, mask, name).sum()


def masked_mean(x: Tensor, mask: Tensor, name: str = "tensor") -> Tensor:
    """Scalar mean of x over mask; 0 where the mask is empty."""
    return clean(x, mask, name).sum() / mask.sum().clamp_min(1)


def masked_moments(x: Tensor, mask: Tensor, name: str = "tensor") -> tuple[Tensor, Tensor]:
    """(mean, population variance) of x over mask, scalars in x's type, both 0 where the mask is empty.

    Two passes in float64, so that the order of rows does not show."""
    kept = clean(x, mask, name)
    wide, count = kept.double(), mask.sum().clamp_min(1)
    mean = wide.sum() / count
    variance = torch.where(mask, wide - mean, 0.0).square().sum() / count
    return mean.to(kept.dtype), variance.to(kept.dtype)


def whiten(x: Tensor, mask: Tensor, min_std: float, name: str = "advantages") -> Tensor:
    """(x - mean) / max(std, min_std) over mask, 0 outside. The floor keeps a batch of nearly equal values from being blown up."""
    assert min_std > 0, f"min_std must be positive, is {min_std}"
    mean, variance = masked_moments(x, mask, name)
    return torch.where(mask, (clean(x, mask, name) - mean) / variance.sqrt().clamp_min(min_std), 0.0)
