"""One TensorRT-LLM engine for a generation group of two ranks, and one for each, against the stand-in: refits from TP2 and PP2, requests
on the leader alone, and failures that every rank of the group hears of. Oracle: the torch engine, from the same export."""

from pathlib import Path

from tests.dist.harness import run_ranks, topologies
from tests.dist.tiny import tiny_hf, weights_of

GRIDS = {"tp2": (2, 1, None, False), "pp2": (1, 2, None, False)}
PROMPTS = ([3, 4, 5], [7], [9, 10, 11, 12], [5, 6], [8, 8, 8])


def _requests():
    from aligner.data.batch import Request

    return [Request(sample_id=i, prompt_ids=list(p), max_output_len=10, temperature=0.0) for i, p in enumerate(PROMPTS)]


def _rollouts(engine, topology):
    """The generation phase's whole batch, as every rank has it: (sample_id, tokens), and how many requests this rank was given."""
    from aligner.algorithms.generation import Generation
    from aligner.data.batch import Sample

    phase = Generation(
        engine=engine, critic=None, reward=None, topology=topology, chunk_size=2, pad_id=0, answer_deadline=60.0
    )
    requests = _requests()
    samples = {r.sample_id: Sample(prompt_ids=r.prompt_ids, prompt="", origin="") for r in requests}
    rollouts, _ = phase.run(requests, samples, critic_step=None)
    rows = zip(rollouts.sample_ids.tolist(), rollouts.lengths.tolist(), rollouts.tokens.tolist())
    return [(i, row[:n]) for i, n, row in rows], len(phase._share(requests))


def _refusal(act):
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _body(rank, folder):
    from aligner.models.build import build_model
    from aligner.models.hf import export_hf, load_hf
    from tests.fake_trtllm import fake_package

    import torch  # isort: skip  (after aligner, which adapts megatron)

    model, shape = tiny_hf("qwen3", tied=True, layers=2)
    found = {}
    with fake_package():
        for name, grid in GRIDS.items():
            for topology in topologies(grid):
                chunks = build_model(shape, topology, head="lm", dtype=torch.float32)
                load_hf(chunks, shape, topology, weights_of(model))
                export = lambda: export_hf(chunks, shape, topology)  # noqa: B023, E731 - called at once
                for size in (2, 1):
                    found[name, size] = _one_engine(shape, topology, size, export, Path(folder))
                found[name, "torch"] = _torch_engine(shape, topology, export)
        found["group of 3"] = _refusal(lambda: _group(topology, 3))
    return found


def _group(topology, size):
    from aligner.trtllm.group import generation_group

    return generation_group(topology, size, timeout=60)


def _torch_engine(shape, topology, export):
    from aligner.rollout.refit import certified_refit
    from aligner.rollout.torch_engine import TorchEngine

    import torch  # isort: skip

    engine = TorchEngine(shape, max_batch_size=5, max_input_len=24, max_output_len=40, dtype=torch.float32)
    certified_refit(engine, export(), version=0)
    return _rollouts(engine, topology)[0]


def _one_engine(shape, topology, size, export, folder):
    from aligner.rollout.refit import certified_refit
    from tests.fake_trtllm import fake_engine

    engine = fake_engine(shape, folder, group=_group(topology, size))
    found = {"checksums": certified_refit(engine, export(), version=0).checksums}
    found["rollouts"], found["share"] = _rollouts(engine, topology)
    if size == 2:
        found["follower"] = engine.group.is_leader or _refusal(lambda: engine.submit(_requests()[:1]))
        found["broken"] = _broken_and_healed(engine, export, topology)
    engine.pause()
    engine.resume()
    certified_refit(engine, export(), version=2)
    found["after pause"], _ = _rollouts(engine, topology)
    engine.close()
    return found


def _broken_and_healed(engine, export, topology):
    """The second rank's GPU is one that no worker has: the leader's call fails, and both ranks know."""
    from aligner.rollout.refit import certified_refit
    from aligner.trtllm import engine as module

    right = module.device_uuid
    module.device_uuid = lambda local_rank: right(local_rank) if local_rank == 0 else "CPU-9"
    refused = _refusal(lambda: certified_refit(engine, export(), version=1))
    module.device_uuid = right
    blocked = _refusal(lambda: engine.state.require_usable("take requests"))
    certified_refit(engine, export(), version=1)
    return refused, blocked, _rollouts(engine, topology)[0]


def test_groups_of_two_ranks_and_of_one(tmp_path):
    from tests.fake_trtllm import checkpoint_with_tokenizer

    first, second = run_ranks(_body, 2, str(checkpoint_with_tokenizer(tmp_path)), deadline=240)
    for grid in GRIDS:
        expected = first[grid, "torch"]
        assert [i for i, _ in expected] == list(range(5)) and expected == second[grid, "torch"]
        for size in (2, 1):
            for rank in (first, second):
                assert rank[grid, size]["rollouts"] == rank[grid, size]["after pause"] == expected
            assert first[grid, size]["checksums"] == second[grid, size]["checksums"] != {}
        assert (first[grid, 2]["share"], second[grid, 2]["share"]) == (5, 0)
        assert (first[grid, 1]["share"], second[grid, 1]["share"]) == (2, 3)
        assert "rank 1 has no engine of its own: requests go to rank 0" in second[grid, 2]["follower"]
        for rank, said in (
            (first, "RuntimeError: sending weights"),
            (second, "RuntimeError: rank 0: RuntimeError: sending"),
        ):
            refused, blocked, healed = rank[grid, 2]["broken"]
            assert refused.startswith(said) and "ipc_handles has ['CPU-0', 'CPU-9']" in refused
            assert "the refit to weight version 1 failed" in blocked and healed == expected
    assert "engine.tensor=3 ranks share an engine" in first["group of 3"] and ": 2 is not one" in first["group of 3"]
