"""TensorRT-LLM behind the engine contract: one engine a generation group, refitted in place. Never run on TensorRT-LLM so far."""

import logging
import math
import tempfile
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

import torch

from aligner.config.groups import Certify
from aligner.data.batch import Completion, Request
from aligner.data.interfaces import RefitCertificate, WeightUpdate
from aligner.models.hf_mapping import hf_names
from aligner.models.model_config import ModelShape
from aligner.parallel.device import synchronise
from aligner.rollout.engine import BuildLimits, Guarded, refuse_in_flight
from aligner.rollout.refit import checked, checksum
from aligner.trtllm.client import LLMSettings, TrtllmClient
from aligner.trtllm.engine_build import EngineBuild
from aligner.trtllm.folder import write_engine_folder
from aligner.trtllm.group import GenerationGroup, device_uuid
from aligner.trtllm.handles import Named, buckets, serialized
from aligner.trtllm.layout import Grid, split_problems
from aligner.trtllm.sampling import refuse_unsupported

log = logging.getLogger(__name__)

FAMILIES = ("llama", "qwen2", "qwen3")  # of ours, those that its PyTorch backend has


class TrtllmEngine(Guarded):
    """RolloutEngine (data/interfaces.py) of a generation group: `ranks` ranks, all of which call refit, pause, resume and close; the
    first of them, the leader, takes the requests of all.

    `nbytes`: this rank's share of the weights; the KV cache is TensorRT-LLM's own. The certificate covers what was sent."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        group: GenerationGroup,
        checkpoint: Path,
        build: EngineBuild,
        pad_id: int,
        memory_fraction: float,
        bucket_bytes: int,
        timeout: float,
        certify: Certify,
    ):
        """checkpoint: for its tokenizer alone. timeout: of each call, in seconds. Raises ValueError for what cannot be built."""
        super().__init__()
        refuse_impossible(shape, group.size)
        self.limits = BuildLimits(build.max_batch_size, build.max_input_len, build.max_output_len, shape.vocab_size)
        self.limits.check_context(shape.max_position_embeddings)
        self.dtype, self.certify, self.ranks = getattr(torch, build.dtype), certify, group.size
        self.group, self._bucket_bytes, self._timeout = group, bucket_bytes, timeout
        self._expected = hf_names(shape)
        self.nbytes = sum(map(math.prod, self._expected.values())) * self.dtype.itemsize // group.size
        self._running: dict[Future, Request] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="aligner-trtllm-")
        settings = LLMSettings(Path(self._folder.name), build, group.size, memory_fraction, group.devices())

        def start() -> TrtllmClient:
            last = group.first + group.size - 1
            log.info(
                "TensorRT-LLM starts on ranks %d to %d, which may take minutes (engine.timeout=%g s)",
                group.first,
                last,
                timeout,
            )
            write_engine_folder(shape, checkpoint, settings.folder, dtype=build.dtype)
            return TrtllmClient(settings, pad_id=pad_id, timeout=timeout)

        self._client: Any = None
        group.lead(lambda: setattr(self, "_client", start()))

    @property
    def running(self) -> int:
        """Requests that have not been returned."""
        return len(self._running)

    # Weights

    def refit(self, update: WeightUpdate) -> RefitCertificate:
        """Every tensor, in place, in buckets; collective over the group. RuntimeError while requests run (nothing changes then);
        ValueError for an update that does not fit, which poisons the engine."""
        self.group.lead(lambda: self._require_no_requests("refit"))
        self._require_open("refit")
        if update.kind != "full":
            raise ValueError(f"the TensorRT-LLM engine takes full updates, not kind={update.kind!r}")
        checksums: dict[str, str] = {}
        with self.state.refitting(update.version):
            for bucket in buckets(checked(update.tensors, self._expected), dtype=self.dtype, limit=self._bucket_bytes):
                if self.certify is not Certify.off:
                    checksums |= {name: checksum(tensor, self.certify, update.version) for name, tensor in bucket}
                self._send(bucket)
            self.group.lead(lambda: self._client.finish_update())
        return RefitCertificate(version=update.version, tensors=len(self._expected), checksums=checksums)

    def _send(self, bucket: Named) -> None:
        """Each rank's copies are read by the worker on its GPU; they may go when the leader's call has returned."""
        synchronise()  # the copies are made
        uuid = device_uuid(self.group.local_rank)
        handles = self.group.all_do(lambda: (uuid, serialized(bucket)))
        self.group.lead(lambda: self._client.update_weights(dict(handles)))

    # Requests

    def submit(self, requests: list[Request]) -> None:
        """Queue requests, all or none, on the leader. ValueError for what the build cannot serve and for a sample_id in flight."""
        self._submit(requests)

    def _submit(self, requests: list[Request]) -> list[Future]:
        self._require_open("take requests")
        self.state.require_usable("take requests")
        if requests and not self.group.is_leader:
            raise RuntimeError(
                f"rank {self.group.rank} has no engine of its own: requests go to rank {self.group.first}, which leads its "
                f"engine.tensor={self.ranks} ranks"
            )
        self.limits.check(requests)
        refuse_unsupported(requests)
        refuse_in_flight(requests, self._running.values())
        futures = [self._client.submit(request, weight_version=self.state.version) for request in requests]
        self._running.update(zip(futures, requests))
        return futures

    def completed(self, timeout: float) -> list[Completion]:
        """What has finished, waiting for the first of it; [] where nothing runs or `timeout` seconds passed. RuntimeError where
        TensorRT-LLM failed on a request: the others are dropped then."""
        self._require_open("run")
        done, _ = wait(self._running, timeout=timeout, return_when=FIRST_COMPLETED)
        return self._take([future for future in self._running if future in done])  # in order of submission

    def _take(self, futures: list[Future]) -> list[Completion]:
        taken = [(self._running.pop(future), future) for future in futures]
        try:
            return [future.result() for _, future in taken]
        except Exception as error:
            self._drop_requests()
            request = next(r for r, future in taken if future.exception() is not None)
            raise RuntimeError(f"TensorRT-LLM failed on sample_id {request.sample_id}: {error}") from error

    def generate(self, requests: list[Request]) -> list[Completion]:
        """submit, then wait for these; in their order. RuntimeError where none finishes for engine.timeout seconds."""
        futures = self._submit(requests)
        left = set(futures)
        while left:
            done, left = wait(left, timeout=self._timeout, return_when=FIRST_COMPLETED)
            if not done:
                self._drop_requests()
                raise RuntimeError(
                    f"TensorRT-LLM finished nothing in {self._timeout:g} s (engine.timeout); {len(left)} requests ran"
                )
        return self._take(futures)

    # Memory

    def pause(self) -> None:
        """Give KV cache and weights back, on every rank's GPU. RuntimeError while requests run. Collective over the group."""
        self.group.lead(lambda: self._require_no_requests("pause"))
        self._require_open("pause")
        self.group.lead(lambda: self._client.release())
        self._paused()

    def _take_memory(self) -> None:
        self.group.lead(lambda: self._client.resume())

    def close(self) -> None:
        """Drop requests, and end TensorRT-LLM's workers; again is harmless."""
        if self.idle_reason == "closed":
            return
        self.idle_reason = "closed"
        self._drop_requests()
        if self._client is not None:
            self._client.close()
        self._folder.cleanup()

    def _drop_requests(self) -> None:
        for future in self._running:
            future.cancel()
        self._running.clear()


def refuse_impossible(shape: ModelShape, tensor: int) -> None:
    """ValueError with every reason why TensorRT-LLM cannot serve the model over `tensor` ranks."""
    problems = split_problems(shape, Grid(tensor), tensor_key="engine.tensor", pipeline_key="")
    if shape.family not in FAMILIES:
        problems.append(
            f"TensorRT-LLM's PyTorch backend has no {shape.family} models (these it has: {', '.join(FAMILIES)}); use engine.kind=torch"
        )
    if problems:
        raise ValueError("engine.kind=trtllm: " + "; ".join(problems))
