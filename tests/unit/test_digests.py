"""A saved model's files are listed with their sha256, which `sha256sum` would give; what changed since is refused by name."""

import hashlib
import json
from types import SimpleNamespace

import pytest

from aligner.models import digests


@pytest.fixture(params=[1, 3])
def ranks(request, monkeypatch):
    """Topologies of the ranks of one job, whose collectives happen one rank after the other."""
    world = request.param

    def agree(error, topology):
        if error is not None:
            raise error

    monkeypatch.setattr(digests, "agree", agree)
    shares = {}

    def gather(obj, group):
        return [shares.get(rank, obj) if isinstance(obj, dict) and rank != group else obj for rank in range(world)]

    monkeypatch.setattr(digests, "gather_objects", gather)
    made = [SimpleNamespace(rank=r, world_size=world, is_reporter=r == 0, cpu_group=r) for r in range(world)]
    real = digests._digests

    def all_shares(names, folder, topology):
        shares.clear()
        for other in made:
            if other is not topology:
                shares[other.rank] = {n: digests.sha256_of(folder / n) for n in names[other.rank :: world]}
        found = real(names, folder, topology)
        shares.clear()
        return found

    monkeypatch.setattr(digests, "_digests", all_shares)
    return made


def test_every_file_is_listed_and_a_changed_one_is_refused_by_name(ranks, tmp_path):
    folder = tmp_path / "step_000002" / "critic"
    files = {f"model_weights/__{i}_0.distcp": bytes([i]) * (3 * 2**20 + i) for i in range(4)} | {"state.json": b"{}"}
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    digests.check_digests(folder, ranks[0])  # a converted model has no list
    digests.write_digests(folder, ranks[0], known={})
    listed = json.loads((folder / "digests.json").read_text())
    assert listed == {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    digests.check_digests(folder, ranks[0])

    damaged = bytearray(files["model_weights/__2_0.distcp"])
    damaged[2**20 + 5] ^= 16
    (folder / "model_weights/__2_0.distcp").write_bytes(damaged)
    (folder / "state.json").unlink()
    with pytest.raises(ValueError) as error:
        digests.check_digests(folder, ranks[0])
    said = str(error.value)
    assert "model_weights/__2_0.distcp (damaged), state.json (missing);" in said and "__1_0" not in said
    assert f"remove {tmp_path / 'step_000002'} to continue from an older pair" in said
