"""grid_problems: every rule has a message with the numbers and the key to change, and a grid that fits has none."""

import pytest

from aligner.config.groups import ParallelConfig
from aligner.models.model_config import ModelShape
from aligner.parallel.topology import grid_problems

SMOLLM2 = ModelShape(
    family="llama",
    head="lm",
    num_layers=30,
    hidden_size=576,
    ffn_hidden_size=1536,
    num_attention_heads=9,
    num_query_groups=3,
    kv_channels=64,
    vocab_size=49152,
    padded_vocab_size=49152,
    max_position_embeddings=8192,
    layernorm_epsilon=1e-5,
    rotary_base=1e5,
    rope_scaling=None,
    qkv_bias=False,
    qk_norm=False,
    tied=True,
)


@pytest.mark.parametrize(
    "grid, world",
    [
        ({}, 1),
        ({"tensor": 3}, 3),
        ({"tensor": 3, "sequence": True}, 6),
        ({"pipeline": 2}, 4),
        ({"pipeline": 5, "virtual_pipeline": 3}, 5),
    ],
)
def test_grids_that_fit(grid, world):
    assert grid_problems(ParallelConfig(**grid), world, SMOLLM2) == []


@pytest.mark.parametrize(
    "grid, world, said",
    [
        ({"tensor": 2, "pipeline": 2}, 6, ["6 ranks, 2 * 2 = 4", "parallel.tensor", "parallel.pipeline"]),
        ({"sequence": True}, 1, ["parallel.sequence=true needs parallel.tensor > 1, and it is 1"]),
        ({"virtual_pipeline": 2}, 1, ["parallel.virtual_pipeline=2 needs parallel.pipeline > 1, and it is 1"]),
        ({"tensor": 0}, 1, ["parallel.tensor=0 must be at least 1"]),
    ],
)
def test_rules_of_the_grid_alone(grid, world, said):
    (problem,) = grid_problems(ParallelConfig(**grid), world)
    assert all(text in problem for text in said), problem


@pytest.mark.parametrize(
    "grid, world, names",
    [
        ({"tensor": 2}, 2, {"num_attention_heads": 9, "num_query_groups": 3}),
        ({"tensor": 9}, 9, {"num_query_groups": 3, "ffn_hidden_size": 1536, "padded_vocab_size": 49152}),
        ({"pipeline": 4}, 4, {"num_layers": 30}),
        ({"pipeline": 2, "virtual_pipeline": 2}, 2, {"num_layers": 30}),
    ],
)
def test_rules_of_the_model(grid, world, names):
    problems = grid_problems(ParallelConfig(**grid), world, SMOLLM2)
    assert len(problems) == len(names)
    for problem, (name, value) in zip(problems, names.items()):
        assert f"the model's {name} must be a multiple of" in problem and f": {value} is not one of" in problem


def test_all_problems_at_once():
    config = ParallelConfig(tensor=2, pipeline=4, virtual_pipeline=3)
    assert len(grid_problems(config, 4, SMOLLM2)) == 4  # world, heads, groups, layers
