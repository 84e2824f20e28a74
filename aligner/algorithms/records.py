"""What is told of a step: one JSON object a sample (where its prompt came from, what was said, what it was worth), and means."""

import logging
from typing import Any, Iterator, Optional, Sequence

from aligner.algorithms.experience import Experience
from aligner.data.batch import Rollouts, Sample, Score
from aligner.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def part_means(prefix: str, scores: list[Score]) -> dict[str, float]:
    """The mean of each part of the scores; a score without a part counts as 0 for it."""
    parts = sorted({name for s in scores for name in s.parts})
    return {f"{prefix}/{part}": sum(s.parts.get(part, 0.0) for s in scores) / len(scores) for part in parts}


class DriftAlarm:
    """Warns once when engine and trainer part by more than `threshold` nats a token on average, and says when that is over."""

    def __init__(self, threshold: float) -> None:
        self.threshold, self._raised = threshold, False

    def check(self, step: int, metrics: dict[str, float]) -> None:
        found, age = metrics["drift/mean"], metrics["refit/staleness"]
        if found > self.threshold and not self._raised:
            why = (
                f"the engine's weights are {age:.0f} updates old: lower refit.sync_every or optim.lr"
                if age
                else "both hold the same weights: their dtypes or kernels differ, so compare engine.dtype with model.dtype"
            )
            log.warning(
                "step %d: log-probs of engine and trainer differ by %.3f on average and %.3f at most, more than logging.drift_alarm=%g; %s "
                "(said once until it is over; drift/* of every step is in metrics.jsonl)",
                step,
                found,
                metrics["drift/max"],
                self.threshold,
                why,
            )
        elif found <= self.threshold and self._raised:
            log.info(
                "step %d: log-probs of engine and trainer are within logging.drift_alarm=%g again", step, self.threshold
            )
        self._raised = found > self.threshold


def sample_rows(
    rollouts: Rollouts,
    samples: dict[int, Sample],
    scores: Optional[list[Score]],
    tokenizer: Tokenizer,
    experience: Optional[Experience] = None,
    stop_strings: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Rows in order of sample_id, made as they are asked for: on the rank that writes them. With an experience (training, not
    validation) KL and advantage of each row are there too."""
    for b, sample_id in enumerate(rollouts.sample_ids.tolist()):
        start, end = int(rollouts.prompt_lengths[b]), int(rollouts.lengths[b])
        response = rollouts.tokens[b, start:end].tolist()
        row = {
            "sample_id": sample_id,
            "origin": samples[sample_id].origin,
            "prompt": samples[sample_id].prompt,
            "response": tokenizer.response_text(response, stop_strings),
            "response_ids": response,
            **({} if scores is None else {"score": scores[b].value, "parts": scores[b].parts}),
            "finish_reason": "length" if rollouts.truncated[b] else "stop",
            "weight_version": rollouts.weight_version,
            "certificate": rollouts.certificate,
        }
        if experience is not None:
            row |= _training_fields(experience, b, start, end)
        yield row


def _training_fields(experience: Experience, b: int, start: int, end: int) -> dict[str, float]:
    advantages, values = experience.advantages[b, start:end], experience.values[b, start:end]
    fields = {
        "kl": float(experience.kl[b, start:end].sum()),
        "advantage_mean": float(advantages.mean()),
        "advantage_min": float(advantages.min()),
        "advantage_max": float(advantages.max()),
        "value_first": float(values[0]),
    }
    if experience.weights is not None:
        fields["importance_weight_mean"] = float(experience.weights[b, start:end].mean())
    return fields
