"""What the policy is given of a step's experience, and whether its only update tells the log-probs too."""

from typing import Iterator, Optional

from torch import Tensor

from aligner.algorithms.experience import Experience
from aligner.algorithms.schedule import mini_batches
from aligner.config.ppo import KLPlace, PPOConfig, Truncation
from aligner.models.policy import PolicyMiniBatch


def update_tells_logprobs(ppo: PPOConfig) -> bool:
    """Whether a step has one update and nothing needs the policy's log-probs before it: they are read off its forward pass then, which
    saves one of their own."""
    alone = ppo.epochs == 1 and ppo.rollout_batch_size * ppo.samples_per_prompt == ppo.mini_batch_size
    needed = (ppo.kl_coefficient > 0 and ppo.kl_place is KLPlace.reward) or ppo.importance_cap is not None
    return alone and not needed and ppo.truncation is not Truncation.mask  # masked responses are not in the update


def update_rows(ppo: PPOConfig, *, seed: int, step: int) -> Iterator[Tensor]:
    """Row indices (int64) of each update of a step, epoch after epoch."""
    rows = ppo.rollout_batch_size * ppo.samples_per_prompt
    for epoch in range(ppo.epochs):
        yield from mini_batches(rows, ppo.mini_batch_size, seed=seed, step=step, epoch=epoch)


def policy_mini_batch(experience: Experience, rows: Tensor, kl_coefficient: float) -> PolicyMiniBatch:
    """The given rows (int64 indices) of a step's experience."""

    def cut(tensor: Optional[Tensor]) -> Optional[Tensor]:
        return None if tensor is None else tensor[rows]

    in_loss = experience.kl_in_loss
    return PolicyMiniBatch(
        tokens=experience.rollouts.tokens[rows],
        lengths=experience.rollouts.lengths[rows],
        mask=experience.mask[rows],
        old_logprobs=cut(experience.logprobs),
        advantages=experience.advantages[rows],
        weights=cut(experience.weights),
        reference_logprobs=cut(experience.reference_logprobs) if in_loss else None,
        kl_coefficient=kl_coefficient if in_loss else 0.0,
    )
