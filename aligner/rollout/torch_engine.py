"""The embedded engine: continuous batching in eager torch, on a CPU or a GPU. Every rank runs its own with a full copy of the weights."""

import math
import time
from collections import deque
from typing import Optional, Sequence

import numpy as np
import torch
from torch import Tensor

from aligner.config.groups import Certify
from aligner.data.batch import Completion, Request
from aligner.data.interfaces import RefitCertificate, WeightUpdate
from aligner.models.model_config import ModelShape
from aligner.parallel.device import trim_heap
from aligner.rollout.cache import round_up
from aligner.rollout.engine import BuildLimits, Guarded, refuse_in_flight
from aligner.rollout.linear import Kernel, choose_kernel
from aligner.rollout.memory import check_memory, make_cache
from aligner.rollout.native_transformer import NativeTransformer
from aligner.rollout.prefill_plan import PrefillPlan
from aligner.rollout.refit import checked, checksum
from aligner.rollout.sampling import Truncation, penalise, sample
from aligner.rollout.slots import Pending, Slots
from aligner.rollout.transformer import Transformer
from aligner.rollout.weights import Weights

REFILL_SHARE = 8  # waiting requests join once 1/8 of the rows is free: prefilling a few at a time would waste matmuls


class TorchEngine(Guarded):
    """RolloutEngine (data/interfaces.py), built here once: shapes, dtype and device never change.

    `nbytes` = weight_nbytes + cache_nbytes, held while in use. A sample depends on (seed, sample_id, stream, position) and the
    logits alone. Raises ValueError where the build does not fit the model or the free memory."""

    ranks = 1

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
        use_native: bool = True,
        kernel: Optional[Kernel] = None,
        token_bytes: Optional[Sequence[bytes]] = None,
    ):
        """use_native: whether the compiled kernels may be used. kernel: None chooses (see linear.py). token_bytes:
        Tokenizer.token_bytes(), for stop strings."""
        super().__init__()
        self.limits = BuildLimits(max_batch_size, max_input_len, max_output_len, shape.vocab_size)
        self.limits.check_context(shape.max_position_embeddings)
        self.device, self.dtype, self.certify = torch.device(device), dtype, certify
        length = round_up(max_input_len + max_output_len)
        kernel = kernel or choose_kernel(
            shape, rows=max_batch_size, dtype=dtype, device=self.device, use_native=use_native
        )
        check_memory(shape, limits=self.limits, length=length, dtype=dtype, device=self.device, kernel=kernel)
        self.weights = Weights(shape, dtype=dtype, device=self.device, kernel=kernel)
        self.cache = make_cache(shape, rows=max_batch_size, length=length, dtype=dtype, device=self.device)
        self.weight_nbytes, self.cache_nbytes = self.weights.nbytes, self.cache.nbytes
        self.nbytes = self.weight_nbytes + self.cache_nbytes
        self.kernel = kernel
        model = NativeTransformer if kernel is Kernel.native else Transformer
        self.transformer = model(shape, self.weights, self.cache)
        self.token_bytes = token_bytes
        self.slots = self._empty_slots()
        self.waiting: deque[Pending] = deque()
        self.finished: list[tuple[int, Completion]] = []
        self.submitted = 0

    def _empty_slots(self) -> Slots:
        limits = self.limits
        return Slots(limits.max_batch_size, limits.max_input_len, limits.max_output_len, token_bytes=self.token_bytes)

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
        self.slots.forget()
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
        if self.token_bytes is None and any(r.stop_strings for r in requests):
            raise ValueError("stop strings need an engine that was built with token_bytes=tokenizer.token_bytes()")
        if not self.running:
            self.slots.forget()  # so that what an engine did before never changes the rounding of what it does next
        refuse_in_flight(requests, (p.request for p in (*self.waiting, *self.slots.pending)))
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
        wanted, missing, seen = set(orders), set(orders), 0
        while True:
            missing.difference_update(order for order, _ in self.finished[seen:])
            seen = len(self.finished)
            if not missing:
                break
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
        self._paused()
        trim_heap()

    def _take_memory(self) -> None:
        self.cache.restore()
        self.weights.restore()
        self.transformer.bind()

    def close(self) -> None:
        """Drop requests and memory; again is harmless."""
        if self.idle_reason == "closed":
            return
        self._drop_requests()
        self.cache.release()
        self.weights.release()
        self.idle_reason = "closed"

    def _drop_requests(self) -> None:
        self.waiting.clear()
        self.slots = self._empty_slots()

    def _step(self) -> None:
        """Let waiting requests in, then one token for every active row."""
        self._admit()
        if self.slots.active:
            active = slice(0, self.slots.active)
            positions = self.slots.lengths[active] - 1
            self._sample(active, self.transformer.decode(self.slots.last_tokens(), positions))
            self._harvest()

    def _admit(self) -> None:
        """Let as many in as there are rows, once enough rows are free, and sample each one's first token."""
        enough = min(len(self.waiting), max(1, self.slots.rows // REFILL_SHARE))
        if not self.waiting or (self.slots.active and self.slots.free < enough):
            return
        chunk = [self.waiting.popleft() for _ in range(min(len(self.waiting), self.slots.free))]
        plan = PrefillPlan(chunk, self.slots)
        self._move(plan.targets, plan.sources, plan.copied)
        self.slots.add(plan.pending)
        for run in plan.passes(self.transformer.prefill_tokens):
            logits = self.transformer.prefill(run.tokens, rows=run.rows, starts=run.starts, final=run.final)
            if run.final:
                self._move(*run.copies())
                self._sample(run.finished, logits[torch.from_numpy(run.repeats()).to(self.device)])
        self._harvest()

    @torch.inference_mode()  # as the logits were made: they are overwritten
    def _sample(self, rows: slice, logits: Tensor) -> None:
        """One token for each of `rows` from logits [n, V], which are overwritten."""
        slots = self.slots
        on_device = lambda array: torch.from_numpy(array).to(self.device)  # noqa: E731
        if slots.any_penalty:
            penalty = on_device(slots.repetition_penalty[rows])
            penalise(logits, history=on_device(slots.history(rows)), penalty=penalty)
        if slots.any_minimum:
            row, token = slots.forbidden(rows)
            logits[on_device(row), on_device(token)] = -math.inf
        tokens, logprobs = self._draw(rows, logits)
        if not np.isfinite(logprobs).all():
            self._fail_non_finite(rows.start + int(np.argmin(np.isfinite(logprobs))))
        slots.record(rows, tokens, logprobs)

    def _draw(self, rows: slice, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        slots = self.slots
        uniforms, temperature = slots.next_uniforms(rows), slots.temperature[rows]
        if self.kernel is Kernel.native and not slots.any_truncated:
            return self.transformer.sample(logits, uniforms=uniforms, temperature=temperature)
        on_device = lambda array: torch.from_numpy(array).to(self.device)  # noqa: E731
        truncation = None
        if slots.any_truncated:
            truncation = Truncation(*(on_device(x[rows]) for x in (slots.top_k, slots.top_p, slots.min_p)))
        tokens, logprobs = sample(
            logits,
            uniforms=on_device(uniforms),
            temperature=on_device(temperature),
            vocab_size=self.limits.vocab_size,
            any_greedy=slots.any_greedy,
            truncation=truncation,
        )
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def _harvest(self) -> None:
        """Move what has finished out, and close the gaps."""
        slots, done = self.slots, self.slots.finished()
        if not done.any():
            return
        for row in np.flatnonzero(done).tolist():
            self.finished.append((slots.pending[row].order, slots.completion(row, self.state.version)))
        used = int(slots.cached[: slots.active].max())
        holes, movers = slots.remove(done)
        self._move(np.concatenate([holes, movers]), np.concatenate([movers, holes]), used)

    def _move(self, targets: np.ndarray, sources: np.ndarray, length: int) -> None:
        """Rows of the cache, as a simultaneous assignment."""
        if len(targets):
            self.cache.move(*(torch.from_numpy(x).to(self.device) for x in (targets, sources)), length=length)

    def _fail_non_finite(self, row: int) -> None:
        sample_id = self.slots.pending[row].request.sample_id
        self._drop_requests()
        self.cache.clear()
        reason = (
            f"weight version {self.state.version} gave logits that are not finite (first seen in sample_id {sample_id})"
        )
        self.state.block(reason)
        raise FloatingPointError(f"{reason}; the policy has diverged or the engine's dtype {self.dtype} overflows")
