"""Variables of the environment that make NCCL or gloo fail, hang or crawl, each found in a sentence. Pure functions of what they are given.

Sources: NCCL's user guide, "Environment Variables"; PyTorch's "ProcessGroupNCCL Environment Variables"; megatron-core's tensor-parallel
layers on CUDA_DEVICE_MAX_CONNECTIONS."""

from typing import Mapping, Optional, Sequence


def gloo_problem(environ: Mapping[str, str], interfaces: Sequence[str]) -> Optional[str]:
    """gloo takes a comma-separated list of interface names, and fails with "Unable to find address" where one is not there."""
    wished = [name.strip() for name in environ.get("GLOO_SOCKET_IFNAME", "").split(",")]
    missing = [name for name in wished if name and name not in interfaces]
    if not missing:
        return None
    return f"GLOO_SOCKET_IFNAME={','.join(wished)} names {', '.join(missing)}, and this host's interfaces are {', '.join(interfaces)}"


def nccl_findings(
    environ: Mapping[str, str], interfaces: Sequence[str], *, nodes: int, tensor: int, many_queues: bool
) -> list[str]:
    """What is odd in a job's environment on GPUs; empty where nothing is. nodes: that the job is on. many_queues: a GPU on which compute
    and communication overlap however many queues there are (Blackwell and later)."""
    found = [_socket_interface(environ, interfaces), _connections(environ, tensor, many_queues)]
    if _on(environ, "NCCL_P2P_DISABLE"):
        found.append(
            "NCCL_P2P_DISABLE is set: GPUs of one node exchange data through host memory, not over NVLink; unset it"
        )
    if _on(environ, "NCCL_SHM_DISABLE"):
        found.append("NCCL_SHM_DISABLE is set: GPUs of one node that have no direct path use the network; unset it")
    if nodes > 1 and _on(environ, "NCCL_IB_DISABLE"):
        found.append(
            f"NCCL_IB_DISABLE is set: the {nodes} nodes talk over TCP sockets, not InfiniBand or RoCE; unset it where there is either"
        )
    if environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") == "0":
        found.append(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=0: where a rank dies the others wait for ever, parallel.timeout included; unset it"
        )
    if environ.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        found.append(
            f"NCCL_DEBUG={environ['NCCL_DEBUG']} prints much on every rank: use it to look for a fault, and WARN otherwise"
        )
    return [finding for finding in found if finding is not None]


def _on(environ: Mapping[str, str], name: str) -> bool:
    """NCCL reads an integer; 0 is off."""
    return environ.get(name, "0").strip() not in ("", "0")


def _connections(environ: Mapping[str, str], tensor: int, many_queues: bool) -> Optional[str]:
    value = environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if tensor == 1 or value == "1" or many_queues:
        return None
    said = "is not set" if value is None else f"is {value}"
    return (
        f"CUDA_DEVICE_MAX_CONNECTIONS {said}, and with parallel.tensor={tensor} communication overlaps computation in the backward pass "
        "for certain only where it is 1: export CUDA_DEVICE_MAX_CONNECTIONS=1"
    )


def _socket_interface(environ: Mapping[str, str], interfaces: Sequence[str]) -> Optional[str]:
    value = environ.get("NCCL_SOCKET_IFNAME", "").strip()
    if not value or matching(value, interfaces):
        return None
    return (
        f"NCCL_SOCKET_IFNAME={value} fits none of this host's interfaces ({', '.join(interfaces)}): NCCL finds no network; "
        "correct it, or unset it"
    )


def matching(value: str, interfaces: Sequence[str]) -> list[str]:
    """Interfaces that NCCL_SOCKET_IFNAME chooses: prefixes with commas between; ^ before them excludes, = before them means whole names."""
    excludes, rest = value.startswith("^"), value.removeprefix("^")
    exact, names = rest.startswith("="), [name for name in rest.removeprefix("=").split(",") if name]

    def named(interface: str) -> bool:
        return any(interface == name if exact else interface.startswith(name) for name in names)

    return [interface for interface in interfaces if named(interface) != excludes]
