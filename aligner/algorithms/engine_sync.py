"""When the engine's weights follow the policy's, and what certifies that they did."""

import time
from concurrent.futures import Future
from typing import Callable, Optional

from aligner.algorithms.agreement import on_all
from aligner.config.groups import Certify
from aligner.data.interfaces import RefitCertificate, RolloutEngine
from aligner.models.policy import Policy
from aligner.parallel.collectives import gather_objects
from aligner.parallel.topology import Topology
from aligner.rollout.refit import certified_refit
from aligner.runtime.errors import AgreedError


class EngineSync:
    """Every rank's engine, and the version of the policy's weights that it holds. All methods that refit are collective.

    When it refits depends on the numbers of the steps alone, and a checkpoint is followed by a refit: so a run that continues from
    one, whose engine begins without weights, samples from what the undisturbed run samples from."""

    def __init__(self, engine: RolloutEngine, policy: Policy, topology: Topology, *, every: int) -> None:
        """every: weight versions between refits."""
        self.engine, self.policy, self.topology, self.every = engine, policy, topology, every
        self._held: Optional[RefitCertificate] = None
        self._catch_up_next = False

    @property
    def certificate(self) -> Optional[str]:
        """What the engine holds, for the record of a sample: "sampled:" and a digest of all checksums; None with refit.certify=off."""
        if self._held is None or self.engine.certify is Certify.off:
            return None
        return f"{self.engine.certify.value}:{self._held.digest}"

    def follow(self, version: int) -> None:
        """Refit where the engine has no weights, is `every` versions behind, or has to catch up after a checkpoint."""
        behind = None if self._held is None else version - self._held.version
        if behind is None or behind >= self.every or self._catch_up_next:
            self.catch_up(version)

    def catch_up(self, version: int) -> None:
        """Refit where the engine does not hold `version`, the policy's present one."""
        if self._held is None or self._held.version != version:
            self._refit(version)
        self._catch_up_next = False

    def catch_up_next(self) -> None:
        """A checkpoint was saved: the next `follow` catches up, as it will in a run that continues from there."""
        self._catch_up_next = True

    def forget(self) -> None:
        """The engine gave its weights back."""
        self._held = None

    def _refit(self, version: int) -> None:
        """A failure on one rank raises on all; so does a replica of the policy that differs from the others'."""
        self._held = None
        held = on_all(lambda: certified_refit(self.engine, self.policy.export(), version=version), self.topology)
        digests = gather_objects(held.digest, self.topology.cpu_group)
        differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if differing:
            raise AgreedError(
                f"after the refit to weight version {version} the engines of ranks {differing} hold other weights than rank 0's: "
                "the policy's data-parallel copies have parted"
            )
        self._held = held


def seconds_beside(other: Optional[Future], act: Callable[[], None]) -> float:
    """Do `act`, and return how many of its seconds passed before `other` was done; 0 where there is no other."""
    ended: list[float] = []
    if other is not None:
        other.add_done_callback(lambda _: ended.append(time.monotonic()))
    began = time.monotonic()
    act()
    if other is None:
        return 0.0
    return max(0.0, min([*ended, time.monotonic()]) - began)
