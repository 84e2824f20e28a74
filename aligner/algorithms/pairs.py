"""Paired checkpoints: the actor's and the critic's of one step, valid together or not at all. The actor alone starts them.

A job without a critic (supervised ones too) has one half, and the rest is the same."""

import logging
import shutil
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Protocol, TypeVar

from aligner.algorithms.agreement import on_all
from aligner.config.groups import CheckpointConfig
from aligner.data.interfaces import Critic
from aligner.parallel.collectives import broadcast_object, gather_objects
from aligner.parallel.topology import Topology
from aligner.runtime import faults
from aligner.runtime.checkpoint_folder import CheckpointFolder, folder_bytes
from aligner.runtime.errors import disk_full_is_named
from aligner.serving.protocol import SaveLost

log = logging.getLogger(__name__)
T = TypeVar("T")


class Half(Protocol):
    """A model that is being written (models/trainable.Saving)."""

    ready: bool

    def finish(self) -> None: ...


class Saved(Protocol):
    """What this job's half holds: a model with its optimizer."""

    def save(self, folder: Path, *, extra: Mapping[str, Any], beside: bool) -> Half: ...

    def load(self, folder: Path) -> dict[str, Any]: ...


@dataclass
class Begun:
    """A pair on its way to disk. critic_half: on rank 0 alone, where there is a critic."""

    step: int
    own_half: Half
    critic_half: Optional["Future[None]"]
    validation: Optional[float]
    began: float  # time.monotonic

    @property
    def ready(self) -> bool:
        """Whether this rank has nothing to wait for."""
        return self.own_half.ready and (self.critic_half is None or self.critic_half.done())


class PairedCheckpoints:
    """All methods are collective over the actor job; rank 0 alone talks to the critic and writes the marker."""

    def __init__(
        self,
        folder: CheckpointFolder,
        config: CheckpointConfig,
        *,
        policy: Saved,
        critic: Optional[Critic],
        topology: Topology,
        critic_deadline: float,
        job: str = "actor",
    ) -> None:
        """critic_deadline: seconds for the critic's half of a pair. job: the folder of this job's half."""
        self.critic_deadline = critic_deadline
        self.folder, self.config = folder, config
        self.policy, self.critic, self.topology, self.job = policy, critic, topology, job
        self._begun: Optional[Begun] = None
        self.longest_save = 0.0  # seconds so far, from the beginning of a save to its commit

    def save(self, step: int, state: dict[str, Any], *, validation: Optional[float]) -> None:
        """Write both halves, then COMMITTED, then drop what is no longer kept. With checkpoint.asynchronous both halves are only begun:
        `settle` does the rest.

        Raises on every rank where either half failed; the older pairs are untouched then."""
        self.settle(wait=True)
        began = time.monotonic()
        what, beside = f"the checkpoint of step {step}", self.config.asynchronous
        critic_half = self._agreed(what, lambda: self._start_critic(step))
        faults.reach("saving", step)
        own_half = self._agreed(
            what, lambda: self.policy.save(self.folder.step(step) / self.job, extra=state, beside=beside)
        )
        self._begun = Begun(step, own_half, critic_half, validation, began)
        faults.reach("copied", step)
        self.settle(wait=not beside)

    def settle(self, *, wait: bool) -> None:
        """Commit the pair that was begun, if both its halves are written. wait: until they are."""
        begun = self._begun
        if begun is None or not (wait or all(gather_objects(begun.ready, self.topology.cpu_group))):
            return
        self._begun = None
        what = f"the checkpoint of step {begun.step}"
        if self.config.asynchronous:
            self._agreed(what, begun.own_half.finish)
        if not self._agreed(what, lambda: self._critic_half_is_there(begun)):
            return
        faults.reach("before_commit", begun.step)
        self._agreed(what, lambda: self._commit(begun.step, begun.validation))
        self.longest_save = max(self.longest_save, time.monotonic() - begun.began)
        log.info("checkpoint of step %d: %s", begun.step, self.folder.step(begun.step))

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
        if self.critic is None:
            return None
        return self.critic.prepare_save(step, self.folder.step(step) / "critic", beside=self.config.asynchronous)

    def _critic_half_is_there(self, begun: "Begun") -> bool:
        """The same on every rank; False where the critic job died while it wrote beside training, which has moved on since."""
        lost = None
        if begun.critic_half is not None:
            try:
                begun.critic_half.result(timeout=self.critic_deadline)
            except SaveLost as error:
                lost = str(error)
        lost = broadcast_object(lost, 0, self.topology.cpu_group)
        if lost is not None:
            log.warning("the checkpoint of step %d is given up, the one before stays: %s", begun.step, lost)
            if self.topology.is_reporter:
                shutil.rmtree(self.folder.step(begun.step), ignore_errors=True)
        return lost is None

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
        return self.policy.load(self.folder.step(step) / self.job)

    def _restore_critic(self, step: Optional[int]) -> None:
        if self.critic is not None and self.topology.is_reporter:
            self.critic.restore(step or 0, None if step is None else self.folder.step(step) / "critic")
