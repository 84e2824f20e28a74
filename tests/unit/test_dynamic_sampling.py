"""Which prompts a step consumes when groups of equal scores are replaced: the fewest that suffice, in whatever order responses finish."""

import itertools
import random
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from aligner.algorithms import agreement
from aligner.algorithms import generation as module
from aligner.algorithms.dynamic_sampling import DynamicSampling, Scored
from aligner.algorithms.generation import Generation
from aligner.data.batch import Completion, Request, Sample, Score, collate

N = 2  # responses a prompt
CONSUMED_BEFORE = 100  # prompts


def supply(wanted, most, *, counts_truncated=True):
    def draw(after, count):
        first = CONSUMED_BEFORE + after
        return {g * N + k: Sample([1 + g], "", f"file:{g}") for g in range(first, first + count) for k in range(N)}

    def requests(samples):
        return [Request(i, s.prompt_ids, max_output_len=8) for i, s in samples.items()]

    how = {"wanted": wanted, "most": most, "samples_per_prompt": N, "counts_truncated": counts_truncated}
    return DynamicSampling(draw, requests, **how)


class Engine:
    """Finishes what it has in a random order, some at a time. Remembers how many ran when more was submitted."""

    ranks = 1

    def __init__(self, seed):
        self.draw, self.left, self.joined = random.Random(seed), [], []

    def submit(self, requests):
        self.joined.append(len(self.left))
        self.left += requests
        self.draw.shuffle(self.left)

    def completed(self, timeout):
        count = self.draw.randint(1, min(3, len(self.left)))
        done, self.left = self.left[:count], self.left[count:]
        return [Completion(r.sample_id, r.prompt_ids, [7, 2], [-1.0, -1.0], "stop", 0) for r in done]


class Reward:
    """Groups named in `alike` earn 1 for every response, others 0 and 1."""

    def __init__(self, alike):
        self.alike = alike

    def score(self, rows):
        done = Future()
        groups = [divmod(row.sample_id, N) for row in rows]
        done.set_result([Score(1.0 if g - CONSUMED_BEFORE in self.alike else float(k)) for g, k in groups])
        return done


@pytest.fixture
def phase(monkeypatch):
    """A generation phase of `world` ranks in one process: of several, this is the only one that has requests."""
    monkeypatch.setattr(module, "gather_objects", lambda obj, group: [obj])
    monkeypatch.setattr(agreement, "agree", lambda error, topology: (_ for _ in ()).throw(error) if error else None)

    def make(alike, *, seed, world=1):
        topology = SimpleNamespace(world_size=world, rank=0, tensor=1, cpu_group=None)
        parts = {"engine": Engine(seed), "critic": None, "reward": Reward(alike), "topology": topology}
        made = Generation(**parts, chunk_size=3, pad_id=0, answer_deadline=5.0)
        made._share = lambda requests: requests
        return made

    return make


def smallest(alike, wanted, most):
    """The definition: the fewest prompts of which `wanted` are unlike, or `most`."""
    for count in range(wanted, most):
        if sum(g not in alike for g in range(count)) >= wanted:
            return count
    return most


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("alike", [set(), {0}, {1, 3, 4}, {0, 1, 2, 3, 4, 5}, set(range(1, 40, 2))], ids=str)
def test_the_fewest_prompts_that_suffice_are_consumed(phase, alike, world):
    for seed in range(5):
        groups = supply(wanted=4, most=11)
        made = phase(alike, seed=seed, world=world)
        rollouts, pending = made.run(groups.first(), groups.samples, critic_step=0, refill=groups.refill)
        count = smallest(alike, 4, 11)
        assert groups.consumed == count and len(rollouts) == count * N
        kept = groups.kept(1, rollouts)
        ids = [i // N - CONSUMED_BEFORE for i in kept.sample_ids.tolist()[::N]]
        useful = [g for g in range(count) if g not in alike][:4]
        others = [g for g in range(count) if g in alike]
        assert ids == sorted([*useful, *others[: 4 - len(useful)]]) and len(kept) == 4 * N
        told = groups.metrics()
        assert told["sampling/prompts"] == count and told["sampling/filled_up"] == 4 - len(useful)
        assert told["sampling/equal"] == pytest.approx(len(others) / count)
        answers = made.answers(pending, kept)
        assert [s.value for s in answers.scores] == [1.0 if i // N - 100 in alike else i % N for i in kept.sample_ids]


def test_one_rank_samples_further_prompts_while_others_run(phase):
    made, groups = phase({0, 1, 2, 3}, seed=3), supply(wanted=16, most=40)
    made.run(groups.first(), groups.samples, critic_step=0, refill=groups.refill)
    assert max(made.engine.joined[1:]) > 0, made.engine.joined


def test_a_bound_is_said(phase, caplog):
    made, groups = phase(set(range(99)), seed=0), supply(wanted=4, most=6)
    rollouts, _ = made.run(groups.first(), groups.samples, critic_step=0, refill=groups.refill)
    assert len(groups.kept(7, rollouts)) == 4 * N
    assert "step 7: of 6 prompts (ppo.dynamic_sampling_max_prompts=6) only 0 had responses" in caplog.text


def test_masked_responses_have_no_say():
    """Scores 1 and 0, but the 0 was cut: nothing is left to compare with."""
    scored = {CONSUMED_BEFORE * N: Scored(1.0, True), CONSUMED_BEFORE * N + 1: Scored(0.0, False)}
    assert supply(1, 5).refill(scored) == []
    assert len(supply(1, 5, counts_truncated=False).refill(scored)) == N


def test_the_order_of_what_is_told_does_not_matter():
    scored = {CONSUMED_BEFORE * N + i: Scored(v, True) for i, v in enumerate([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])}
    for order in itertools.permutations(scored.items()):
        groups, asked = supply(3, 9), []
        for cut in (2, 5, 6):
            asked += [r.sample_id for r in groups.refill(dict(order[:cut]))]
        assert asked == list(range((CONSUMED_BEFORE + 3) * N, (CONSUMED_BEFORE + 5) * N))


def test_rows_are_selected_with_all_that_belongs_to_them():
    done = [
        Completion(i, [9] * (1 + i % 3), [i], [-float(i)], "stop", 0)
        for i in range(CONSUMED_BEFORE * N, CONSUMED_BEFORE * N + 6)
    ]
    groups = supply(2, 4)
    groups.refill({c.sample_id: Scored(float(c.sample_id % 2 and c.sample_id >= 202), True) for c in done})
    kept = groups.kept(1, collate(done, pad_id=0))
    assert kept.sample_ids.tolist() == [202, 203, 204, 205] and kept.engine_logprobs.sum(1).tolist() == [
        -202,
        -203,
        -204,
        -205,
    ]
