"""PPO (Schulman et al. 2017) with a served critic: a step reads top to bottom."""

from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Callable, Iterator, Optional

import torch

from aligner.algorithms.agreement import on_all
from aligner.algorithms.dynamic_sampling import DynamicSampling
from aligner.algorithms.engine_sync import EngineSync, seconds_beside
from aligner.algorithms.experience import Experience, Signals, build_experience
from aligner.algorithms.generation import Answers, Generation, sampling_fields
from aligner.algorithms.pairs import PairedCheckpoints
from aligner.algorithms.policy_batches import policy_mini_batch, update_rows, update_tells_logprobs
from aligner.algorithms.records import DriftAlarm, part_means, sample_rows
from aligner.algorithms.trainer_state import TrainerState
from aligner.algorithms.updates import train_in_turn
from aligner.algorithms.validation import Validator
from aligner.config.jobs import ActorConfig
from aligner.config.ppo import ReferencePlace, Truncation
from aligner.data.batch import Request, Rollouts, Sample
from aligner.data.interfaces import Critic, RolloutEngine
from aligner.data.sampler import PromptSampler
from aligner.data.tokenizer import Tokenizer
from aligner.models.policy import Policy, PolicyMiniBatch
from aligner.ops.kl import AdaptiveKL
from aligner.parallel.collectives import broadcast_object, gather_objects
from aligner.parallel.device import peak_memory_bytes
from aligner.parallel.topology import Topology
from aligner.runtime import faults
from aligner.runtime.errors import AgreedError, Stopped
from aligner.runtime.recorder import Recorder


class PPOTrainer:
    """Owns the loop; the parts it is given own everything else. All methods are collective over the actor job."""

    def __init__(
        self,
        *,
        config: ActorConfig,
        topology: Topology,
        tokenizer: Tokenizer,
        policy: Policy,
        engine: RolloutEngine,
        critic: Optional[Critic],
        generation: Generation,
        validator: Validator,
        checkpoints: PairedCheckpoints,
        recorder: Recorder,
        train_samples: list[Sample],
        stop_token_ids: tuple[int, ...],
    ) -> None:
        self.config, self.ppo, self.topology, self.tokenizer = config, config.ppo, topology, tokenizer
        self.total_steps = config.run.max_steps
        self.policy, self.engine, self.critic = policy, engine, critic
        self.generation, self.validator = generation, validator
        self.checkpoints, self.recorder = checkpoints, recorder
        self.train_samples, self.stop_token_ids = train_samples, stop_token_ids
        self.sampler = PromptSampler(len(train_samples), seed=config.run.seed, shuffle=config.data.shuffle)
        self.state = TrainerState(kl_coefficient=config.ppo.kl_coefficient)
        self.sync = EngineSync(engine, policy, topology, every=config.refit.sync_every)
        self.drift_alarm = DriftAlarm(config.logging.drift_alarm)
        self.validated: Optional[float] = None  # val/reward of the present weights, where this step had a validation

    # The loop

    def fit(self, *, resume_from: Optional[int], should_stop: Callable[[], bool] = lambda: False) -> TrainerState:
        """Run to run.max_steps, or until `should_stop` (asked on rank 0, between steps) says that the job has to end; save, and return."""
        saved = self.checkpoints.restore(resume_from)
        self.recorder.start()
        if saved is not None:
            self.state = TrainerState.of(saved)
            if self.ppo.kl_target is None:  # fixed: the setting counts, as every other does
                self.state.kl_coefficient = self.ppo.kl_coefficient
        elif self.config.validation.every:
            self.validate_before_training()
        stopping = False
        while self.state.step < self.config.run.max_steps and not stopping:
            self.run_step()
            wishes = (should_stop(), self.critic is not None and self.critic.draining)
            stopping, leaving = broadcast_object(wishes, 0, self.topology.cpu_group)
            if self.checkpoint_is_due() or stopping or leaving:  # a critic job that leaves waits for the pair
                self.save()
            self.checkpoints.settle(wait=stopping or leaving)
        self.checkpoints.settle(wait=True)
        return self.state

    def run_step(self) -> None:
        step, phase = self.state.step + 1, self.recorder.phase
        with phase("refit"):
            self.enter_generation()
            self.sync.follow(self.state.weight_version)
        with phase("generate"):
            groups = self.prompt_groups()
            refill = groups.refill if self.ppo.dynamic_sampling else None
            how = {"critic_step": step - 1, "refill": refill}
            rollouts, pending = self.generation.run(groups.first(), groups.samples, **how)
            rollouts = groups.kept(step, rollouts) if refill else rollouts
            rollouts.certificate = self.sync.certificate
            self.leave_generation()
        faults.reach("generated", step)
        with phase("logprobs"):
            logprobs, reference = self.logprobs(rollouts)
        with phase("critic_wait"):
            answers = self.generation.answers(pending, rollouts)
        with phase("advantages"):
            experience = self.experience(step, rollouts, logprobs, reference, answers)
        with phase("train"):
            critic_update = self.start_critic_training(step, experience)
            policy_metrics = self.train_policy(step, experience)
        with phase("refit"):
            overlapped = self.refit_ahead(step, critic_update)
        with phase("critic_wait"):
            critic_metrics = self.finish_critic_training(critic_update)
        self.drift_alarm.check(step, experience.metrics)
        faults.reach("trained", step)
        self.advance(step, rollouts, experience, consumed=groups.consumed)
        stops = self.config.sampling.stop_strings
        rows = sample_rows(rollouts, groups.samples, answers.scores, self.tokenizer, experience, stops)
        on_all(lambda: self.recorder.training_samples(step, rows), self.topology)
        with phase("validate"):
            validation = self.validate_when_due(step)
        parts = part_means("reward", answers.scores)
        metrics = {**parts, **experience.metrics, **policy_metrics, **critic_metrics, **validation, **self.counters()}
        metrics |= {"refit/overlapped_seconds": overlapped, **(groups.metrics() if refill else {})}
        self.end_step(step, metrics, tokens=int(rollouts.lengths.sum()))

    # Phases

    def enter_generation(self) -> None:
        """Make room."""
        if self.config.optim.offload_during_generation:
            self.policy.offload_optimizer()
        if self.config.engine.offload_during_training:
            self.engine.resume()

    def leave_generation(self) -> None:
        if self.config.engine.offload_during_training:
            self.engine.pause()
            self.sync.forget()
        if self.config.optim.offload_during_generation:
            self.policy.restore_optimizer()

    def prompt_groups(self) -> DynamicSampling:
        """This step's prompts; with ppo.dynamic_sampling those that are sampled further, too."""
        return DynamicSampling(
            self.next_samples,
            self.requests,
            wanted=self.ppo.rollout_batch_size,
            most=self.ppo.dynamic_sampling_max_prompts,
            samples_per_prompt=self.ppo.samples_per_prompt,
            counts_truncated=self.ppo.truncation is not Truncation.mask,
        )

    def next_samples(self, after: int, prompts: int) -> dict[int, Sample]:
        """So many prompts, `after` others of this step, by sample_id = group_id * n + k, where group_id counts the prompts consumed."""
        n, first = self.ppo.samples_per_prompt, self.state.prompts_consumed + after
        chosen = self.sampler.take(first, prompts)
        return {(first + i) * n + k: self.train_samples[row] for i, row in enumerate(chosen) for k in range(n)}

    def requests(self, samples: dict[int, Sample]) -> list[Request]:
        return [
            Request(
                sample_id=sample_id,
                prompt_ids=sample.prompt_ids,
                max_output_len=self.config.engine.max_output_len,
                **sampling_fields(self.config.sampling),
                stop_token_ids=self.stop_token_ids,
                stop_strings=tuple(self.config.sampling.stop_strings),
                seed=self.config.run.seed,
            )
            for sample_id, sample in samples.items()
        ]

    def logprobs(self, rollouts: Rollouts) -> tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
        """[B, S] each: of the policy (None where it is read off the update) and of the frozen reference (None without one), at the sampling
        temperature."""
        temperature = self.config.sampling.temperature
        from_update = self.critic is None and update_tells_logprobs(self.ppo)
        logprobs = None if from_update else self.policy.logprobs(rollouts, temperature=temperature)
        if self.ppo.reference is ReferencePlace.none:
            return logprobs, None
        if self.state.weight_version == 0 and logprobs is not None:
            return logprobs, logprobs  # before its first update the policy is the reference
        return logprobs, self.policy.reference_logprobs(rollouts, temperature=temperature)

    def experience(self, step: int, rollouts: Rollouts, logprobs, reference, answers: Answers) -> Experience:
        signals = Signals(
            logprobs=logprobs,
            reference_logprobs=reference,
            scores=torch.tensor([s.value for s in answers.scores]),
            values=answers.values,
            bootstrap=answers.bootstrap,
            weight_version=self.state.weight_version,
        )
        falls_back = partial(self.state.trust.judge, step, ppo=self.ppo)
        carried = {"moments": self.state.scores, "falls_back": falls_back}
        return build_experience(rollouts, signals, self.ppo, self.state.kl_coefficient, **carried)

    def start_critic_training(self, step: int, experience: Experience) -> Optional["Future[dict[str, float]]"]:
        """Send the step to the critic, which trains while the policy does. Rank 0 alone talks to it."""
        if self.critic is None or not self.topology.is_reporter:
            return None
        try:
            return self.critic.train(step, experience.critic_batch())
        except Exception as problem:  # the other ranks train already: they hear of it where the answer is awaited
            refused: Future[dict[str, float]] = Future()
            refused.set_exception(problem)
            return refused

    def finish_critic_training(self, update) -> dict[str, float]:
        """Await the critic's acknowledgement on rank 0; a failure there fails every rank."""
        if self.critic is None:
            return {}
        outcome: object = None
        if update is not None:
            try:
                outcome = update.result(timeout=self.config.critic.patience)
            except Exception as problem:  # whatever it is, every rank must hear of it
                outcome = problem
        outcome = broadcast_object(outcome, 0, self.topology.cpu_group)
        if isinstance(outcome, Stopped):
            raise outcome
        if isinstance(outcome, Exception):
            raise AgreedError(f"the critic did not train: {outcome}") from outcome
        return {f"critic/{key}": value for key, value in outcome.items()}

    def train_policy(self, step: int, experience: Experience) -> dict[str, float]:
        """The policy's epochs and mini-batches; means of their metrics over the updates applied. Nothing in critic warm-up."""
        if not broadcast_object(self.policy_trains(step), 0, self.topology.cpu_group):
            return {}
        batches = self.policy_mini_batches(step, experience)
        metrics = train_in_turn(batches, self.policy.train, step=step, keep_batch=self.recorder.keep_batch)
        self.state.weight_version += 1
        if experience.logprobs is None:
            (rows,) = update_rows(self.ppo, seed=self.config.run.seed, step=step)
            experience.observe(self.policy.trained_logprobs[rows.argsort()])
        return {f"policy/{key}": value for key, value in metrics.items()}

    def policy_trains(self, step: int) -> bool:
        """Not in critic warm-up."""
        waits = self.ppo.critic_warmup_max_steps is not None and not self.state.trust.warmed_up
        return step > self.ppo.critic_warmup_steps and not waits

    def policy_mini_batches(self, step: int, experience: Experience) -> Iterator[PolicyMiniBatch]:
        for rows in update_rows(self.ppo, seed=self.config.run.seed, step=step):
            yield policy_mini_batch(experience, rows, self.state.kl_coefficient)

    def refit_ahead(self, step: int, critic_update: "Optional[Future[dict[str, float]]]") -> float:
        """What the next step's refit would do, while the critic still trains. Returns the seconds that both took together, on rank 0."""
        last = step == self.config.run.max_steps and not self.validation_is_due(step)
        if last or self.config.engine.offload_during_training:
            return 0.0
        return seconds_beside(critic_update, lambda: self.sync.follow(self.state.weight_version))

    # Between steps

    def advance(self, step: int, rollouts: Rollouts, experience: Experience, *, consumed: int) -> None:
        self.state.step = step
        self.state.prompts_consumed += consumed
        # In critic warm-up the policy is the reference: a KL of 0 would only drive the coefficient down.
        if self.ppo.kl_target is not None and self.policy_trains(step):
            controller = AdaptiveKL(self.state.kl_coefficient, self.ppo.kl_target, self.ppo.kl_horizon)
            controller.update(experience.metrics["kl/sequence"], len(rollouts))
            self.state.kl_coefficient = controller.coefficient

    def end_step(self, step: int, metrics: dict[str, float], *, tokens: int) -> None:
        on_all(lambda: self.recorder.end_step(step, metrics, tokens=tokens), self.topology)

    def counters(self) -> dict[str, float]:
        peaks = gather_objects(peak_memory_bytes(), self.topology.cpu_group)
        return {
            "weight_version": self.state.weight_version,
            "prompts_consumed": self.state.prompts_consumed,
            "memory/peak_bytes": max(peaks),
        }

    def validate_before_training(self) -> None:
        """Metrics row 0."""
        with self.recorder.phase("validate"):
            metrics, tokens = self.validate(0)
        self.end_step(0, {**metrics, **self.counters()}, tokens=tokens)

    def validate_when_due(self, step: int) -> dict[str, float]:
        self.validated = None
        return self.validate(step)[0] if self.validation_is_due(step) else {}

    def validation_is_due(self, step: int) -> bool:
        every = self.config.validation.every
        return bool(every) and (step % every == 0 or step == self.config.run.max_steps)

    def validate(self, step: int) -> tuple[dict[str, float], int]:
        """Metrics, and the number of tokens that they took."""
        self.enter_generation()
        self.sync.catch_up(self.state.weight_version)
        validation = self.validator.run()
        if validation is not None:
            validation.rollouts.certificate = self.sync.certificate
        self.leave_generation()
        if validation is None:
            return {}, 0
        self.validated = validation.metrics["val/reward"]
        stops = self.config.sampling.stop_strings
        rows = sample_rows(
            validation.rollouts, validation.samples, validation.answers.scores, self.tokenizer, stop_strings=stops
        )
        on_all(lambda: self.recorder.validation_samples(step, rows), self.topology)
        return validation.metrics, int(validation.rollouts.lengths.sum())

    def checkpoint_is_due(self) -> bool:
        settings, step = self.config.checkpoint, self.state.step
        last = step == self.config.run.max_steps
        return (settings.every > 0 and step % settings.every == 0) or (last and settings.at_end)

    def save(self) -> None:
        with self.recorder.phase("checkpoint"):
            self.checkpoints.save(self.state.step, asdict(self.state), validation=self.validated)
        self.sync.catch_up_next()
