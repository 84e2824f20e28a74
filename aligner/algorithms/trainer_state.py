"""What the loop carries from step to step, and a checkpoint beside weights and optimizer."""

from dataclasses import dataclass, field
from typing import Any

from aligner.algorithms.critic_trust import CriticTrust
from aligner.ops.reward_scaling import RunningMoments


@dataclass
class TrainerState:
    """Everything of the loop that a resumed run needs beside weights and optimizer."""

    step: int = 0
    prompts_consumed: int = 0
    weight_version: int = 0
    kl_coefficient: float = 0.0
    scores: RunningMoments = field(default_factory=RunningMoments)  # for ppo.reward_scale=running
    trust: CriticTrust = field(default_factory=CriticTrust)

    @classmethod
    def of(cls, saved: dict[str, Any]) -> "TrainerState":
        """From the plain values of a checkpoint."""
        parts = {
            name: kind(**saved[name])
            for name, kind in (("scores", RunningMoments), ("trust", CriticTrust))
            if name in saved
        }
        return cls(**{**saved, **parts})
