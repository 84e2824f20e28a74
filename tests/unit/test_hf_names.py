"""Names and shapes of Hugging Face tensors against transformers' own models, and the split of each over tensor-parallel ranks."""

from dataclasses import replace

import pytest
import torch

from aligner.models.hf_config import config_of, shape_of
from aligner.models.hf_mapping import (
    Unit,
    all_units,
    canonical_name,
    from_megatron,
    hf_names,
    hf_shape,
    pieces,
    to_megatron,
)
from aligner.models.model_config import padded, read_model_config, write_model_config
from aligner.models.reward_head import RewardHead
from aligner.models.rope import llama3_frequencies
from tests.dist.tiny import tiny_hf, weights_of

FAMILIES = [(family, tied) for family in ("llama", "qwen2", "qwen3", "gpt2") for tied in (False, True)]
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
        parts = [pieces(unit, shard) for shard in shards]
        back_again = [back for same in zip(*parts) for back in from_megatron(unit, torch.stack(same), shape)]
        for name, back in zip(unit.hf, back_again, strict=True):
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
    if not shape.gpt2_style:
        shape = type(shape)(**{**shape.__dict__, "rope_scaling": scaling})
    assert shape_of(config_of(shape, dtype="float32", special={})) == shape
    score = shape.with_head("score")
    assert shape_of(config_of(score, dtype="float32", special={})) == score
    write_model_config(shape, tmp_path)
    assert read_model_config(tmp_path) == shape


def test_a_reward_models_attributes_are_a_classifiers_labels():
    """In one direction: weights by which to add them up are not in a config.json."""
    shape = replace(
        tiny_hf("llama", tied=False)[1].with_head("score"), reward=RewardHead(("help", "brief"), (1.0, -0.5))
    )
    config = config_of(shape, dtype="float32", special={})
    assert config["id2label"] == {"0": "help", "1": "brief"} and config["label2id"] == {"help": 0, "brief": 1}
    assert hf_shape("score.weight", shape) == (2, 64)
    with pytest.raises(ValueError, match="LlamaForSequenceClassification with 2 labels is not supported"):
        shape_of(config)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"model_type": "opt"}, "model family 'opt' is not supported; these are: llama, qwen2, qwen3, gpt2"),
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


@pytest.mark.parametrize(
    "change, said",
    [
        ({"activation_function": "gelu"}, "activation_function='gelu'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"scale_attn_weights": False}, "scale_attn_weights=False"),
        ({"add_cross_attention": True}, "add_cross_attention=True, which is not supported for gpt2 models"),
        ({"architectures": ["GPT2DoubleHeadsModel"]}, "architecture GPT2DoubleHeadsModel with"),
    ],
)
def test_what_is_not_supported_of_gpt2_is_refused_by_name(change, said):
    _, shape = tiny_hf("gpt2", tied=True)
    with pytest.raises(ValueError, match=said):
        shape_of(config_of(shape, dtype="float32", special={}) | change)


def test_the_configuration_of_the_published_gpt2():
    """Its config.json, as far as it matters: no n_inner, and labels of no classifier."""
    published = {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    shape = shape_of(published)
    assert (shape.ffn_hidden_size, shape.kv_channels, shape.padded_vocab_size) == (3072, 64, 50304)
    assert shape.tied and shape.qkv_bias and shape.rotary_base is None and shape.head == "lm"
    del published["n_embd"]
    with pytest.raises(ValueError, match="config.json lacks 'n_embd' of a gpt2 model"):
        shape_of(published)


def test_names_in_the_published_gpt2_file():
    """They lack the prefix, and each layer has its causal mask."""
    _, shape = tiny_hf("gpt2", tied=True)
    names = {
        "wte.weight": "transformer.wte.weight",
        "h.3.attn.c_attn.bias": "transformer.h.3.attn.c_attn.bias",
        "h.3.attn.bias": None,
        "transformer.h.3.attn.bias": None,
        "h.3.attn.masked_bias": None,
        "ln_f.bias": "transformer.ln_f.bias",
        "transformer.h.11.ln_1.weight": "transformer.h.11.ln_1.weight",
        "lm_head.weight": "lm_head.weight",
        "score.weight": "score.weight",
    }
    assert {name: canonical_name(name, shape) for name in names} == names


def test_gpt2_rows_against_written_down_ones():
    """Conv1D keeps [in, out], its columns all queries, then all keys, then all values: 4 heads of 1 channel and hidden size 4."""
    _, shape = tiny_hf("gpt2", tied=True)
    shape = type(shape)(**{**shape.__dict__, "kv_channels": 1, "hidden_size": 4})
    rows = [*range(4), *range(10, 14), *range(20, 24)]
    conv = torch.tensor([[100.0 * i + row for row in rows] for i in range(4)])
    shard = to_megatron(Unit("", ("c",), "qkv", transposed=True), [conv], shape, rank=1, tensor=2)
    assert shard.tolist() == [[100.0 * i + row for i in range(4)] for row in (2, 12, 22, 3, 13, 23)]
    bias = to_megatron(Unit("", ("c",), "qkv"), [conv[0]], shape, rank=0, tensor=2)
    assert bias.tolist() == [0, 10, 20, 1, 11, 21]


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
