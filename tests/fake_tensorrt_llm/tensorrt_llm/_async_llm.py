"""AsyncLLM: the order of calls that the real one needs is enforced, where that would hang, lie or crash."""

import asyncio
import base64
import os
import pickle
from pathlib import Path

import torch

from tensorrt_llm._contract import METHODS, SIGNATURES, TAGS, WORKER_METHODS, Record
from tensorrt_llm._generation import Generator
from tensorrt_llm.llmapi import CudaGraphConfig, KvCacheConfig, SamplingParams
from tensorrt_llm.llmapi.llm_args import SleepConfig

LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
TYPES = {"kv_cache_config": KvCacheConfig, "cuda_graph_config": CudaGraphConfig, "sleep_config": SleepConfig}
REQUIRED = {"backend": "pytorch", "load_format": "dummy", "allreduce_strategy": "NCCL", "sampler_type": "TRTLLMSampler"}


def check_environment():
    left = [n for n in os.environ if n in LAUNCHERS or n.startswith(("PMI", "PMIX", "OMPI", "SLURM_"))]
    if left:
        raise RuntimeError(f"PMIx mismatch: {sorted(left)} are set")
    if os.environ.get("TLLM_RAY_FORCE_LOCAL_CLUSTER") != "1":
        raise RuntimeError("joined somebody else's Ray cluster")


class AsyncLLM:
    def __init__(self, **given):
        if unknown := sorted(given.keys() - SIGNATURES["AsyncLLM"]):
            raise TypeError(f"AsyncLLM() got an unexpected keyword argument {unknown[0]!r}")
        if missing := sorted(SIGNATURES["AsyncLLM"] - given.keys()):
            raise TypeError(f"the engine left {missing} to TensorRT-LLM's defaults")
        check_environment()
        asyncio.get_running_loop()  # without one the constructor would start the workers itself, and block
        for name, kind in TYPES.items():
            assert isinstance(given[name], kind), name
        for name, value in REQUIRED.items():
            assert given[name] == value, f"{name}={given[name]}"
        assert given["max_seq_len"] > given["max_input_len"] <= given["max_num_tokens"]
        devices = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        assert len(devices) == given["tensor_parallel_size"], devices
        self._given, self._uuids = given, {f"CPU-{device}" for device in devices}
        self._state, self._received, self._prefixes, self._running = "new", {}, set(), 0
        self.calls = []  # for tests

    def __getattr__(self, name):
        raise AttributeError(f"AsyncLLM of the contract has no attribute {name!r}, only {sorted(METHODS)}")

    def _require(self, *states):
        if self._state not in states:
            raise RuntimeError(f"called while the engine is {self._state}, not {' or '.join(states)}")

    async def setup_async(self):
        self._require("new")
        check_environment()
        self._model = Generator(Path(self._given["model"]), self._given["dtype"])
        self._state = "without weights"

    async def update_weights(self, weights):
        """Buckets, then None."""
        self._require("without weights", "serving", "loading")
        assert not self._running, "requests run"
        if weights is None:
            self._finish()
        else:
            self._receive(weights)

    def _receive(self, weights):
        if weights.keys() != self._uuids:
            raise ValueError(f"device UUIDs {sorted(self._uuids)} are wanted, ipc_handles has {sorted(weights)}")
        self._state = "loading"
        buckets = [self._opened(weights[uuid]) for uuid in sorted(weights)]
        for other in buckets[1:]:
            assert other.keys() == buckets[0].keys() and all(torch.equal(t, other[n]) for n, t in buckets[0].items())
        for name, tensor in buckets[0].items():
            if tuple(tensor.shape) != self._model.manifest.get(name):
                raise ValueError(f"{name} {tuple(tensor.shape)}: the model has {self._model.manifest.get(name)}")
            self._received[name] = tensor  # again after a refit that broke off: the later one counts, as it does there
        self.calls.append(sorted(buckets[0]))

    @staticmethod
    def _opened(text):
        handles = pickle.loads(base64.b64decode(text.encode()))
        assert isinstance(handles, list)
        return {name: rebuild(*arguments) for name, (rebuild, arguments) in handles}

    def _finish(self):
        if missing := sorted(self._model.manifest.keys() - self._received.keys()):
            self._received = {}
            raise ValueError(f"{len(missing)} tensors never came, first {missing[0]}")
        self._model.load(self._received)
        self._received, self._prefixes, self._state = {}, set(), "serving"
        self.calls.append(None)

    def generate_async(self, inputs, sampling_params):
        self._require("serving")
        assert isinstance(sampling_params, SamplingParams) and isinstance(inputs, list)
        if len(inputs) > self._given["max_input_len"]:
            raise ValueError(f"prompt of {len(inputs)} tokens, max_input_len={self._given['max_input_len']}")
        if len(inputs) + sampling_params.max_tokens > self._given["max_seq_len"]:
            raise ValueError(
                f"{len(inputs)} + {sampling_params.max_tokens} tokens, max_seq_len={self._given['max_seq_len']}"
            )
        return self._generate(inputs, sampling_params)

    async def _generate(self, inputs, sampling_params):
        self._running += 1
        try:
            self._prefixes.add(tuple(inputs))
            output = await self._model.generate(inputs, sampling_params)
        finally:
            self._running -= 1
        return Record(outputs=[output])

    async def pause_generation(self):
        self._require("serving")
        self._state = "paused"

    async def resume_generation(self):
        self._require("paused")
        self._state = "serving"

    async def release(self, tags):
        self._require("paused")
        if self._prefixes:
            raise RuntimeError("blocks of the prefix cache would outlive their memory: reset it first")
        unknown = set(tags) - {tag for tag in TAGS.values() if not tag.startswith("_")}
        if unknown:
            raise ValueError(f"invalid tags {sorted(unknown)}")
        assert {"kv_cache", "model", "model_weights"} <= set(tags)
        self._state, self._released = "released", sorted(tags)

    async def resume(self, tags):
        self._require("released")
        assert sorted(tags) == self._released, "the same tags as released"
        self._state = "paused"

    async def collective_rpc(self, method, args=(), kwargs=None, unique_reply_rank=None, target_ranks=None):
        if method not in WORKER_METHODS:
            raise AttributeError(f"workers of the contract have no method {method!r}")
        self._prefixes = set()
        return [None] * len(self._uuids)

    def shutdown(self):
        self._state = "shut down"
