"""Refit: a policy's tensors into an engine, checked by name and shape, and certified by checksums on both sides."""

from typing import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from aligner.config.groups import Certify
from aligner.data.interfaces import RefitCertificate, RolloutEngine, WeightUpdate
from aligner.rollout.engine import SHOWN

SAMPLED_SHARE = 16  # sampled certificates take every 16th row; which ones moves with the weight version
WHOLE_BELOW = 4096  # elements; smaller tensors are taken whole
BLOCK = 2**17  # words of a block of the checksum: 1 MiB
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
    """128 bits of a tensor's bytes: the sum of its words, and the sum of its words each times its position from 1, both modulo 2**64.

    Words are signed integers of 64 bits, or as wide as an element where the bytes are no multiple of 8. Integer sums do not depend
    on order, so CPU and GPU agree. Any single changed word changes the first sum, any two that changed places the second; a check
    against accidents (a stale tensor, a lost slice, a wrong offset), not against somebody who forges weights.

    sampled: of every 16th row (dimension 0), from row `version % 16` on, so that 16 refits in a row cover everything."""
    if certify is Certify.sampled and tensor.numel() >= WHOLE_BELOW:
        share = min(SAMPLED_SHARE, tensor.size(0))
        tensor = tensor[version % share :: share]
    plain, weighted = _sums(_words(tensor))
    return f"{plain & WORD:016x}{weighted & WORD:016x}"


def _words(tensor: Tensor) -> Tensor:
    """[r, c] int64, the words in their order. A view wherever words do not straddle rows."""
    rows = tensor.flatten(1) if tensor.dim() > 1 else tensor[None]
    size = rows.element_size()
    if size * rows.size(1) % 8:
        rows = rows.flatten()[None]
        if rows.nbytes % 8:
            return rows.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[size]).long()
    if rows.stride(1) != 1 or size * rows.stride(0) % 8 or size * rows.storage_offset() % 8:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(torch.int64)


def _sums(words: Tensor) -> tuple[int, int]:
    """(sum, sum weighted by positions from 1) of [r, c] int64, modulo 2**64.

    The weighted sum follows from the sums of rows and of columns: two passes of additions instead of a product for every word, a
    block at a time on a CPU, so that the second pass finds it in the cache. The few numbers left go to numpy, whose calls on small
    arrays cost a fifth of torch's: a model has hundreds of tensors."""
    rows, columns = words.shape
    whole = words.device.type != "cpu" or words.numel() <= BLOCK
    sums = [(block.sum(1), block.sum(0)) for block in ((words,) if whole else words.split(max(1, BLOCK // columns)))]
    in_rows, in_columns = sums[0]
    if len(sums) > 1:
        in_rows, in_columns = torch.cat([of for of, _ in sums]), torch.stack([of for _, of in sums]).sum(0)
    in_rows, in_columns = in_rows.cpu().numpy(), in_columns.cpu().numpy()
    weighted = int(in_columns @ np.arange(1, columns + 1)) + columns * int(in_rows @ np.arange(rows))
    return int(in_columns.sum()), weighted


def source_checksums(
    tensors: Iterable[tuple[str, Tensor]], into: dict[str, str], *, dtype: torch.dtype, certify: Certify, version: int
) -> Iterator[tuple[str, Tensor]]:
    """The pairs, while `into` collects name -> checksum of each as an engine of `dtype` will hold it. What was summed is handed on, so
    in `dtype`: a conversion happens once."""
    for name, tensor in tensors:
        if certify is not Certify.off:
            tensor = tensor.detach().to(dtype)
            into[name] = checksum(tensor, certify, version)
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

    `tensors` is consumed whole, also where the engine refuses one: the other ranks take part in its collectives. Whatever goes wrong,
    the engine refuses requests until a whole refit succeeds."""
    sent: dict[str, str] = {}
    tensors = iter(tensors)
    summed = source_checksums(tensors, sent, dtype=engine.dtype, certify=engine.certify, version=version)
    try:
        certificate = engine.refit(weight_update(summed, version))
    except Exception:
        for _ in tensors:
            pass
        raise
    try:
        verify(certificate, sent)
    except RuntimeError as error:
        engine.poison(str(error))
        raise
    return certificate
