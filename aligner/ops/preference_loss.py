"""Losses of a reward model. Legend: m responses, A attributes. Responses to one prompt share a group id; ranks order them, 0 is best.

Groups are told by their ids, never by position, and all responses of a group must be there: a loss is of the group as a whole.
Metrics are detached SUMS (over groups, or over what their name says); divide after summing over micro-batches and ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.ops.masks import clean, same_shapes
from aligner.ops.policy_loss import per_denominator

Told = tuple[Tensor, dict[str, Tensor]]
COMPARISON_SUMS = ("correct", "margin", "groups", "off_centre", "score", "score_square", "responses")


def pairwise_loss(
    scores: Tensor,
    groups: Tensor,
    ranks: Tensor,
    margins: Tensor,
    mask: Tensor,
    *,
    denominator: float,
    centre: float = 0.0,
) -> Told:
    """Bradley-Terry: sum over groups of the mean over their ordered pairs of -log sigmoid(s_better - s_worse - margin_better).

    With two responses a group this is Bradley & Terry (1952); with more, InstructGPT's equation 1 (Ouyang et al. 2022), whose
    K choose 2 comparisons of a prompt count as one. The margin is that of Llama 2's equation 2. Responses of equal rank are not
    compared. centre: weight of (2 * mean score of the group)^2, for a pair (s_chosen + s_rejected)^2 (Eisenstein et al. 2023).

    scores [m] with gradients; groups [m] int64; ranks [m], lower is better; margins [m], of the better response of a pair; mask [m]
    bool. denominator: groups of the whole mini-batch, over all ranks and micro-batches. Returns (scalar, sums `correct` (share of a
    group's pairs that are in order, equal scores count half), `margin` (mean difference of a group's pairs), `groups`, and those of
    `_moments`)."""
    scores, margins = clean(scores, mask, "scores"), clean(margins, mask, "margins")
    together = _together(groups, mask)
    better = together & (ranks[:, None] < ranks[None, :])
    compared = better.sum(1).to(scores.dtype)
    pairs = together.to(scores.dtype) @ compared  # [m], those of the row's whole group
    share = torch.where(better, 1.0 / pairs.clamp_min(1.0)[:, None], 0.0)
    difference = scores[:, None] - scores[None, :]
    total = (share * F.softplus(margins[:, None] - difference)).sum()
    right = (difference > 0) + 0.5 * (difference == 0)
    metrics = {"correct": (share * right).sum(), "margin": (share * difference).sum(), "groups": share.sum()}
    return _finished(total, metrics, scores, together, mask, denominator=denominator, centre=centre)


def plackett_luce_loss(
    scores: Tensor, groups: Tensor, ranks: Tensor, mask: Tensor, *, denominator: float, centre: float = 0.0
) -> Told:
    """Minus the log-likelihood of whole rankings: sum over groups and places of logsumexp(scores from this place on) - score here
    (Plackett 1975, Luce 1959). With two responses it is Bradley-Terry.

    Arguments as in pairwise_loss; ranks of a group must differ. Returns (scalar, the same sums)."""
    scores = clean(scores, mask, "scores")
    together = _together(groups, mask)
    left = together & (ranks[:, None] <= ranks[None, :])
    # Rows that are masked have nothing left: they stand for themselves, and add 0.
    left = left | torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    total = (torch.where(left, scores[None, :], -torch.inf).logsumexp(1) - scores).sum()
    with torch.no_grad():
        metrics = pairwise_loss(scores, groups, ranks, torch.zeros_like(scores), mask, denominator=denominator)[1]
    return _finished(total, metrics, scores, together, mask, denominator=denominator, centre=centre)


def regression_loss(predicted: Tensor, wanted: Tensor, mask: Tensor, *, denominator: float) -> Told:
    """Squared error of attributes (SteerLM, Dong et al. 2023; HelpSteer): sum over the mask of (p - y)^2 / denominator.

    predicted [m, A] with gradients; wanted [m, A]; mask [m, A] bool: False where a response was not given a value of the attribute.
    denominator: values of the whole mini-batch. Returns (scalar, sums over responses `squared_error/i` and `values/i` of attribute i)."""
    same_shapes(mask, predicted=predicted, wanted=wanted)
    error = clean(predicted, mask, "predicted") - clean(wanted, mask, "wanted")
    squared = torch.where(mask, error, 0.0).square()
    metrics = {f"squared_error/{i}": squared[:, i].sum() for i in range(squared.size(1))}
    metrics |= {f"values/{i}": mask[:, i].sum().to(squared.dtype) for i in range(squared.size(1))}
    return per_denominator(squared.sum(), denominator), {name: value.detach() for name, value in metrics.items()}


def _together(groups: Tensor, mask: Tensor) -> Tensor:
    """[m, m] bool: both rows are real and of one group."""
    return (groups[:, None] == groups[None, :]) & mask[:, None] & mask[None, :]


def _finished(
    total: Tensor,
    metrics: dict[str, Tensor],
    scores: Tensor,
    together: Tensor,
    mask: Tensor,
    *,
    denominator: float,
    centre: float,
) -> Told:
    weights = together.to(scores.dtype)
    size = weights.sum(1).clamp_min(1.0)
    means = (weights @ scores) / size
    off_centre = torch.where(mask, (2.0 * means).square() / size, 0.0).sum()
    if centre:
        total = total + centre * off_centre
    metrics = {**metrics, "off_centre": off_centre, **_moments(scores, mask)}
    return per_denominator(total, denominator), {name: value.detach() for name, value in metrics.items()}


def _moments(scores: Tensor, mask: Tensor) -> dict[str, Tensor]:
    kept = torch.where(mask, scores, 0.0)
    return {"score": kept.sum(), "score_square": kept.square().sum(), "responses": mask.sum().to(scores.dtype)}
