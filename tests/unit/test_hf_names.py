"""Names and shapes of Hugging Face tensors against transformers' own models, and the split of each over tensor-parallel ranks."""

import pytest
import torch

from aligner.models.hf_config import config_of, shape_of
from aligner.models.hf_mapping import Unit, all_units, from_megatron, hf_names, hf_shape, to_megatron
from aligner.models.model_config import padded, read_model_config, write_model_config
from aligner.models.rope import llama3_frequencies
from tests.dist.tiny import tiny_hf, weights_of

FAMILIES = [(family, tied) for family in ("llama", "qwen2", "qwen3") for tied in (False, True)]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("family, tied", FAMILIES)
def test_names_and_shapes_are_those_of_transformers(family, tied):
    model, shape = tiny_hf(family, tied=tied)
    assert hf_names(shape) == {name: tuple(tensor.shape) for name, tensor in weights_of(model).items()}


@pytest.mark.parametrize("family, tied", FAMILIES)
@pytest.mark.parametrize("tensor", [1, 2])
def test_split_and_back_is_exact(family, tied, tensor):
    model, shape = tiny_hf(family, tied=tied)
    weights = weights_of(model)
    for unit in all_units(shape):
        whole = [weights[name] for name in unit.hf]
        shards = [to_megatron(unit, whole, shape, rank=rank, tensor=tensor) for rank in range(tensor)]
        for name, back in zip(unit.hf, from_megatron(unit, shards, shape)):
            assert torch.equal(back, weights[name]), (unit, name)


def test_layout_of_rows_against_a_written_down_one():
    """4 heads in 2 groups of 1 channel: [q0 q1 k0 v0 | q2 q3 k1 v1], rank 1 has the second group; gate and up rows interleave by rank."""
    _, shape = tiny_hf("llama", tied=False)
    shape = type(shape)(**{**shape.__dict__, "kv_channels": 1})
    query, key, value = torch.tensor([[0.0], [1], [2], [3]]), torch.tensor([[10.0], [11]]), torch.tensor([[20.0], [21]])
    unit = Unit("", ("q", "k", "v"), "qkv")
    assert to_megatron(unit, [query, key, value], shape, rank=1, tensor=2).ravel().tolist() == [2, 3, 11, 21]
    gate, up = torch.arange(4.0)[:, None], 10 + torch.arange(4.0)[:, None]
    assert to_megatron(Unit("", ("g", "u"), "gated"), [gate, up], shape, rank=0, tensor=2).ravel().tolist() == [
        0,
        1,
        10,
        11,
    ]


@pytest.mark.parametrize(
    "name", ["model.layers.4.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias", "lm_head.weight", "x"]
)
def test_unknown_names_are_refused(name):
    _, shape = tiny_hf("llama", tied=True)
    with pytest.raises(ValueError, match="is not a tensor of a 4-layer llama model with head lm"):
        hf_shape(name, shape)


@pytest.mark.parametrize("family, tied", FAMILIES)
@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_config_and_yaml_round_trips(family, tied, scaling, tmp_path):
    _, shape = tiny_hf(family, tied=tied)
    shape = type(shape)(**{**shape.__dict__, "rope_scaling": scaling})
    assert shape_of(config_of(shape, dtype="float32", special={})) == shape
    score = shape.with_head("score")
    assert shape_of(config_of(score, dtype="float32", special={})) == score
    write_model_config(shape, tmp_path)
    assert read_model_config(tmp_path) == shape


@pytest.mark.parametrize(
    "change, said",
    [
        ({"model_type": "gpt2"}, "model family 'gpt2' is not supported; these are: llama, qwen2, qwen3"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear' is not"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "llama3 rope scaling lacks low_freq_factor"),
        ({"architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification with 2 labels"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, said):
    _, shape = tiny_hf("llama", tied=False)
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        shape_of(config_of(shape, dtype="float32", special={}) | change)


def test_a_value_head_has_no_hugging_face_class():
    with pytest.raises(ValueError, match="no Hugging Face class"):
        config_of(tiny_hf("llama", tied=False)[1].with_head("value"), dtype="float32", special={})


def test_llama3_frequencies_are_those_of_transformers():
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {**LLAMA3, "rope_theta": 10000.0}
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=2, rope_parameters=rope)
    want, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / 10000.0 ** (torch.arange(0, 32, 2).float() / 32)
    assert torch.allclose(llama3_frequencies(plain, LLAMA3), want, rtol=1e-6)


def test_missing_config_and_missing_keys(tmp_path):
    with pytest.raises(ValueError, match="it has no model_config.yaml; make one with convert_hf_to_nemo.py"):
        read_model_config(tmp_path)
    (tmp_path / "model_config.yaml").write_text("family: llama\nhead: lm\n")
    with pytest.raises(ValueError, match="lacks num_layers, hidden_size, .*share_embeddings_and_output_weights"):
        read_model_config(tmp_path)


def test_padding_is_to_a_multiple_of_128():
    assert [padded(n) for n in (1, 128, 129, 49152)] == [128, 128, 256, 49152]
