"""Files written tensor by tensor, read back by the safetensors library."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from aligner.models.tensor_file import INDEX, HfWeights, TensorFile


def tensors(dtype):
    generator = torch.Generator().manual_seed(0)
    sizes = {"b": (3, 5), "a": (7,), "c": (2, 3, 4)}
    return {name: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()}


def shapes(found):
    return {name: tuple(tensor.shape) for name, tensor in found.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safetensors_reads_what_is_written_in_any_order(tmp_path, dtype):
    wanted = tensors(dtype)
    with TensorFile(tmp_path / "x.safetensors", shapes(wanted), dtype) as file:
        for name in ("c", "a", "b"):
            file.write(name, wanted[name])
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)
    assert all(found[n].dtype == dtype for n in found)
    with safe_open(tmp_path / "x.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_a_transposed_view_is_written_as_it_reads(tmp_path):
    matrix = torch.arange(6.0).reshape(2, 3)
    with TensorFile(tmp_path / "x.safetensors", {"m": (3, 2)}, torch.float32) as file:
        file.write("m", matrix.t())
    assert torch.equal(load_file(tmp_path / "x.safetensors")["m"], matrix.t())


def test_what_does_not_fit_the_header_is_refused(tmp_path):
    with TensorFile(tmp_path / "x.safetensors", {"m": (2,)}, torch.float32) as file:
        for name, tensor, message in (
            ("other", torch.zeros(2), "'other' is unknown"),
            ("m", torch.zeros(3), r"\[3\], the header says .*\[2\]"),
            ("m", torch.zeros(2, dtype=torch.float16), "float16"),
        ):
            with pytest.raises(ValueError, match=message):
                file.write(name, tensor)
        file.write("m", torch.ones(2))
        with pytest.raises(ValueError, match="came twice"):
            file.write("m", torch.ones(2))
    with (
        pytest.raises(ValueError, match="lacks 1 tensors, first"),
        TensorFile(tmp_path / "y.safetensors", {"m": (2,)}, torch.float32),
    ):
        pass


def test_shards_hold_at_most_the_limit_and_the_index_names_them(tmp_path):
    wanted = tensors(torch.float32)  # 60, 28 and 96 bytes
    with HfWeights(tmp_path, shapes(wanted), torch.float32, shard_bytes=90) as out:
        for name, tensor in wanted.items():
            out.write(name, tensor)
    index = json.loads((tmp_path / INDEX).read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index["weight_map"] == {"b": first, "a": first, "c": second}
    assert index["metadata"]["total_size"] == 184
    found = {**load_file(tmp_path / first), **load_file(tmp_path / second)}
    assert all(torch.equal(found[n], wanted[n]) for n in wanted) and found.keys() == wanted.keys()


def test_one_shard_has_the_plain_name(tmp_path):
    wanted = tensors(torch.bfloat16)
    with HfWeights(tmp_path, shapes(wanted), torch.bfloat16) as out:
        for name, tensor in wanted.items():
            out.write(name, tensor)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert load_file(tmp_path / "model.safetensors").keys() == wanted.keys()
