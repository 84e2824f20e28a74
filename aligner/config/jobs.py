"""What each job's configuration is made of. Groups have the same names in all jobs."""

from dataclasses import dataclass, field

from aligner.config import groups as g
from aligner.config import preference as p
from aligner.config import supervised as s
from aligner.config.ppo import PPOConfig


def _group(cls):
    return field(default_factory=cls)


@dataclass
class ActorConfig:
    """train_ppo_actor.py"""

    run: g.RunConfig = _group(g.RunConfig)
    parallel: g.ParallelConfig = _group(g.ParallelConfig)
    model: g.ModelConfig = _group(g.ModelConfig)
    optim: g.OptimConfig = _group(g.OptimConfig)
    data: g.DataConfig = _group(g.DataConfig)
    sampling: g.SamplingConfig = _group(g.SamplingConfig)
    engine: g.EngineConfig = _group(g.EngineConfig)
    refit: g.RefitConfig = _group(g.RefitConfig)
    ppo: PPOConfig = _group(PPOConfig)
    reward: g.RewardConfig = _group(g.RewardConfig)
    critic: g.CriticClientConfig = _group(g.CriticClientConfig)
    checkpoint: g.CheckpointConfig = _group(g.CheckpointConfig)
    validation: g.ValidationConfig = _group(g.ValidationConfig)
    logging: g.LoggingConfig = _group(g.LoggingConfig)

    @property
    def engine_ranks(self) -> int:
        """Consecutive ranks that share a rollout engine."""
        return 1 if self.engine.kind is g.EngineKind.torch else self.engine.tensor or self.parallel.tensor


@dataclass
class CriticConfig:
    """serve_ppo_critic.py"""

    run: g.RunConfig = _group(g.RunConfig)
    parallel: g.ParallelConfig = _group(g.ParallelConfig)
    model: g.ModelConfig = _group(g.ModelConfig)
    optim: g.OptimConfig = _group(g.OptimConfig)
    reward: g.RewardConfig = _group(g.RewardConfig)
    critic: g.CriticTrainConfig = _group(g.CriticTrainConfig)
    serving: g.ServingConfig = _group(g.ServingConfig)


@dataclass
class RewardServerConfig:
    """serve_reward_model.py"""

    run: g.RunConfig = _group(g.RunConfig)
    parallel: g.ParallelConfig = _group(g.ParallelConfig)
    model: g.ModelConfig = _group(g.ModelConfig)
    reward: g.RewardConfig = _group(g.RewardConfig)
    serving: g.ServingConfig = _group(g.ServingConfig)


@dataclass
class SFTConfig:
    """train_sft.py"""

    run: s.SupervisedRunConfig = _group(s.SupervisedRunConfig)
    parallel: g.ParallelConfig = _group(g.ParallelConfig)
    model: g.ModelConfig = _group(g.ModelConfig)
    optim: g.OptimConfig = _group(g.OptimConfig)
    data: s.SFTDataConfig = _group(s.SFTDataConfig)
    train: s.TrainConfig = _group(s.TrainConfig)
    sft: s.SFTSettings = _group(s.SFTSettings)
    engine: g.EngineConfig = _group(g.EngineConfig)
    refit: g.RefitConfig = _group(g.RefitConfig)
    checkpoint: g.CheckpointConfig = _group(g.CheckpointConfig)
    validation: s.SFTValidationConfig = _group(s.SFTValidationConfig)
    logging: g.LoggingConfig = _group(g.LoggingConfig)


@dataclass
class RewardTrainingConfig:
    """train_reward_model.py"""

    run: s.SupervisedRunConfig = _group(s.SupervisedRunConfig)
    parallel: g.ParallelConfig = _group(g.ParallelConfig)
    model: g.ModelConfig = _group(g.ModelConfig)
    optim: g.OptimConfig = _group(g.OptimConfig)
    data: s.SupervisedDataConfig = _group(s.SupervisedDataConfig)
    train: s.TrainConfig = _group(s.TrainConfig)
    preference: p.PreferenceConfig = _group(p.PreferenceConfig)
    checkpoint: g.CheckpointConfig = _group(g.CheckpointConfig)
    validation: s.SupervisedValidationConfig = _group(s.SupervisedValidationConfig)
    logging: g.LoggingConfig = _group(g.LoggingConfig)


JOBS = {
    "actor": ActorConfig,
    "critic": CriticConfig,
    "reward": RewardServerConfig,
    "sft": SFTConfig,
    "reward_training": RewardTrainingConfig,
}
