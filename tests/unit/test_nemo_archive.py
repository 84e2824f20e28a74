"""Archives that no honest tool writes: whatever a member is named, nothing lands outside of the folder."""

import io
import tarfile

import pytest

from aligner.models.checkpoint_folder import checkpoint_shape, copy_tokenizer, unpack


def archive(path, *members, mode="w"):
    with tarfile.open(path, mode) as tar:
        for member in members:
            member.size = 3 if member.isreg() else 0
            tar.addfile(member, io.BytesIO(b"xyz") if member.isreg() else None)
    return path


def member(name, **fields):
    found = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(found, field, value)
    return found


HOSTILE = {
    "up": member("../evil"),
    "inside, then up": member("model_weights/../../evil"),
    "link": member("model_config.yaml", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "hard link": member("model_config.yaml", type=tarfile.LNKTYPE, linkname="../../secret"),
    "device": member("model_config.yaml", type=tarfile.CHRTYPE),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_member_that_leaves_the_folder_is_refused(kind, tmp_path):
    path = archive(tmp_path / "model.nemo", HOSTILE[kind])
    with pytest.raises(ValueError, match=r"model.nemo is refused, it would write outside of its folder: "):
        unpack(path, tmp_path / "a" / "b")
    with pytest.raises(ValueError):
        checkpoint_shape(path)
    assert not (tmp_path / "a" / "evil").exists() and not (tmp_path / "evil").exists()


def test_an_absolute_name_stays_inside(tmp_path):
    unpack(archive(tmp_path / "model.nemo", member(f"{tmp_path}/evil")), tmp_path / "out")
    assert not (tmp_path / "evil").exists() and list((tmp_path / "out").rglob("evil"))


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_one_part_of_an_archive(mode, tmp_path):
    names = ("./model_config.yaml", "tokenizer/tokenizer.json", "model_weights/common.pt")
    path = archive(tmp_path / "model.nemo", *map(member, names), mode=mode)
    unpack(path, tmp_path / "config", only="model_config.yaml")
    assert [f.name for f in (tmp_path / "config").rglob("*")] == ["model_config.yaml"]
    copy_tokenizer(path, tmp_path / "copied")
    assert [f.name for f in (tmp_path / "copied").rglob("*.*")] == ["tokenizer.json"]
    with pytest.raises(ValueError, match="model.nemo has no optimizer: it is not a model"):
        unpack(path, tmp_path / "config", only="optimizer")
    copy_tokenizer(archive(tmp_path / "bare.nemo", member("model_config.yaml")), tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("content", [b"", b"not a tar", b"\x1f\x8b\x08 no gzip"])
def test_what_is_no_archive_is_refused(content, tmp_path):
    path = tmp_path / "model.nemo"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="model.nemo is no whole tar archive .*; copy it again"):
        checkpoint_shape(path)
