"""The check of where ranks are, on made-up hosts."""

import pytest

from aligner.parallel.placement import LINES, Grid, engine_problems, host_name, table, tensor_problems

TWO_NODES = ["a"] * 4 + ["b"] * 4


@pytest.mark.parametrize(
    "hosts, tensor",
    [
        (TWO_NODES, 1),
        (TWO_NODES, 2),
        (TWO_NODES, 4),
        (["a"] * 8, 8),
        (["a", "a", "b", "b", "b", "b"], 2),
        (["a", "b", "a", "b"], 1),  # dealt in turn, which only costs speed where nothing has to be together
    ],
)
def test_what_fits(hosts, tensor):
    assert tensor_problems(hosts, tensor) == []


@pytest.mark.parametrize(
    "hosts, tensor, said",
    [
        (TWO_NODES, 8, "ranks 0 to 7 form a tensor-parallel group and must be on one node, they are on a (4), b (4)"),
        (TWO_NODES, 8, "no node has that many ranks: lower parallel.tensor to 4 or less"),
        (["a"] * 3 + ["b"], 2, "parallel.tensor=2: ranks 2 to 3 form a tensor-parallel group and must be on one node"),
        (["a"] * 3 + ["b"], 2, "the nodes hold 3, 1 ranks: start them with --ntasks-per-node=2"),
        (["a", "b", "a", "b"], 2, "in turn: start them block by block (srun --distribution=block)"),
        (["a"] * 3 + ["b"] * 3, 2, "ranks 2 to 3"),
        (["a"] * 3 + ["b"] * 3, 2, "make it a multiple of parallel.tensor on every node, with --ntasks-per-node"),
        (["a"] * 3 + ["b"] * 2 + ["c"] * 2, 4, "no node has that many ranks: lower parallel.tensor to 2 or less"),
    ],
)
def test_what_does_not(hosts, tensor, said):
    (problem,) = tensor_problems(hosts, tensor)
    assert said in problem


def test_ranks_that_share_an_engine_are_held_to_the_same():
    assert engine_problems(TWO_NODES, 4) == []
    (problem,) = engine_problems(["a"] * 3 + ["b"], 4)
    assert problem.startswith(
        "engine.tensor=4: ranks 0 to 3 share an engine and must be on one node, they are on a (3), b (1); "
    )


def test_a_rank_s_place_is_megatrons():
    """Tensor first, then data, then pipeline; tests/dist/test_collectives.py holds megatron's own groups to the same order."""
    grid = Grid(tensor=2, pipeline=2, world=8)
    assert grid.data == 2
    assert [grid.place(rank) for rank in range(8)] == [
        (0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1), (0, 1, 0), (1, 1, 0), (0, 1, 1), (1, 1, 1),
    ]  # fmt: skip


def test_the_mapping():
    assert table(TWO_NODES, Grid(tensor=4, pipeline=2, world=8)) == [
        "ranks  host  tp   pp  dp",
        "0-3    a     0-3  0   0",
        "4-7    b     0-3  1   0",
    ]
    assert table(["node1"] * 3 + ["node2"], Grid(tensor=2, pipeline=1, world=4)) == [
        "ranks  host   tp   pp  dp",
        "0-1    node1  0-1  0   0",
        "2      node1  0    0   1",
        "3      node2  1    0   1",
    ]
    many = table(["a"] * 512, Grid(tensor=1, pipeline=1, world=512))
    assert len(many) == LINES and many[-1].startswith("511 ") and many[-2] == "... 450 more lines ..."
    assert [line.split()[0] for line in many[1:62]] == [str(rank) for rank in range(61)]


@pytest.mark.parametrize(
    "environ, name, known",
    [
        ({}, "login1", "login1"),
        ({"SLURMD_NODENAME": "gpu7"}, "gpu7", "gpu7"),
        ({"SLURMD_NODENAME": "gpu7"}, "gpu7.cluster.local", "gpu7"),
        ({"SLURMD_NODENAME": "node1"}, "machine", "node1@machine"),  # several slurmd on one machine
    ],
)
def test_host_names(environ, name, known):
    assert host_name(environ, name) == known
