"""Responses to the same held-out prompts at every validation, greedy unless set otherwise, scored like training responses."""

import math
from dataclasses import dataclass
from typing import Optional

from aligner.algorithms.generation import Answers, Generation, sampling_fields
from aligner.algorithms.records import part_means
from aligner.config.groups import ValidationConfig
from aligner.data.batch import Request, Rollouts, Sample

VALIDATION_STREAM = 1


@dataclass
class Validation:
    metrics: dict[str, float]
    rollouts: Rollouts
    answers: Answers
    samples: dict[int, Sample]


class Validator:
    def __init__(
        self,
        generation: Generation,
        samples: list[Sample],
        settings: ValidationConfig,
        *,
        seed: int,
        max_output_len: int,
        stop_token_ids: tuple[int, ...],
        stop_strings: tuple[str, ...] = (),
    ) -> None:
        self.generation = generation
        self.samples = dict(enumerate(samples))
        self.requests = [
            Request(
                sample_id=i,
                prompt_ids=s.prompt_ids,
                max_output_len=max_output_len,
                **sampling_fields(settings),
                stop_token_ids=stop_token_ids,
                stop_strings=stop_strings,
                seed=seed,
                stream=VALIDATION_STREAM,
            )
            for i, s in self.samples.items()
        ]

    def run(self) -> Optional[Validation]:
        """None where there are no held-out prompts. Collective: every rank calls it."""
        if not self.requests:
            return None
        rollouts, pending = self.generation.run(self.requests, self.samples, critic_step=None)
        answers = self.generation.answers(pending, rollouts)
        return Validation(validation_metrics(rollouts, answers), rollouts, answers, self.samples)


def validation_metrics(rollouts: Rollouts, answers: Answers) -> dict[str, float]:
    """val/reward is the raw score; each part of the score has its mean, and accuracy its 95 % half-width (normal approximation)."""
    n = len(answers.scores)
    metrics = part_means("val", answers.scores) | {
        "val/reward": sum(s.value for s in answers.scores) / n,
        "val/response_length": float(rollouts.mask.sum(1).float().mean()),
        "val/count": float(n),
    }
    if "val/accuracy" in metrics:
        p = metrics["val/accuracy"]
        metrics["val/accuracy_ci95"] = 1.96 * math.sqrt(p * (1 - p) / n)
    return metrics
