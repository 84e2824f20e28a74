"""A reward model's scores are Hugging Face's on every grid, fewer rows than ranks included; recomputed activations change nothing."""

import numpy as np
import pytest
import torch

from tests.dist.harness import run_ranks, topologies
from tests.dist.tiny import tiny_hf, weights_of
from tests.dist.training_data import policy_batch, rows, write_checkpoint

DATA = (1, 1, None, False)
TENSOR, SEQUENCE, PIPELINE, VIRTUAL = (2, 1, None, False), (2, 1, None, True), (1, 2, None, False), (1, 2, 2, False)
SCORED = [DATA, TENSOR, SEQUENCE, PIPELINE, VIRTUAL]
GPT2_SCORED = [DATA, SEQUENCE, PIPELINE]
RECOMPUTED = [TENSOR, PIPELINE]


def classifier(family):
    """Hugging Face's sequence classifier with one label over the tiny backbone, and its shape."""
    import transformers

    backbone, shape = tiny_hf(family, tied=False)
    config = backbone.config
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(4)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    model.base_model.load_state_dict(backbone.base_model.state_dict())
    return model, shape.with_head("score")


def _scores(folder, family, grids):
    """The largest differences from Hugging Face's on each grid, of all rows and of one."""
    from aligner.config.groups import Dtype, ModelConfig
    from aligner.models.build import build_model
    from aligner.models.checkpoint import save_weights
    from aligner.models.hf import load_hf
    from aligner.models.reward_model import RewardModel

    model, shape = classifier(family)
    for topology in topologies(DATA):
        chunks = build_model(shape, topology, head="score", dtype=torch.float32)
        load_hf(chunks, shape, topology, weights_of(model))
        save_weights(chunks, shape, topology, folder)
    tokens, lengths, _ = rows()
    with torch.no_grad():
        want = torch.cat([model(tokens[b : b + 1, :n]).logits[:, 0] for b, n in enumerate(lengths.tolist())])
    scores = []
    for topology in topologies(*grids):
        reward = RewardModel(ModelConfig(checkpoint=str(folder), dtype=Dtype.float32), topology, micro_batch_size=2)
        found = reward.scores(tokens, lengths), reward.scores(tokens[:1], lengths[:1])
        scores.append([float((f - want[: len(f)]).abs().max()) for f in found])
    return scores


def _body(rank, folder, plain):
    from aligner.config.groups import Dtype, ModelConfig, OptimConfig, Recompute
    from aligner.models.policy import Policy, PolicyLoss
    from aligner.models.reward_model import RewardModel

    scores = _scores(folder, "llama", SCORED) + _scores(folder / "gpt2", "gpt2", GPT2_SCORED)
    write_checkpoint(plain)
    topology = next(topologies(DATA))
    with pytest.raises(ValueError, match="without a score head"):
        RewardModel(ModelConfig(checkpoint=str(plain)), topology, micro_batch_size=2)
    steps = []
    for topology in topologies(*RECOMPUTED):
        for recompute in Recompute:
            settings = ModelConfig(checkpoint=str(plain), dtype=Dtype.float32, recompute=recompute)
            policy = Policy(
                settings, OptimConfig(lr=1e-2), topology, loss=PolicyLoss(), micro_batch_size=2, reference=None
            )
            steps.append([policy.train(policy_batch(seed)) for seed in (0, 1)])
    return scores, steps


def test_scores_and_recomputed_steps(tmp_path):
    for scores, steps in run_ranks(_body, 2, tmp_path / "score", tmp_path / "plain"):
        assert np.max(scores) < 1e-5, list(zip(SCORED + GPT2_SCORED, scores))
        for without, recomputed in zip(steps[::2], steps[1::2]):
            assert without == recomputed
