"""model_config.yaml as somebody may have edited it: one sentence that names the file and the key."""

from dataclasses import replace

import pytest
import torch

from aligner.models.model_config import read_model_config, write_model_config
from aligner.models.reward_head import RewardHead
from tests.unit.tiny_engine import tiny_shape


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("num_layers: 2", "num_layers: many", "num_layers must be a whole number above 0, got 'many'"),
        ("num_layers: 2", "num_layers: 2.0", "num_layers must be a whole number above 0, got 2.0"),
        ("num_query_groups: 2", "num_query_groups: 0", "num_query_groups must be a whole number above 0, got 0"),
        ("num_query_groups: 2", "num_query_groups: 3", "must be a multiple of num_query_groups, got 4 and 3"),
        ("layernorm_epsilon: 1.0e-05", "layernorm_epsilon: .nan", "layernorm_epsilon must be a number above 0"),
        ("qk_layernorm: false", "qk_layernorm: 1", "qk_norm must be true or false, got 1"),
        ("family: llama", "family: gpt", "family must be one of llama, "),
        ("hidden_size: 32\n", "", "lacks hidden_size"),
        ("num_layers: 2", "num_layers: [", "is not YAML: "),
        ("num_layers: 2", "\udcff", "is not YAML: "),
    ],
)
def test_what_is_wrong_is_named(tmp_path, old, new, says):
    write_model_config(tiny_shape("llama"), tmp_path)
    file = tmp_path / "model_config.yaml"
    assert read_model_config(tmp_path) == tiny_shape("llama")
    text = file.read_text()
    assert old in text
    file.write_bytes(text.replace(old, new, 1).encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError) as caught:
        read_model_config(tmp_path)
    assert str(file) in str(caught.value) and says in str(caught.value)


HEAD = RewardHead(("help", "brief"), (0.75, -0.5), mean=0.5, std=2.0, count=7)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("  - brief", "  - help", "reward.attributes must be names, each once, got ['help', 'help']"),
        ("  - -0.5", "  - .nan", "reward.weights must be a number for each of help, brief"),
        ("  - -0.5\n", "", "reward.weights must be a number for each of help, brief, got [0.75]"),
        ("  std: 2.0", "  std: -1", "reward.mean and reward.std must be numbers, got 0.5 and -1"),
        ("  std: 2.0\n", "", "reward.mean and reward.std must be numbers, got 0.5 and None"),
        (
            "  count: 7",
            "  counts: 7",
            "reward must have attributes and weights, and at most attributes, count, mean, std",
        ),
        ("  weights:\n  - 0.75\n  - -0.5", "  weights: 1", "reward.attributes and reward.weights must be lists"),
    ],
)
def test_what_is_wrong_with_a_score_head_is_named(tmp_path, old, new, says):
    shape = replace(tiny_shape("llama").with_head("score"), reward=HEAD)
    write_model_config(shape, tmp_path)
    assert read_model_config(tmp_path) == shape and shape.outputs == 2
    file = tmp_path / "model_config.yaml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(ValueError) as caught:
        read_model_config(tmp_path)
    assert str(file) in str(caught.value) and says in str(caught.value)


def test_a_score_is_what_the_outputs_add_up_to():
    outputs = torch.tensor([[1.0, 2.0], [4.0, -1.0]])
    assert HEAD.merged(outputs).tolist() == [-0.25, 3.5]
    assert HEAD.standardised(HEAD.merged(outputs)).tolist() == [-0.375, 1.5]
    with pytest.raises(ValueError, match="has no mean and standard deviation"):
        replace(HEAD, mean=None, std=None).standardised(outputs)
    assert replace(tiny_shape("llama").with_head("score"), reward=HEAD).with_head("value").outputs == 1
