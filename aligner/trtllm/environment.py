"""The environment that TensorRT-LLM is started in: without the launcher's variables, and with the GPUs of one generation group."""

import contextlib
import os
from typing import Iterator, Sequence

# With these set it would join the trainer's own job ("PMIx mismatch"), or take its ranks for its own.
LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
LAUNCHER_PREFIXES = ("PMI", "PMIX", "OMPI", "SLURM_")


@contextlib.contextmanager
def clean_environment(devices: Sequence[str]) -> Iterator[None]:
    """Inside, launcher variables are gone, and Ray sees `devices` (as CUDA_VISIBLE_DEVICES names them) and no cluster but its own.

    Ray workers inherit the environment at their start. What TensorRT-LLM itself sets meanwhile stays set."""
    given = {
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
        "TLLM_RAY_FORCE_LOCAL_CLUSTER": "1",  # one cluster an engine: several engines on a node must not share GPUs
    }
    hidden = [n for n in os.environ if n in LAUNCHER_NAMES or n.startswith(LAUNCHER_PREFIXES)]
    saved = {name: os.environ.get(name) for name in (*hidden, *given)}
    for name in hidden:
        del os.environ[name]
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
