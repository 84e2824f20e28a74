"""Supervised fine-tuning is the same on every grid, padded and packed, and on one rank it is what plain torch and Hugging Face compute."""

import numpy as np
import pytest
import torch

from tests.dist.harness import run_ranks, topologies
from tests.dist.test_training import ONE, PIPELINE, SEQUENCE, STEPS, TENSOR, VIRTUAL, _adamw, _same, _step
from tests.dist.training_data import rows, write_checkpoint

BUDGET = 64  # tokens of a packed row


def batch_of(seed: int = 3):
    from aligner.models.sft import SFTBatch

    return SFTBatch(*rows(seed=seed))


def _model(folder, topology, *, micro=2, budget=None, packed=None, **optim):
    from aligner.config.groups import Dtype, ModelConfig, OptimConfig
    from aligner.models.sft import SFTModel

    return SFTModel(
        ModelConfig(checkpoint=str(folder), dtype=Dtype.float32),
        OptimConfig(**{"lr": 1e-2, "clip_grad": 0.5, "weight_decay": 0.1, **optim}),
        topology,
        micro_batch_size=micro,
        micro_batch_tokens=budget,
        packed_tokens=packed,
    )


def _trained(model):
    """Metrics of each step, and those of a batch that was not trained on."""
    found = [model.train(batch_of(seed)) for seed in range(STEPS)]
    return found, np.array(list(model.likelihood(batch_of(9)).metrics().values()))


# ranks -> (grid, how it is cut): how rows lie in a forward pass changes nothing
CASES = {
    1: [
        (ONE, {}),
        (ONE, {"micro": 1}),
        (ONE, {"micro": 6, "distributed": True}),
        (ONE, {"budget": 70}),
        (ONE, {"packed": BUDGET}),
        (ONE, {"packed": 1000}),
    ],
    2: [
        (ONE, {}),
        (ONE, {"packed": BUDGET, "distributed": True}),
        (TENSOR, {"micro": 3}),
        (SEQUENCE, {"packed": BUDGET}),
        (PIPELINE, {"packed": BUDGET}),
        (PIPELINE, {"budget": 70}),
        (VIRTUAL, {}),
    ],
    4: [((2, 1, None, True), {"packed": BUDGET}), ((2, 2, None, False), {"packed": BUDGET})],
}


def _body(rank, folder, cases):
    return [_trained(_model(folder, next(topologies(grid)), **how)) for grid, how in cases]


def _one_body(rank, folder):
    """What needs one rank: Hugging Face's side, gradients, and a batch that holds nothing to learn."""
    write_checkpoint(folder / "llama")
    write_checkpoint(folder / "gpt2", "gpt2", tied=True)
    found = _body(rank, folder / "llama", CASES[1]), _hugging_face("llama", tied=False)
    gpt2 = _body(rank, folder / "gpt2", [(ONE, {}), (ONE, {"packed": BUDGET})]), _hugging_face("gpt2", tied=True)
    for family in ("llama", "gpt2"):
        (topology,) = topologies(ONE)
        _gradients_agree(folder / family, topology)
        _nothing_leaks(folder / family, topology)
    _nothing_to_learn(folder / "llama", topology)
    return found, gpt2


def _hugging_face(family, *, tied):
    """Three steps with transformers' own loss (labels of -100 are left out of its mean), and what it says of a batch."""
    from tests.dist.tiny import tiny_hf

    model, _ = tiny_hf(family, tied=tied)
    optimizer = _adamw(model, 0.1)
    metrics = [_step(model, optimizer, _loss_of(model, batch_of(seed))) for seed in range(STEPS)]
    last = batch_of(9)
    with torch.no_grad():
        loss = float(_loss_of(model, last))
        best = model(last.tokens).logits.argmax(-1)[:, :-1] == last.tokens[:, 1:]
    return metrics, np.array([loss, np.exp(loss), float(best[last.mask[:, 1:]].float().mean())])


def _loss_of(model, batch):
    seen = torch.arange(batch.tokens.size(1)) < batch.lengths[:, None]
    labels = torch.where(batch.mask, batch.tokens, -100)
    return model(batch.tokens, attention_mask=seen.long(), labels=labels).loss


def _gradient(model, batch) -> list[torch.Tensor]:
    from functools import partial

    from aligner.models import pipeline
    from aligner.models.optimizer import clear_gradients
    from aligner.models.policy import predicting_positions

    inner = model.model
    micro = inner.micro_batches(batch.tokens, batch.lengths, {"mask": batch.mask})
    clear_gradients(inner.chunks, inner.optimizer)
    loss = partial(model._loss, int(batch.mask.sum()))
    pipeline.forward_backward(inner.chunks, micro, model.topology, loss=loss, positions=predicting_positions)
    return [p.main_grad.clone() for p in inner.plain_chunks[0].parameters()]


def _gradients_agree(folder, topology):
    """Packed and padded, to 1e-5."""
    padded, packed = (_gradient(_model(folder, topology, **how), batch_of()) for how in ({}, {"packed": BUDGET}))
    assert max(float(g.abs().max()) for g in padded) > 1e-2
    for one, other in zip(padded, packed, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def _nothing_leaks(folder, topology):
    """What the other sequences of a packed row say changes nothing, to the bit; what a sequence itself says does."""
    model, batch = _model(folder, topology, packed=1000), batch_of()
    batch.mask[torch.arange(6) != 3] = False
    before = model.likelihood(batch)
    for row in (0, 1, 2, 4, 5):
        batch.tokens[row] = (batch.tokens[row] + 7) % 200
    assert model.likelihood(batch) == before and before.tokens == 29
    batch.tokens[3, 4] += 1
    assert model.likelihood(batch).loss != before.loss


def _nothing_to_learn(folder, topology):
    for how in ({}, {"packed": BUDGET}):
        model, nothing = _model(folder, topology, **how), batch_of()
        nothing.mask = torch.zeros_like(nothing.mask)
        metrics = model.train(nothing)
        assert metrics["skipped"] == metrics["empty"] == 1.0 and model.step_count == 0
        assert model.likelihood(nothing).metrics()["loss"] == 0.0


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    return folder, *run_ranks(_one_body, 1, folder)[0]


def test_steps_are_those_of_hugging_face_padded_and_packed(one_rank):
    _, *families = one_rank
    for (cases, wanted), name in zip(families, ("llama", "gpt2"), strict=True):
        for found, how in zip(cases, CASES[1] if name == "llama" else "ab"):
            _same(found, wanted, f"{name} {how}")
            assert all(m["perplexity"] == pytest.approx(np.exp(m["loss"])) for m in found[0])


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.faults)])
def test_three_steps_are_the_same_on_every_grid(one_rank, world):
    folder, (cases, _), _ = one_rank
    for results in run_ranks(_body, world, folder / "llama", CASES[world], deadline=300):
        for case, found in zip(CASES[world], results, strict=True):
            _same(found, cases[0], f"{case}")
