"""What a job looks at once its ranks have met, on four ranks of tensor 2 x data 2 that Slurm would have put on made-up nodes."""

import logging
import os
import time

import pytest

from tests.dist.harness import run_ranks, topologies

PAUSE = 0.3  # seconds: a third of it is far beyond what a busy machine adds to the best of a few rounds


class _Said(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append((record.levelname, record.getMessage()))


def _look(topology, hosts, **settings):
    """(facts or the error's text, what was logged) of look_around where rank r is on hosts[r]."""
    from aligner.config.groups import ParallelConfig
    from aligner.parallel.arrival import look_around

    engine_ranks = settings.pop("engine_ranks", 1)
    os.environ["SLURMD_NODENAME"] = hosts[topology.rank]
    said, logger = _Said(), logging.getLogger("aligner")
    logger.addHandler(said)
    logger.setLevel(logging.INFO)
    try:
        parallel = ParallelConfig(tensor=topology.tensor, **settings)
        return look_around(parallel, topology, engine_ranks=engine_ranks), said.lines
    except ValueError as error:
        return str(error), said.lines
    finally:
        logger.removeHandler(said)
        del os.environ["SLURMD_NODENAME"]


def _slow_probe(topology):
    """The probe where rank 3 comes late to every large all-reduce."""
    import torch.distributed as dist

    from aligner.parallel.probe import probe, slow_warning

    def reduce(tensor, group):
        if topology.rank == 3 and tensor.numel() > 2:
            time.sleep(PAUSE)
        dist.all_reduce(tensor, group=group)

    figures, size = probe(topology, 0.25, reduce=reduce)
    return figures, size, slow_warning(figures, size, ["n1", "n1", "n2", "n2"])


def _body(rank):
    from aligner.config.groups import Placement

    (topology,) = topologies((2, 1, None, False))
    return {
        "fits": _look(topology, ["n1", "n1", "n2", "n2"], probe_mb=0.1),
        "3 + 1": _look(topology, ["n1", "n1", "n1", "n2"]),
        "3 + 1, warned": _look(topology, ["n1", "n1", "n1", "n2"], placement=Placement.warn, probe=False),
        "split engine": _look(topology, ["n1", "n1", "n2", "n2"], placement=Placement.warn, engine_ranks=4),
        "slow": _slow_probe(topology),
    }


@pytest.fixture(scope="module")
def results():
    return run_ranks(_body, 4)


def test_a_placement_that_fits_is_recorded_and_shown(results):
    for rank, result in enumerate(results):
        facts, said = result["fits"]
        assert [host.split("@")[0] for host in facts["hosts"]] == ["n1", "n1", "n2", "n2"], f"rank {rank}"
        mapping = [text.split()[1:] for level, text in said if text.startswith("placement: ")]
        hosts = facts["hosts"]
        assert mapping == [
            ["ranks", "host", "tp", "pp", "dp"],
            ["0-1", hosts[0], "0-1", "0", "0"],
            ["2-3", hosts[2], "0-1", "0", "1"],
        ]


def test_every_group_of_more_than_one_rank_is_probed(results):
    facts, said = results[0]["fits"]
    groups = {(f["group"], tuple(f["ranks"])) for f in facts["probe"]}
    pairs = {("tensor", (0, 1)), ("tensor", (2, 3)), ("data", (0, 2)), ("data", (1, 3))}
    assert groups == pairs | {("world", (0, 1, 2, 3))}  # pipelines of one stage are not
    assert all(f["latency_us"] > 0 and f["gb_s"] > 0 for f in facts["probe"])
    lines = [text for level, text in said if text.startswith("probe of ")]
    assert [line.split(",")[0] for line in lines] == [
        "probe of tensor: 2 x 2 ranks", "probe of data: 2 x 2 ranks", "probe of world: 1 x 4 ranks",
    ]  # fmt: skip
    assert all(" us for 8 B" in line and " GB/s for 0.1 MB" in line for line in lines)
    assert [result["fits"][0]["probe"] for result in results] == [facts["probe"]] * 4


def test_a_split_tensor_group_is_refused_on_every_rank_with_the_mapping(results):
    for result in results:
        text, _ = result["3 + 1"]
        assert (
            "parallel.tensor=2: ranks 2 to 3 form a tensor-parallel group and must be on one node, they are on " in text
        )
        assert "start them with --ntasks-per-node=2 (parallel.placement=warn starts all the same)" in text
        assert [line.split()[0] for line in text.splitlines()[1:]] == ["ranks", "0-1", "2", "3"]


def test_or_warned_about(results):
    facts, said = results[0]["3 + 1, warned"]
    assert [host.split("@")[0] for host in facts["hosts"]] == ["n1", "n1", "n1", "n2"] and "probe" not in facts
    (warning,) = [text for level, text in said if level == "WARNING"]
    assert warning.startswith("parallel.tensor=2: ranks 2 to 3")


def test_an_engine_s_ranks_are_on_one_node_whatever_the_setting(results):
    text, _ = results[1]["split engine"]
    assert (
        "engine.tensor=4: ranks 0 to 3 share an engine and must be on one node" in text and "placement=warn" not in text
    )


def test_a_slow_rank_is_named(results):
    figures, size, warning = results[2]["slow"]
    assert warning.startswith("rank 3 on n2 is slow: it is in every group that is far behind (")
    assert "tensor group of ranks 2, 3: 0.00" in warning and "data group of ranks 1, 3: 0.00" in warning
    late = {f.ranks: f for f in figures if 3 in f.ranks}
    assert set(late) == {(2, 3), (1, 3), (0, 1, 2, 3)} and size == 250_000
    assert all(f.seconds >= PAUSE and f.bandwidth_gb_s(size) <= size / PAUSE / 1e9 for f in late.values())


def _without_interface(rank):
    from aligner.config.groups import ParallelConfig
    from aligner.parallel.startup import start

    os.environ["GLOO_SOCKET_IFNAME"] = "nope0"
    try:
        start(ParallelConfig(), 1)
    except ValueError as error:
        return str(error)
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def test_an_interface_that_is_not_there_is_told_before_gloo_fails_on_it():
    (said,) = run_ranks(_without_interface, 1)
    assert "GLOO_SOCKET_IFNAME=nope0 names nope0, and this host's interfaces are " in said
