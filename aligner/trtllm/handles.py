"""Weights on their way to TensorRT-LLM's workers: copies in buckets, whose handles another process of the same GPU opens."""

import base64
import pickle
from typing import Iterable, Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

Named = list[tuple[str, Tensor]]


def buckets(tensors: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype, limit: int) -> Iterator[Named]:
    """Copies of the tensors as `dtype`, in lists of `limit` bytes at most (one larger tensor is a bucket of its own).

    A copy, since a handle shares the whole allocation that a tensor lies in, and the next layer may overwrite a gathered one."""
    bucket: Named = []
    size = 0
    for name, tensor in tensors:
        bytes_ = tensor.numel() * dtype.itemsize
        if bucket and size + bytes_ > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.detach().to(dtype).clone(memory_format=torch.contiguous_format)))
        size += bytes_
    if bucket:
        yield bucket


def serialized(bucket: Named) -> str:
    """[(name, (function, arguments that rebuild the tensor))], pickled, in base64. The tensors must live until the workers have read
    them."""
    return base64.b64encode(pickle.dumps([(name, reduce_tensor(tensor)) for name, tensor in bucket])).decode()
