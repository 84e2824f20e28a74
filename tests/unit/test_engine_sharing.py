"""Slots, compaction and shared prompts of the torch engine: who sits where never changes what is said, and no prompt is computed twice."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from aligner.data.batch import Request
from aligner.rollout.slots import Pending, Slots
from tests.unit.test_torch_engine import count_prefilled, hf_greedy, prompts
from tests.unit.tiny_engine import FAMILIES, KERNELS, VOCAB, tiny_engine, tiny_hf


@pytest.fixture(scope="module")
def llama():
    return tiny_hf("llama")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_hugging_faces_in_every_order_of_arrival(family, kernel):
    """Prompts of unequal lengths, in several orders, all at once or a few at a time, with 1 to 16 slots."""
    model, ids = tiny_hf(family), prompts()
    lengths = [1 + 7 * i % 12 for i in range(len(ids))]
    want = {i: hf_greedy(model, prompt, lengths[i]) for i, prompt in enumerate(ids)}
    rng = random.Random(0)
    for rows in (1, 3, 4, 16):
        engine = tiny_engine(family, model, max_batch_size=rows, kernel=kernel)
        for a_time in (1, 3, len(ids)):
            order = rng.sample(range(len(ids)), len(ids))
            waiting = [
                Request(sample_id=i, prompt_ids=ids[i], max_output_len=lengths[i], temperature=0.0) for i in order
            ]
            found = {}
            while waiting or engine.running:
                now, waiting = waiting[:a_time], waiting[a_time:]
                engine.submit(now)
                found |= {c.sample_id: c.token_ids for c in engine.completed(timeout=0)}
            assert found == want, (rows, a_time, order)


@pytest.mark.parametrize("seed", range(20))
def test_compaction_never_mixes_rows(seed):
    """Random arrivals and ends: every row keeps its own request's tokens, uniforms, settings and cache, beside a plain dictionary."""
    rng = np.random.default_rng(seed)
    rows, counter = int(rng.integers(1, 9)), 0
    slots, cache, truth = Slots(rows, 4, 6), np.full((rows, 10), -1), {}
    for _ in range(60):
        for _ in range(int(rng.integers(0, slots.free + 1))):
            request = Request(
                sample_id=counter,
                prompt_ids=rng.integers(0, 1000, rng.integers(1, 5)).tolist(),
                max_output_len=int(rng.integers(1, 7)),
                temperature=float(counter),
                top_k=counter,
                stop_token_ids=tuple(range(counter, counter + int(rng.integers(0, 4)))),
            )
            row = slots.active
            slots.add([Pending(counter, request)])
            cache[row, : len(request.prompt_ids)] = request.prompt_ids
            truth[counter] = list(request.prompt_ids)
            slots.record(slice(row, row + 1), np.array([2000 + counter]), np.array([-float(counter)], np.float32))
            truth[counter].append(2000 + counter)
            counter += 1
        done = rng.random(slots.active) < 0.4
        holes, movers = slots.remove(done)
        targets, sources = np.concatenate([holes, movers]), np.concatenate([movers, holes])
        cache[targets] = cache[sources]
        assert len(slots.pending) == slots.active == int((~done).sum())
        for row in range(slots.active):
            request, tokens = slots.pending[row].request, truth[slots.pending[row].request.sample_id]
            assert slots.tokens[row, : slots.lengths[row]].tolist() == tokens
            assert cache[row, : slots.cached[row]].tolist() == tokens[:-1]
            assert (slots.temperature[row], slots.top_k[row]) == (request.sample_id, request.sample_id)
            assert slots.limits[row] == request.max_output_len
            assert [i for i in slots.stop_ids[row] if i >= 0] == list(request.stop_token_ids)
            assert slots.completion(row, 0).logprobs == [-float(request.sample_id)]
        for row in range(slots.active, rows):  # what is left behind is still what the slots say of it
            assert cache[row, : slots.cached[row]].tolist() == slots.tokens[row, : slots.cached[row]].tolist()


@pytest.mark.parametrize("kernel", KERNELS)
def test_more_samples_of_a_prompt_than_slots_share_one_prefill(llama, kernel):
    """Of the later ones only the last token of the prompt runs again, for its logits."""
    ids, other = prompts()[4], prompts()[9]
    many = [Request(sample_id=i, prompt_ids=ids, max_output_len=3 + i % 5, seed=2) for i in range(14)]
    alone = [tiny_engine("llama", llama, max_batch_size=1).generate([r])[0].token_ids for r in many]
    engine = tiny_engine("llama", llama, max_batch_size=4, kernel=kernel)
    seen = count_prefilled(engine)
    assert [c.token_ids for c in engine.generate(many)] == alone
    assert seen[0] == len(ids) and set(seen[1:]) == {1}
    seen.clear()
    mixed = [*many[:3], Request(sample_id=50, prompt_ids=other, max_output_len=4), *many[3:6]]
    assert [c.token_ids for c in engine.generate(mixed) if c.sample_id < 50] == alone[:6]
    assert sum(seen) - seen.count(1) == len(ids) + len(other)


@pytest.mark.parametrize("kernel", KERNELS)
def test_samples_that_arrive_over_time_share_one_prefill(llama, kernel):
    """While others run a prompt is known, also when the row that computed it has finished and given its place away."""
    ids = prompts()[4]
    engine = tiny_engine("llama", llama, max_batch_size=6, kernel=kernel)
    seen, found = count_prefilled(engine), {}
    engine.submit([Request(sample_id=90 + i, prompt_ids=[7, i], max_output_len=40) for i in range(3)])
    many = [Request(sample_id=i, prompt_ids=ids, max_output_len=2 + i % 3, seed=2) for i in range(6)]
    for request in many:
        engine.submit([request])
        for _ in range(3):
            found |= {c.sample_id: c.token_ids for c in engine.completed(timeout=0)}
    while engine.running:
        found |= {c.sample_id: c.token_ids for c in engine.completed(timeout=10)}
    for request in many:
        assert (
            found[request.sample_id] == tiny_engine("llama", llama, max_batch_size=1).generate([request])[0].token_ids
        )
    assert seen == [3 * 2 + len(ids)] + [1] * (len(many) - 1)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_common_beginning_is_computed_once(llama, kernel):
    """A prompt that begins like one in the cache, and one that continues a whole sequence, take over what is there."""
    start = prompts([18])[0]
    engine = tiny_engine("llama", llama, max_batch_size=4, kernel=kernel)
    seen = count_prefilled(engine)
    engine.submit([Request(sample_id=0, prompt_ids=start + [5, 6], max_output_len=30)])
    engine.completed(timeout=0)
    later = Request(sample_id=1, prompt_ids=start + [9, 8, 7], max_output_len=6, temperature=0.0)
    engine.submit([later])
    done = {c.sample_id: c for _ in range(40) for c in engine.completed(timeout=0)}
    assert seen == [20, 3]
    assert done[1].token_ids == hf_greedy(llama, later.prompt_ids, 6)


def test_nothing_is_remembered_across_a_refit_or_an_idle_engine(llama):
    """Else what an engine did before would change the rounding of what it does next: a resumed run would differ."""
    request = Request(sample_id=0, prompt_ids=prompts()[4], max_output_len=3)
    engine = tiny_engine("llama", llama)
    seen = count_prefilled(engine)
    engine.generate([request])
    engine.generate([request])
    assert seen == [24, 24]


def test_sequences_come_out_while_others_run(llama):
    engine = tiny_engine("llama", llama)
    engine.submit([Request(sample_id=i, prompt_ids=[3, i], max_output_len=n) for i, n in enumerate((40, 2, 9, 40, 5))])
    order = []
    while engine.running:
        order += [(c.sample_id, engine.running) for c in engine.completed(timeout=10)]
    assert [i for i, _ in order[:3]] == [1, 4, 2] and [running for _, running in order[:3]] == [4, 3, 2]


@pytest.mark.parametrize("kernel", KERNELS)
def test_bytes_of_pause_and_resume(llama, kernel):
    engine = tiny_engine("llama", llama, kernel=kernel)
    request = Request(sample_id=0, prompt_ids=[3, 1, 4], max_output_len=9, temperature=0.0)
    before = engine.generate([request])[0].token_ids
    engine.pause()
    scratch = [torch.ones(4096) for _ in range(64)]  # so that the memory does not come back at the same place
    engine.resume()
    from aligner.rollout.refit import weight_update
    from tests.unit.tiny_engine import tensors

    engine.refit(weight_update(tensors(llama), 1))
    assert engine.generate([replace(request)])[0].token_ids == before == hf_greedy(llama, [3, 1, 4], 9)
    assert len(scratch) == 64 and VOCAB > 5
