"""Reading a checkpoint unit by unit, whatever grid wrote it; and converting it with the memory of a few parameters."""

import tracemalloc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.dist.harness import run_ranks, topologies
from tests.dist.test_weight_checkpoint import _built, _refusal
from tests.dist.tiny import tiny_hf, weights_of

SAVED = [(2, 1, None, False), (1, 2, None, False)]


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages of tensors that live, as operators make them, and the most there were at once."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen or not size:
            return
        self.seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key, size):
        self.seen.discard(key)
        self.now -= size


def _body(rank, folder):
    from aligner.models.checkpoint import save_weights

    found = {}
    for family, tied in (("llama", False), ("qwen2", True), ("qwen3", True), ("gpt2", True)):
        model, shape = tiny_hf(family, tied=tied)
        weights = weights_of(model)
        for topology in topologies(*SAVED):
            target = Path(folder) / f"{family}-{topology.tensor}"
            save_weights(_built(shape, topology, weights), shape, topology, target)
            if rank == 0:
                _check_units(target, shape, weights)
    model, shape = tiny_hf("llama", tied=False, layers=24, vocab=128)
    for topology in topologies(SAVED[0]):
        save_weights(_built(shape, topology, weights_of(model)), shape, topology, Path(folder) / "deep")
    if rank == 0:
        found["memory"] = _peak_of_conversion(Path(folder), shape)
        found |= _refusals(Path(folder), shape)
    return found


def _check_units(folder, shape, weights):
    from aligner.models.hf_mapping import all_units, to_megatron
    from aligner.models.stored_weights import StoredWeights

    stored = StoredWeights(folder, shape)
    assert stored.dtypes() == {torch.float32}
    for unit in all_units(shape):
        expected = to_megatron(unit, [weights[name] for name in unit.hf], shape, rank=0, tensor=1)
        assert torch.equal(stored.read(unit), expected), unit


def _peak_of_conversion(folder, shape):
    """(most bytes of tensors, most bytes of Python's own objects, bytes of the largest parameter, of the model)."""
    from aligner.models.hf_mapping import all_units
    from aligner.models.stored_weights import StoredWeights, unit_shape
    from aligner.trtllm.export import write_weights
    from aligner.trtllm.layout import Grid

    (folder / "out" / "hf").mkdir(parents=True)
    sizes = [4 * torch.empty(unit_shape(u, shape), device="meta").numel() for u in all_units(shape)]
    stored = StoredWeights(folder / "deep", shape)
    tracemalloc.start()
    with LiveBytes() as live:
        write_weights(stored, shape, Grid(2, 2), torch.float32, folder / "out", lambda: None)
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert live.now == 0, "the counter sees tensors go"
    return live.peak, python, max(sizes), sum(sizes)


def _refusals(folder, shape):
    from aligner.models.stored_weights import StoredWeights

    other = replace(shape, ffn_hidden_size=128)
    found = {"shape": _refusal(StoredWeights, folder / "deep", other)}
    found["layers"] = _refusal(StoredWeights, folder / "deep", replace(shape, num_layers=23))
    found["names"] = _refusal(StoredWeights, folder / "qwen2-2", tiny_hf("llama", tied=True)[1])
    (folder / "deep" / "model_weights" / "metadata.json").unlink()
    found["incomplete"] = _refusal(StoredWeights, folder / "deep", shape)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(_body, 2, str(tmp_path_factory.mktemp("export")), deadline=240)[0]


def test_conversion_holds_a_few_parameters(found):
    """What is read, the parameter and its parts: three of the largest one at most. The model has 147 parameters."""
    tensors, python, largest, model = found["memory"]
    assert largest < tensors <= 3 * largest and tensors < model / 20
    assert python < 8 * largest + 2**20, "headers, names and what was read"


def test_a_checkpoint_of_another_shape_is_refused(found):
    assert "mlp.linear_fc1.weight has shape (24, 192, 64), but model_config.yaml says (24, 256, 64)" in found["shape"]
    assert "has shape (24, 64), but model_config.yaml says (23, 64)" in found["layers"]
    assert "unknown ['model.decoder.layers.self_attention.linear_qkv.bias'] (1)" in found["names"]
    assert "there is no metadata.json in it" in found["incomplete"]


def test_float16_that_would_overflow_is_refused():
    from aligner.trtllm.export import converted

    large = torch.tensor([1.0, 70000.0])
    with pytest.raises(ValueError, match="norm has values up to 70000, beyond float16's 65504: use --dtype bfloat16"):
        converted(large, torch.float16, "norm")
    assert converted(large, torch.bfloat16, "norm").dtype is torch.bfloat16
    assert converted(torch.tensor([0.5]), torch.float16, "x").tolist() == [0.5]
