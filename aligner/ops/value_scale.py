"""Returns on a scale that a value head can learn, while the values that it says keep their meaning: PopArt (van Hasselt et al. 2016)."""

import math
from dataclasses import dataclass

from torch import Tensor

from aligner.ops.masks import masked_moments

MIN_SCALE, MAX_SCALE = 2.0**-13, 2.0**20


@dataclass(frozen=True)
class HeadChange:
    """What a change of scale makes of a linear head, so that it says the same as before: weight * ratio, bias * ratio + shift."""

    ratio: float
    shift: float


@dataclass
class ValueScale:
    """V = scale * n + offset, where n is what the head says; the six numbers are its whole state.

    mean, square: first and second moment of the returns, exponentially averaged over train steps. weight: 1 - (1 - rate)^steps,
    which corrects the average for its start (section 2.1 there: beta_t = beta / (1 - (1 - beta)^t)). The scale is the power of two
    next to the deviation: a head's weight times a power of two is exact in every float type, bfloat16 too."""

    rate: float
    mean: float = 0.0
    square: float = 0.0
    weight: float = 0.0
    scale: float = 1.0
    offset: float = 0.0

    def observe(self, returns: Tensor, mask: Tensor) -> HeadChange:
        """Add the returns [B, S] under mask [B, S] of one train step, and move to the new scale. Returns what the head must become.

        An empty mask changes nothing. Raises FloatingPointError where a return under the mask is not finite."""
        if not mask.any():
            return HeadChange(1.0, 0.0)
        mean, variance = (float(x) for x in masked_moments(returns.double(), mask, "returns"))
        self.weight += self.rate * (1.0 - self.weight)
        step = self.rate / self.weight
        self.mean += step * (mean - self.mean)
        self.square += step * (variance + mean**2 - self.square)
        old_scale, old_offset = self.scale, self.offset
        std = math.sqrt(max(self.square - self.mean**2, 0.0))
        if std >= MIN_SCALE:  # below, the returns are alike, and nothing is known of their scale
            self.scale = power_of_two(std)
        self.offset = self.mean
        return HeadChange(old_scale / self.scale, (old_offset - self.offset) / self.scale)

    def settle(self, change: HeadChange, before: float, after: float) -> None:
        """Take into the offset what the bias lost when it was rounded to its type: it was `before`, should have become
        before * ratio + shift, and is `after`."""
        self.offset += self.scale * (before * change.ratio + change.shift - after)

    def normalised(self, values: Tensor) -> Tensor:
        """V -> n."""
        return (values - self.offset) / self.scale

    def denormalised(self, outputs: Tensor) -> Tensor:
        """n -> V."""
        return outputs * self.scale + self.offset


def power_of_two(x: float) -> float:
    """The power of two nearest to x > 0 in the logarithm, within [2^-13, 2^20]."""
    return min(max(2.0 ** round(math.log2(x)), MIN_SCALE), MAX_SCALE)
