"""The reward job: scores and nothing else, behind the critic's protocol (reward.place=server)."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn, Optional

import torch
from torch import Tensor

from aligner.algorithms.assemble import Job
from aligner.algorithms.critic_job import build_verifier, score_rows, served_contract
from aligner.algorithms.model_scorer import ModelScorer, build_model_scorer
from aligner.config.jobs import RewardServerConfig
from aligner.data.batch import CriticBatch, CriticRows, Score
from aligner.data.interfaces import RewardSource
from aligner.serving.backend import Refused


class RewardJob:
    """A CriticBackend without a critic: it has no values, and nothing to train or to save. It stays at step 0."""

    def __init__(self, reward: Optional[RewardSource], scorer: Optional[ModelScorer], identity: dict[str, Any]) -> None:
        """reward: on rank 0, where a verifier or a service scores; scorer: on every rank, where a model does."""
        self.reward, self.scorer, self.identity = reward, scorer, identity

    def start_scoring(self, rows: CriticRows) -> Optional["Future[list[Score]]"]:
        return None if self.reward is None else self.reward.score(score_rows(rows))

    def infer(self, rows: CriticRows) -> tuple[Tensor, Tensor, Optional[list[Score]]]:
        if rows.values:
            raise Refused("values were asked of a reward job: it scores, and has no critic")
        scores = None if self.scorer is None else self.scorer.scores(rows)
        return torch.zeros(rows.tokens.shape), torch.zeros(len(rows.lengths)), scores

    def train(self, step: int, batch: CriticBatch) -> NoReturn:
        raise Refused(f"train step {step} was sent to a reward job, which has no critic to train")

    def prepare_save(self, step: int, folder: Path) -> NoReturn:
        raise Refused("a reward job has nothing to save")

    def commit(self, step: int) -> None:
        pass

    def restore(self, step: int, folder: Optional[Path]) -> NoReturn:
        raise Refused("a reward job has nothing to restore")

    def status(self) -> dict[str, Any]:
        return {**self.identity, "step": 0}

    def close(self) -> None:
        if self.reward is not None:
            self.reward.close()


def build_reward_job(config: RewardServerConfig, job: Job) -> RewardJob:
    """Verifier processes start before the model fills the memory."""
    reward = build_verifier(config.reward, job)
    scorer = build_model_scorer(config, job)
    shape = job.shape if scorer is None else scorer.shape
    identity = served_contract(config, job, scores=True, max_length=shape.max_position_embeddings)
    return RewardJob(reward, scorer, {**identity, "max_rows": config.serving.max_rows})
