"""A RewardSource whose scores a reward job gives (serve_reward_model.py): inference requests that want no values."""

import logging
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Mapping, Optional

import torch

from aligner.config.groups import CriticClientConfig, RewardPlace
from aligner.config.jobs import ActorConfig
from aligner.data.batch import CriticAnswer, CriticRows, Score, ScoreRow
from aligner.data.tasks import wire_fields
from aligner.runtime.signals import StopSignals
from aligner.serving.client import RemoteCritic
from aligner.serving.hello import Contract
from aligner.serving.link import REWARD
from aligner.serving.protocol import RequestFailed

log = logging.getLogger(__name__)


class RemoteReward:
    """Futures raise RequestFailed where a request as a whole failed; a sample that could not be scored is Score.error."""

    def __init__(
        self,
        contract: Contract,
        config: CriticClientConfig,
        *,
        endpoint_file: Path,
        keeps_alive: bool,
        stop: Optional[StopSignals] = None,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        """config: deadlines, and the reward job's address as `endpoint`. keeps_alive: on one rank of the actor job.

        Raises ContractError where no reward job answers in time or the jobs do not fit."""
        how = {"peer": REWARD, "keeps_alive": keeps_alive, "stop": stop, "say": say}
        self._client = RemoteCritic(contract, config, endpoint_file=endpoint_file, **how)
        self.address = self._client.address

    def score(self, rows: list[ScoreRow]) -> "Future[list[Score]]":
        scores: Future[list[Score]] = Future()
        asked = self._client.infer(critic_rows(rows))
        asked.add_done_callback(lambda answered: _hand_over(answered, scores))
        return scores

    def stop(self) -> None:
        """The run is complete: the reward job may end."""
        self._client.stop()

    def close(self) -> None:
        self._client.close()


def connect(config: ActorConfig, contract: Mapping[str, Any], file: Path, **how: Any) -> Optional[RemoteReward]:
    """The reward job of the actor's settings, whose endpoint file is `file`; None where another job scores. how: keeps_alive, stop, say."""
    if config.reward.place is not RewardPlace.server:
        return None
    client = replace(config.critic, endpoint=config.reward.endpoint)
    return RemoteReward(Contract(**contract), client, endpoint_file=file, **how)


def critic_rows(rows: list[ScoreRow]) -> CriticRows:
    """Prompt and response in one row each, right-padded; no values are wanted."""
    lengths = torch.tensor([len(r.prompt_ids) + len(r.response_ids) for r in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for b, row in enumerate(rows):
        tokens[b, : lengths[b]] = torch.tensor(row.prompt_ids + row.response_ids)
    return CriticRows(
        tokens=tokens,
        lengths=lengths,
        prompt_lengths=torch.tensor([len(r.prompt_ids) for r in rows]),
        sample_ids=torch.tensor([r.sample_id for r in rows]),
        truncated=torch.tensor([not r.ended for r in rows]),
        fields=[wire_fields(r.fields) for r in rows],
        values=False,
    )


def _hand_over(answered: "Future[CriticAnswer]", scores: "Future[list[Score]]") -> None:
    error = answered.exception()
    if error is not None:
        scores.set_exception(error)
    elif answered.result().scores is None:
        scores.set_exception(RequestFailed("the reward job answered without scores"))
    else:
        scores.set_result(answered.result().scores)
