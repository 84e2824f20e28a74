"""Checkpoints and mini-batches for the tests of training."""

from pathlib import Path

import torch

ROWS, COLUMNS = 6, 64


def write_checkpoint(folder: Path, family: str = "llama", *, tied: bool = False) -> None:
    """Save a tiny model as a converted checkpoint. Runs in a rank, alone or with others."""
    from aligner.models.build import build_model
    from aligner.models.checkpoint import save_weights
    from aligner.models.hf import load_hf
    from tests.dist.harness import topologies
    from tests.dist.tiny import tiny_hf, weights_of

    model, shape = tiny_hf(family, tied=tied)
    for topology in topologies((1, 1, None, False)):
        chunks = build_model(shape, topology, head="lm", dtype=torch.float32)
        load_hf(chunks, shape, topology, weights_of(model))
        save_weights(chunks, shape, topology, folder)


def rows(vocab: int = 200, seed: int = 3):
    """tokens, lengths, mask of six rows of unlike length, one of which has no response token in the mask."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([30, 9, 21, 40, 17, 12])
    prompts = torch.tensor([5, 4, 20, 11, 9, 6])
    tokens = torch.randint(1, vocab, (ROWS, COLUMNS), generator=generator)
    at = torch.arange(COLUMNS)
    mask = (at >= prompts[:, None]) & (at < lengths[:, None])
    mask[5] = False
    return torch.where(at < lengths[:, None], tokens, 0), lengths, mask


def policy_batch(seed: int = 3, *, weighted: bool = False, kl_coefficient: float = 0.0):
    """Old log-probs near those of a random model, so that some ratios are clipped and some are not; what is not masked is garbage.

    weighted: with a weight from 0 to 2 for each token's loss. kl_coefficient: above 0, with a KL penalty in the loss."""
    from aligner.models.policy import PolicyMiniBatch

    tokens, lengths, mask = rows(seed=seed)
    generator = torch.Generator().manual_seed(seed + 100)
    old = -5.3 + 0.5 * torch.randn(ROWS, COLUMNS, generator=generator)
    advantages = torch.randn(ROWS, COLUMNS, generator=generator)
    weights = 2 * torch.rand(ROWS, COLUMNS, generator=generator)
    reference = old + 0.3 * torch.randn(ROWS, COLUMNS, generator=generator)
    garbage = torch.full((ROWS, COLUMNS), float("nan"))
    return PolicyMiniBatch(
        tokens=tokens,
        lengths=lengths,
        mask=mask,
        old_logprobs=torch.where(mask, old, garbage),
        advantages=torch.where(mask, advantages, garbage),
        weights=torch.where(mask, weights, garbage) if weighted else None,
        reference_logprobs=torch.where(mask, reference, garbage) if kl_coefficient else None,
        kl_coefficient=kl_coefficient,
    )


def critic_batch(seed: int = 3):
    from aligner.models.critic import CriticMiniBatch

    tokens, lengths, mask = rows(seed=seed)
    generator = torch.Generator().manual_seed(seed + 200)
    old = 0.3 * torch.randn(ROWS, COLUMNS, generator=generator)
    returns = torch.randn(ROWS, COLUMNS, generator=generator)
    return CriticMiniBatch(tokens=tokens, lengths=lengths, mask=mask, old_values=old, returns=returns)


def rollouts_of(batch):
    """The rows of a PolicyMiniBatch as Rollouts."""
    from aligner.data.batch import Rollouts

    return Rollouts(
        tokens=batch.tokens,
        lengths=batch.lengths,
        prompt_lengths=torch.zeros_like(batch.lengths),
        mask=batch.mask,
        sample_ids=torch.arange(ROWS),
        truncated=torch.zeros(ROWS, dtype=torch.bool),
        engine_logprobs=torch.zeros(batch.mask.shape),
    )
