"""What variables do to NCCL and gloo is found in a sentence each, on made-up environments."""

import pytest

from aligner.parallel.environment import gloo_problem, matching, nccl_findings

INTERFACES = ["lo", "eth0", "eth1", "ib0", "docker0"]
GOOD = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_SOCKET_IFNAME": "eth", "NCCL_DEBUG": "WARN", "NCCL_P2P_DISABLE": "0"}


def found(environ=GOOD, *, nodes=2, tensor=4, many_queues=False, **more):
    return nccl_findings({**environ, **more}, INTERFACES, nodes=nodes, tensor=tensor, many_queues=many_queues)


def test_a_good_environment_has_no_findings():
    assert found() == []
    assert found({}, tensor=1) == []


@pytest.mark.parametrize(
    "variable, said",
    [
        (("NCCL_SOCKET_IFNAME", "enp"), "fits none of this host's interfaces (lo, eth0, eth1, ib0, docker0)"),
        (("NCCL_P2P_DISABLE", "1"), "through host memory, not over NVLink; unset it"),
        (("NCCL_SHM_DISABLE", "1"), "NCCL_SHM_DISABLE is set"),
        (("NCCL_IB_DISABLE", "1"), "the 2 nodes talk over TCP sockets, not InfiniBand or RoCE"),
        (("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"), "where a rank dies the others wait for ever"),
        (("NCCL_DEBUG", "info"), "NCCL_DEBUG=info prints much on every rank"),
        (("CUDA_DEVICE_MAX_CONNECTIONS", "32"), "CUDA_DEVICE_MAX_CONNECTIONS is 32, and with parallel.tensor=4"),
    ],
)
def test_findings(variable, said):
    (finding,) = found(**dict([variable]))
    assert said in finding


def test_what_does_not_matter_is_not_told():
    assert found(NCCL_IB_DISABLE="1", nodes=1) == []
    assert found(CUDA_DEVICE_MAX_CONNECTIONS="32", tensor=1) == []
    assert found(CUDA_DEVICE_MAX_CONNECTIONS="32", many_queues=True) == []
    (finding,) = found({})
    assert "CUDA_DEVICE_MAX_CONNECTIONS is not set" in finding and finding.endswith(
        "export CUDA_DEVICE_MAX_CONNECTIONS=1"
    )


@pytest.mark.parametrize(
    "value, chosen",
    [  # the examples of NCCL's user guide
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("=eth0,eth1", ["eth0", "eth1"]),
        ("^docker", ["lo", "eth0", "eth1", "ib0"]),
        ("^=docker0", ["lo", "eth0", "eth1", "ib0"]),
        ("eth1,ib", ["eth1", "ib0"]),
        ("=eth", []),
    ],
)
def test_how_nccl_chooses_interfaces(value, chosen):
    assert matching(value, INTERFACES) == chosen


def test_gloo_takes_whole_names():
    assert gloo_problem({}, INTERFACES) is None
    assert gloo_problem({"GLOO_SOCKET_IFNAME": "eth0, ib0"}, INTERFACES) is None
    assert gloo_problem({"GLOO_SOCKET_IFNAME": "eth0,enp"}, INTERFACES) == (
        "GLOO_SOCKET_IFNAME=eth0,enp names enp, and this host's interfaces are lo, eth0, eth1, ib0, docker0"
    )
