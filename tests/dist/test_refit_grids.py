"""A refit from any training grid gives the engine that was built freshly from the same Hugging Face tensors, bit for bit.

Oracle: an engine that was never near Megatron, refitted once with the Hugging Face model's own tensors."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.dist.harness import run_ranks, topologies
from tests.dist.tiny import tiny_hf, weights_of

TP2, PP2, VPP2, TP2_PP2 = (2, 1, None, True), (1, 2, None, False), (1, 2, 2, False), (2, 2, None, False)
MODELS = {  # name -> (family, tied)
    "tied": ("llama", True),
    "qkv_bias_untied": ("qwen2", False),
    "qk_norm_tied": ("qwen3", True),
}
PROMPTS = [[5, 9, 33], [1], list(range(40, 57))]


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that were made inside the block and still live, and their peak. Views count once, `known` never."""

    def __init__(self, known):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.live: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:  # those have a shape and no memory
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.live[StorageWeakRef(storage)] = storage.nbytes()
        self.live = {storage: size for storage, size in self.live.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self.live.values()))
        return out


def _engine(shape, **changes):
    from aligner.config.groups import Certify
    from aligner.rollout.linear import Kernel
    from aligner.rollout.torch_engine import TorchEngine

    build = {"max_batch_size": 4, "max_input_len": 24, "max_output_len": 8, "dtype": torch.float32}
    return TorchEngine(shape, **{**build, "certify": Certify.full, "kernel": Kernel.plain, **changes})


def _answers(engine):
    from aligner.data.batch import Request

    requests = [
        Request(sample_id=i, prompt_ids=ids, max_output_len=8, temperature=1.0) for i, ids in enumerate(PROMPTS)
    ]
    return [(c.token_ids, c.logprobs, c.weight_version) for c in engine.generate(requests)]


def _same(engine, fresh) -> bool:
    views, others = engine.weights.views, fresh.weights.views
    return list(views) == list(others) and all(torch.equal(views[name], others[name]) for name in views)


def _body(rank, grids, dtype):
    """([what refits gave, in order of models and grids], what was said of a broken one)"""
    return [case for family, tied in MODELS.values() for case in _model(family, tied, grids, dtype)], _broken(rank)


def _model(family, tied, grids, dtype):
    """What a refit twice gave on each grid."""
    from aligner.models.build import build_model
    from aligner.models.hf import export_hf, load_hf
    from aligner.rollout.refit import certified_refit

    first, _ = tiny_hf(family, tied=tied, seed=1)
    second, shape = tiny_hf(family, tied=tied, seed=2)
    fresh, engine = _engine(shape, dtype=dtype), _engine(shape, dtype=dtype)
    wanted = certified_refit(fresh, weights_of(second).items(), version=1)
    for topology in topologies(*grids):
        chunks = build_model(shape, topology, head="lm", dtype=torch.float32)
        load_hf(chunks, shape, topology, weights_of(first))
        before = certified_refit(engine, export_hf(chunks, shape, topology), version=0)
        load_hf(chunks, shape, topology, weights_of(second))
        known = [*engine.weights.views.values(), *(p for chunk in chunks for p in chunk.parameters())]
        with LiveBytes(known) as live:
            after = certified_refit(engine, export_hf(chunks, shape, topology), version=1)
        digests = [certificate.digest for certificate in (before, after, wanted)]
        yield _same(engine, fresh), digests, live.peak, _layer(shape)


def _layer(shape) -> int:
    """Bytes of a layer in float32, or of two embeddings where that is more, and of a few vectors."""
    from aligner.models.hf import hf_names

    layer = sum(torch.Size(size).numel() for name, size in hf_names(shape).items() if ".layers.0." in name)
    return 4 * max(layer, 2 * shape.padded_vocab_size * shape.hidden_size) + 1024


def check(ranks, grids, dtype):
    cases = [(model, grid) for model in MODELS for grid in grids]
    for rank, (found, _) in enumerate(ranks):
        for case, (same, (before, after, wanted), peak, layer) in zip(cases, found, strict=True):
            assert same and before != after == wanted, f"{case}, rank {rank}"
            if dtype is torch.float32:  # a conversion is the caller's
                assert 0 < peak <= layer, (
                    f"{case}, rank {rank}: {peak} bytes beside model and engine, a layer has {layer}"
                )


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(_body, 2, (TP2, PP2, VPP2), torch.float32)


def test_refitted_twice_it_is_the_fresh_engine_and_no_more_than_a_layer_lives_beside_it(two_ranks):
    check(two_ranks, (TP2, PP2, VPP2), torch.float32)


@pytest.mark.faults
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_both_kinds_of_parallelism(dtype):
    check(run_ranks(_body, 4, (TP2_PP2,), dtype), (TP2_PP2,), dtype)


def _broken(rank):
    """Rank 1's copy of one tensor is cut half-way through the second refit."""
    from aligner.rollout.refit import certified_refit

    old, shape = tiny_hf("llama", tied=False, seed=1)
    new, _ = tiny_hf("llama", tied=False, seed=2)
    fresh = _engine(shape)
    certified_refit(fresh, weights_of(new).items(), version=2)
    (said,) = [_break_and_heal(rank, topology, shape, (old, new), fresh) for topology in topologies(TP2)]
    return said


def _break_and_heal(rank, topology, shape, models, fresh):
    from aligner.algorithms.agreement import on_all
    from aligner.models.build import build_model
    from aligner.models.hf import export_hf, load_hf
    from aligner.rollout.refit import certified_refit

    old, new = models
    said, chunks, engine = [], build_model(shape, topology, head="lm", dtype=torch.float32), _engine(shape)

    def refit(model, version, spoil=lambda pairs: pairs):
        load_hf(chunks, shape, topology, weights_of(model))
        pairs = spoil(export_hf(chunks, shape, topology))
        on_all(lambda: certified_refit(engine, pairs, version=version), topology)

    refit(old, 0)
    cut = "model.layers.2.mlp.down_proj.weight"
    for attempt in (
        lambda: refit(new, 1, lambda pairs: ((n, t[:1] if rank == 1 and n == cut else t) for n, t in pairs)),
        lambda: _answers(engine),
    ):
        try:
            attempt()
            said.append("went well")
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    refit(new, 2)
    return [*said, (_same(engine, fresh), _answers(engine) == _answers(fresh))]


def test_broken_half_way_on_one_rank_poisons_it_and_the_next_whole_one_heals(two_ranks):
    healthy, broken = (said for _, said in two_ranks)
    sentence = (
        "refit: tensor 'model.layers.2.mlp.down_proj.weight' has shape [1, 96], the engine was built with [64, 96]"
    )
    for rank, found in enumerate((healthy, broken)):
        assert found[0] == sentence  # every rank hears of it, and none waits for rank 1
        assert found[2] == (True, True), f"rank {rank}"
    assert healthy[1] == "went well"
    assert broken[1].startswith(f"the engine cannot take requests: the refit to weight version 1 failed ({sentence})")
