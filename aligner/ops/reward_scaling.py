"""Scores brought to a common scale before they become rewards, and bounded. Statistics are in float64: they add up over a whole run."""

import math
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from aligner.config.ppo import RewardScale

MIN_STD = 1e-4
"""Smallest deviation that is divided by: scores that are all alike become 0 and are not blown up."""


@dataclass
class RunningMoments:
    """Mean and population variance of all numbers seen so far, by the pairwise update of Chan, Golub and LeVeque (1979).

    The three numbers are its whole state."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared deviations from the mean."""

    def update(self, x: Tensor) -> None:
        """x: any shape, finite. Nothing changes where it is empty."""
        if not x.numel():
            return
        wide = x.double()
        count, mean = x.numel(), float(wide.mean())
        delta, total = mean - self.mean, self.count + count
        self.squares += float((wide - mean).square().sum()) + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    @property
    def std(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0


def scale_scores(
    scores: Tensor,
    counted: Tensor,
    *,
    scale: RewardScale,
    groups: Tensor,
    moments: RunningMoments,
    clip: Optional[float],
) -> Tensor:
    """scores [B] float32 -> (score - mean) / max(std, 1e-4), then clipped to +-clip (None: not), [B] float32.

    running: mean and deviation of all scores of the run, these included, which are added to `moments`. batch: of these scores. group:
    of the scores of the same prompt, as GRPO does (Shao et al. 2024, section 4.1.2); groups [B] int64 names them. counted [B] bool:
    rows that count in the statistics; the others come back as they are."""
    assert scores.shape == counted.shape == groups.shape, f"{scores.shape}, {counted.shape} and {groups.shape} differ"
    wide, used = scores.double(), scores[counted].double()
    if scale is RewardScale.running:
        moments.update(used)
        wide = _standard(wide, moments.mean, moments.std)
    elif scale is RewardScale.batch and len(used):
        wide = _standard(wide, float(used.mean()), float(used.std(unbiased=False)))
    elif scale is RewardScale.group:
        for group in groups[counted].unique():
            mine = counted & (groups == group)
            wide[mine] = _standard(wide[mine], float(wide[mine].mean()), float(wide[mine].std(unbiased=False)))
    if clip is not None:
        wide = wide.clamp(-clip, clip)
    return torch.where(counted, wide.float(), scores)


def _standard(x: Tensor, mean: float, std: float) -> Tensor:
    return (x - mean) / max(std, MIN_STD)
