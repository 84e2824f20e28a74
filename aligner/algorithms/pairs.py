"""Paired checkpoints: the actor's and the critic's of one step, valid together or not at all. The actor alone starts them."""

import logging
from typing import Any, Optional

from aligner.config.groups import CheckpointConfig
from aligner.data.interfaces import Critic
from aligner.models.policy import Policy
from aligner.parallel.collectives import agree
from aligner.parallel.topology import Topology
from aligner.runtime import faults
from aligner.runtime.checkpoint_folder import CheckpointFolder, folder_bytes
from aligner.runtime.errors import disk_full_is_named

log = logging.getLogger(__name__)

SAVE_DEADLINE = 3600.0  # seconds for the critic's half of a pair


class PairedCheckpoints:
    """All methods are collective over the actor job; rank 0 alone talks to the critic and writes the marker."""

    def __init__(
        self,
        folder: CheckpointFolder,
        config: CheckpointConfig,
        *,
        policy: Policy,
        critic: Optional[Critic],
        topology: Topology,
    ) -> None:
        self.folder, self.config = folder, config
        self.policy, self.critic, self.topology = policy, critic, topology

    def save(self, step: int, state: dict[str, Any], *, validation: Optional[float]) -> None:
        """Write both halves, then COMMITTED, then drop what is no longer kept.

        Raises on every rank where either half failed; the older pairs are untouched then."""
        error = None
        target = self.folder.step(step)
        try:
            self._check_space()
            with disk_full_is_named(self.folder.path, f"the checkpoint of step {step}"):
                critic_half = self._start_critic(step)
                faults.reach("saving", step)
                self.policy.save(target / "actor", extra=state)
                if critic_half is not None:
                    critic_half.result(timeout=SAVE_DEADLINE)
        except Exception as problem:
            error = problem
        agree(error, self.topology)
        faults.reach("before_commit", step)
        if self.topology.is_reporter:
            self.folder.commit(step, validation=validation)
            if self.critic is not None:
                self.critic.commit(step)
            self.folder.prune(keep_last=self.config.keep_last, keep_best=self.config.keep_best)
        log.info("checkpoint of step %d: %s", step, target)

    def _check_space(self) -> None:
        if self.topology.is_reporter and (newest := self.folder.newest()) is not None:
            self.folder.check_space(folder_bytes(self.folder.step(newest)))

    def _start_critic(self, step: int):
        if self.critic is None or not self.topology.is_reporter:
            return None
        return self.critic.prepare_save(step, self.folder.step(step) / "critic")

    def restore(self, step: Optional[int]) -> Optional[dict[str, Any]]:
        """Both halves of a committed pair; the state that was saved with it. step None: nothing to load, the critic starts afresh."""
        error = None
        try:
            if self.critic is not None and self.topology.is_reporter:
                self.critic.restore(step or 0, None if step is None else self.folder.step(step) / "critic")
        except Exception as problem:
            error = problem
        agree(error, self.topology)
        if step is None:
            return None
        log.info("continuing from the checkpoint of step %d", step)
        return self.policy.load(self.folder.step(step) / "actor")

