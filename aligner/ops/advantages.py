"""Advantages and returns. [B, S] tensors are aligned with the token chosen; everything runs over True positions of the mask only."""

import torch
from torch import Tensor

from aligner.ops.masks import clean, masked_mean, same_shapes


def _chosen_columns(mask: Tensor) -> list[int]:
    """Columns with a True, last first: the rest cannot change a result and would cost a loop turn each."""
    return mask.any(0).nonzero().flatten().flip(0).tolist()


def _clean_rows(bootstrap: Tensor, mask: Tensor) -> Tensor:
    assert bootstrap.shape == mask.shape[:1], f"bootstrap must be [{mask.size(0)}], is {tuple(bootstrap.shape)}"
    return clean(bootstrap, mask.any(1), "bootstrap")


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, bootstrap: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, equation 16).

    rewards, values, mask: [B, S]; values[b, t] is V of the state before tokens[b, t] is chosen. bootstrap [B]: V after the last
    chosen token, 0 where the response terminated. The successor of a chosen token is the next chosen one, however far off.
    Returns (advantages, returns = advantages + values), [B, S] float32, 0 outside the mask."""
    same_shapes(mask, rewards=rewards, values=values)
    rewards, values = clean(rewards, mask, "rewards"), clean(values, mask, "values")
    next_value = _clean_rows(bootstrap, mask)
    running = torch.zeros_like(next_value)
    advantages = torch.zeros_like(rewards)
    for t in _chosen_columns(mask):
        on = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(on, delta + gamma * lam * running, running)
        next_value = torch.where(on, values[:, t], next_value)
        advantages[:, t] = torch.where(on, running, 0.0)
    return advantages, advantages + values


def monte_carlo_returns(rewards: Tensor, mask: Tensor, bootstrap: Tensor, *, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each chosen token on, plus the discounted bootstrap [B]; [B, S] float32, 0 outside the mask."""
    same_shapes(mask, rewards=rewards)
    rewards, running = clean(rewards, mask, "rewards"), _clean_rows(bootstrap, mask)
    returns = torch.zeros_like(rewards)
    for t in _chosen_columns(mask):
        on = mask[:, t]
        running = torch.where(on, rewards[:, t] + gamma * running, running)
        returns[:, t] = torch.where(on, running, 0.0)
    return returns


def reinforce_baseline(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Critic-free advantages of REINFORCE++ (Hu et al. 2025): returns-to-go minus their mean over the whole batch.

    rewards, mask: [B, S]. Returns [B, S] float32, 0 outside the mask; dividing by the deviation (whitening) is the caller's."""
    returns = monte_carlo_returns(rewards, mask, rewards.new_zeros(rewards.size(0)), gamma=gamma)
    return torch.where(mask, returns - masked_mean(returns, mask), 0.0)
