"""A model of Megatron's equals Hugging Face's: logits on every grid, and the weights that come back out are the ones that went in."""

import pytest
import torch

from tests.dist.harness import run_ranks, topologies
from tests.dist.tiny import tiny_hf, weights_of

GRIDS = [(1, 1, None, False), (2, 1, None, False), (2, 1, None, True), (1, 2, None, False), (1, 2, 2, False)]
WIDTH = 32


def forward(chunks, topology, tokens, positions=None):
    """What the last chunk returns, on every rank of the last stage; None elsewhere. The pipeline is run by hand."""
    import torch.distributed as dist

    from aligner.models.build import unwrap

    last = unwrap(chunks[-1])
    if positions is not None and last.post_process:
        last.output_layer.select(positions)
    where = torch.arange(tokens.size(1)).expand(tokens.size(0), -1)
    hidden_shape = (tokens.size(1), tokens.size(0), unwrap(chunks[0]).config.hidden_size)
    stages = [(r, c) for c in range(len(chunks)) for r in range(topology.pipeline)]
    out, sent = None, None
    for i, (rank, chunk) in enumerate(stages):
        if i:
            source = dist.get_global_rank(topology.pipeline_group, stages[i - 1][0])
            sent = out if topology.pipeline_rank == stages[i - 1][0] else torch.empty(hidden_shape)
            dist.broadcast(sent.contiguous(), src=source, group=topology.pipeline_group)
        if rank == topology.pipeline_rank:
            if i:
                unwrap(chunks[chunk]).set_input_tensor(sent)
            with torch.no_grad():
                out = chunks[chunk](tokens, where, None)
    return out if topology.is_last_stage else None


def whole_logits(logits, topology):
    import torch.distributed as dist

    parts = [torch.empty_like(logits) for _ in range(topology.tensor)]
    dist.all_gather(parts, logits.contiguous(), group=topology.tensor_group)
    return torch.cat(parts, -1)


def _body(rank, family, grids):
    from aligner.models.build import build_model
    from aligner.models.hf import export_hf, load_hf

    found = []
    for tied in (False, True):
        model, shape = tiny_hf(family, tied=tied)
        weights = weights_of(model)
        tokens = torch.randint(0, shape.vocab_size, (3, WIDTH), generator=torch.Generator().manual_seed(5))
        chosen = torch.tensor([3, WIDTH + 1, 2 * WIDTH, 3 * WIDTH - 1])
        with torch.no_grad():
            want = model(tokens).logits
        for topology in topologies(*grids):
            chunks = build_model(shape, topology, head="lm", dtype=torch.float32)
            load_hf(chunks, shape, topology, weights)
            out = forward(chunks, topology, tokens)
            some = forward(chunks, topology, tokens, chosen)
            worst = 0.0
            if topology.is_last_stage:
                got = whole_logits(out, topology)[..., : shape.vocab_size]
                few = whole_logits(some, topology)[0, :, : shape.vocab_size]
                worst = float((got - want).abs().max())
                worst = max(worst, float((few - want.reshape(-1, shape.vocab_size)[chosen]).abs().max()))
            back = {name: tensor.clone() for name, tensor in export_hf(chunks, shape, topology)}
            same = list(back) and set(back) == set(weights) and all(torch.equal(back[n], weights[n]) for n in back)
            found.append((worst, bool(same)))
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2"])
def test_logits_and_exported_weights_on_every_grid(family):
    grids = GRIDS if family == "llama" else [GRIDS[i] for i in (0, 2, 3)]
    for results in run_ranks(_body, 2, family, grids):
        for (worst, same), grid in zip(results, grids * 2):
            assert worst < 1e-5, f"{grid}: logits differ by {worst}"
            assert same, f"{grid}: the exported weights are not the loaded ones"
