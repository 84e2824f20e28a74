"""The generation phase: engine and scorers overlap. A finished chunk is sent to the critic while other responses still generate."""

import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Callable, Optional

import numpy as np
import torch
from torch import Tensor

from aligner.algorithms.agreement import on_all
from aligner.algorithms.dynamic_sampling import Refill, Scored
from aligner.config.groups import SamplingConfig, ValidationConfig
from aligner.data.batch import Completion, CriticRows, Request, Rollouts, Sample, Score, ScoreRow, collate
from aligner.data.interfaces import Critic, RewardSource, RolloutEngine
from aligner.data.tasks import STOP_STRINGS, wire_fields
from aligner.parallel.collectives import gather_objects
from aligner.parallel.topology import Topology


@dataclass
class Answers:
    """What the critic and the reward said of every row, in order of sample_id."""

    scores: list[Score]
    values: Tensor  # [B, S] float32, zeros without a critic
    bootstrap: Tensor  # [B] float32


class Pending:
    """Answers that are on their way for this rank's rows. Futures are kept until `answers` has awaited every one."""

    def __init__(self) -> None:
        self.chunks: list[tuple[list[int], Optional[Future], Optional[Future]]] = []
        self.ended: dict[int, bool] = {}  # sample_id -> whether it ended by itself
        self.stops: dict[int, tuple[str, ...]] = {}  # sample_id -> stop strings of its request

    def add(self, chunk: list[Completion], critic: Optional[Future], reward: Optional[Future]) -> None:
        self.chunks.append(([c.sample_id for c in chunk], critic, reward))
        self.ended |= {c.sample_id: c.finish_reason == "stop" for c in chunk}

    def scored(self, deadline: float) -> dict[int, Scored]:
        """What was asked so far, awaited. Raises as `local` does."""
        found = self.local(deadline)
        return {sample_id: Scored(score.value, self.ended[sample_id]) for sample_id, (score, _, _) in found.items()}

    def local(self, deadline: float) -> dict[int, tuple[Score, np.ndarray, float]]:
        """sample_id -> (score, values of the row, bootstrap). Raises RuntimeError naming the sample whose scoring failed."""
        until = time.monotonic() + deadline
        answers = {}
        for sample_ids, critic, reward in self.chunks:
            values, bootstrap, scores = _await_critic(critic, len(sample_ids), until)
            if reward is not None:
                scores = reward.result(timeout=max(0.0, until - time.monotonic()))
            for i, (sample_id, score) in enumerate(zip(sample_ids, scores, strict=True)):
                if score.error is not None:
                    raise RuntimeError(f"the reward of sample {sample_id} failed: {score.error}")
                answers[sample_id] = (score, values[i], bootstrap[i])
        return answers


def _await_critic(critic: Optional[Future], rows: int, until: float):
    if critic is None:
        return np.zeros((rows, 0), np.float32), [0.0] * rows, []
    answer = critic.result(timeout=max(0.0, until - time.monotonic()))
    return answer.values.numpy(), answer.bootstrap.tolist(), answer.scores


class Generation:
    """Turns samples into rollouts on every rank's engine and asks critic and reward about them as they finish."""

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        critic: Optional[Critic],
        reward: Optional[RewardSource],
        topology: Topology,
        chunk_size: int,
        pad_id: int,
        answer_deadline: float,
    ) -> None:
        self.engine, self.critic, self.reward, self.topology = engine, critic, reward, topology
        self.chunk_size, self.pad_id, self.answer_deadline = chunk_size, pad_id, answer_deadline
        self.on_progress: Callable[[str], None] = lambda text: None  # told in words how far this rank's share is

    def run(
        self,
        requests: list[Request],
        samples: dict[int, Sample],
        *,
        critic_step: Optional[int],
        refill: Refill = None,
    ) -> tuple[Rollouts, Pending]:
        """Generate the world's `requests` (each rank its own share) and return all of them on every rank, with the answers under way.

        samples: sample_id -> its prompt's Sample. critic_step: values are those of the critic after this step; None where only scores
        are wanted (validation). refill: told the scores so far, what else is to be generated; it adds the prompts to `samples`. One rank
        alone asks it while others still run, several between rounds, since all have to know all scores."""
        pending, finished = Pending(), []
        alone = self.topology.world_size == 1
        while requests:
            work = partial(self._generate, self._share(requests), samples, pending, critic_step)
            finished += on_all(partial(work, refill if alone else None), self.topology)
            requests = [] if refill is None else refill(self._all_scores(pending))
        everyone = gather_objects(finished, self.topology.cpu_group)
        rollouts = collate(
            [c for rank in everyone for c in rank], pad_id=self.pad_id, tensor_parallel=self.topology.tensor
        )
        return rollouts, pending

    def _all_scores(self, pending: Pending) -> dict[int, Scored]:
        """Of every rank, on every rank."""
        mine = on_all(lambda: pending.scored(self.answer_deadline), self.topology)
        return {i: scored for part in gather_objects(mine, self.topology.cpu_group) for i, scored in part.items()}

    def _generate(
        self,
        mine: list[Request],
        samples: dict[int, Sample],
        pending: Pending,
        critic_step: Optional[int],
        refill: Refill,
    ) -> list[Completion]:
        """This rank's share, on this rank alone: no collectives. refill is asked whenever half of what ran has finished: at points that
        depend on the responses alone, not on how long a score takes."""
        self._submit(mine, pending)
        waiting: list[Completion] = []
        finished: list[Completion] = []
        began, asked, running = time.monotonic(), len(mine), len(mine)
        while len(finished) < asked:
            done = self.engine.completed(timeout=self.answer_deadline)
            if not done:
                progress = f"{len(finished)} of {asked} done"
                raise RuntimeError(f"the rollout engine finished nothing in {self.answer_deadline:.0f} s ({progress})")
            finished += done
            waiting += done
            self.on_progress(progress_text(finished, asked, time.monotonic() - began))
            left = asked - len(finished)
            decide = refill is not None and left <= running // 2
            while len(waiting) >= self.chunk_size or (waiting and (decide or not left)):
                self._ask(waiting[: self.chunk_size], samples, pending, critic_step)
                waiting = waiting[self.chunk_size :]
            if decide and (more := refill(pending.scored(self.answer_deadline))):
                self._submit(more, pending)
                asked += len(more)
            running = asked - len(finished) if decide else running
        return finished

    def _submit(self, requests: list[Request], pending: Pending) -> None:
        pending.stops |= {r.sample_id: r.stop_strings for r in requests}
        self.engine.submit(requests)

    def answers(self, pending: Pending, rollouts: Rollouts) -> Answers:
        """Await this rank's answers and gather everybody's. A failure on one rank raises on all."""
        local = on_all(lambda: pending.local(self.answer_deadline), self.topology)
        everyone = gather_objects(local, self.topology.cpu_group)
        merged = {sample_id: answer for part in everyone for sample_id, answer in part.items()}
        values, bootstrap = torch.zeros_like(rollouts.engine_logprobs), torch.zeros(len(rollouts))
        scores = []
        for b, sample_id in enumerate(rollouts.sample_ids.tolist()):
            score, row, last = merged[sample_id]
            row = torch.from_numpy(row[: values.size(1)])
            values[b, : len(row)] = row
            bootstrap[b] = last
            scores.append(score)
        return Answers(scores, values, bootstrap)

    def _share(self, requests: list[Request]) -> list[Request]:
        """Contiguous, so that the responses of one prompt stay on one engine and share its prefill. Nothing where another rank has the
        engine."""
        engines = self.topology.world_size // self.engine.ranks
        mine, place = divmod(self.topology.rank, self.engine.ranks)
        return [] if place else requests[len(requests) * mine // engines : len(requests) * (mine + 1) // engines]

    def _ask(
        self, chunk: list[Completion], samples: dict[int, Sample], pending: Pending, critic_step: Optional[int]
    ) -> None:
        chunk = sorted(chunk, key=lambda c: c.sample_id)
        fields = [with_stops(samples[c.sample_id], pending.stops[c.sample_id]).fields for c in chunk]
        ask_critic = self.critic is not None and (critic_step is not None or self.reward is None)
        wire = [wire_fields(f) for f in fields]
        critic = self.critic.infer(_critic_rows(chunk, wire, self.pad_id, critic_step)) if ask_critic else None
        reward = self.reward.score(_score_rows(chunk, fields)) if self.reward is not None else None
        pending.add(chunk, critic, reward)


def progress_text(finished: list[Completion], total: int, seconds: float) -> str:
    tokens = sum(len(c.token_ids) for c in finished)
    return f"{len(finished)} of {total} responses, {tokens / max(seconds, 1e-9):.0f} tokens/s"


def with_stops(sample: Sample, stop_strings: tuple[str, ...]) -> Sample:
    """The sample as a scorer has to see it: text after a stop string is no part of a response."""
    if not stop_strings:
        return sample
    return replace(sample, fields=sample.fields | {STOP_STRINGS: list(stop_strings)})


def _critic_rows(chunk: list[Completion], fields: list[dict], pad_id: int, critic_step: Optional[int]) -> CriticRows:
    batch = collate(chunk, pad_id=pad_id)
    return CriticRows(
        tokens=batch.tokens,
        lengths=batch.lengths,
        prompt_lengths=batch.prompt_lengths,
        sample_ids=batch.sample_ids,
        truncated=batch.truncated,
        fields=fields,
        values=critic_step is not None,
        critic_step=critic_step,
    )


def _score_rows(chunk: list[Completion], fields: list[dict]) -> list[ScoreRow]:
    return [
        ScoreRow(
            sample_id=c.sample_id,
            prompt_ids=c.prompt_ids,
            response_ids=c.token_ids,
            ended=c.finish_reason == "stop",
            fields=f,
        )
        for c, f in zip(chunk, fields)
    ]


def sampling_fields(settings: SamplingConfig | ValidationConfig) -> dict[str, Any]:
    """What settings of sampling say of each Request. In training all but temperature are neutral: others are refused with the settings."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_output_len")
    return {name: getattr(settings, name) for name in names}
