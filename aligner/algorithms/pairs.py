"""Paired checkpoints: the actor's and the critic's of one step, valid together or not at all. The actor alone starts them."""

import logging
from concurrent.futures import Future
from typing import Any, Callable, Optional, TypeVar

from aligner.algorithms.agreement import on_all
from aligner.config.groups import CheckpointConfig
from aligner.data.interfaces import Critic
from aligner.models.policy import Policy
from aligner.parallel.topology import Topology
from aligner.runtime import faults
from aligner.runtime.checkpoint_folder import CheckpointFolder, folder_bytes
from aligner.runtime.errors import disk_full_is_named

log = logging.getLogger(__name__)
T = TypeVar("T")


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
        critic_deadline: float,
    ) -> None:
        """critic_deadline: seconds for the critic's half of a pair."""
        self.critic_deadline = critic_deadline
        self.folder, self.config = folder, config
        self.policy, self.critic, self.topology = policy, critic, topology

    def save(self, step: int, state: dict[str, Any], *, validation: Optional[float]) -> None:
        """Write both halves, then COMMITTED, then drop what is no longer kept.

        Raises on every rank where either half failed; the older pairs are untouched then."""
        what = f"the checkpoint of step {step}"
        critic_half = self._agreed(what, lambda: self._start_critic(step))
        faults.reach("saving", step)
        self._agreed(what, lambda: self._write(step, state, critic_half))
        faults.reach("before_commit", step)
        self._agreed(what, lambda: self._commit(step, validation))
        log.info("checkpoint of step %d: %s", step, self.folder.step(step))

    def _agreed(self, what: str, act: Callable[[], T]) -> T:
        """Do it on every rank; where it fails on one, raise on all before the next collective."""

        def named() -> T:
            with disk_full_is_named(self.folder.path, what):
                return act()

        return on_all(named, self.topology)

    def _start_critic(self, step: int) -> Optional["Future[None]"]:
        if not self.topology.is_reporter:
            return None
        if (newest := self.folder.newest()) is not None:
            self.folder.check_space(folder_bytes(self.folder.step(newest)))
        return None if self.critic is None else self.critic.prepare_save(step, self.folder.step(step) / "critic")

    def _write(self, step: int, state: dict[str, Any], critic_half: Optional["Future[None]"]) -> None:
        self.policy.save(self.folder.step(step) / "actor", extra=state)
        if critic_half is not None:
            critic_half.result(timeout=self.critic_deadline)

    def _commit(self, step: int, validation: Optional[float]) -> None:
        if not self.topology.is_reporter:
            return
        self.folder.commit(step, validation=validation)
        if self.critic is not None:
            self.critic.commit(step)
        self.folder.prune(keep_last=self.config.keep_last, keep_best=self.config.keep_best)

    def restore(self, step: Optional[int]) -> Optional[dict[str, Any]]:
        """Both halves of a committed pair; the state that was saved with it. step None: nothing to load, the critic starts afresh."""
        self._agreed("the critic's state", lambda: self._restore_critic(step))
        if step is None:
            return None
        log.info("continuing from the checkpoint of step %d", step)
        return self.policy.load(self.folder.step(step) / "actor")

    def _restore_critic(self, step: Optional[int]) -> None:
        if self.critic is not None and self.topology.is_reporter:
            self.critic.restore(step or 0, None if step is None else self.folder.step(step) / "critic")
