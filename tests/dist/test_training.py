"""Training is the same on every grid, and on one rank it is what plain torch and Hugging Face compute."""

import numpy as np
import pytest
import torch

from tests.dist.harness import run_ranks, topologies
from tests.dist.training_data import critic_batch, policy_batch, rollouts_of, write_checkpoint

ONE = (1, 1, None, False)
STEPS = 3
TEMPERATURE, CLIP, ENTROPY = 0.7, 0.2, 0.01


def _policy(folder, topology, *, micro=2, zero=False, reference=None, dtype="float32", **optim):
    from aligner.config.groups import Dtype, ModelConfig, OptimConfig
    from aligner.models.policy import Policy, PolicyLoss
    from aligner.ops.policy_loss import Objective

    return Policy(
        ModelConfig(checkpoint=str(folder), dtype=Dtype(dtype)),
        OptimConfig(**{"lr": 1e-2, "clip_grad": 0.5, "weight_decay": 0.1, "distributed": zero, **optim}),
        topology,
        loss=PolicyLoss(TEMPERATURE, Objective(low=CLIP, high=CLIP, entropy_bonus=ENTROPY)),
        micro_batch_size=micro,
        reference=reference,
    )


def _critic(folder, topology, *, micro=2, zero=False, **settings):
    from aligner.config.groups import Dtype, ModelConfig, OptimConfig
    from aligner.models.critic import CriticModel

    return CriticModel(
        ModelConfig(checkpoint=str(folder), dtype=Dtype.float32),
        OptimConfig(lr=1e-2, clip_grad=0.5, distributed=zero),
        topology,
        micro_batch_size=micro,
        value_clip=0.2,
        **settings,
    )


def _train_policy(policy, *, weighted=False):
    found = [policy.train(policy_batch(seed, weighted=weighted)) for seed in range(STEPS)]
    return found, policy.logprobs(rollouts_of(policy_batch(9)), temperature=TEMPERATURE).numpy()


def _train_critic(critic):
    found = [critic.train(critic_batch(seed)) for seed in range(STEPS)]
    batch = critic_batch(9)
    return found, *(x.numpy() for x in critic.values(batch.tokens, batch.lengths))


# model -> (family, tied)
MODELS = {"untied": ("llama", False), "tied": ("llama", True), "qwen3": ("qwen3", False)}
TENSOR, SEQUENCE, PIPELINE, VIRTUAL = (2, 1, None, False), (2, 1, None, True), (1, 2, None, False), (1, 2, 2, False)

# ranks -> (grid, micro-batch size, ZeRO-1)
GRIDS = {
    1: [(ONE, 2, False), (ONE, 1, False), (ONE, 4, False), (ONE, 6, True)],
    2: [
        (ONE, 2, False),
        (ONE, 2, True),
        (TENSOR, 2, False),
        (SEQUENCE, 4, False),
        (PIPELINE, 2, False),
        (PIPELINE, 1, True),
        (VIRTUAL, 2, False),
        (VIRTUAL, 4, False),  # as many micro-batches as stages
    ],
    4: [(ONE, 2, True), ((2, 2, None, False), 2, False), ((2, 2, 2, True), 1, False)],
}


def _grids_body(rank, folders, cases):
    """{model: [(policy's results, critic's results) of each case]}"""
    return {model: [_case(folder, *case) for case in cases] for model, folder in folders.items()}


def _case(folder, grid, micro, zero):
    topology = next(topologies(grid))
    policy = _train_policy(_policy(folder, topology, micro=micro, zero=zero))
    return policy, _train_critic(_critic(folder, topology, micro=micro, zero=zero))


def _write_body(rank, folders):
    for model, folder in folders.items():
        family, tied = MODELS[model]
        write_checkpoint(folder, family, tied=tied)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """{model: folder}"""
    base = tmp_path_factory.mktemp("checkpoints")
    folders = {model: base / model for model in MODELS}
    run_ranks(_write_body, 1, folders)
    return folders


@pytest.fixture(scope="module")
def one_rank(checkpoints):
    """{model: results of GRIDS[1]}"""
    return run_ranks(_grids_body, 1, checkpoints, GRIDS[1])[0]


@pytest.mark.parametrize("world", GRIDS)
def test_three_steps_are_the_same_on_every_grid(checkpoints, one_rank, world):
    cases = GRIDS[world]
    if world == 4:
        checkpoints = {model: checkpoints[model] for model in ("untied", "tied")}
    ranks = [one_rank] if world == 1 else run_ranks(_grids_body, world, checkpoints, cases, deadline=300)
    for results in ranks:
        for model, found in results.items():
            for case, (policy, critic) in zip(cases, found, strict=True):
                _same(policy, one_rank[model][0][0], f"policy {model} {case}")
                _same(critic, one_rank[model][0][1], f"critic {model} {case}")


def _same(found, wanted, what):
    for step, (one, other) in enumerate(zip(found[0], wanted[0], strict=True)):
        for key, value in other.items():
            assert one[key] == pytest.approx(value, abs=1e-4, rel=1e-4), f"{what}, step {step}, {key}"
    for one, other in zip(found[1:], wanted[1:], strict=True):
        assert np.allclose(one, other, atol=2e-4), f"{what}: off by {np.abs(one - other).max()}"


def _oracle_body(rank, folder):
    """Our steps and plain torch's, from the same weights."""
    for topology in topologies(ONE):
        policy, critic = _policy(folder, topology), _critic(folder, topology)
        ours = [_train_policy(policy, weighted=True), _train_critic(critic)]
    return ours, [_torch_policy(weighted=True), _torch_critic()]


def _adamw(model, decay):
    plain = [p for p in model.parameters() if p.dim() == 1]
    decayed = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)


def _step(model, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return {"loss": float(loss.detach()), "grad_norm": float(norm)}


def _hf_logprobs(model, tokens):
    """[B, S] log-probs at the temperature, and entropies; column 0 is 0."""
    every = torch.log_softmax(model(tokens).logits[:, :-1] / TEMPERATURE, -1)
    chosen = every.gather(2, tokens[:, 1:, None])[:, :, 0]
    pad = torch.nn.functional.pad
    return pad(chosen, (1, 0)), pad(-(every.exp() * every).sum(-1), (1, 0))


def _torch_policy(family="llama", tied=False, *, weighted=False):
    from tests.dist.tiny import tiny_hf

    model, _ = tiny_hf(family, tied=tied)
    optimizer = _adamw(model, 0.1)
    metrics = []
    for seed in range(STEPS):
        batch = policy_batch(seed, weighted=weighted)
        logprobs, entropy = (x[batch.mask] for x in _hf_logprobs(model, batch.tokens))
        ratio = (logprobs - batch.old_logprobs[batch.mask]).exp()
        gain, weights = batch.advantages[batch.mask], batch.weights[batch.mask] if weighted else 1.0
        surrogate = weights * torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
        loss = -(surrogate + ENTROPY * entropy).mean()
        metrics.append(
            {**_step(model, optimizer, loss), "ratio": float(ratio.mean()), "entropy": float(entropy.mean())}
        )
    last = policy_batch(9)
    with torch.no_grad():
        return metrics, torch.where(last.mask, _hf_logprobs(model, last.tokens)[0], 0.0).numpy()


def _torch_critic(family="llama", tied=False):
    from tests.dist.tiny import tiny_hf

    backbone = tiny_hf(family, tied=tied)[0].base_model
    model = torch.nn.ModuleDict({"backbone": backbone, "head": torch.nn.Linear(64, 1, bias=False)})
    torch.nn.init.zeros_(model["head"].weight)
    optimizer = _adamw(model, 0.0)

    def after(tokens):
        return model["head"](backbone(tokens).last_hidden_state)[:, :, 0]

    metrics = []
    for seed in range(STEPS):
        batch = critic_batch(seed)
        values = torch.nn.functional.pad(after(batch.tokens)[:, :-1], (1, 0))[batch.mask]
        old, returns = batch.old_values[batch.mask], batch.returns[batch.mask]
        near = old + (values - old).clamp(-0.2, 0.2)
        loss = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).mean()
        metrics.append({**_step(model, optimizer, loss), "value": float(values.mean())})
    last = critic_batch(9)
    with torch.no_grad():
        out = after(last.tokens)
    values = torch.nn.functional.pad(out[:, :-1], (1, 0))
    inside = torch.arange(values.size(1)) < last.lengths[:, None]
    ends = out[torch.arange(len(out)), last.lengths - 1]
    return metrics, torch.where(inside, values, 0.0).numpy(), ends.numpy()


def test_steps_are_those_of_plain_torch_on_hugging_face_models(checkpoints):
    ours, theirs = run_ranks(_oracle_body, 1, checkpoints["untied"])[0]
    for found, wanted, what in zip(ours, theirs, ("policy", "critic"), strict=True):
        _same(found, wanted, what)


GPT2_GRIDS = [(ONE, 2, False), (TENSOR, 2, False), (SEQUENCE, 4, True), (PIPELINE, 2, False)]


def _gpt2_body(rank, folder):
    """The results of each grid, with a tied embedding, and plain torch's."""
    write_checkpoint(folder, "gpt2", tied=True)
    found = [_case(folder, *case) for case in GPT2_GRIDS]
    return found, (_torch_policy("gpt2", tied=True), _torch_critic("gpt2", tied=True))


def test_gpt2_steps_are_those_of_plain_torch_on_every_grid(tmp_path):
    """Learned positions, biases on both sides of a split product, and layer norms, under tensor, sequence and pipeline parallelism."""
    for found, (policy, critic) in run_ranks(_gpt2_body, 2, tmp_path, deadline=300):
        for case, (our_policy, our_critic) in zip(GPT2_GRIDS, found, strict=True):
            _same(our_policy, policy, f"policy {case}")
            _same(our_critic, critic, f"critic {case}")


def _behaviour_body(rank, folder):
    """What does not need a grid of its own, checked where it runs."""
    for topology in topologies((1, 2, None, False)):
        _garbage_changes_nothing(folder, topology)
        _references_agree(folder, topology)
        _non_finite_steps_are_skipped(folder, topology)
        _empty_steps_are_skipped(folder, topology)
        _head_learns_faster(folder, topology)


def _garbage_changes_nothing(folder, topology):
    batch = policy_batch()
    dirty = policy_batch()
    beyond = torch.arange(batch.tokens.size(1)) >= batch.lengths[:, None]
    dirty.tokens = torch.where(beyond, 77, dirty.tokens)
    dirty.advantages = torch.where(batch.mask, batch.advantages, 1e30)
    clean_policy, dirty_policy = _policy(folder, topology), _policy(folder, topology)
    assert clean_policy.train(batch) == dirty_policy.train(dirty)
    after = [p.logprobs(rollouts_of(b), temperature=1.0) for p, b in ((clean_policy, batch), (dirty_policy, dirty))]
    assert torch.equal(*after)


def _references_agree(folder, topology):
    from aligner.config.ppo import ReferencePlace

    batch = policy_batch()
    rollouts = rollouts_of(batch)
    held, swapped = (
        _policy(folder, topology, reference=place) for place in (ReferencePlace.held, ReferencePlace.swapped)
    )
    first = held.logprobs(rollouts, temperature=1.0)
    for policy in (held, swapped):
        assert torch.equal(policy.reference_logprobs(rollouts, temperature=1.0), first)
        policy.train(batch)
        moved = policy.logprobs(rollouts, temperature=1.0)
        assert not torch.allclose(moved, first, atol=1e-3)
        assert torch.equal(policy.reference_logprobs(rollouts, temperature=1.0), first)
        assert torch.equal(policy.logprobs(rollouts, temperature=1.0), moved)
        assert (first[~batch.mask] == 0).all()


def _non_finite_steps_are_skipped(folder, topology):
    policy = _policy(folder, topology, lr=1e-2, warmup_steps=4)
    policy.train(policy_batch())
    before = _snapshot(policy)
    broken = policy_batch(1)
    broken.old_logprobs = torch.where(broken.mask, -500.0, 0.0)  # the ratio overflows: inf
    metrics = policy.train(broken)
    assert metrics["skipped"] == 1.0 and metrics["learning_rate"] == pytest.approx(5e-3)
    assert _same_snapshot(before, _snapshot(policy)) and policy.step_count == 1
    assert policy.train(policy_batch(1))["skipped"] == 0.0 and policy.step_count == 2
    assert not _same_snapshot(before, _snapshot(policy))
    bad = policy_batch()
    bad.advantages[0, 6] = float("nan")
    with pytest.raises(FloatingPointError, match="advantages is nan at row 0"):
        policy.train(bad)


def _empty_steps_are_skipped(folder, topology):
    """Momentum and weight decay move nothing where no token says whereto."""
    policy, critic = _policy(folder, topology, weight_decay=0.1), _critic(folder, topology)
    for model, make in ((policy, policy_batch), (critic, critic_batch)):
        assert model.train(make())["empty"] == 0.0
        before = _snapshot(model)
        nothing = make(1)
        nothing.mask = torch.zeros_like(nothing.mask)
        metrics = model.train(nothing)
        assert metrics["skipped"] == metrics["empty"] == 1.0 and np.isfinite(list(metrics.values())).all()
        assert _same_snapshot(before, _snapshot(model)) and model.step_count == 1


def _snapshot(policy):
    from aligner.models.optimizer import inner_optimizers

    state = [
        v.clone()
        for o in inner_optimizers(policy.model.optimizer)
        for s in o.optimizer.state.values()
        for v in s.values()
    ]
    return [p.detach().clone() for c in policy.model.chunks for p in c.parameters()] + state


def _same_snapshot(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _head_learns_faster(folder, topology):
    """Adam's first update of a zero-initialised weight has the size of its learning rate."""
    critic = _critic(folder, topology, head_lr_multiplier=5.0)
    critic.train(critic_batch())
    if topology.is_last_stage:
        weight = critic.model.plain_chunks[-1].output_layer.weight
        assert float(weight.abs().max()) == pytest.approx(5e-2, rel=1e-3)


def test_garbage_references_skipped_steps_and_the_heads_learning_rate(checkpoints):
    run_ranks(_behaviour_body, 2, checkpoints["untied"])


def _bfloat16_body(rank, folder):
    found = []
    for zero in (False, True):
        for topology in topologies((2, 1, None, False) if zero else (1, 2, None, False)):
            policy = _policy(folder, topology, dtype="bfloat16", zero=zero)
            found.append(_train_policy(policy))
    return found


def test_bfloat16_with_float32_master_weights_follows_float32(checkpoints, one_rank):
    """The first step and the one after an update; at this learning rate the two part at the third."""
    for metrics, _ in run_ranks(_bfloat16_body, 2, checkpoints["untied"])[0]:
        for one, other in zip(metrics[:2], one_rank["untied"][0][0][0][:2], strict=True):
            assert one["loss"] == pytest.approx(other["loss"], abs=0.02)
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.05)
