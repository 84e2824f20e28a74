"""Refit: a policy's tensors into an engine, checked by name and shape, and certified by checksums on both sides."""

from typing import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from aligner.config.groups import Certify
from aligner.data.interfaces import RefitCertificate, RolloutEngine, WeightUpdate
from aligner.rollout.engine import SHOWN

SAMPLED_SHARE = 16  # sampled certificates take every 16th row; which ones moves with the weight version
WHOLE_BELOW = 4096  # elements; smaller tensors are taken whole
CHUNK = 2**20  # elements a pass of the checksum, which bounds its temporary memory at 16 MiB
WORD = 2**64 - 1


def weight_update(tensors: Iterable[tuple[str, Tensor]], version: int) -> WeightUpdate:
    """A full refit to weight version `version` from (Hugging Face name, full tensor) pairs, consumed once."""
    return WeightUpdate(version=version, tensors=iter(tensors))


def checked(
    tensors: Iterable[tuple[str, Tensor]], expected: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """The pairs, each verified before it is handed on. ValueError for a name that is unknown, repeated or, at the end, missing,
    and for a shape that differs."""
    seen: set[str] = set()
    for name, tensor in tensors:
        if name not in expected:
            raise ValueError(f"refit: tensor {name!r} is not one of the {len(expected)} that the engine was built with")
        if name in seen:
            raise ValueError(f"refit: tensor {name!r} came twice")
        if tuple(tensor.shape) != tuple(expected[name]):
            raise ValueError(
                f"refit: tensor {name!r} has shape {list(tensor.shape)}, the engine was built with {list(expected[name])}"
            )
        seen.add(name)
        yield name, tensor
    missing = [name for name in expected if name not in seen]
    if missing:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise ValueError(
            f"refit: {len(missing)} of {len(expected)} tensors are missing: {', '.join(missing[:SHOWN])}{more}"
        )


@torch.no_grad()
def checksum(tensor: Tensor, certify: Certify, version: int) -> str:
    """128 bits of a tensor's bytes: the sum of its elements, read as integers, and the sum weighted by their positions, both
    modulo 2**64. Integer sums do not depend on order, so CPU and GPU agree; the second sees elements that changed places.

    sampled: every 16th row (dimension 0), from row `version % 16` on, so that 16 refits in a row cover everything."""
    if certify is Certify.sampled and tensor.numel() >= WHOLE_BELOW:
        share = min(SAMPLED_SHARE, tensor.size(0))
        tensor = tensor[version % share :: share]
    words = (
        tensor.contiguous()
        .view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
        .flatten()
    )
    weights = torch.arange(1, min(CHUNK, max(words.numel(), 1)) + 1, device=words.device)
    plain = weighted = 0
    for start in range(0, words.numel(), CHUNK):
        chunk = words[start : start + CHUNK].long()
        total = int(chunk.sum())
        plain += total
        weighted += int((chunk * weights[: chunk.numel()]).sum()) + start * total
    return f"{plain & WORD:016x}{weighted & WORD:016x}"


def source_checksums(
    tensors: Iterable[tuple[str, Tensor]], into: dict[str, str], *, dtype: torch.dtype, certify: Certify, version: int
) -> Iterator[tuple[str, Tensor]]:
    """The pairs unchanged, while `into` collects name -> checksum of each as an engine of `dtype` will hold it."""
    for name, tensor in tensors:
        if certify is not Certify.off:
            into[name] = checksum(tensor.detach().to(dtype), certify, version)
        yield name, tensor


def verify(certificate: RefitCertificate, source: Mapping[str, str]) -> None:
    """RuntimeError where the engine does not hold what was sent. An empty `source` (certify off) verifies nothing."""
    differing = [name for name, value in source.items() if certificate.checksums.get(name) != value]
    if differing:
        raise RuntimeError(
            f"refit to weight version {certificate.version}: {len(differing)} of {len(source)} checksums of the engine differ "
            f"from the policy's, first {', '.join(differing[:SHOWN])}; the engine does not hold the policy's weights"
        )


def certified_refit(engine: RolloutEngine, tensors: Iterable[tuple[str, Tensor]], *, version: int) -> RefitCertificate:
    """Refit an engine to weight version `version` and verify that it holds what was sent, as far as engine.certify asks.

    `tensors` is consumed whole, also where the engine refuses one: the other ranks take part in its collectives."""
    sent: dict[str, str] = {}
    tensors = iter(tensors)
    summed = source_checksums(tensors, sent, dtype=engine.dtype, certify=engine.certify, version=version)
    try:
        certificate = engine.refit(weight_update(summed, version))
    except Exception:
        for _ in tensors:
            pass
        raise
    verify(certificate, sent)
    return certificate
