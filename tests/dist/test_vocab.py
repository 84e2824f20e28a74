"""Vocab-parallel log-probs and entropies equal torch's log_softmax of the whole logits, and so do their gradients, for every split."""

import torch

from tests.dist.harness import run_ranks, topologies


def _oracle(logits, targets, vocab_size, temperature, upstream):
    whole = logits.clone().double().requires_grad_()
    log_p = torch.log_softmax(whole[:, :vocab_size] / temperature, -1)
    chosen = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (upstream[0] * chosen + upstream[1] * entropy).sum().backward()
    return chosen, entropy, whole.grad


def _cases():
    g = torch.Generator().manual_seed(3)
    for vocab_size, padded, temperature in ((256, 256, 1.0), (200, 256, 0.7), (90, 256, 1.3)):
        logits = torch.randn(7, padded, generator=g) * 2
        targets = torch.randint(0, vocab_size, (7,), generator=g)
        yield logits, targets, vocab_size, temperature, torch.randn(2, 7, generator=g)


def _body(rank):
    from aligner.parallel.vocab import vocab_parallel_logprobs, vocab_parallel_logprobs_and_entropy

    worst = 0.0
    for topology in topologies((1, 1, None, False), (2, 1, None, False)):
        for logits, targets, vocab_size, temperature, upstream in _cases():
            chosen, entropy, grad = _oracle(logits, targets, vocab_size, temperature, upstream)
            part = logits.chunk(topology.tensor, -1)[topology.tensor_rank].clone().requires_grad_()
            before = part.detach().clone()
            settings = {"group": topology.tensor_group, "vocab_size": vocab_size, "temperature": temperature}
            found = vocab_parallel_logprobs_and_entropy(part, targets, **settings)
            (upstream[0] * found[0] + upstream[1] * found[1]).sum().backward()
            alone = vocab_parallel_logprobs(part, targets, **settings)
            want = grad.chunk(topology.tensor, -1)[topology.tensor_rank]
            for a, b in ((found[0], chosen), (found[1], entropy), (alone, chosen), (part.grad, want)):
                worst = max(worst, float((a.detach() - b.detach()).abs().max()))
            assert torch.equal(part.detach(), before), "the logits were changed in place"
    return worst


def test_equals_log_softmax_for_every_split():
    assert max(run_ranks(_body, 2)) < 1e-5


def _logprobs_only_gradient(rank):
    from aligner.parallel import vocab
    from aligner.parallel.vocab import vocab_parallel_logprobs

    (topology,) = topologies((1, 1, None, False))
    logits = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
    vocab._BLOCK_ELEMENTS = 256  # two rows a block
    chosen = vocab_parallel_logprobs(logits, torch.arange(5), group=topology.tensor_group, vocab_size=100)
    chosen.sum().backward()
    padding = logits.grad[:, 100:].abs().max()
    whole = logits.detach().clone().requires_grad_()
    torch.log_softmax(whole[:, :100], -1)[torch.arange(5), torch.arange(5)].sum().backward()
    errors = []
    for targets, temperature in ((torch.full((5,), 100), 1.0), (torch.arange(5), 0.0)):
        try:
            vocab_parallel_logprobs(
                logits, targets, group=topology.tensor_group, vocab_size=100, temperature=temperature
            )
        except ValueError as error:
            errors.append(str(error))
    empty = vocab_parallel_logprobs(logits[:0], torch.arange(0), group=topology.tensor_group, vocab_size=100)
    empty.sum().backward()
    return float(padding), float((logits.grad - whole.grad).abs().max()), errors, tuple(empty.shape)


def test_blocks_padding_refusals_and_no_positions():
    ((padding, difference, errors, empty),) = run_ranks(_logprobs_only_gradient, 1)
    assert padding == 0.0 and difference < 1e-6 and empty == (0,)
    assert errors[0] == "targets must be in [0, 100), found 100 to 100" and "temperature above 0" in errors[1]
