"""TensorRT-LLM's checkpoint: tensor by tensor megatron-core's own exporter's for Llama, the written rules for what that does not know."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from aligner.models.hf_mapping import all_units, hf_names, to_megatron
from aligner.models.stored_weights import unit_shape
from aligner.trtllm.checkpoint_config import checkpoint_config
from aligner.trtllm.engine_build import EngineBuild
from aligner.trtllm.layout import Grid, rank_shapes, rank_tensors, split_problems
from tests.unit.tiny_engine import tiny_shape


def random_hf(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator) for name, size in hf_names(shape).items()}


def in_megatron(shape, hf):
    """(unit, whole parameter) of every parameter."""
    return [(u, to_megatron(u, [hf[n] for n in u.hf], shape, rank=0, tensor=1)) for u in all_units(shape)]


def exported(shape, hf, grid):
    ranks = [{} for _ in range(grid.world)]
    for unit, whole in in_megatron(shape, hf):
        for rank, name, tensor in rank_tensors(unit, whole, shape, grid):
            assert name not in ranks[rank]
            ranks[rank][name] = tensor
    return ranks


class Mapping(SimpleNamespace):
    """What megatron-core asks of tensorrt_llm's Mapping."""

    def pp_layers(self, layers):
        each = layers // self.pp_size
        return list(range(self.pp_rank * each, (self.pp_rank + 1) * each))

    def is_first_pp_rank(self):
        return self.pp_rank == 0

    def is_last_pp_rank(self):
        return self.pp_rank == self.pp_size - 1


@pytest.fixture
def stub_of_utils(monkeypatch):
    """The two functions of tensorrt_llm._utils that megatron-core's exporter calls."""
    utils = ModuleType("tensorrt_llm._utils")
    utils.str_dtype_to_torch = lambda name: getattr(torch, name)
    utils.pad_vocab_size = lambda size, tensor: -(-size // tensor) * tensor
    monkeypatch.setitem(sys.modules, "tensorrt_llm", ModuleType("tensorrt_llm"))
    monkeypatch.setitem(sys.modules, "tensorrt_llm._utils", utils)


def by_megatron_core(shape, hf, grid):
    from megatron.core.export.data_type import DataType
    from megatron.core.export.export_config import ExportConfig
    from megatron.core.export.trtllm.model_to_trllm_mapping.default_conversion_dict import DEFAULT_CONVERSION_DICT
    from megatron.core.export.trtllm.trtllm_weights_converter.single_device_trtllm_model_weights_converter import (
        SingleDeviceTRTLLMModelWeightsConverter,
    )

    config = SimpleNamespace(
        num_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        hidden_size=shape.hidden_size,
        layernorm_zero_centered_gamma=False,
        normalization="RMSNorm",
        gated_linear_unit=shape.family != "gpt2",
    )
    state = {}
    for unit, whole in in_megatron(shape, hf):
        name = unit.megatron if unit.layer is None else f"decoder.layers.{unit.layer}.{unit.megatron}"
        state[name] = whole.clone()
    if shape.tied:
        state["output_layer.weight"] = state["embedding.word_embeddings.weight"].clone()
    converter = SingleDeviceTRTLLMModelWeightsConverter(
        ExportConfig(inference_tp_size=grid.tensor, inference_pp_size=grid.pipeline),
        config,
        DataType.float32,
        activation="gelu" if shape.family == "gpt2" else "swiglu",
    )
    converter.convert(state, DEFAULT_CONVERSION_DICT)
    ranks = []
    for rank in range(grid.world):
        stage, tensor_rank = divmod(rank, grid.tensor)
        mapping = Mapping(tp_size=grid.tensor, tp_rank=tensor_rank, pp_size=grid.pipeline, pp_rank=stage)
        ranks.append(converter.get_local_model_weights_per_gpu(mapping, SimpleNamespace()))
    return ranks


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("grid", [Grid(1), Grid(2), Grid(4), Grid(2, 2)], ids=str)
def test_llama_equals_megatron_cores_exporter(stub_of_utils, grid, tied):
    shape = replace(tiny_shape("llama"), tied=tied, vocab_size=256)  # no padding: the oracle does not take it off
    hf = random_hf(shape)
    ours, theirs = exported(shape, hf, grid), by_megatron_core(shape, hf, grid)
    for rank in range(grid.world):
        assert ours[rank].keys() == theirs[rank].keys()
        for name, tensor in theirs[rank].items():
            assert torch.equal(ours[rank][name], tensor), f"rank {rank}: {name}"


@pytest.mark.parametrize("grid", [Grid(1), Grid(2), Grid(2, 2)], ids=str)
def test_gpt2_equals_megatron_cores_exporter(stub_of_utils, grid):
    """Biases, two parts a norm, learned positions, and a feed-forward layer without a gate; attention heads are not grouped."""
    shape = gpt2_shape(vocab=256)
    hf = random_hf(shape)
    ours, theirs = exported(shape, hf, grid), by_megatron_core(shape, hf, grid)
    for rank in range(grid.world):
        assert ours[rank].keys() == theirs[rank].keys()
        for name, tensor in theirs[rank].items():
            assert torch.equal(ours[rank][name], tensor), f"rank {rank}: {name}"
    assert "transformer.position_embedding.weight" in ours[0] and "transformer.ln_f.bias" in ours[-1]
    assert tuple(ours[0]["transformer.layers.0.mlp.fc.bias"].shape) == (shape.ffn_hidden_size // grid.tensor,)


def gpt2_shape(vocab):
    from tests.dist.tiny import tiny_hf

    return tiny_hf("gpt2", tied=True, layers=2, vocab=vocab)[1]


def by_the_rules(shape, hf, grid, rank):
    """The written rules, from Hugging Face's tensors, in numpy."""
    t, (stage, r) = grid.tensor, divmod(rank, grid.tensor)
    a, k, d = shape.num_attention_heads, shape.num_query_groups, shape.kv_channels
    x = {name: tensor.numpy() for name, tensor in hf.items()}
    found = {}
    if stage == 0:
        found["transformer.vocab_embedding.weight"] = x["model.embed_tokens.weight"]
    kv = [r * k // t + i for i in range(k // t)] if k >= t else [r // (t // k)]
    for local, layer in enumerate(np.split(np.arange(shape.num_layers), grid.pipeline)[stage]):
        ours, theirs = f"transformer.layers.{local}.", f"model.layers.{layer}."
        for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
            q, key, v = (x[f"{theirs}self_attn.{n}_proj.{kind}"] for n in "qkv")
            heads = [q[h * d : (h + 1) * d] for h in range(r * a // t, (r + 1) * a // t)]
            heads += [key[h * d : (h + 1) * d] for h in kv] + [v[h * d : (h + 1) * d] for h in kv]
            found[f"{ours}attention.qkv.{kind}"] = np.concatenate(heads)
        if shape.qk_norm:
            for n in "qk":
                found[f"{ours}attention.{n}_layernorm.weight"] = x[f"{theirs}self_attn.{n}_norm.weight"]
        found[f"{ours}attention.dense.weight"] = np.split(x[f"{theirs}self_attn.o_proj.weight"], t, 1)[r]
        found[f"{ours}mlp.fc.weight"] = np.split(x[f"{theirs}mlp.gate_proj.weight"], t)[r]
        found[f"{ours}mlp.gate.weight"] = np.split(x[f"{theirs}mlp.up_proj.weight"], t)[r]
        found[f"{ours}mlp.proj.weight"] = np.split(x[f"{theirs}mlp.down_proj.weight"], t, 1)[r]
        found[f"{ours}input_layernorm.weight"] = x[f"{theirs}input_layernorm.weight"]
        found[f"{ours}post_layernorm.weight"] = x[f"{theirs}post_attention_layernorm.weight"]
    if stage == grid.pipeline - 1:
        head = x["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
        rows = -(-len(head) // t)
        padded = np.concatenate([head, np.zeros((rows * t - len(head), head.shape[1]), head.dtype)])
        found["lm_head.weight"] = padded[r * rows : (r + 1) * rows]
        found["transformer.ln_f.weight"] = x["model.norm.weight"]
    return found


@pytest.mark.parametrize("grid", [Grid(1), Grid(2), Grid(4), Grid(4, 2)], ids=str)
@pytest.mark.parametrize("kind", ["llama", "llama3_rope", "qwen2", "qwen3"])
def test_every_family_follows_the_written_rules(kind, grid):
    """With a vocabulary of 150 (padded to 256 in Megatron, to 152 over 4 ranks) and 2 or 4 key-value heads."""
    shape = tiny_shape(kind)
    hf = random_hf(shape)
    ours = exported(shape, hf, grid)
    sizes = rank_shapes([(u, unit_shape(u, shape)) for u in all_units(shape)], shape, grid)
    for rank in range(grid.world):
        expected = by_the_rules(shape, hf, grid, rank)
        assert ours[rank].keys() == expected.keys()
        assert sizes[rank] == {name: array.shape for name, array in expected.items()}
        for name, array in expected.items():
            assert np.array_equal(ours[rank][name].numpy(), array), f"rank {rank}: {name}"


def test_a_vocabulary_smaller_than_its_ranks_share():
    """5 entries over 4 ranks: two rows each; the third has one row and the last none of its own."""
    shape = replace(tiny_shape("llama"), vocab_size=5, tied=False)
    hf = random_hf(shape)
    heads = [rank["lm_head.weight"] for rank in exported(shape, hf, Grid(4))]
    assert [tuple(h.shape) for h in heads] == [(2, 32)] * 4
    assert torch.equal(torch.cat(heads)[:5], hf["lm_head.weight"]) and not torch.cat(heads)[5:].any()


COMMON = {
    *("architecture", "dtype", "logits_dtype", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_size", "intermediate_size", "hidden_act", "norm_epsilon", "position_embedding_type"),
    *("max_position_embeddings", "use_parallel_embedding", "embedding_sharding_dim", "qk_layernorm", "mapping"),
    "quantization",
}
LLAMA = {
    *("mlp_bias", "attn_bias", "rotary_base", "rotary_scaling", "residual_mlp", "disable_weight_only_quant_plugin"),
    *("remove_duplicated_kv_heads", "tie_word_embeddings"),
}
QWEN = {
    *("qwen_type", "attn_bias", "mlp_bias", "rotary_base", "rotary_scaling", "seq_length", "use_logn_attn"),
    *("moe_intermediate_size", "moe_shared_expert_intermediate_size", "num_labels", "tie_word_embeddings"),
}
GPT = {"bias", "q_scaling", "rotary_pct", "rotary_base", "apply_query_key_layer_scaling"}
KEYS = {"llama": COMMON | LLAMA, "qwen2": COMMON | QWEN, "qwen3": COMMON | QWEN}


@pytest.mark.parametrize("kind", ["llama", "llama3_rope", "qwen2", "qwen3"])
def test_config_has_exactly_the_allowed_keys(kind):
    shape = tiny_shape(kind)
    config = checkpoint_config(shape, Grid(2, 3), dtype="bfloat16", quantization="int8")
    assert config.keys() == KEYS[shape.family]
    assert config["mapping"] == {"world_size": 6, "tp_size": 2, "pp_size": 3}
    assert config["quantization"] == {"quant_algo": "W8A16", "kv_cache_quant_algo": None}
    assert config["vocab_size"] == 150 and config["dtype"] == "bfloat16" and config["logits_dtype"] == "float32"
    assert config["head_size"] == shape.kv_channels and config["num_key_value_heads"] == shape.num_query_groups
    assert config["tie_word_embeddings"] is shape.tied and config["rotary_scaling"] == shape.rope_scaling
    assert (config["architecture"], config["attn_bias"], config["qk_layernorm"]) == {
        "llama": ("LlamaForCausalLM", False, False),
        "qwen2": ("Qwen2ForCausalLM", True, False),
        "qwen3": ("Qwen3ForCausalLM", False, True),
    }[shape.family]


def test_config_of_a_gpt2_model():
    config = checkpoint_config(gpt2_shape(vocab=150), Grid(2), dtype="float16", quantization="none")
    assert config.keys() == COMMON | GPT
    assert config["architecture"] == "GPTForCausalLM" and config["position_embedding_type"] == "learned_absolute"
    assert config["hidden_act"] == "gelu" and config["bias"] is True and config["num_key_value_heads"] == 4
    assert config["quantization"]["quant_algo"] is None


@pytest.mark.parametrize(
    "grid, problem",
    [
        (Grid(3), "num_attention_heads must be a multiple of --tp_size: 4 is not one of 3"),
        (Grid(1, 3), "num_layers must be a multiple of --pp_size: 2 is not one of 3"),
        (Grid(0), "--tp_size=0 must be at least 1"),
        (Grid(32), "ffn_hidden_size must be a multiple of --tp_size: 48 is not one of 32"),
    ],
)
def test_impossible_splits_are_refused_with_the_rule(grid, problem):
    found = split_problems(tiny_shape("llama"), grid, tensor_key="--tp_size", pipeline_key="--pp_size")
    assert problem in "; ".join(found)


def test_key_value_heads_that_neither_divide_nor_are_divided():
    shape = replace(tiny_shape("llama"), num_attention_heads=12, num_query_groups=6, ffn_hidden_size=64)
    (problem,) = split_problems(shape, Grid(4), tensor_key="--tp_size", pipeline_key="--pp_size")
    assert "multiple one of the other" in problem and problem.endswith(": 6 and 4")
    assert split_problems(shape, Grid(2), tensor_key="--tp_size", pipeline_key="--pp_size") == []


def test_what_an_engine_cannot_be_built_for():
    shape = tiny_shape("llama")  # 128 positions, hidden size 32, ffn 48

    def problems(**changes):
        build = {"dtype": "bfloat16", "max_batch_size": 4, "max_input_len": 64, "max_output_len": 64}
        return "; ".join(EngineBuild(**{**build, **changes}).problems(shape, Grid(2)))

    assert problems() == ""
    assert "--max_input_len=65 + --max_output_len=64 = 129 exceeds the model's max_position_embeddings=128" in problems(
        max_input_len=65
    )
    assert problems(max_batch_size=0) == "--max_batch_size=0 must be at least 1"
    assert "needs 16-bit activations" in problems(dtype="float32", quantization="int8")
    assert "needs inputs in multiples of 32" in problems(quantization="int4")
    assert "dense has 16 inputs and 32 outputs" in problems(quantization="int4")
    # int8 tiles 16 inputs: 24 of the feed-forward layer's on each of two ranks are none
    assert problems(quantization="int8").count("inputs and") == 1 and "mlp.proj has 24 inputs" in problems(
        quantization="int8"
    )
