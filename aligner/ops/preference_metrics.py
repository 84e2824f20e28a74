"""How well scores order responses. Legend: m responses, P ordered pairs of them. On the CPU, over whole sets of held-out rows."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """Every pair of a group in which one response is better. weights: of a group's pairs they sum to 1."""

    margins: Tensor  # [P] float64, score of the better response less that of the worse
    weights: Tensor  # [P] float64
    groups: Tensor  # [P] int64

    @property
    def right(self) -> Tensor:
        """[P] float64: 1 where the better response has the higher score, a half where both have the same."""
        return (self.margins > 0).double() + 0.5 * (self.margins == 0)


def ordered_pairs(scores: Tensor, groups: Tensor, ranks: Tensor) -> Pairs:
    """scores [m] float, groups [m] int64, ranks [m] int64 (0 is best)."""
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(groups.tolist()):
        rows.setdefault(group, []).append(row)
    order, score = ranks.tolist(), scores.double().tolist()
    margins, weights, names = [], [], []
    for group, members in rows.items():
        found = [score[i] - score[j] for i in members for j in members if order[i] < order[j]]
        margins += found
        weights += [1.0 / len(found)] * len(found)
        names += [group] * len(found)
    wide = {"dtype": torch.float64}
    return Pairs(torch.tensor(margins, **wide), torch.tensor(weights, **wide), torch.tensor(names, dtype=torch.int64))


def clustered_mean(values: Tensor, weights: Tensor, clusters: Tensor) -> tuple[float, float]:
    """(weighted mean, 95 % half-width): of values [n] that are alike within a cluster [n] int64 (pairs of one prompt).

    The normal approximation with the cluster-robust variance of a ratio: sum over clusters of (sum of w (x - mean))^2 / (sum of w)^2,
    times G / (G - 1) for G clusters. With one cluster the half-width is 0, and says nothing."""
    total = weights.sum()
    mean = (weights * values).sum() / total
    _, index = clusters.unique(return_inverse=True)
    count = int(index.max()) + 1
    sums = torch.zeros(count, dtype=torch.float64).index_add(0, index, weights * (values - mean))
    variance = sums.square().sum() / total**2 * (count / max(count - 1, 1))
    return float(mean), 1.96 * math.sqrt(float(variance))


@dataclass(frozen=True)
class Bin:
    """Pairs whose predicted order has a probability from `low` to `high`: their weight, mean probability, and share that is right."""

    low: float
    high: float
    weight: float
    confidence: float
    accuracy: float


def calibration(pairs: Pairs, bins: int) -> tuple[float, list[Bin]]:
    """(expected calibration error, the reliability table): Guo et al. 2017, equation 3, of the order that the scores predict.

    The probability of the predicted order is sigmoid(|margin|), from 0.5 to 1, which `bins` bins of equal width divide; the error is the
    mean, by weight, of |accuracy - confidence| over them."""
    confidence = pairs.margins.abs().sigmoid()
    index = ((confidence - 0.5) * 2 * bins).long().clamp(0, bins - 1)
    table, error, total = [], 0.0, float(pairs.weights.sum())
    for i in range(bins):
        weights = torch.where(index == i, pairs.weights, 0.0)
        if (weight := float(weights.sum())) > 0:
            found = [float((weights * x).sum()) / weight for x in (confidence, pairs.right)]
            table.append(Bin(0.5 + i / (2 * bins), 0.5 + (i + 1) / (2 * bins), weight, *found))
            error += weight / total * abs(found[0] - found[1])
    return error, table


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's, of two [n]; 0 where one of them does not vary."""
    x, y = (z.double() - z.double().mean() for z in (x, y))
    scale = float((x.square().sum() * y.square().sum()).sqrt())
    return float((x * y).sum()) / scale if scale > 0 else 0.0
