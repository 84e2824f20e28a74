"""The one place that chooses a job's rollout engine: the embedded torch engine, or TensorRT-LLM's."""

from pathlib import Path
from typing import Sequence

import torch

from aligner.config.groups import EngineKind
from aligner.config.jobs import ActorConfig, SFTConfig
from aligner.data.interfaces import RolloutEngine
from aligner.data.tokenizer import Tokenizer
from aligner.models.model_config import ModelShape
from aligner.parallel.device import DEVICE
from aligner.parallel.topology import Topology
from aligner.rollout.torch_engine import TorchEngine
from aligner.trtllm.engine import TrtllmEngine
from aligner.trtllm.engine_build import EngineBuild
from aligner.trtllm.group import generation_group


def build_engine(
    config: ActorConfig | SFTConfig,
    shape: ModelShape,
    topology: Topology,
    *,
    dtype: torch.dtype,
    tokenizer: Tokenizer,
    stop_strings: Sequence[str] = (),
) -> RolloutEngine:
    """This rank's engine, or the one that its generation group shares. Collective over the job."""
    if config.engine.kind is EngineKind.trtllm:
        return _trtllm(config, shape, topology, dtype=dtype, pad_id=tokenizer.pad_id)
    return TorchEngine(
        shape,
        **_limits(config),
        dtype=dtype,
        device=DEVICE,
        certify=config.refit.certify,
        use_native=config.engine.native,
        token_bytes=tokenizer.token_bytes() if stop_strings else None,
    )


def _limits(config: ActorConfig) -> dict[str, int]:
    return {name: getattr(config.engine, name) for name in ("max_batch_size", "max_input_len", "max_output_len")}


def _trtllm(
    config: ActorConfig, shape: ModelShape, topology: Topology, *, dtype: torch.dtype, pad_id: int
) -> TrtllmEngine:
    """Started by the first rank of each generation group."""
    return TrtllmEngine(
        shape,
        group=generation_group(topology, config.engine_ranks, timeout=config.parallel.timeout),
        checkpoint=Path(config.model.checkpoint),
        build=EngineBuild(dtype=str(dtype).removeprefix("torch."), **_limits(config)),
        pad_id=pad_id,
        memory_fraction=config.engine.memory_fraction,
        bucket_bytes=config.refit.bucket_mb * 2**20,
        timeout=config.engine.timeout,
        certify=config.refit.certify,
    )
