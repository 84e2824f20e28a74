"""The one file that knows TensorRT-LLM's names: its PyTorch LLM API (AsyncLLM, 1.2 and later), called with deadlines.

Written from its sources and from how verl and NeMo-RL use it; never run on TensorRT-LLM."""

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Sequence

from aligner.data.batch import Completion, Request
from aligner.runtime.errors import UserError
from aligner.trtllm.background import BackgroundLoop
from aligner.trtllm.engine_build import EngineBuild
from aligner.trtllm.environment import clean_environment
from aligner.trtllm.sampling import sampling_settings, to_completion

INSTALL = (
    "run in NVIDIA's container (nvcr.io/nvidia/tensorrt-llm/release), or install its wheel from NVIDIA's index "
    "(pip install tensorrt_llm --extra-index-url https://pypi.nvidia.com; PyPI's own tensorrt-llm is a stub); "
    "engine.kind=torch works without it"
)


@dataclass(frozen=True)
class LLMSettings:
    """What an engine is started with. folder: config.json and tokenizer files, no weights; memory_fraction: of the free GPU memory, for
    the KV cache; devices: of its ranks, as CUDA_VISIBLE_DEVICES names them."""

    folder: Path
    build: EngineBuild
    tensor: int
    memory_fraction: float
    devices: Sequence[str]


def require_package() -> None:
    """UserError that says what to install where TensorRT-LLM, or its AsyncLLM, is not there."""
    try:
        import tensorrt_llm
    except ImportError as error:
        raise UserError(
            f"engine.kind=trtllm needs TensorRT-LLM, which cannot be imported here ({error}): {INSTALL}"
        ) from error
    if not hasattr(tensorrt_llm, "AsyncLLM"):
        found = getattr(tensorrt_llm, "__version__", "of an unknown version")
        raise UserError(
            f"engine.kind=trtllm needs AsyncLLM of TensorRT-LLM 1.2 or later, and {found} is installed: {INSTALL}"
        )


class TrtllmClient:
    """A running AsyncLLM. RuntimeError, naming the call, where one fails or takes longer than `timeout` seconds."""

    def __init__(self, settings: LLMSettings, *, pad_id: int, timeout: float):
        self._pad_id, self._timeout = pad_id, timeout
        self._loop = BackgroundLoop("tensorrt-llm")
        try:
            with clean_environment(settings.devices):
                require_package()  # its import asks the environment too
                self._llm = self._run(self._start(settings), "starting TensorRT-LLM")
        except BaseException:
            self._loop.close()
            raise

    def _run(self, coroutine: Any, what: str) -> Any:
        return self._loop.run(coroutine, what=what, timeout=self._timeout)

    @staticmethod
    async def _start(settings: LLMSettings) -> Any:
        """Inside the loop: with a running loop the constructor leaves its workers to setup_async."""
        from tensorrt_llm import AsyncLLM
        from tensorrt_llm.llmapi import CudaGraphConfig, KvCacheConfig
        from tensorrt_llm.llmapi.llm_args import SleepConfig

        build = settings.build
        llm = AsyncLLM(
            model=str(settings.folder),
            backend="pytorch",
            dtype=build.dtype,
            load_format="dummy",  # the weights come by refit
            tensor_parallel_size=settings.tensor,
            max_batch_size=build.max_batch_size,
            max_input_len=build.max_input_len,  # longer prompts than its default of 1024 would vanish without a word
            max_seq_len=build.max_seq_len,
            max_num_tokens=build.max_num_tokens,
            kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=settings.memory_fraction, enable_block_reuse=True),
            cuda_graph_config=CudaGraphConfig(enable_padding=True, max_batch_size=build.max_batch_size),
            sleep_config=SleepConfig(),  # restore mode NONE on weights would lose the buffers that no refit brings
            allreduce_strategy="NCCL",  # forced upstream for a convergence bug
            sampler_type="TRTLLMSampler",  # the one that takes a seed for each request
        )
        await llm.setup_async()
        return llm

    # Weights

    def update_weights(self, handles: dict[str, str]) -> None:
        """One bucket: device uuid -> serialized handles."""
        self._run(self._llm.update_weights(handles), "sending weights to TensorRT-LLM")

    def finish_update(self) -> None:
        """Every bucket is there: post-processing, and old keys and values are dropped."""
        self._run(self._llm.update_weights(None), "finishing the refit of TensorRT-LLM")

    # Requests

    def submit(self, request: Request, *, weight_version: int) -> "Future[Completion]":
        return self._loop.spawn(self._generate(request, weight_version))

    async def _generate(self, request: Request, weight_version: int) -> Completion:
        from tensorrt_llm.llmapi import SamplingParams

        sampling = SamplingParams(**sampling_settings(request, pad_id=self._pad_id))
        output = await self._llm.generate_async(inputs=list(request.prompt_ids), sampling_params=sampling)
        return to_completion(request, output, weight_version=weight_version)

    # Memory

    def release(self) -> None:
        """Give GPU memory back. Blocks of the prefix cache would outlive their memory: they are dropped first."""
        self._run(self._release(), "releasing TensorRT-LLM's memory")

    async def _release(self) -> None:
        if pause := self._since_1_3("pause_generation"):
            await pause()
        await self._llm.collective_rpc("reset_prefix_cache")
        await self._llm.release(_memory_tags())

    def resume(self) -> None:
        """Take it again."""
        self._run(self._resume(), "resuming TensorRT-LLM")

    async def _resume(self) -> None:
        await self._llm.resume(_memory_tags())
        if resume := self._since_1_3("resume_generation"):
            await resume()

    def _since_1_3(self, name: str) -> Optional[Any]:
        return getattr(self._llm, name, None)

    def close(self) -> None:
        """End the workers, and what still runs; again is harmless."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        ending = threading.Thread(target=llm.shutdown, name="tensorrt-llm-shutdown", daemon=True)
        ending.start()
        ending.join(self._timeout)
        self._loop.close()
        if ending.is_alive():
            raise RuntimeError(f"shutting TensorRT-LLM down did not end within {self._timeout:g} s (engine.timeout)")


def _memory_tags() -> list[str]:
    """Every tag of this release (weights have one of their own in some), less the stages of initialisation that are never captured."""
    from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType

    return [kind.value for kind in ExecutorMemoryType if not kind.value.startswith("_")]
