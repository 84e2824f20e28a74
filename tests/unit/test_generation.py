"""The generation phase against a scripted engine and critic: nothing is lost, mixed up or silently worth 0."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from aligner.algorithms import agreement
from aligner.algorithms import generation as module
from aligner.algorithms.generation import Generation
from aligner.data.batch import Completion, CriticAnswer, Request, Sample, Score


class ScriptedEngine:
    """Finishes requests in reverse order, two at a time. The response of sample i is [i, i + 1]."""

    ranks = 1

    def submit(self, requests):
        self.left = list(requests)

    def completed(self, timeout):
        done, self.left = self.left[-2:], self.left[:-2]
        return [
            Completion(r.sample_id, r.prompt_ids, [r.sample_id, r.sample_id + 1], [-0.5, -0.5], "stop", 3) for r in done
        ]


class ScriptedCritic:
    """values[b, t] = tokens[b, t]; the score is the sample_id. Remembers the chunks it saw."""

    def __init__(self, fail_on=None):
        self.chunks, self.fail_on = [], fail_on

    def infer(self, rows):
        self.chunks.append(rows.sample_ids.tolist())
        scores = [
            Score(float(i), {"accuracy": 1.0}, "verifier died" if i == self.fail_on else None)
            for i in rows.sample_ids.tolist()
        ]
        future = Future()
        future.set_result(CriticAnswer(rows.tokens.float(), rows.sample_ids.float() / 10, scores))
        return future


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(module, "gather_objects", lambda obj, group: [obj])

    def agree(error, topology):
        if error is not None:
            raise RuntimeError(f"rank 0: {error}")

    monkeypatch.setattr(agreement, "agree", agree)


def generation(critic):
    topology = SimpleNamespace(world_size=1, rank=0, tensor=1, cpu_group=None)
    return Generation(
        engine=ScriptedEngine(),
        critic=critic,
        reward=None,
        topology=topology,
        chunk_size=3,
        pad_id=0,
        answer_deadline=5.0,
    )


def requests(n):
    samples = {i: Sample(prompt_ids=[50 + i] * (1 + i % 3), prompt="", origin=f"file:{i}") for i in range(n)}
    return [Request(i, s.prompt_ids, max_output_len=4) for i, s in samples.items()], samples


def test_rows_values_and_scores_belong_together():
    critic = ScriptedCritic()
    phase = generation(critic)
    rollouts, pending = phase.run(*requests(7), critic_step=4)
    answers = phase.answers(pending, rollouts)
    assert rollouts.sample_ids.tolist() == list(range(7)) and rollouts.weight_version == 3
    assert [s.value for s in answers.scores] == list(range(7))
    assert torch.equal(answers.values[rollouts.mask], rollouts.tokens[rollouts.mask].float())
    assert answers.bootstrap.tolist() == pytest.approx([i / 10 for i in range(7)])
    assert sorted(i for chunk in critic.chunks for i in chunk) == list(range(7))


def test_a_chunk_is_asked_about_while_others_generate():
    critic = ScriptedCritic()
    generation(critic).run(*requests(7), critic_step=0)
    assert critic.chunks == [[3, 5, 6], [1, 2, 4], [0]]


def test_a_failed_score_is_an_error_that_names_the_sample():
    phase = generation(ScriptedCritic(fail_on=2))
    rollouts, pending = phase.run(*requests(4), critic_step=0)
    with pytest.raises(RuntimeError, match="sample 2 failed: verifier died"):
        phase.answers(pending, rollouts)


def test_an_engine_that_stalls_is_an_error():
    phase = generation(ScriptedCritic())
    phase.engine.completed = lambda timeout: []
    with pytest.raises(RuntimeError, match="finished nothing in 5 s"):
        phase.run(*requests(2), critic_step=0)


def test_an_engine_or_critic_that_raises_is_told_to_all_ranks():
    phase = generation(ScriptedCritic())
    phase.critic.infer = lambda rows: (_ for _ in ()).throw(ValueError("too many rows"))
    with pytest.raises(RuntimeError, match="rank 0: too many rows"):
        phase.run(*requests(2), critic_step=0)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_ranks_share_the_requests_without_gap_or_overlap(world):
    asked, _ = requests(7)
    shares = []
    for rank in range(world):
        phase = generation(ScriptedCritic())
        phase.topology = SimpleNamespace(world_size=world, rank=rank)
        shares.append([r.sample_id for r in phase._share(asked)])
    assert [i for share in shares for i in share] == list(range(7))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_first_rank_of_each_group_has_the_requests_of_all():
    """Four ranks, two an engine: the leaders share as two ranks would, the others have none."""
    asked, _ = requests(7)
    shares = []
    for rank in range(4):
        phase = generation(ScriptedCritic())
        phase.engine.ranks = 2
        phase.topology = SimpleNamespace(world_size=4, rank=rank)
        shares.append([r.sample_id for r in phase._share(asked)])
    assert shares == [[0, 1, 2], [], [3, 4, 5, 6], []]
