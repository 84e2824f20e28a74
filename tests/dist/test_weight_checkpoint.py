"""Weight checkpoints: the names on disk are the written-down ones, and what one grid saves another loads, bit for bit."""

import shutil
import tarfile
import tempfile
from pathlib import Path

import torch

from tests.dist.harness import run_ranks, topologies
from tests.dist.test_hf_parity import forward
from tests.dist.tiny import tiny_hf, weights_of

# NeMo's names of a Llama model with Transformer Engine layers. Changing one makes every checkpoint written so far unreadable.
LAYER_KEYS = {
    "model.decoder.layers.self_attention.linear_qkv.layer_norm_weight": (4, 64),
    "model.decoder.layers.self_attention.linear_qkv.weight": (4, 128, 64),
    "model.decoder.layers.self_attention.linear_proj.weight": (4, 64, 64),
    "model.decoder.layers.mlp.linear_fc1.layer_norm_weight": (4, 64),
    "model.decoder.layers.mlp.linear_fc1.weight": (4, 192, 64),
    "model.decoder.layers.mlp.linear_fc2.weight": (4, 64, 96),
}
OUTER_KEYS = {"model.embedding.word_embeddings.weight": (256, 64), "model.decoder.final_layernorm.weight": (64,)}
HEADS = {"lm": {"model.output_layer.weight": (256, 64)}, "tied": {}, "value": {"model.rm_head.weight": (1, 64)}}
QWEN2_KEYS = {"model.decoder.layers.self_attention.linear_qkv.bias": (4, 128)}
QWEN3_KEYS = {
    "model.decoder.layers.self_attention.q_layernorm.weight": (4, 32),
    "model.decoder.layers.self_attention.k_layernorm.weight": (4, 32),
}
GPT2_KEYS = {
    "model.embedding.word_embeddings.weight": (256, 64),
    "model.embedding.position_embeddings.weight": (128, 64),
    "model.decoder.layers.self_attention.linear_qkv.layer_norm_weight": (4, 64),
    "model.decoder.layers.self_attention.linear_qkv.layer_norm_bias": (4, 64),
    "model.decoder.layers.self_attention.linear_qkv.weight": (4, 192, 64),
    "model.decoder.layers.self_attention.linear_qkv.bias": (4, 192),
    "model.decoder.layers.self_attention.linear_proj.weight": (4, 64, 64),
    "model.decoder.layers.self_attention.linear_proj.bias": (4, 64),
    "model.decoder.layers.mlp.linear_fc1.layer_norm_weight": (4, 64),
    "model.decoder.layers.mlp.linear_fc1.layer_norm_bias": (4, 64),
    "model.decoder.layers.mlp.linear_fc1.weight": (4, 96, 64),
    "model.decoder.layers.mlp.linear_fc1.bias": (4, 96),
    "model.decoder.layers.mlp.linear_fc2.weight": (4, 64, 96),
    "model.decoder.layers.mlp.linear_fc2.bias": (4, 64),
    "model.decoder.final_layernorm.weight": (64,),
    "model.decoder.final_layernorm.bias": (64,),
}

DAMAGED = ("__0_0.distcp", ".metadata", "common.pt", "metadata.json")

SAVED = (1, 2, None, False)
LOADED = [(2, 1, None, True), (1, 2, 2, False), (1, 1, None, False)]


def _built(shape, topology, weights=None, dtype=torch.float32):
    from aligner.models.build import build_model
    from aligner.models.hf import load_hf

    chunks = build_model(shape, topology, head=shape.head, dtype=dtype)
    if weights is not None:
        load_hf(chunks, shape, topology, weights)
    return chunks


def _exported(chunks, shape, topology):
    from aligner.models.hf import export_hf

    return {name: tensor.clone() for name, tensor in export_hf(chunks, shape, topology)}


def _keys(folder):
    from megatron.core import dist_checkpointing

    return {k: tuple(t.global_shape) for k, t in dist_checkpointing.load_tensors_metadata(str(folder)).items()}


def _layouts(rank, folder):
    """Save in one layout, load in the others; untied and tied, and into a bfloat16 model."""
    from aligner.models.checkpoint import load_weights, save_weights

    for tied in (False, True):
        model, shape = tiny_hf("llama", tied=tied)
        small = shape.with_layers(2)
        weights, target = weights_of(model), f"{folder}/{tied}"
        for topology in topologies(SAVED):
            save_weights(_built(shape, topology, weights), shape, topology, target)
        expected = LAYER_KEYS | OUTER_KEYS | HEADS["tied" if tied else "lm"]
        assert _keys(f"{target}/model_weights") == expected
        for topology in topologies(*LOADED):
            chunks = _built(shape, topology)
            load_weights(chunks, shape, topology, target)
            back = _exported(chunks, shape, topology)
            assert set(back) == set(weights) and all(torch.equal(back[n], weights[n]) for n in back), topology
        for topology in topologies((1, 2, None, False)):
            chunks = _built(small, topology)
            load_weights(chunks, small, topology, target)
            back = _exported(chunks, small, topology)
            assert len(back) < len(weights) and all(torch.equal(back[n], weights[n]) for n in back)
        for topology in topologies((2, 1, None, False)):
            chunks = _built(shape, topology, dtype=torch.bfloat16)
            load_weights(chunks, shape, topology, target)
            back = _exported(chunks, shape, topology)
            assert all(torch.equal(back[n], weights[n].bfloat16()) for n in back)

    return _cut_by_one_rank(shape, Path(target))


def _cut_by_one_rank(shape, folder):
    """What is said of a checkpoint of which the second rank's tensors are cut off."""
    from aligner.models.checkpoint import load_weights

    (topology,) = topologies((2, 1, None, False))
    if topology.is_reporter:
        file = folder / "model_weights" / "__1_0.distcp"
        file.write_bytes(file.read_bytes()[:-1000])
    torch.distributed.barrier()
    return _refusal(load_weights, _built(shape, topology), shape, topology, folder)


def test_any_layout_loads_what_another_saved(tmp_path):
    first, second = run_ranks(_layouts, 2, str(tmp_path), deadline=240)
    assert first == second and "/model_weights/__1_0.distcp has " in first and "it was cut" in first


def _refusal(function, *args):
    try:
        function(*args)
    except ValueError as error:
        return str(error)
    return None


def _one_rank(rank, folder):
    """What needs one rank only: other families' names, fewer layers, other heads, archives, refusals."""
    from dataclasses import replace

    from aligner.models.build import unwrap
    from aligner.models.checkpoint import checkpoint_shape, load_weights, save_weights, sharded_weights

    (topology,) = topologies((1, 1, None, False))
    model, shape = tiny_hf("llama", tied=False)
    weights = weights_of(model)
    save_weights(_built(shape, topology, weights), shape, topology, f"{folder}/lm")
    assert checkpoint_shape(f"{folder}/lm") == shape
    found = {}
    for family, extra in (("qwen2", QWEN2_KEYS), ("qwen3", QWEN3_KEYS)):
        chunks = _built(tiny_hf(family, tied=True)[1], topology)
        names = sharded_weights(chunks, topology)
        biases_and_norms = {t.key: tuple(t.global_shape) for t in names.values() if hasattr(t, "global_shape")}
        assert extra.items() <= biases_and_norms.items()
    _check_gpt2(topology, folder)
    _check_fewer_layers_and_value_head(shape, topology, weights, folder)
    _check_archives(shape, topology, weights, folder)
    chunks = _built(shape, topology)
    assert isinstance(unwrap(chunks[-1]).output_layer.weight, torch.nn.Parameter)
    found["missing"] = _refusal(load_weights, chunks, shape, topology, f"{folder}/nowhere")
    found["other"] = _refusal(load_weights, chunks, replace(shape, ffn_hidden_size=128), topology, f"{folder}/lm")
    value = shape.with_head("value")
    save_weights(_built(value, topology), value, topology, f"{folder}/value")
    assert _keys(f"{folder}/value/model_weights") == LAYER_KEYS | OUTER_KEYS | HEADS["value"]
    found["no lm head"] = _refusal(load_weights, chunks, shape, topology, f"{folder}/value")
    found |= _damaged(chunks, shape, topology, Path(folder))
    return found


def _damaged(chunks, shape, topology, folder):
    """{how file: what is said of the checkpoint}"""
    from aligner.models.checkpoint import load_weights

    ways = {
        "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
        "overwritten": lambda file: file.write_bytes(b"\xff" * file.stat().st_size),
        "missing": lambda file: file.unlink(),
    }
    found = {}
    for name in DAMAGED:
        for way, damage in ways.items():
            bad = folder / f"{way} {name}"
            shutil.copytree(folder / "lm", bad)
            damage(bad / "model_weights" / name)
            found[f"{way} {name}"] = _refusal(load_weights, chunks, shape, topology, bad)
    (folder / "bad.nemo").write_bytes(b"x" * 10_000)
    found["archive"] = _refusal(load_weights, chunks, shape, topology, folder / "bad.nemo")
    return found


def _check_archives(shape, topology, weights, folder):
    """Plain and compressed ones are read; what is cut off, wherever, is refused in a sentence and leaves nothing behind."""
    from aligner.models.checkpoint import checkpoint_shape, load_weights

    chunks = _built(shape, topology)
    Path(f"{folder}/unpacked").mkdir()
    tempfile.tempdir = f"{folder}/unpacked"
    for mode in ("w", "w:gz"):
        archive = Path(f"{folder}/model.nemo")
        with tarfile.open(archive, mode) as tar:
            tar.add(f"{folder}/lm", arcname=".")
        whole = archive.read_bytes()
        assert checkpoint_shape(archive) == shape
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.detach().fill_(0.5)
        load_weights(chunks, shape, topology, archive)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in _exported(chunks, shape, topology).items())
        for part in (0, 300, len(whole) // 3, len(whole) * 9 // 10):
            archive.write_bytes(whole[:part])
            said = _refusal(load_weights, chunks, shape, topology, archive)
            assert said and "model.nemo" in said and "\n" not in said, (mode, part, said)
    assert not list(Path(f"{folder}/unpacked").iterdir())


def _check_gpt2(topology, folder):
    """Every name on disk, and what comes back."""
    from aligner.models.checkpoint import load_weights, save_weights

    model, shape = tiny_hf("gpt2", tied=True)
    weights = weights_of(model)
    save_weights(_built(shape, topology, weights), shape, topology, f"{folder}/gpt2")
    assert _keys(f"{folder}/gpt2/model_weights") == GPT2_KEYS
    chunks = _built(shape, topology)
    load_weights(chunks, shape, topology, f"{folder}/gpt2")
    back = _exported(chunks, shape, topology)
    assert set(back) == set(weights) and all(torch.equal(back[n], weights[n]) for n in back)


def _check_fewer_layers_and_value_head(shape, topology, weights, folder):
    """The first two layers of four, with a value head that the checkpoint lacks: layers are equal, values are zero."""
    from aligner.models.checkpoint import load_weights
    from aligner.models.hf_mapping import hf_names

    small = shape.with_layers(2).with_head("value")
    chunks = _built(small, topology)
    with torch.no_grad():
        chunks[0].output_layer.weight.fill_(3.0)
    load_weights(chunks, small, topology, f"{folder}/lm")
    back = _exported(chunks, small, topology)
    assert {name: tuple(t.shape) for name, t in back.items()} == hf_names(small)
    assert not back.pop("score.weight").any()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in back.items())
    values = forward(chunks, topology, torch.arange(16).reshape(2, 8))
    assert values.shape == (2, 8, 1) and values.dtype == torch.float32 and not values.any()


def test_names_heads_layers_archives_and_refusals(tmp_path):
    (found,) = run_ranks(_one_rank, 1, str(tmp_path), deadline=240)
    assert found["missing"].endswith("nowhere is neither a folder nor a .nemo archive")
    assert "holds another architecture: ffn_hidden_size=96 (wanted 128)" in found["other"]
    assert "missing ['model.output_layer.weight'] (1), unknown none (0)" in found["no lm head"]
    assert found["archive"].startswith(f"{tmp_path}/bad.nemo is no whole tar archive")
    for name in DAMAGED:
        for way in ("cut", "overwritten"):
            said = found[f"{way} {name}"]
            assert said.startswith(f"{tmp_path}/{way} {name}/model_weights/{name} ") and "it was " in said
        assert name in found[f"missing {name}"]
