"""The frozen reference of a policy: its weights as they were at the start of the run."""

from contextlib import contextmanager
from typing import Iterator, Protocol

import torch

from aligner.config.groups import Recompute
from aligner.config.ppo import ReferencePlace
from aligner.models.build import build_model
from aligner.models.model_config import ModelShape
from aligner.parallel.device import ON_GPU
from aligner.parallel.topology import Topology

Chunks = list[torch.nn.Module]


class Reference(Protocol):
    @contextmanager
    def chunks(self) -> Iterator[Chunks]:
        """Chunks that compute with the reference's weights, inside the with block only."""


class HeldReference:
    """A second model on the device, without DDP and optimizer."""

    def __init__(self, policy: Chunks, shape: ModelShape, topology: Topology, *, dtype: torch.dtype) -> None:
        """policy: the chunks whose present weights become the reference's."""
        self._chunks = build_model(shape, topology, head=shape.head, dtype=dtype, recompute=Recompute.none)
        with torch.no_grad():
            for mine, theirs in zip(_parameters(self._chunks), _parameters(policy), strict=True):
                mine.copy_(theirs)
                mine.requires_grad_(False)

    @contextmanager
    def chunks(self) -> Iterator[Chunks]:
        yield self._chunks


class SwappedReference:
    """The reference's weights on the host, exchanged with the policy's for its forward pass. Peak extra memory: one tensor.

    Values are only copied, so the policy comes back bit for bit."""

    def __init__(self, policy: Chunks) -> None:
        self._policy = policy
        self._host = [_host_copy(p) for p in _parameters(policy)]

    @contextmanager
    def chunks(self) -> Iterator[Chunks]:
        self._exchange()
        try:
            yield self._policy
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for live, stored in zip(_parameters(self._policy), self._host, strict=True):
            was = live.detach().clone()
            live.copy_(stored)
            stored.copy_(was)


def make_reference(
    place: ReferencePlace, policy: Chunks, shape: ModelShape, topology: Topology, *, dtype: torch.dtype
) -> Reference:
    if place is ReferencePlace.held:
        return HeldReference(policy, shape, topology, dtype=dtype)
    return SwappedReference(policy)


def _parameters(chunks: Chunks) -> list[torch.nn.Parameter]:
    return [p for chunk in chunks for p in chunk.parameters()]


def _host_copy(parameter: torch.nn.Parameter) -> torch.Tensor:
    copy = parameter.detach().cpu().clone()
    return copy.pin_memory() if ON_GPU else copy
