"""When the critic's values are relied on: the end of its warm-up, and the steps in which a plain baseline takes its place."""

import logging
from dataclasses import dataclass

from aligner.config.ppo import PPOConfig

log = logging.getLogger(__name__)


@dataclass
class CriticTrust:
    """Decided by the explained variance of each step, before the critic trains on it. Its two fields are its whole state."""

    warmed_up: bool = False
    unexplained: int = 0
    """Steps in a row, after warm-up, with an explained variance of 0 or less."""

    def judge(self, step: int, explained: float, ppo: PPOConfig) -> bool:
        """Take a step's explained variance into account. Returns whether its advantages are to be the baseline's."""
        if not self.warmed_up:
            self._end_warmup(step, explained, ppo)
        if not self.warmed_up or not ppo.critic_fallback_steps:
            return False
        before = self.unexplained >= ppo.critic_fallback_steps
        self.unexplained = self.unexplained + 1 if explained <= 0 else 0
        now = self.unexplained >= ppo.critic_fallback_steps
        if now and not before:
            log.warning(
                "step %d: explained variance was not positive in %d steps in a row (ppo.critic_fallback_steps): advantages are those of "
                "reinforce_baseline until it is; the critic trains on",
                step,
                self.unexplained,
            )
        if before and not now:
            log.info("step %d: explained variance is %.3f: advantages are the critic's again", step, explained)
        return now

    def _end_warmup(self, step: int, explained: float, ppo: PPOConfig) -> None:
        most = ppo.critic_warmup_max_steps
        self.warmed_up = step > ppo.critic_warmup_steps and (most is None or explained > 0 or step > most)
        if not self.warmed_up or most is None:
            return
        if explained > 0:
            log.info("step %d: critic warm-up ends, its explained variance is %.3f", step, explained)
        else:
            log.warning(
                "step %d: critic warm-up ends at ppo.critic_warmup_max_steps=%d although its explained variance is %.3f",
                step,
                most,
                explained,
            )
