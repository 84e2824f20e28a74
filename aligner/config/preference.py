"""Settings of train_reward_model.py that are its own; the rest it shares with supervised fine-tuning (config/supervised.py)."""

from dataclasses import dataclass, field
from enum import Enum


class Objective(Enum):
    pairwise = "pairwise"
    plackett_luce = "plackett_luce"
    regression = "regression"


@dataclass
class PreferenceConfig:
    objective: Objective = Objective.pairwise
    """pairwise: Bradley-Terry on pairs, and on rankings the mean over all their pairs; plackett_luce: the likelihood of whole rankings;
    regression: squared error of preference.attributes."""
    attributes: dict[str, float] = field(default_factory=dict)
    """For regression: name of each attribute in the data, and the weight by which it counts in the score that is served."""
    centre: float = 0.0
    """Weight of the squared sum of a pair's scores in the loss (of a ranking: twice their mean, squared), which keeps scores near 0
    (Eisenstein et al. 2023); 0.01 is usual."""
    head_lr_multiplier: float = 1.0
    """Learning rate of the score head over that of the backbone."""
    fresh_head: bool = False
    """Start with a score head of zeros even where model.checkpoint has one."""
    calibration_bins: int = 10
    """Bins of the predicted probability in the calibration of validation."""
