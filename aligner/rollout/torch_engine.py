"""The embedded engine: continuous batching in eager torch, on a CPU or a GPU. Every rank runs its own with a full copy of the weights."""

import time
from collections import deque
from pathlib import Path
from typing import Optional

import numpy as np
import torch
from torch import Tensor

from aligner.config.groups import Certify
from aligner.data.batch import Completion, Request
from aligner.data.interfaces import RefitCertificate, WeightUpdate
from aligner.models.model_config import ModelShape
from aligner.rollout.cache import KVCache, round_up
from aligner.rollout.engine import BuildLimits, WeightState
from aligner.rollout.linear import Kernel
from aligner.rollout.refit import checked, checksum
from aligner.rollout.sampling import sample
from aligner.rollout.slots import Pending, Slots
from aligner.rollout.transformer import Transformer
from aligner.rollout.weights import Weights

PREFILL_TOKENS = 4096  # prompt tokens a prefill pass: bounds its activations; one longer prompt goes alone
REFILL_SHARE = 8  # waiting requests join once 1/8 of the rows is free: prefilling a few at a time would waste matmuls


class TorchEngine:
    """RolloutEngine (data/interfaces.py), built here once: shapes, dtype and device never change.

    `nbytes` = weight_nbytes + cache_nbytes, held while in use. A sample depends on (seed, sample_id, stream, position) and the
    logits alone. Raises ValueError where the build does not fit the model or the free memory."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        max_batch_size: int,
        max_input_len: int,
        max_output_len: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        certify: Certify = Certify.sampled,
        kernel: Optional[Kernel] = None,
    ):
        """kernel: of every linear layer; None times them (see linear.py)."""
        self.limits = BuildLimits(max_batch_size, max_input_len, max_output_len, shape.vocab_size)
        self.limits.check_context(shape.max_position_embeddings)
        self.device, self.dtype, self.certify = torch.device(device), dtype, certify
        length = round_up(max_input_len + max_output_len)
        check_memory(shape, limits=self.limits, length=length, dtype=dtype, device=self.device)
        self.weights = Weights(shape, rows=max_batch_size, dtype=dtype, device=self.device, kernel=kernel)
        self.cache = make_cache(shape, rows=max_batch_size, length=length, dtype=dtype, device=self.device)
        self.weight_nbytes, self.cache_nbytes = self.weights.nbytes, self.cache.nbytes
        self.nbytes = self.weight_nbytes + self.cache_nbytes
        self.transformer = Transformer(shape, self.weights, self.cache)
        self.state = WeightState()
        self.slots = Slots(max_batch_size, max_output_len)
        self.waiting: deque[Pending] = deque()
        self.finished: list[tuple[int, Completion]] = []
        self.submitted = 0
        self.idle_reason: Optional[str] = None  # paused or closed

    @property
    def running(self) -> int:
        """Requests that have not finished."""
        return self.slots.active + len(self.waiting)

    def refit(self, update: WeightUpdate) -> RefitCertificate:
        """Every tensor in place. RuntimeError while requests run (nothing changes then); ValueError for an update that does not
        fit, which poisons the engine. No keys or values outlive their request, so none of the old weights remain."""
        self._require_open("refit")
        self._require_no_requests("refit")
        if update.kind != "full":
            raise ValueError(f"the torch engine takes full updates, not kind={update.kind!r}")
        with self.state.refitting(update.version):
            for name, tensor in checked(update.tensors, self.weights.expected()):
                self.weights.write(name, tensor)
        checksums = {}
        if self.certify is not Certify.off:
            names = self.weights.views
            checksums = {name: checksum(self.weights.read(name), self.certify, update.version) for name in names}
        return RefitCertificate(version=update.version, tensors=len(self.weights.views), checksums=checksums)

    def submit(self, requests: list[Request]) -> None:
        """Queue requests, all or none. ValueError for what the build cannot serve and for a sample_id that is in flight."""
        self._submit(requests)

    def _submit(self, requests: list[Request]) -> list[int]:
        self._require_open("take requests")
        self.state.require_usable("take requests")
        self.limits.check(requests)
        flying = {p.request.sample_id for p in (*self.waiting, *self.slots.pending)}
        for request in requests:
            if request.sample_id in flying:
                raise ValueError(f"sample_id {request.sample_id} is already in flight; ids are unique in a run")
            flying.add(request.sample_id)
        orders = list(range(self.submitted, self.submitted + len(requests)))
        self.submitted += len(requests)
        self.waiting.extend(map(Pending, orders, requests))
        return orders

    def completed(self, timeout: float) -> list[Completion]:
        """Run until something finishes; [] where nothing runs or `timeout` seconds passed (one step is made at least)."""
        self._require_open("run")
        deadline = time.monotonic() + timeout
        while not self.finished and self.running:
            self._step()
            if time.monotonic() >= deadline:
                break
        done, self.finished = self.finished, []
        return [completion for _, completion in done]

    def generate(self, requests: list[Request]) -> list[Completion]:
        """Run these (and whatever else is in flight) until all of these have finished; in their order."""
        orders = self._submit(requests)
        wanted = set(orders)
        while sum(order in wanted for order, _ in self.finished) < len(orders):
            self._step()
        mine = {order: completion for order, completion in self.finished if order in wanted}
        self.finished = [entry for entry in self.finished if entry[0] not in wanted]
        return [mine[order] for order in orders]

    def pause(self) -> None:
        """Give KV cache and weights back. RuntimeError while requests run."""
        self._require_open("pause")
        self._require_no_requests("pause")
        self.cache.release()
        self.weights.release()
        self.idle_reason = "paused; call resume() first"

    def resume(self) -> None:
        """Take the memory again. The weights are gone: a refit must come before requests."""
        if self.idle_reason is None:
            return
        if self.idle_reason == "closed":
            raise RuntimeError("the engine cannot resume: it is closed")
        self.cache.restore()
        self.weights.restore()
        self.idle_reason = None
        self.state.block("its weights were given back by pause()")

    def close(self) -> None:
        """Drop requests and memory; again is harmless."""
        if self.idle_reason == "closed":
            return
        self._drop_requests()
        self.cache.release()
        self.weights.release()
        self.idle_reason = "closed"

    def _require_open(self, action: str) -> None:
        if self.idle_reason is not None:
            raise RuntimeError(f"the engine cannot {action}: it is {self.idle_reason}")

    def _require_no_requests(self, action: str) -> None:
        if self.running:
            raise RuntimeError(
                f"the engine cannot {action} while {self.running} requests run; await them with completed() first"
            )

    def _drop_requests(self) -> None:
        self.waiting.clear()
        self.slots = Slots(self.limits.max_batch_size, self.limits.max_output_len)

    def _step(self) -> None:
        """Let waiting requests in, then one token for every active row."""
        self._admit()
        if self.slots.active:
            active = slice(0, self.slots.active)
            positions = self.slots.lengths[active] - 1
            window = round_up(int(positions.max()) + 1)
            self._record(active, self.transformer.decode(self.slots.last_tokens(), positions, window=window))

    def _admit(self) -> None:
        """Prefill in chunks, the longest prompts last, and sample each one's first token."""
        enough = min(len(self.waiting), max(1, self.slots.rows // REFILL_SHARE))
        if not self.waiting or (self.slots.active and self.slots.free < enough):
            return
        chunk = [self.waiting.popleft() for _ in range(min(len(self.waiting), self.slots.free))]
        chunk.sort(key=lambda p: len(p.request.prompt_ids))
        for group in prefill_groups(chunk):
            prompts = {}
            prompt_of_row = np.array([prompts.setdefault(tuple(p.request.prompt_ids), len(prompts)) for p in group])
            first = self.slots.active
            logits = self.transformer.prefill(
                [list(ids) for ids in prompts], prompt_of_row=prompt_of_row, first_row=first
            )
            self.slots.add(group)
            self._record(slice(first, self.slots.active), logits)

    def _record(self, rows: slice, logits: Tensor) -> None:
        """Sample for `rows`, and move what has finished out."""
        slots = self.slots
        temperature = slots.temperature[rows]
        tokens, logprobs = sample(
            logits,
            uniforms=torch.from_numpy(slots.next_uniforms(rows)).to(self.device),
            temperature=torch.from_numpy(temperature).to(self.device),
            vocab_size=self.limits.vocab_size,
            any_greedy=bool((temperature == 0).any()),
        )
        logprobs = logprobs.cpu().numpy()
        if not np.isfinite(logprobs).all():
            self._fail_non_finite(rows.start + int(np.argmin(np.isfinite(logprobs))))
        slots.record(rows, tokens.cpu().numpy(), logprobs)
        self._harvest()

    def _harvest(self) -> None:
        slots, done = self.slots, self.slots.finished()
        if not done.any():
            return
        for row in np.flatnonzero(done).tolist():
            self.finished.append((slots.pending[row].order, slots.completion(row, self.state.version)))
        used = int(slots.lengths[: slots.active].max())
        holes, movers = slots.remove(done)
        if len(holes):
            self.cache.move(*(torch.from_numpy(x).to(self.device) for x in (holes, movers)), length=round_up(used))

    def _fail_non_finite(self, row: int) -> None:
        sample_id = self.slots.pending[row].request.sample_id
        self._drop_requests()
        self.cache.clear()
        reason = (
            f"weight version {self.state.version} gave logits that are not finite (first seen in sample_id {sample_id})"
        )
        self.state.block(reason)
        raise FloatingPointError(f"{reason}; the policy has diverged or the engine's dtype {self.dtype} overflows")


def prefill_groups(chunk: list[Pending]) -> list[list[Pending]]:
    """Consecutive groups of at most PREFILL_TOKENS right-padded tokens (one longer prompt goes alone); `chunk` sorted by length."""
    groups: list[list[Pending]] = []
    for pending in chunk:
        if not groups or (len(groups[-1]) + 1) * len(pending.request.prompt_ids) > PREFILL_TOKENS:
            groups.append([])
        groups[-1].append(pending)
    return groups


def make_cache(shape: ModelShape, *, rows: int, length: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    return KVCache(
        layers=shape.num_layers,
        rows=rows,
        kv_heads=shape.num_query_groups,
        length=length,
        head_dim=shape.kv_channels,
        dtype=dtype,
        device=device,
    )


def check_memory(
    shape: ModelShape, *, limits: BuildLimits, length: int, dtype: torch.dtype, device: torch.device
) -> None:
    """ValueError with the figures where weights and cache would not fit into the free memory of `device`."""
    meta = torch.device("meta")
    weights = Weights(shape, rows=limits.max_batch_size, dtype=dtype, device=meta).nbytes
    cache = make_cache(shape, rows=limits.max_batch_size, length=length, dtype=dtype, device=meta).nbytes
    free = free_memory(device)
    if weights + cache > free:
        raise ValueError(
            f"the torch engine needs {weights / 1e9:.2f} GB of weights and {cache / 1e9:.2f} GB of KV cache "
            f"(engine.max_batch_size={limits.max_batch_size} rows of {length} tokens), {free / 1e9:.2f} GB are free on {device}; "
            "lower engine.max_batch_size, engine.max_input_len or engine.max_output_len, or take a smaller dtype"
        )


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
