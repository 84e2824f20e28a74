"""What a score head says: the meaning of its outputs, and the size of its scores. Kept in model_config.yaml, under `reward`."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Optional

import torch
from torch import Tensor


@dataclass(frozen=True)
class RewardHead:
    """What a score head says, and of what size its scores are. Written in model_config.yaml under `reward`.

    attributes: the name of each output, in order; weights: by which outputs are added up to the score. mean, std and count: of the
    scores of held-out responses, where training measured them."""

    attributes: tuple[str, ...]
    weights: tuple[float, ...]
    mean: Optional[float] = None
    std: Optional[float] = None
    count: int = 0

    def __post_init__(self):
        if not self.attributes or len(set(self.attributes)) != len(self.attributes):
            raise ValueError(f"reward.attributes must be names, each once, got {list(self.attributes)}")
        if len(self.weights) != len(self.attributes) or not all(_finite(weight) for weight in self.weights):
            raise ValueError(
                f"reward.weights must be a number for each of {', '.join(self.attributes)}, got {list(self.weights)}"
            )
        if (self.mean is None) is not (self.std is None) or not (
            self.mean is None or (_finite(self.mean) and _finite(self.std) and self.std >= 0)
        ):
            raise ValueError(f"reward.mean and reward.std must be numbers, got {self.mean!r} and {self.std!r}")

    @classmethod
    def of(cls, written: Any) -> "RewardHead":
        """From the value of the key `reward`. Raises ValueError where it is none."""
        known = {field.name for field in fields(cls)}
        if not isinstance(written, dict) or not {"attributes", "weights"} <= set(written) <= known:
            raise ValueError(
                f"reward must have attributes and weights, and at most {', '.join(sorted(known))}, got {written!r}"
            )
        lists = {name: written[name] for name in ("attributes", "weights")}
        if not all(isinstance(value, list) for value in lists.values()):
            raise ValueError(f"reward.attributes and reward.weights must be lists, got {written!r}")
        return cls(**{**written, **{name: tuple(value) for name, value in lists.items()}})

    def written(self) -> dict[str, Any]:
        """For YAML, which has lists and no tuples."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def merged(self, outputs: Tensor) -> Tensor:
        """[..., A] -> [...]: what the outputs add up to."""
        return outputs @ torch.tensor(self.weights, dtype=outputs.dtype, device=outputs.device)

    def standardised(self, scores: Tensor) -> Tensor:
        """Scores less their mean over their deviation, both of held-out responses. Raises ValueError where they were not measured."""
        if self.mean is None or not self.std:
            raise ValueError(
                "it has no mean and standard deviation of its scores: train it with held-out rows (docs/reward-models.md)"
            )
        return (scores - self.mean) / self.std


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
