"""Reading and writing safetensors in shards, and what is said of a folder that lacks something."""

import os

import pytest
import torch
from safetensors.torch import save_file

from aligner.models.hf_folder import SafeTensors, copy_tokenizer_files, read_config
from aligner.models.tensor_file import HfWeights


def write(folder, tensors, **how):
    dtype = next(iter(tensors.values())).dtype
    with HfWeights(folder, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, dtype, **how) as out:
        for name, tensor in tensors.items():
            out.write(name, tensor)


def test_shards_come_back_equal(tmp_path):
    tensors = {f"t{i}": torch.arange(100.0)[i : i + 50] for i in range(5)}  # views of storages of their own
    write(tmp_path, tensors, shard_bytes=400)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    back = SafeTensors(tmp_path)
    assert set(back) == set(tensors) and all(torch.equal(back[n], tensors[n]) for n in tensors)
    assert back.dtypes() == {"F32"} and "t9" not in back and len(back) == 5


def test_one_shard_has_no_index(tmp_path):
    write(tmp_path, {"a": torch.ones(2, dtype=torch.bfloat16)})
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert SafeTensors(tmp_path).dtypes() == {"BF16"}


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no \*.safetensors"):
        SafeTensors(tmp_path)
    write(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)}, shard_bytes=8)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        ValueError, match="lacks model-00002-of-00002.safetensors, which its model.safetensors.index.json"
    ):
        SafeTensors(tmp_path)
    with pytest.raises(ValueError, match="has no tokenizer.json"):
        copy_tokenizer_files(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    "content",
    [b'{"weight_map": {"a": "mod', b"\xff\xfe", b"[]", b"{}", b'{"weight_map": {}}', b'{"weight_map": {"a": 3}}',
     b'{"weight_map": {"a": "../model.safetensors"}}'],
)  # fmt: skip
def test_a_damaged_index_is_named(tmp_path, content):
    write(tmp_path, {"a": torch.ones(2)})
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(
        ValueError, match="model.safetensors.index.json is no index of safetensors files .*copy it again"
    ):
        SafeTensors(tmp_path)


def test_files_follow_the_umask_and_transposed_views_are_written_whole(tmp_path):
    before = os.umask(0o027)
    try:
        write(tmp_path, {"a": torch.arange(6.0).reshape(2, 3).t()})
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o640
    assert SafeTensors(tmp_path)["a"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_tensors_under_other_names(tmp_path):
    save_file({"a": torch.ones(2), "mask": torch.ones(2, dtype=torch.bool)}, tmp_path / "model.safetensors")
    found = SafeTensors(tmp_path, rename={"a": "b"}.get)
    assert list(found) == ["b"] and found["b"].tolist() == [1, 1] and found.dtypes() == {"F32"}


def test_a_damaged_file_and_a_damaged_configuration_are_named(tmp_path):
    write(tmp_path, {"a": torch.ones(200)})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors is no whole safetensors file \(.*\); copy it again"):
        SafeTensors(tmp_path)
    for text, said in (("{", "config.json is not JSON"), ("[1]", "config.json holds no object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=said):
            read_config(tmp_path)
