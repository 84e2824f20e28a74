"""A disk that fills up on one rank of two while a checkpoint is written: every rank raises at once, and says so.

The disk is a real one, with a limit on the size of the files that the rank may write."""

import resource

import torch

from aligner.runtime.errors import AgreedUserError
from aligner.runtime.exit_codes import ExitCode
from tests.dist.harness import run_ranks, topologies
from tests.dist.training_data import policy_batch, rollouts_of, write_checkpoint

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

    (topology,) = topologies((1, 1, None, False), timeout=600)  # longer than the whole may take: nobody waits for it
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
    first, second = run_ranks(_body, 2, tmp_path, deadline=300)
    assert first == second and list(first) == list(CASES)
    for name, (code, text) in first.items():
        assert code is ExitCode.STORAGE
        assert text.startswith(f"{tmp_path / name} could not be written: ")
        assert not (tmp_path / name / "metadata.json").exists(), "it would look complete"
    assert (tmp_path / "whole" / "metadata.json").exists()


# The rank whose disk is full, and the bytes that a file of its may have. What is written is of unlike size, so that with each limit
# another file fails: model_config.yaml, common.pt, .metadata, tensors of the model, those of the optimizer.
LIMITS = [(rank, limit) for limit in (100, 1_000, 5_000, 50_000) for rank in (0, 1)]


def _pairs_body(rank, base):
    """What this rank hears of a pair that cannot be saved, for each limit; whether the pair before it is what it was."""
    from aligner.algorithms.pairs import PairedCheckpoints
    from aligner.config.groups import CheckpointConfig
    from aligner.runtime.checkpoint_folder import CheckpointFolder
    from tests.dist.test_training import _policy

    (topology,) = topologies((2, 1, None, False), timeout=60)  # so that both write
    policy = _policy(base / "model", topology)
    policy.train(policy_batch(0))
    folder = CheckpointFolder(base / "checkpoints")
    pairs = PairedCheckpoints(
        folder, CheckpointConfig(keep_last=20), policy=policy, critic=None, topology=topology, critic_deadline=60
    )
    pairs.save(1, {"step": 1}, validation=None)
    before = policy.logprobs(rollouts_of(policy_batch(9)), temperature=1.0)
    policy.train(policy_batch(1))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = []
    for step, (where, limit) in enumerate(LIMITS, start=2):
        if rank == where:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            pairs.save(step, {"step": step}, validation=None)
            said.append("it was saved")
        except AgreedUserError as error:
            said.append((error.exit_code, str(error)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    committed = folder.committed()
    assert pairs.restore(1) == {"step": 1}
    same = torch.equal(policy.logprobs(rollouts_of(policy_batch(9)), temperature=1.0), before)
    pairs.save(100, {"step": 100}, validation=None)  # where there is room again
    return said, committed, same, folder.committed()


def test_every_rank_hears_of_a_pair_that_one_cannot_write_and_the_pair_before_it_is_whole(tmp_path):
    run_ranks(_write_model_body, 1, tmp_path / "model")
    first, second = run_ranks(_pairs_body, 2, tmp_path, deadline=200)
    assert first == second
    said, committed, same, later = first
    for step, case, answer in zip(range(2, 100), LIMITS, said, strict=False):
        sentence = f"the checkpoint of step {step} could not be written under {tmp_path / 'checkpoints'}: no space left"
        assert answer[0] is ExitCode.STORAGE and answer[1].startswith(sentence), case
    assert (committed, same, later) == ([1], True, [1, 100])


def _write_model_body(rank, folder):
    write_checkpoint(folder)
