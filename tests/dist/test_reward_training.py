"""A reward model trains the same on every grid and as plain torch does on Hugging Face's model, and is served as it was trained."""

import json
import types

import numpy as np
import pytest
import torch

from tests.dist.harness import run_ranks, topologies
from tests.dist.training_data import write_checkpoint

ONE, TENSOR, SEQUENCE = (1, 1, None, False), (2, 1, None, False), (2, 1, None, True)
PIPELINE, VIRTUAL, BOTH = (1, 2, None, False), (1, 2, 2, False), (2, 2, None, True)
OBJECTIVES = ("pairwise", "plackett_luce", "regression")
# ranks -> (grid, rows or tokens a micro-batch, ZeRO-1, objectives)
GRIDS = {
    1: [
        (ONE, {"rows": 4}, False, OBJECTIVES),
        (ONE, {"rows": 1}, False, OBJECTIVES),
        (ONE, {"rows": 100}, True, ("pairwise",)),
        (ONE, {"tokens": 90}, False, ("pairwise",)),
    ],
    2: [
        (ONE, {"rows": 4}, True, OBJECTIVES),
        (ONE, {"tokens": 90}, False, ("plackett_luce",)),
        (TENSOR, {"rows": 4}, False, ("regression",)),
        (SEQUENCE, {"rows": 2}, False, ("pairwise", "regression")),
        (PIPELINE, {"rows": 3}, False, ("plackett_luce",)),
        (VIRTUAL, {"rows": 2}, True, ("pairwise", "regression")),
    ],
    4: [(BOTH, {"rows": 4}, False, ("pairwise",))],
}
STEPS, CENTRE, LR = 3, 0.05, 3e-3
WEIGHTS = {"help": 0.75, "brief": -0.5}
GROUPS = torch.tensor(
    [0, 0, 1, 2, 1, 2, 1, 3, 3, 4]
)  # a pair, two groups whose rows lie between each other's, a pair, one alone
RANKS = torch.tensor([1, 0, 2, 0, 0, 3, 1, 0, 1, 0])


def batch(seed, *, junk=0):
    """junk: the token that stands beyond the end of rows."""
    from aligner.models.reward_training import PreferenceBatch

    generator = torch.Generator().manual_seed(seed)
    m = len(GROUPS)
    lengths = torch.randint(5, 41, (m,), generator=generator)
    tokens = torch.randint(1, 200, (m, 64), generator=generator)
    given = torch.rand(m, 2, generator=generator) < 0.7
    given[0] = True
    return PreferenceBatch(
        tokens=torch.where(torch.arange(64) < lengths[:, None], tokens, junk),
        lengths=lengths,
        groups=GROUPS,
        ranks=RANKS,
        margins=torch.rand(m, generator=generator),
        wanted=torch.where(given, torch.randn(m, 2, generator=generator), float("nan")),
        given=given,
    )


def model(folder, topology, objective, cut, zero=False, **more):
    from aligner.config.groups import Dtype, ModelConfig, OptimConfig
    from aligner.config.preference import Objective, PreferenceConfig
    from aligner.models.reward_training import TrainedRewardModel

    attributes = WEIGHTS if objective == "regression" else {}
    return TrainedRewardModel(
        ModelConfig(checkpoint=str(folder), dtype=Dtype.float32),
        OptimConfig(lr=LR, clip_grad=0.5, distributed=zero),
        topology,
        preference=PreferenceConfig(Objective(objective), attributes, centre=CENTRE, head_lr_multiplier=3.0, **more),
        micro_batch_size=cut.get("rows", 1),
        micro_batch_tokens=cut.get("tokens"),
    )


def trained(reward):
    """Metrics of each step, and what the head says afterwards, of other rows."""
    found = [reward.train(batch(seed)) for seed in range(STEPS)]
    last = batch(9)
    return found, reward.outputs(last.tokens, last.lengths).numpy()


def _grids_body(rank, folder, cases):
    return [
        {name: trained(model(folder, topology, name, cut, zero)) for name in names}
        for grid, cut, zero, names in cases
        for topology in topologies(grid)
    ]


def _write_body(rank, folder):
    write_checkpoint(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    run_ranks(_write_body, 1, folder)
    return folder


@pytest.fixture(scope="module")
def one_rank(checkpoint):
    return run_ranks(_grids_body, 1, checkpoint, GRIDS[1])[0]


@pytest.mark.parametrize("world", GRIDS)
def test_steps_are_the_same_on_every_grid(checkpoint, one_rank, world):
    ranks = [one_rank] if world == 1 else run_ranks(_grids_body, world, checkpoint, GRIDS[world])
    for results in ranks:
        for case, found in zip(GRIDS[world], results, strict=True):
            for name, result in found.items():
                same(result, one_rank[0][name], f"{name} {case}")


def same(found, wanted, what):
    for step, (one, other) in enumerate(zip(found[0], wanted[0], strict=True)):
        for key, value in other.items():
            assert one[key] == pytest.approx(value, abs=1e-4, rel=1e-4), f"{what}, step {step}, {key}"
    assert np.allclose(found[1], wanted[1], atol=2e-4), f"{what}: off by {np.abs(found[1] - wanted[1]).max()}"


# Plain torch on Hugging Face's model


def _torch_losses(outputs, given):
    """The three losses by loops over groups."""
    scores, log_sigmoid = outputs[:, 0], torch.nn.functional.logsigmoid
    pairwise, rankings, centre = [], [], []
    for group in (0, 1, 2, 3):
        rows = sorted((group == GROUPS).nonzero()[:, 0].tolist(), key=lambda row: int(RANKS[row]))
        pairs = [(a, b) for i, a in enumerate(rows) for b in rows[i + 1 :]]
        pairwise.append(torch.stack([-log_sigmoid(scores[a] - scores[b] - given.margins[a]) for a, b in pairs]).mean())
        places = [scores[rows[i:]].logsumexp(0) - scores[rows[i]] for i in range(len(rows))]
        rankings.append(torch.stack(places).sum())
        centre.append((2 * scores[rows].mean()).square())
    alone = (2 * scores[GROUPS == 4]).square()  # it is in no comparison, and has a score all the same
    off = CENTRE * (sum(centre) + alone.sum()) / 4
    error = (outputs - given.wanted)[given.given].square().mean()
    return {"pairwise": sum(pairwise) / 4 + off, "plackett_luce": sum(rankings) / 4 + off, "regression": error}


def _torch_steps(objective):
    from tests.dist.tiny import tiny_hf

    backbone = tiny_hf("llama", tied=False)[0].base_model
    head = torch.nn.Linear(64, 2 if objective == "regression" else 1, bias=False)
    torch.nn.init.zeros_(head.weight)
    matrices = list(backbone.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": head.weight, "lr": 3 * LR}], lr=LR, betas=(0.9, 0.95), weight_decay=0.0
    )

    def outputs(given):
        hidden = backbone(given.tokens).last_hidden_state
        return head(hidden[torch.arange(len(hidden)), given.lengths - 1])

    metrics = []
    for seed in range(STEPS):
        given = batch(seed)
        loss = _torch_losses(outputs(given), given)[objective]
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([*matrices, head.weight], 0.5)
        optimizer.step()
        metrics.append({"loss": float(loss), "grad_norm": float(norm)})
    with torch.no_grad():
        return metrics, outputs(batch(9)).numpy()


def _oracle_body(rank):
    return {name: _torch_steps(name) for name in OBJECTIVES}


def test_steps_are_those_of_plain_torch_on_hugging_faces_model(one_rank):
    for name, (metrics, outputs) in run_ranks(_oracle_body, 1)[0].items():
        same(one_rank[0][name], (metrics, outputs), name)


# Behaviour


def _behaviour_body(rank, folder, base):
    for topology in topologies(PIPELINE):
        _junk_beyond_the_end_changes_nothing(folder, topology)
        _what_has_no_order_is_skipped(folder, topology)
        _a_loss_that_is_not_finite_is_skipped(folder, topology)
        _resumed_steps_are_those_of_a_run_without_a_break(folder, topology, base / "resumed")
        found = _served_as_trained(folder, topology, base)
        _other_attributes_are_refused(base, topology)
        _a_critic_begins_with_it(base, topology)
    return found


def _junk_beyond_the_end_changes_nothing(folder, topology):
    clean, dirty = (model(folder, topology, "pairwise", {"rows": 3}) for _ in range(2))
    assert [clean.train(batch(s)) for s in (0, 1)] == [dirty.train(batch(s, junk=77)) for s in (0, 1)]


def _what_has_no_order_is_skipped(folder, topology):
    reward, given = model(folder, topology, "pairwise", {"rows": 3}), batch(0)
    given.ranks = torch.zeros_like(given.ranks)
    found = reward.train(given)
    assert (found["empty"], found["skipped"], reward.step_count) == (1, 1, 0)


def _a_loss_that_is_not_finite_is_skipped(folder, topology):
    reward, given = model(folder, topology, "pairwise", {"rows": 3}), batch(0)
    given.margins = torch.full_like(given.margins, float("inf"))
    before = reward.outputs(given.tokens, given.lengths)
    found = reward.train(given)
    assert (found["empty"], found["skipped"], reward.step_count) == (0, 1, 0)
    assert torch.equal(reward.outputs(given.tokens, given.lengths), before)


def _resumed_steps_are_those_of_a_run_without_a_break(folder, topology, saved):
    whole, first, second = (model(folder, topology, "plackett_luce", {"rows": 3}) for _ in range(3))
    metrics = [whole.train(batch(seed)) for seed in range(4)]
    assert [first.train(batch(seed)) for seed in range(2)] == metrics[:2]
    first.save(saved, extra={"step": 2})
    assert second.load(saved) == {"step": 2}
    assert [second.train(batch(seed)) for seed in (2, 3)] == metrics[2:]


def _served_as_trained(folder, topology, base):
    """The score of a rollout by the critic job's path is what training computes of the same ids."""
    from aligner.algorithms.model_scorer import ModelScorer
    from aligner.config.groups import Dtype, ModelConfig
    from aligner.config.reward import RewardKind, RewardPart
    from aligner.models.reward_model import RewardModel

    rows, served = batch(9), {}
    asked = types.SimpleNamespace(tokens=rows.tokens, lengths=rows.lengths)
    for name, objective in (("score", "pairwise"), ("attributes", "regression")):
        reward = model(folder, topology, objective, {"rows": 4})
        for seed in range(STEPS):
            reward.train(batch(seed))
        outputs = reward.outputs(rows.tokens, rows.lengths)
        merged = outputs[:, 0] if name == "score" else 0.75 * outputs[:, 0] - 0.5 * outputs[:, 1]
        reward.save(base / f"{name}-unmeasured")
        reward.describe(mean=0.5, std=2.0, count=7)
        reward.save(base / name)
        settings = ModelConfig(checkpoint=str(base / name), dtype=Dtype.float32)
        how = {"micro_batch_size": 2}
        plain = RewardModel(settings, topology, **how)
        assert torch.allclose(plain.scores(rows.tokens, rows.lengths), merged, atol=1e-6)
        found = ModelScorer(plain).scores(asked)
        assert np.allclose([s.value for s in found], merged, atol=1e-6)
        parts = {"help": float(outputs[3, 0]), "brief": float(outputs[3, 1])} if name == "attributes" else {}
        assert found[3].parts == pytest.approx(parts, abs=1e-6)
        part = ModelScorer(plain, RewardPart(kind=RewardKind.model, weight=-2.0, name="taste")).scores(asked)[3]
        assert part.value == pytest.approx(-2 * merged[3].item(), abs=1e-6)
        parts = {"taste": merged[3].item(), **{f"taste/{name}": value for name, value in parts.items()}}
        assert part.parts == pytest.approx(parts, abs=1e-6)
        standard = RewardModel(settings, topology, standardise=True, **how)
        assert torch.allclose(standard.scores(rows.tokens, rows.lengths), (merged - 0.5) / 2, atol=1e-6)
        bare = ModelConfig(checkpoint=str(base / f"{name}-unmeasured"), dtype=Dtype.float32)
        with pytest.raises(ValueError, match="reward.standardise=true, but .* does not say the mean and deviation"):
            RewardModel(bare, topology, standardise=True, **how)
        served[name] = merged.tolist()
    return served


def _other_attributes_are_refused(base, topology):
    with pytest.raises(
        ValueError, match="gives help, brief, and this run trains reward: set preference.fresh_head=true"
    ):
        model(base / "attributes", topology, "pairwise", {"rows": 2})
    with pytest.raises(
        ValueError, match="gives help, brief, and this run trains reward: resume with preference.attributes"
    ):
        model(base / "score", topology, "pairwise", {"rows": 2}).load(base / "attributes")
    fresh = model(base / "attributes", topology, "pairwise", {"rows": 2}, fresh_head=True)
    rows = batch(9)
    assert (fresh.outputs(rows.tokens, rows.lengths) == 0).all()
    again = model(base / "score", topology, "pairwise", {"rows": 2})
    assert (again.outputs(rows.tokens, rows.lengths) != 0).all()


def _a_critic_begins_with_it(base, topology):
    """Its bootstrap, the value after the last token, is the score; of several attributes what they add up to; 0 with a fresh head."""
    from aligner.config.groups import Dtype, ModelConfig, OptimConfig
    from aligner.models.critic import CriticModel
    from aligner.models.reward_model import RewardModel

    rows = batch(9)
    for name in ("score", "attributes"):
        settings = ModelConfig(checkpoint=str(base / name), dtype=Dtype.float32)
        scores = RewardModel(settings, topology, micro_batch_size=2).scores(rows.tokens, rows.lengths)
        for fresh in (False, True):
            critic = CriticModel(settings, OptimConfig(), topology, micro_batch_size=2, fresh_head=fresh)
            values, ends = critic.values(rows.tokens, rows.lengths)
            assert torch.allclose(ends, torch.zeros_like(scores) if fresh else scores, atol=1e-6)
            critic.reset()
            assert torch.equal(critic.values(rows.tokens, rows.lengths)[1], ends)


def test_behaviour(checkpoint, tmp_path):
    found = run_ranks(_behaviour_body, 2, checkpoint, tmp_path)
    assert found[0] == found[1]
    config = (tmp_path / "attributes" / "model_config.yaml").read_text()
    assert (
        "attributes:\n  - help\n  - brief\n  weights:\n  - 0.75\n  - -0.5\n  mean: 0.5\n  std: 2.0\n  count: 7"
        in config
    )
    assert json.loads((tmp_path / "resumed" / "trainer_state.json").read_text())["state"]["step_count"] == 2
