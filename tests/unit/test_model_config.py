"""model_config.yaml as somebody may have edited it: one sentence that names the file and the key."""

import pytest

from aligner.models.model_config import read_model_config, write_model_config
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
