"""Every algorithm in every size: the settings load, the grid divides the GPUs and the model, the memory fits, the batches come out even."""

import math

import pytest

from aligner.config.groups import CriticPlace
from aligner.config.jobs import ActorConfig, CriticConfig, RewardTrainingConfig, SFTConfig
from aligner.config.load import CONF, load
from aligner.config.ppo import Advantage, ReferencePlace
from aligner.models.model_config import ModelShape
from aligner.parallel.topology import grid_problems

GIVEN = ["model.checkpoint=there", "tasks=chain_sum"]
ALGORITHMS = sorted(path.stem for path in (CONF / "algorithms").glob("*.yaml"))

# size -> GPUs, parameters, and the shape of a public model of the class: layers, hidden, ffn, heads, query groups, vocabulary
SIZES = {
    "135m": (1, 135e6, (30, 576, 1536, 9, 3, 49152)),
    "8b": (8, 8.0e9, (32, 4096, 14336, 32, 8, 128256)),
    "70b": (64, 70.6e9, (80, 8192, 28672, 64, 8, 128256)),
}
GPU_BYTES = 80e9


def shape(size):
    layers, hidden, ffn, heads, groups, vocabulary = SIZES[size][2]
    return ModelShape(
        family="llama", head="lm", num_layers=layers, hidden_size=hidden, ffn_hidden_size=ffn, num_attention_heads=heads,
        num_query_groups=groups, kv_channels=hidden // heads, vocab_size=vocabulary, padded_vocab_size=vocabulary,
        max_position_embeddings=8192, layernorm_epsilon=1e-5, rotary_base=5e5, rope_scaling=None, qkv_bias=False,
        qk_norm=False, tied=size == "135m",
    )  # fmt: skip


def data_parallel(parallel, gpus):
    return gpus // (parallel.tensor * parallel.pipeline)


def training_bytes(config, size):
    """Of one GPU: bfloat16 weights and float32 gradients of its part of the model, and float32 master weights with Adam's two moments,
    which optim.distributed divides between the data-parallel ranks."""
    gpus, parameters, _ = SIZES[size]
    part = parameters / (config.parallel.tensor * config.parallel.pipeline)
    return part * (2 + 4), part * 12 / (data_parallel(config.parallel, gpus) if config.optim.distributed else 1)


def activation_bytes(config, size, tokens):
    """Of one micro-batch with full recomputation: each layer's input, one layer's work (about 34 hidden sizes a token in 2 bytes), and
    float32 logits and their gradient, all divided by the tensor-parallel degree; 1F1B keeps as many micro-batches as stages."""
    layers, hidden, _, _, _, vocabulary = SIZES[size][2]
    stages = config.parallel.pipeline
    inputs = tokens * hidden * 2 * (layers / stages) * stages
    work, logits = tokens * hidden * 34, tokens * vocabulary * 4 * 2
    return (inputs + work + logits) / config.parallel.tensor


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_actor_of_each_size_runs_each_algorithm(algorithm, size):
    config = load(ActorConfig, [*GIVEN, f"algorithms={algorithm}", f"sizes={size}"])
    gpus, parameters, _ = SIZES[size]
    assert grid_problems(config.parallel, gpus, shape(size)) == []
    assert gpus % (config.parallel.tensor * config.parallel.pipeline) == 0 and config.parallel.tensor <= 8
    samples = config.ppo.rollout_batch_size * config.ppo.samples_per_prompt
    assert (
        samples % config.ppo.mini_batch_size == 0
        and config.ppo.mini_batch_size % data_parallel(config.parallel, gpus) == 0
    )
    engines = gpus // config.parallel.tensor
    assert samples % engines == 0, "an engine would have less to do than the others"
    longest = config.engine.max_input_len + config.engine.max_output_len
    assert longest <= shape(size).max_position_embeddings
    assert config.ppo.micro_batch_tokens is None or config.ppo.micro_batch_tokens >= longest
    model, optimizer = training_bytes(config, size)
    reference = model / 3 if config.ppo.reference is ReferencePlace.held else 0.0
    tokens = config.ppo.micro_batch_tokens or config.ppo.micro_batch_size * longest
    assert model + optimizer + reference + activation_bytes(config, size, tokens) < 0.9 * GPU_BYTES
    engine = parameters * 2 / config.parallel.tensor  # each engine has a whole copy
    while_generating = model + reference + engine + (0.0 if config.optim.offload_during_generation else optimizer)
    assert while_generating < 0.8 * GPU_BYTES, "nothing is left for the KV cache"
    assert (config.critic.place is CriticPlace.none) == (config.ppo.advantage is not Advantage.gae)


@pytest.mark.parametrize("size", SIZES)
def test_a_critic_of_each_size(size):
    config = load(CriticConfig, [*GIVEN, f"critics={size}"], "ppo_critic")
    actor = load(ActorConfig, [*GIVEN, "algorithms=ppo", f"sizes={size}"])
    gpus = SIZES[size][0]
    assert grid_problems(config.parallel, gpus, shape(size)) == []
    assert actor.ppo.rollout_batch_size * actor.ppo.samples_per_prompt % config.critic.mini_batch_size == 0
    longest = actor.engine.max_input_len + actor.engine.max_output_len
    tokens = config.critic.micro_batch_tokens or config.critic.micro_batch_size * longest
    assert sum(training_bytes(config, size)) + activation_bytes(config, size, tokens) < 0.9 * GPU_BYTES


@pytest.mark.parametrize("job,name", [(SFTConfig, "sft"), (RewardTrainingConfig, "reward_training")])
@pytest.mark.parametrize("size", SIZES)
def test_supervised_training_of_each_size(size, job, name):
    given = ["model.checkpoint=there", f"data.train={__file__}", "data.holdout=0.05"]
    config = load(job, [*given, f"supervised={size}"], name)
    gpus = SIZES[size][0]
    assert grid_problems(config.parallel, gpus, shape(size)) == []
    ranks = data_parallel(config.parallel, gpus)
    tokens = config.train.micro_batch_tokens
    assert config.train.mini_batch_size % ranks == 0
    assert 2 * config.data.max_length <= tokens, "a pair's two responses are in one forward pass"
    assert sum(training_bytes(config, size)) + activation_bytes(config, size, tokens) < 0.9 * GPU_BYTES


def test_sizes_are_the_same_in_every_folder():
    for folder in ("sizes", "critics", "supervised"):
        assert sorted(path.stem for path in (CONF / folder).glob("*.yaml")) == sorted(SIZES)
    for size, (_, parameters, (layers, hidden, ffn, heads, groups, vocabulary)) in SIZES.items():
        kv = hidden * groups // heads
        counted = layers * (2 * hidden**2 + 2 * hidden * kv + 3 * hidden * ffn) + vocabulary * hidden * (
            1 if size == "135m" else 2
        )
        assert math.isclose(counted, parameters, rel_tol=0.02), f"{size}: {counted / 1e9:.2f}e9"
