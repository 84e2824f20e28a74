"""A disk that fills up on one rank of two while a checkpoint is written: every rank raises at once, and says so.

The disk is a real one, with a limit on the size of the files that the rank may write."""

import resource

import torch

from aligner.runtime.errors import AgreedUserError
from aligner.runtime.exit_codes import ExitCode
from tests.dist.harness import run_ranks, topologies

# What fails -> (rank, bytes, whether there is much in common.pt). Rank 0 has one small tensor, but describes all 400 in .metadata.
CASES = {
    "common.pt": (0, 20_000, True),
    ".metadata": (0, 20_000, False),
    "tensors": (0, 100, False),
    "the other's tensors": (1, 100, False),
}


def _state(rank, common):
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    names = ["first"] if rank == 0 else [f"other.{i}" for i in range(400)]
    tensors = {name: ShardedTensor.from_rank_offsets(name, torch.ones(2)) for name in names}
    return {**tensors, "common": "x" * 100_000 * common}


def _body(rank, base):
    from aligner.models.checkpoint import write_sharded

    (topology,) = topologies((1, 1, None, False), timeout=100)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = {}
    for name, (where, limit, common) in CASES.items():
        folder = base / name
        folder.mkdir(exist_ok=True)
        if rank == where:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            write_sharded(_state(rank, common), folder, topology)
        except AgreedUserError as error:
            said[name] = (error.exit_code, str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    (base / "whole").mkdir(exist_ok=True)
    write_sharded(
        _state(rank, False), base / "whole", topology
    )  # the ranks are in step, and where there is room all is well
    return said


def test_every_rank_raises(tmp_path):
    first, second = run_ranks(_body, 2, tmp_path, deadline=60)
    assert first == second and list(first) == list(CASES)
    for name, (code, text) in first.items():
        assert code is ExitCode.STORAGE
        assert text.startswith(f"{tmp_path / name} could not be written: ")
        assert not (tmp_path / name / "metadata.json").exists(), "it would look complete"
    assert (tmp_path / "whole" / "metadata.json").exists()
