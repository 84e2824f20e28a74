"""The grid's ranks and the collectives on it, on four ranks: tensor 2 x data 2, and pipeline 2 x data 2."""

import torch

from aligner.runtime.errors import StorageError
from tests.dist.harness import run_ranks, topologies


def _error_of(call, *args):
    try:
        call(*args)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


def _body(rank):
    from aligner.parallel import collectives as c

    found = []
    for topology in topologies((2, 1, None, False), (1, 2, None, False)):
        places = (topology.tensor_rank, topology.data_rank, topology.pipeline_rank, topology.last_stage_rank)
        sent = torch.arange(3.0) + topology.data_rank if topology.is_last_stage else None
        error = ValueError("bad row") if rank == 3 else None
        found.append(
            {
                "places": places,
                "objects": c.gather_objects({"rank": rank}, topology.data_group),
                "object": c.broadcast_object(rank * 10, 2, topology.cpu_group),
                "last": c.from_last_stage(sent, (3,), torch.float32, topology).tolist(),
                "no error": _error_of(c.agree, None, topology),
                "error": _error_of(c.agree, error, topology),
                "user's error": _error_of(c.agree, StorageError("disk full") if rank == 2 else error, topology),
            }
        )
    return found


def test_four_ranks():
    results = run_ranks(_body, 4)
    for rank, (tensor_data, pipeline_data) in enumerate(results):
        # megatron's order is tensor, data, pipeline: rank = tensor + T * (data + D * pipeline)
        assert tensor_data["places"] == (rank % 2, rank // 2, 0, rank)
        assert pipeline_data["places"] == (0, rank % 2, rank // 2, 2 + rank % 2)
        peers = {True: [rank % 2, rank % 2 + 2], False: [rank // 2 * 2, rank // 2 * 2 + 1]}
        for found, is_first in ((tensor_data, True), (pipeline_data, False)):
            assert found["objects"] == [{"rank": r} for r in peers[is_first]]
            assert found["object"] == 20
            assert found["no error"] is None
            assert found["error"] == "rank 3: ValueError: bad row"
            assert found["user's error"] == "disk full"
        assert tensor_data["last"] == [rank // 2 + i for i in range(3)]
        assert pipeline_data["last"] == [rank % 2 + i for i in range(3)]
