"""Every objective, way to add up and KL in the loss: the same on every grid, and what plain torch and Hugging Face compute."""

import pytest
import torch

from tests.dist.harness import run_ranks, topologies
from tests.dist.test_training import CLIP, ENTROPY, GRIDS, TEMPERATURE, _adamw, _hf_logprobs, _policy, _same, _step
from tests.dist.training_data import policy_batch, rollouts_of, write_checkpoint

KL = 0.1


def _write_body(rank, folder):
    write_checkpoint(folder, "llama")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("losses") / "untied"
    run_ranks(_write_body, 1, folder)
    return folder


def _losses():
    """One PolicyLoss a step: every other objective and way to add up, all with a KL in the loss."""
    from aligner.config.ppo import Aggregate, KLEstimator, PolicyObjective
    from aligner.models.policy import PolicyLoss
    from aligner.ops.policy_loss import Objective

    gspo = Objective(PolicyObjective.gspo, 0.05, 0.1)
    cispo = Objective(PolicyObjective.cispo, 1.0, 0.3, kl_estimator=KLEstimator.k2)
    dual = Objective(low=CLIP, high=0.28, dual=1.5, entropy_bonus=ENTROPY)
    ways = ((gspo, Aggregate.sequence), (cispo, Aggregate.token), (dual, Aggregate.constant))
    return [PolicyLoss(TEMPERATURE, objective, aggregate, constant_length=32) for objective, aggregate in ways]


def _train_on_losses(policy):
    found = []
    for seed, policy.loss in enumerate(_losses()):
        found.append(policy.train(policy_batch(seed, weighted=True, kl_coefficient=KL)))
    return found, policy.logprobs(rollouts_of(policy_batch(9)), temperature=TEMPERATURE).numpy()


def _losses_body(rank, folder, cases):
    return [_train_on_losses(_policy(folder, next(topologies(grid)), micro=m, zero=z)) for grid, m, z in cases]


@pytest.mark.parametrize("world", GRIDS)
def test_every_loss_is_that_of_plain_torch_on_every_grid(checkpoint, world):
    """A response's ratio, shares and KL do not depend on micro-batches, DP, TP or PP."""
    wanted = _torch_losses()
    for found in run_ranks(_losses_body, world, checkpoint, GRIDS[world]):
        for case, ours in zip(GRIDS[world], found, strict=True):
            _same(ours, wanted, f"losses {case}")


def _torch_losses():
    """The same steps, each response by itself: docs/algorithms.md has the formulas."""
    from tests.dist.tiny import tiny_hf

    model, _ = tiny_hf("llama", tied=False)
    optimizer = _adamw(model, 0.1)
    ways, metrics = ("gspo", "cispo", "dual"), []
    for seed, way in enumerate(ways):
        batch = policy_batch(seed, weighted=True, kl_coefficient=KL)
        logprobs, entropy = _hf_logprobs(model, batch.tokens)
        losses, kls = [], []
        for b in batch.mask.any(1).nonzero().flatten().tolist():
            names = ("old_logprobs", "advantages", "weights", "reference_logprobs")
            m = batch.mask[b]
            old, gain, weights, reference = (getattr(batch, name)[b][m] for name in names)
            new = logprobs[b][m]
            d = new - reference
            kls.append(d.square() / 2 if way == "cispo" else (-d).exp() - 1 + d)
            losses.append(-weights * _gain(way, new, old, gain) + KL * kls[-1])
            if way == "dual":
                losses[-1] = losses[-1] - ENTROPY * entropy[b][m]
        if way == "gspo":
            whole = torch.stack([x.mean() for x in losses]).mean()
        else:
            whole = torch.cat(losses).sum() / (batch.mask.sum() if way == "cispo" else len(batch.mask) * 32)
        metrics.append({**_step(model, optimizer, whole), "kl": float(torch.cat(kls).mean())})
    last = policy_batch(9)
    with torch.no_grad():
        return metrics, torch.where(last.mask, _hf_logprobs(model, last.tokens)[0], 0.0).numpy()


def _gain(way, new, old, gain):
    """What a response's tokens are to maximise."""
    if way == "gspo":  # token by token with its own advantage: GSPO-token
        ratio = ((new - old).mean().detach() + new - new.detach()).exp()
        return torch.minimum(ratio * gain, ratio.clamp(0.95, 1.1) * gain)
    ratio = (new - old).exp()
    if way == "cispo":
        return ratio.detach().clamp(max=1.3) * gain * new
    surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1.28) * gain)
    return torch.where(gain < 0, torch.maximum(surrogate, 1.5 * gain), surrogate)
