"""Groups that teach nothing are dropped, and the next prompts sampled in their place (DAPO, Yu et al. 2025, section 3.2)."""

import logging
from dataclasses import dataclass
from typing import Callable, Optional

import torch

from aligner.data.batch import Request, Rollouts, Sample

log = logging.getLogger(__name__)

ALIKE = 1e-6  # scores that differ by no more are equal


@dataclass(frozen=True)
class Scored:
    """What a finished response was worth, and whether it ended by itself."""

    value: float
    ended: bool


class DynamicSampling:
    """The prompts of one step, in the order in which they are consumed: as many as give `wanted` groups with unlike scores, `most` at most.

    Each group whose scores are all equal asks for one further prompt. So the prompts consumed are the fewest that suffice, whatever the
    order in which responses finish and whoever sampled them: the same on any grid, and after a resume."""

    def __init__(
        self,
        draw: Callable[[int, int], dict[int, Sample]],
        requests: Callable[[dict[int, Sample]], list[Request]],
        *,
        wanted: int,
        most: int,
        samples_per_prompt: int,
        counts_truncated: bool,
    ) -> None:
        """draw: (place after the prompts consumed before, number) -> samples by sample_id. counts_truncated: whether a response that was
        cut has a say in whether its group's scores are equal (not where it is masked out)."""
        self._draw, self._requests = draw, requests
        self.wanted, self.most, self.n, self._counts_truncated = wanted, most, samples_per_prompt, counts_truncated
        self.consumed = wanted
        self.samples = draw(0, wanted)
        self._alike: dict[int, bool] = {}  # group id -> whether its scores are all equal, once all are known
        self._values: list[float] = []

    def first(self) -> list[Request]:
        return self._requests(self.samples)

    def refill(self, scored: dict[int, Scored]) -> list[Request]:
        """Told all that is known by sample_id, what is to be sampled further. Their prompts join `samples`."""
        groups: dict[int, list[Scored]] = {}
        for sample_id, one in scored.items():
            groups.setdefault(sample_id // self.n, []).append(one)
        self._alike = {group: self._are_alike(found) for group, found in groups.items() if len(found) == self.n}
        self._values = [one.value for one in scored.values()]
        missing = min(self.wanted + sum(self._alike.values()), self.most) - self.consumed
        if missing <= 0:
            return []
        further = self._draw(self.consumed, missing)
        self.consumed += missing
        self.samples |= further
        return self._requests(further)

    def _are_alike(self, group: list[Scored]) -> bool:
        values = [one.value for one in group if one.ended or self._counts_truncated]
        return len(values) < 2 or max(values) - min(values) <= ALIKE

    def kept(self, step: int, rollouts: Rollouts) -> Rollouts:
        """The `wanted` groups to train on. Where too few had unlike scores, the first of the others fill it up: the batch keeps its size,
        and they have no advantage."""
        useful = [group for group, alike in sorted(self._alike.items()) if not alike]
        others = [group for group, alike in sorted(self._alike.items()) if alike]
        if len(useful) < self.wanted:
            log.warning(
                "step %d: of %d prompts (ppo.dynamic_sampling_max_prompts=%d) only %d had responses with unlike scores; %d others fill "
                "the batch up and teach nothing",
                step,
                self.consumed,
                self.most,
                len(useful),
                self.wanted - len(useful),
            )
        chosen = {*useful, *others[: self.wanted - len(useful)]}
        groups = (rollouts.sample_ids // self.n).tolist()
        return rollouts.select(torch.tensor([row for row, group in enumerate(groups) if group in chosen]))

    def metrics(self) -> dict[str, float]:
        """Of all that was sampled, what was dropped included."""
        alike = sum(self._alike.values())
        return {
            "sampling/prompts": float(self.consumed),
            "sampling/equal": alike / len(self._alike),
            "sampling/reward_mean": sum(self._values) / len(self._values),
            "sampling/filled_up": float(max(0, self.wanted - (len(self._alike) - alike))),
        }


Refill = Optional[Callable[[dict[int, Scored]], list[Request]]]
