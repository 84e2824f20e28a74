"""When the critic job ends: told to by its actor or a signal, left alone, or without its server."""

import logging
import time
from typing import Callable, Optional

from aligner.config.groups import ServingConfig
from aligner.serving.control import Control
from aligner.serving.loop import JobFailed, Loop
from aligner.serving.reception import Reception
from aligner.serving.triton_server import TritonServer

log = logging.getLogger(__name__)

TOLD = "the actor job told it to stop"


class Ending:
    """Asked between calls: the reason to end, or None. Raises JobFailed where Triton died."""

    def __init__(
        self,
        reception: Reception,
        control: Control,
        loop: Loop,
        triton: TritonServer,
        should_stop: Callable[[], bool],
        config: ServingConfig,
    ) -> None:
        self._reception, self._control, self._loop, self._triton = reception, control, loop, triton
        self._should_stop, self._config = should_stop, config
        self._checked = time.monotonic()
        self._drained_at, self._commits = 0.0, 0
        self._missed = False

    def __call__(self) -> Optional[str]:
        now = time.monotonic()
        if self._control.stop_requested:
            return TOLD
        if self._should_stop() and (reason := self._drain(now)):
            return f"it was told to stop by a signal; {reason}"
        if now - max(self._reception.last_spoken, self._loop.last_call) > self._config.idle_timeout:
            return f"no actor spoke to it for serving.idle_timeout={self._config.idle_timeout:g} s"
        if now - self._checked >= 1.0:
            self._checked = now
            self._look_for_the_actor(now)
            if not self._triton.is_alive():
                raise JobFailed(f"the Triton server process died; its log is {self._triton.log_file}")
        return None

    def _drain(self, now: float) -> Optional[str]:
        """Serve on until the actor has saved a pair, which it does at its step's end once it reads `draining` in a reply."""
        if not self._reception.draining:
            self._reception.draining = True
            self._drained_at, self._commits = now, self._control.commits
        if self._control.commits > self._commits:
            return "the actor job has saved a pair"
        if not self._present(now):
            return "no actor is there to save a pair"
        if now - self._drained_at >= self._config.drain_timeout:
            return f"no pair was saved within serving.drain_timeout={self._config.drain_timeout:g} s"
        return None

    def _present(self, now: float) -> bool:
        heard = max(self._reception.last_spoken, self._loop.last_call)  # signs of life wait while a pair is saved
        return self._reception.actor_present and now - heard <= self._config.silence

    def _look_for_the_actor(self, now: float) -> None:
        missed = self._reception.actor_present and not self._present(now) and not self._loop.queued
        if missed and not self._missed:
            silent = now - self._reception.last_spoken
            log.warning(
                "the actor job has said nothing for %.0f s (serving.silence); waiting for it to come back, up to serving.idle_timeout=%g s",
                silent,
                self._config.idle_timeout,
            )
        if self._missed and not missed:
            log.info("the actor job speaks again")
        self._missed = missed
