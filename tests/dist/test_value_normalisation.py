"""PopArt and micro-batches by tokens on every kind of grid, against plain torch on a Hugging Face model with van Hasselt et al.'s rule.

The oracle normalises by what it is told (scale and offset); that these are the statistics of the returns is what
tests/unit/test_value_scale.py holds."""

import numpy as np
import pytest
import torch

from tests.dist.harness import run_ranks, topologies
from tests.dist.test_training import _adamw, _step
from tests.dist.training_data import critic_batch, write_checkpoint

STEPS, RATE = 3, 0.3
DATA, SEQUENCE, PIPELINE = (1, 1, None, False), (2, 1, None, True), (1, 2, None, False)
# grid, ZeRO-1, type, tokens a micro-batch
CASES = [
    (DATA, True, "float32", None),
    (SEQUENCE, False, "float32", 60),
    (PIPELINE, False, "float32", 41),
    (DATA, True, "bfloat16", None),
]


def _batch(seed):
    """Returns about 20 with a deviation of 5 to 40, by step."""
    batch = critic_batch(seed)
    batch.returns = torch.where(batch.mask, 20.0 + 5.0 * 2.0**seed * batch.returns, float("nan"))
    batch.old_values = torch.where(batch.mask, 20.0 * batch.old_values, float("nan"))
    return batch


def _critic(folder, topology, *, zero=False, dtype="float32", tokens=None, rate=RATE):
    from aligner.config.groups import Dtype, ModelConfig, OptimConfig
    from aligner.models.critic import CriticModel

    return CriticModel(
        ModelConfig(checkpoint=str(folder), dtype=Dtype(dtype)),
        OptimConfig(lr=1e-2, clip_grad=0.5, distributed=zero),
        topology,
        micro_batch_size=2,
        micro_batch_tokens=tokens,
        value_clip=0.2,
        normalisation_rate=rate,
    )


def _train(critic, seed):
    """A step's metrics, its (scale, offset), and how far observing its returns moved any value."""
    batch, probe = _batch(seed), critic_batch(9)
    before = critic.values(probe.tokens, probe.lengths)
    critic.observe(batch.returns, batch.mask)
    after = critic.values(probe.tokens, probe.lengths)
    moved = max(float((a - b).abs().max()) for a, b in zip(before, after))
    return critic.train(batch), (critic.scale.scale, critic.scale.offset), moved


def _values(critic):
    probe = critic_batch(9)
    return [x.numpy() for x in critic.values(probe.tokens, probe.lengths)]


def _oracle(scales):
    from tests.dist.tiny import tiny_hf

    backbone = tiny_hf("llama", tied=False)[0].model
    head = torch.nn.Linear(64, 1)
    torch.nn.init.zeros_(head.weight), torch.nn.init.zeros_(head.bias)
    model = torch.nn.ModuleDict({"backbone": backbone, "head": head})
    optimizer = _adamw(model, 0.0)
    scale, offset, metrics = 1.0, 0.0, []
    for seed, (new_scale, new_offset) in enumerate(scales):
        with torch.no_grad():  # equation 8 there: W' = W sigma / sigma', b' = (sigma b + mu - mu') / sigma'
            head.weight *= scale / new_scale
            head.bias.copy_((scale * head.bias + offset - new_offset) / new_scale)
        scale, offset = new_scale, new_offset
        batch = _batch(seed)
        out = head(backbone(batch.tokens).last_hidden_state)[:, :, 0]
        values = torch.nn.functional.pad(out[:, :-1], (1, 0))[batch.mask]
        old, returns = ((x[batch.mask] - offset) / scale for x in (batch.old_values, batch.returns))
        near = old + (values - old).clamp(-0.2, 0.2)
        loss = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).mean()
        metrics.append({**_step(model, optimizer, loss), "value": float(values.mean()) * scale + offset})
    probe = critic_batch(9)
    with torch.no_grad():
        out = head(backbone(probe.tokens).last_hidden_state)[:, :, 0] * scale + offset
    inside = torch.arange(out.size(1)) < probe.lengths[:, None]
    values = torch.where(inside, torch.nn.functional.pad(out[:, :-1], (1, 0)), 0.0)
    return metrics, [values.numpy(), out[torch.arange(len(out)), probe.lengths - 1].numpy()]


def _body(rank, source, folder):
    cases = []
    write_checkpoint(source)
    for grid, zero, dtype, tokens in CASES:
        for topology in topologies(grid):
            critic = _critic(source, topology, zero=zero, dtype=dtype, tokens=tokens)
            steps = [_train(critic, seed) for seed in range(STEPS)]
            cases.append((steps, _values(critic)))
            if grid == SEQUENCE:
                critic.save(folder, extra={"step": 3})
                saved = _values(critic), [_train(critic, seed)[0] for seed in (3, 4)]
            if grid == PIPELINE:
                resumed = _resume(critic, folder), [_train(critic, seed)[0] for seed in (3, 4)]
                with pytest.raises(
                    ValueError, match="value_normalisation=popart, this job has none: resume with popart"
                ):
                    _critic(source, topology, rate=None).load(folder)
    return cases, saved, resumed, _oracle([scale for _, scale, _ in cases[0][0]]) if rank == 0 else None


def _resume(critic, folder):
    """Loaded into a critic whose own statistics have gone elsewhere."""
    assert critic.load(folder) == {"step": 3}
    return _values(critic)


def test_normalised_training_is_plain_torchs_on_every_grid_and_resumes(tmp_path):
    ranks = run_ranks(_body, 2, tmp_path / "initial", tmp_path / "saved")
    wanted_steps, wanted_values = ranks[0][3]
    for cases, saved, resumed, _ in ranks:
        for (steps, values), (_, _, dtype, _) in zip(cases, CASES):
            _preserved(steps)
            if dtype == "float32":
                _same(steps, wanted_steps, values, wanted_values)
        for one, other in zip(saved[0], resumed[0]):
            assert np.allclose(one, other, atol=1e-3)
        for one, other in zip(saved[1], resumed[1]):
            assert all(one[key] == pytest.approx(other[key], rel=1e-3, abs=1e-3) for key in one)


def _preserved(steps):
    """Values about 20 stay, to the rounding of float32, while scale and offset move by factors: in bfloat16 too."""
    for _, (scale, offset), moved in steps:
        assert moved < 2e-5, (scale, offset, moved)
    assert len({scale for _, (scale, _), _ in steps}) > 1


def _same(steps, wanted_steps, values, wanted_values):
    for (metrics, _, _), wanted in zip(steps, wanted_steps, strict=True):
        assert all(metrics[key] == pytest.approx(value, rel=1e-3, abs=1e-3) for key, value in wanted.items())
    for one, other in zip(values, wanted_values):
        assert np.allclose(one, other, atol=2e-2), np.abs(one - other).max()  # of values about 20
