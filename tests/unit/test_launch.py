"""detect_launch against environments as torchrun and Slurm 22.05 set them."""

import pytest

from aligner.parallel.device import gpu_index
from aligner.parallel.startup import default_threads, detect_launch, first_host, tasks_per_node

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.1.2.3",
}


def _resolves(host):
    return True


def test_plain_python_is_one_rank():
    launch = detect_launch({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0"})  # a batch script, no srun
    assert (launch.kind, launch.rank, launch.world_size, launch.local_world_size) == ("plain", 0, 1, 1)


def test_torchrun_wins_under_srun():
    launch = detect_launch(SLURM | TORCHRUN)
    assert (launch.kind, launch.rank, launch.world_size, launch.local_rank) == ("torchrun", 5, 8, 1)
    assert (launch.local_world_size, launch.master_addr, launch.master_port) == (4, "n0", 29500)


def test_torchrun_half_set_is_refused():
    with pytest.raises(ValueError, match="LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not; start with torchrun"):
        detect_launch({"RANK": "0", "WORLD_SIZE": "2"})


def test_slurm_step():
    launch = detect_launch(SLURM, can_resolve=_resolves)
    assert (launch.kind, launch.rank, launch.world_size, launch.local_rank) == ("slurm", 5, 7, 1)
    assert (launch.local_world_size, launch.master_addr) == (3, "gpu003")


def test_slurm_ports_differ_between_steps_and_jobs_and_stay_below_the_ephemeral_range():
    ports = {
        detect_launch(SLURM | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}, can_resolve=_resolves).master_port
        for job in range(4700, 4720)
        for step in range(4)
    }
    assert len(ports) == 80 and min(ports) >= 20000 and max(ports) < 32768


def test_slurm_master_address():
    def unknown(host):
        return False

    assert detect_launch(SLURM, can_resolve=unknown).master_addr == "10.1.2.3"
    assert detect_launch(SLURM | {"MASTER_ADDR": "m", "MASTER_PORT": "1"}, can_resolve=unknown).master_addr == "m"
    one_node = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0"}
    assert detect_launch(one_node, can_resolve=unknown).master_addr == "127.0.0.1"
    nowhere = {name: value for name, value in SLURM.items() if name != "SLURM_LAUNCH_NODE_IPADDR"}
    with pytest.raises(ValueError, match="first node 'gpu003' does not resolve .*set MASTER_ADDR"):
        detect_launch(nowhere, can_resolve=unknown)


@pytest.mark.parametrize("text, counts", [("4", [4]), ("4(x2),3", [4, 4, 3]), ("1(x3)", [1, 1, 1]), ("2,1", [2, 1])])
def test_tasks_per_node(text, counts):
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize(
    "text, host",
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[003-005,9],login1", "gpu003"),
        ("a[1,3]-ib,b2", "a1-ib"),
        ("rack-2-n[12-15]", "rack-2-n12"),
    ],
)
def test_first_host(text, host):
    assert first_host(text) == host


@pytest.mark.parametrize(
    "environ, visible, index",
    [
        ({}, 1, 0),
        ({"LOCAL_RANK": "3"}, 8, 3),
        ({"SLURM_LOCALID": "5"}, 8, 5),
        ({"SLURM_LOCALID": "5"}, 1, 0),  # srun --gpus-per-task=1
        ({"LOCAL_RANK": "1", "SLURM_LOCALID": "0"}, 2, 1),
    ],
)
def test_a_rank_takes_a_gpu_that_it_sees(environ, visible, index):
    assert gpu_index(environ, visible) == index


@pytest.mark.parametrize(
    "wished, environ, threads",
    [
        (None, {}, 16),
        ("3", {}, 3),
        ("1", {}, 1),
        ("4,2", {}, 4),
        ("many", {}, 16),
        ("0", {}, 16),
        (None, TORCHRUN, 4),
        ("1", TORCHRUN, 4),  # torchrun's own
        ("2", TORCHRUN, 2),
        ("1", {**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}, 1),  # torchrun leaves it alone for one rank
    ],
)
def test_threads(wished, environ, threads):
    variables = {} if wished is None else {"OMP_NUM_THREADS": wished}
    assert default_threads(variables, detect_launch(environ), cores=16) == threads
