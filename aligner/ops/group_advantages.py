"""Critic-free advantages from several responses to the same prompt. A group is what has the same id: never a position, never equal tokens.

Legend: B responses; returns [B] are their whole returns (score less any KL penalty), counted [B] bool says which ones count (a response
whose mask is empty does not), groups [B] int64 names the prompt. Order does not matter, and groups may be of unlike size: a response that
a filter took away is not there. All give [B] float32: the advantage of every token of the response, 0 where it does not count."""

import torch
from torch import Tensor

from aligner.ops.masks import clean

MIN_STD = 1e-4
"""Smallest deviation that is divided by: a group whose returns are all alike teaches nothing and is not blown up."""


def group_norm(returns: Tensor, counted: Tensor, groups: Tensor) -> Tensor:
    """(return - mean) / std of the group: GRPO with outcome supervision (Shao et al. 2024, "DeepSeekMath", section 4.1.2).

    std is the group's population deviation; dividing by n - 1 instead would shrink all advantages by sqrt((n - 1) / n)."""
    centred, count, index = _centred(returns, counted, groups)
    variance = _group_sums(centred.square(), index, len(count)) / count
    return _finished(centred / variance.sqrt().clamp_min(MIN_STD)[index], counted)


def dr_grpo(returns: Tensor, counted: Tensor, groups: Tensor) -> Tensor:
    """return - mean of the group: without the deviation, which weighs prompts by how easy they are (Liu et al. 2025, "Understanding
    R1-Zero-like training", section 3.2)."""
    return _finished(_centred(returns, counted, groups)[0], counted)


def rloo(returns: Tensor, counted: Tensor, groups: Tensor) -> Tensor:
    """return - mean of the others' returns in the group: REINFORCE leave-one-out (Ahmadian et al. 2024, "Back to basics", section 2.3;
    Kool et al. 2019). A response without others has no baseline, and gets 0.

    With n responses it is n / (n - 1) times the return less the group's own mean."""
    centred, count, index = _centred(returns, counted, groups)
    size = count[index]
    return _finished(torch.where(size > 1, centred * size / (size - 1).clamp_min(1), 0.0), counted)


def equal_groups(returns: Tensor, counted: Tensor, groups: Tensor) -> tuple[int, int]:
    """(groups whose counted returns are all alike, groups with a counted return)."""
    some = groups[counted].unique()
    alike = [bool((mine := returns[counted & (groups == group)]).max() - mine.min() <= MIN_STD) for group in some]
    return sum(alike), len(alike)


def _centred(returns: Tensor, counted: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(returns less their group's mean [B] float64, 0 where not counted; size of each group [G] float64; the group of each response [B],
    0 to G - 1)."""
    shapes = (returns.shape, counted.shape, groups.shape)
    assert returns.dim() == 1 and len(set(shapes)) == 1, f"returns, counted and groups must be [B], are {shapes}"
    wide = clean(returns, counted, "returns").double()
    names, index = groups.unique(return_inverse=True)
    count = _group_sums(counted.double(), index, len(names)).clamp_min(1)
    mean = _group_sums(wide, index, len(names)) / count
    return torch.where(counted, wide - mean[index], 0.0), count, index


def _group_sums(x: Tensor, index: Tensor, groups: int) -> Tensor:
    return torch.zeros(groups, dtype=torch.float64).index_add(0, index, x)


def _finished(x: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, x, 0.0).float()
