"""The critic job's side of the contract: a critic on its own grid, a reward, and the saves that pair it with the actor's.

Every method but `start_scoring` and `status` runs on every rank of the job, in the same order, with the same arguments."""

import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Callable, Mapping, Optional

import torch
from torch import Tensor

from aligner.algorithms.assemble import Job
from aligner.algorithms.model_scorer import ModelScorer, build_model_scorer
from aligner.algorithms.schedule import mini_batches
from aligner.algorithms.updates import train_in_turn
from aligner.config.groups import RewardConfig, RewardKind, RewardPlace, ValueNormalisation
from aligner.config.jobs import ActorConfig, CriticConfig
from aligner.config.reward import reward_name
from aligner.data.batch import CriticBatch, CriticRows, Score, ScoreRow
from aligner.data.interfaces import RewardSource
from aligner.models.critic import CriticMiniBatch, CriticModel
from aligner.models.trainable import Saving
from aligner.parallel.collectives import gather_objects
from aligner.parallel.device import computing_with
from aligner.rewards.source import build_reward
from aligner.runtime import faults
from aligner.serving.backend import Refused
from aligner.serving.hello import NO_REWARD

log = logging.getLogger(__name__)


class CriticJob:
    """Values, scores and training of one run. `step` is the last step whose train request was applied."""

    def __init__(
        self,
        *,
        config: CriticConfig,
        critic: CriticModel,
        reward: Optional[RewardSource],
        scorer: Optional[ModelScorer],
        identity: dict[str, Any],
        keep_batch: Callable[[str, Mapping[str, Any]], str] = lambda name, tensors: "",
    ) -> None:
        """keep_batch: saves a mini-batch that could not be trained on, and says where."""
        self.keep_batch = keep_batch
        self.config, self.critic = config, critic
        self.reward, self.scorer = reward, scorer
        self.identity = identity
        self.step = 0
        self._saving: Optional[Saving] = None
        self._saving_step = 0
        self._initial = (
            True  # whether the weights are those that the job began with; a step that failed half-way leaves others
        )

    def start_scoring(self, rows: CriticRows) -> Optional["Future[list[Score]]"]:
        """Begin the verifier's work in its own processes, beside the ranks' forward pass. Rank 0 only; None where no verifier scores."""
        if self.reward is None:
            return None
        return self.reward.score(score_rows(rows))

    def infer(self, rows: CriticRows) -> tuple[Tensor, Tensor, Optional[list[Score]]]:
        """Values [b, S] and bootstrap [b] (0 where terminated), and the reward model's scores where there is one."""
        faults.reach("critic_infer", self.step + 1)
        scores = None if self.scorer is None else self.scorer.scores(rows)
        if not rows.values:
            return torch.zeros(rows.tokens.shape), torch.zeros(len(rows.lengths)), scores
        values, bootstrap = self.critic.values(rows.tokens, rows.lengths)
        return values, torch.where(rows.truncated, bootstrap, torch.zeros_like(bootstrap)), scores

    def train(self, step: int, batch: CriticBatch) -> dict[str, float]:
        """Epochs and mini-batches of one step; the means of their metrics."""
        settings, rows = self.config.critic, len(batch.lengths)
        if rows % settings.mini_batch_size:
            raise Refused(
                f"step {step} has {rows} rows, not a multiple of the critic job's critic.mini_batch_size={settings.mini_batch_size}: "
                "set it to a divisor of the actor's ppo.rollout_batch_size * ppo.samples_per_prompt"
            )
        self._initial = False
        self.critic.observe(batch.returns, batch.mask)
        faults.reach("critic_train", step)
        seed, size = self.config.run.seed, settings.mini_batch_size
        orders = [mini_batches(rows, size, seed=seed, step=step, epoch=epoch) for epoch in range(settings.epochs)]
        batches = (_mini_batch(batch, chosen) for order in orders for chosen in order)
        with computing_with(self.config.parallel.training_threads):
            metrics = train_in_turn(
                batches, self.critic.train, step=step, keep_batch=lambda name, b: self.keep_batch(f"critic_{name}", b)
            )
        self.step = step
        faults.reach("critic_trained", step)
        return metrics

    def prepare_save(self, step: int, folder: Path, *, beside: bool) -> None:
        """First phase of a paired save: everything is under `folder`, valid once the actor commits."""
        if step != self.step:
            raise Refused(f"asked to save the critic of step {step}, but the last step applied is {self.step}")
        faults.reach("critic_save", step)
        self._saving = self.critic.save(folder, extra={"step": step}, beside=beside)
        self._saving_step = step
        if beside:
            faults.reach("critic_copied", step)
        else:
            faults.reach("critic_saved", step)

    def saved(self) -> bool:
        """Whether the save that was begun last is whole on every rank."""
        if not all(gather_objects(self._saving.ready, self.critic.topology.cpu_group)):
            return False
        self._saving.finish()
        faults.reach("critic_saved", self._saving_step)  # training may have gone on
        return True

    def commit(self, step: int) -> None:
        faults.reach("critic_commit", step)
        log.info("checkpoint pair of step %d is committed", step)

    def restore(self, step: int, folder: Optional[Path]) -> None:
        """Back to a committed pair, or to the initial weights where folder is None."""
        faults.reach("critic_restore", step)
        if (
            self._saving is not None
        ):  # of an actor that is no longer: nobody asks for it, and its folder may be used again
            self._saving.abandon()
            self._saving = None
        if folder is None:
            if not self._initial:
                self.critic.reset()
            self.step, self._initial = 0, True
            return
        self._initial = False
        saved = self.critic.load(folder)["step"]
        if saved != step:
            raise ValueError(f"{folder} holds the critic of step {saved}, not of step {step}")
        self.step = step

    def status(self) -> dict[str, Any]:
        return {**self.identity, "step": self.step, "weight_version": self.critic.step_count}

    def close(self) -> None:
        if self.reward is not None:
            self.reward.close()


def build_critic_job(config: CriticConfig, job: Job) -> CriticJob:
    """Critic and reward from their settings. Verifier processes start before the models fill the memory."""
    scores = config.reward.place is RewardPlace.critic
    reward = build_verifier(config.reward, job) if scores else None
    settings = config.critic
    plain = settings.value_normalisation is ValueNormalisation.none
    critic = CriticModel(
        config.model,
        config.optim,
        job.topology,
        micro_batch_size=settings.micro_batch_size,
        micro_batch_tokens=settings.micro_batch_tokens,
        value_clip=settings.value_clip,
        head_lr_multiplier=settings.head_lr_multiplier,
        normalisation_rate=None if plain else settings.value_normalisation_rate,
        fresh_head=settings.fresh_head,
    )
    scorer = build_model_scorer(config, job) if scores else None
    positions = [model.shape.max_position_embeddings for model in (critic, scorer) if model is not None]
    return CriticJob(
        config=config,
        critic=critic,
        reward=reward,
        scorer=scorer,
        identity={
            **served_contract(config, job, scores=scores, max_length=min(positions)),
            "mini_batch_size": config.critic.mini_batch_size,
            "max_rows": config.serving.max_rows,
            "head": critic.shape.head,
            "dtype": str(critic.model.dtype).removeprefix("torch."),
        },
        **({"keep_batch": job.folder.keep_batch} if job.topology.is_reporter else {}),
    )


def build_verifier(reward: RewardConfig, job: Job) -> Optional[RewardSource]:
    """What scores beside the ranks, on rank 0; None on the others, and where a model alone scores."""
    scores = job.topology.is_reporter and reward.kind is not RewardKind.model
    return build_reward(reward, job.tokenizer) if scores else None


def actor_contract(config: ActorConfig, job: Job) -> dict[str, Any]:
    """The actor's side of what it and the critic job must agree on."""
    scores = config.reward.place is RewardPlace.critic
    return {
        **served_contract(config, job, scores=scores, max_length=_longest(config)),
        "train_rows": config.ppo.rollout_batch_size * config.ppo.samples_per_prompt,
        "infer_rows": config.critic.infer_batch_size,
        "reward_normalisation": config.ppo.reward_scale.value,
    }


def reward_contract(config: ActorConfig, job: Job) -> dict[str, Any]:
    """The actor's side of what it and a reward job must agree on."""
    return {
        **served_contract(config, job, scores=True, max_length=_longest(config)),
        "infer_rows": config.critic.infer_batch_size,
    }


def _longest(config: ActorConfig) -> int:
    return config.engine.max_input_len + config.engine.max_output_len


def served_contract(config: Any, job: Job, *, scores: bool, max_length: int) -> dict[str, Any]:
    """scores: whether the other job, or this one where it serves, gives scores."""
    return {
        "tokenizer_fingerprint": job.tokenizer.fingerprint(),
        "chat_template": job.tokenizer.chat_template_hash,
        "vocab_size": job.shape.vocab_size,
        "max_length": max_length,
        "reward_kind": reward_name(config.reward) if scores else NO_REWARD,
        "run_id": config.run.name,
    }


def score_rows(rows: CriticRows) -> list[ScoreRow]:
    """The rows as a verifier sees them: prompt and response ids apart."""
    result = []
    for b, fields in enumerate(rows.fields):
        start, end = int(rows.prompt_lengths[b]), int(rows.lengths[b])
        ids = rows.tokens[b, :end].tolist()
        result.append(
            ScoreRow(
                sample_id=int(rows.sample_ids[b]),
                prompt_ids=ids[:start],
                response_ids=ids[start:],
                ended=not bool(rows.truncated[b]),
                fields=fields,
            )
        )
    return result


def _mini_batch(batch: CriticBatch, rows: Tensor) -> CriticMiniBatch:
    return CriticMiniBatch(
        tokens=batch.tokens[rows],
        lengths=batch.lengths[rows],
        mask=batch.mask[rows],
        old_values=batch.values[rows],
        returns=batch.returns[rows],
    )
