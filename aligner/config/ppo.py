"""The settings of the algorithm: estimators, losses, and what is done with rewards. As in groups.py, a default lives here alone."""

from dataclasses import dataclass
from enum import Enum
from typing import Optional


class ReferencePlace(Enum):
    held = "held"
    swapped = "swapped"
    none = "none"


class Advantage(Enum):
    gae = "gae"
    group_norm = "group_norm"
    dr_grpo = "dr_grpo"
    rloo = "rloo"
    reinforce_baseline = "reinforce_baseline"

    @property
    def of_groups(self) -> bool:
        """Whether responses are compared with the others to the same prompt."""
        return self in (Advantage.group_norm, Advantage.dr_grpo, Advantage.rloo)


class PolicyObjective(Enum):
    clip = "clip"
    gspo = "gspo"
    cispo = "cispo"


class Aggregate(Enum):
    auto = "auto"
    token = "token"
    sequence = "sequence"
    constant = "constant"


class KLPlace(Enum):
    reward = "reward"
    loss = "loss"


class KLEstimator(Enum):
    k1 = "k1"
    abs = "abs"
    k2 = "k2"
    k3 = "k3"


class KLReduction(Enum):
    token = "token"
    sequence = "sequence"


class RewardScale(Enum):
    none = "none"
    running = "running"
    batch = "batch"
    group = "group"


class Truncation(Enum):
    auto = "auto"
    bootstrap = "bootstrap"
    mask = "mask"
    penalise = "penalise"
    ignore = "ignore"


@dataclass
class PPOConfig:
    rollout_batch_size: int = 128
    """Prompts a step."""
    samples_per_prompt: int = 1
    """Responses a prompt."""
    mini_batch_size: int = 128
    """Samples an optimizer step; rollout_batch_size * samples_per_prompt must be a multiple of it."""
    micro_batch_size: int = 4
    """Rows a forward pass on one data-parallel rank."""
    micro_batch_tokens: Optional[int] = None
    """Tokens a forward pass on one data-parallel rank, padding included, instead of ppo.micro_batch_size rows: rows of like length
    are put together up to it, and a longer one goes alone. Absent: rows count."""
    epochs: int = 1
    """Passes of the policy over a rollout."""
    advantage: Advantage = Advantage.gae
    """gae needs a critic. Critic-free: group_norm (GRPO), dr_grpo, rloo, all three of the responses to one prompt, and reinforce_baseline
    (REINFORCE++ with a global batch baseline). docs/algorithms.md has their formulas."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 0.95
    """Lambda of generalised advantage estimation."""
    whiten: Optional[bool] = None
    """Whiten advantages over the whole rollout, all data-parallel ranks together; absent: true for gae and reinforce_baseline, false for
    the estimators of groups."""
    whiten_min_std: float = 1e-4
    """Smallest standard deviation that whitening divides by."""
    loss: PolicyObjective = PolicyObjective.clip
    """clip: PPO's clipped ratio of each token; gspo: one clipped ratio a response, the geometric mean of its tokens'; cispo: the clipped
    ratio as a constant weight of the log-probs, so that no token loses its gradient."""
    clip: float = 0.2
    """The ratio is clipped to [1 - clip, 1 + clip]; gspo wants about 3e-4; 1 or more: no lower bound."""
    clip_high: Optional[float] = None
    """Its upper bound is 1 + clip_high instead (clip-higher of DAPO, where it is 0.28); absent: ppo.clip."""
    dual_clip: Optional[float] = None
    """Where the advantage is negative, a token's loss is at most dual_clip times its size, whatever the ratio (dual-clip PPO, where it is
    3); above 1, for ppo.loss=clip; absent: no such bound."""
    aggregate: Aggregate = Aggregate.auto
    """How the losses of tokens add up, over a whole mini-batch. token: their mean; sequence: the mean over responses of each one's mean;
    constant: their sum over responses times constant_length. auto: sequence for gspo and, with ppo.loss=clip, for group_norm; constant
    for dr_grpo; token else."""
    constant_length: Optional[int] = None
    """Length in tokens that aggregate=constant divides by; absent: engine.max_output_len."""
    importance_cap: Optional[float] = None
    """Multiply each token's policy loss with min(importance_cap, p / q): p the probability that the policy gave it before this step's
    updates, q the engine's when it sampled it (truncated importance sampling; decoupled PPO, Hilton et al. 2021, where
    refit.sync_every > 1, which needs it). 2 is usual; absent: no correction."""
    entropy_bonus: float = 0.0
    """Weight of the entropy in the policy loss."""
    kl_coefficient: float = 0.01
    """Weight of the KL penalty; 0: none."""
    kl_place: KLPlace = KLPlace.reward
    """reward: the penalty lowers the rewards (ppo.kl_reduction); loss: it is added to each token's loss, as GRPO does. In the loss the
    gradient counts: k2's is that of KL(policy || reference), k3's that of KL(reference || policy), abs's that of the total variation,
    each for tokens of the present policy; k1's is 0 on average, and refused."""
    kl_estimator: KLEstimator = KLEstimator.k1
    """Estimator of the KL to the reference: k1, |k1|, k2, k3 (Schulman 2020)."""
    kl_reduction: KLReduction = KLReduction.token
    """token: each token pays its own KL; sequence: the last token pays the sum."""
    kl_target: Optional[float] = None
    """Adapt kl_coefficient to hold this KL per sequence (Ziegler et al. 2019, section 2.2); absent: fixed."""
    kl_horizon: int = 10000
    """Samples over which the adaptive coefficient moves."""
    truncation: Truncation = Truncation.auto
    """A response cut at max_output_len: bootstrap from the critic's value, mask it out of both losses (DAPO's overlong filter), penalise
    its score, or ignore that it was cut. auto: bootstrap for gae, ignore else."""
    truncation_penalty: float = 1.0
    """Subtracted from a truncated response's score where truncation is penalise."""
    overlong_cache: Optional[int] = None
    """Soft overlong penalty (DAPO, equation 13): the score falls by up to overlong_penalty over the last so many tokens below
    overlong_length; absent: no such penalty."""
    overlong_length: Optional[int] = None
    """Length in tokens from which the whole soft penalty is paid; absent: engine.max_output_len."""
    overlong_penalty: float = 1.0
    """The whole soft penalty."""
    dynamic_sampling: bool = False
    """Groups whose scores are all equal teach nothing: drop them and sample the next prompts in their place (DAPO)."""
    dynamic_sampling_max_prompts: Optional[int] = None
    """Prompts that a step may sample for it; beyond, it is filled up with dropped groups. Absent: 10 times rollout_batch_size."""
    reward_scale: RewardScale = RewardScale.none
    """Scores less their mean over their deviation, before the KL penalty: over the whole run so far (running), the step (batch) or the
    responses to one prompt (group; ppo.samples_per_prompt > 1). Metrics and records keep the raw score."""
    reward_clip: Optional[float] = None
    """Scores are clipped to +- this, after ppo.reward_scale; absent: not clipped."""
    critic_warmup_steps: int = 0
    """First steps in which only the critic trains."""
    critic_warmup_max_steps: Optional[int] = None
    """Warm-up goes on beyond critic_warmup_steps until the critic's explained variance is positive, up to this step; absent: it does
    not."""
    critic_fallback_steps: int = 0
    """After this many steps in a row with an explained variance of 0 or less, advantages are those of reinforce_baseline until it is
    positive again, and the critic trains on; 0: never. Warm-up does not count."""
    reference: ReferencePlace = ReferencePlace.held
    """held: the frozen reference's weights stay on the device; swapped: they live on the host and are swapped in for its forward pass;
    none: there is no reference, and no KL (ppo.kl_coefficient=0)."""
