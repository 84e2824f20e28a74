"""A real model, SmolLM2-135M (9 heads, 3 groups: TP 1 or 3), gives Hugging Face's logits, and converts there and back bit for bit.

Needs its Hugging Face folder in ALIGNER_SMOLLM2_HF (python tools/smollm2.py --output_dir X --hf_dir DIR writes one)."""

import os
from pathlib import Path

import pytest
import torch

from tests.dist.harness import run_ranks, topologies
from tests.dist.test_hf_parity import forward, whole_logits

TOLERANCE = 1e-5  # of the largest logit


@pytest.fixture
def folder():
    path = os.environ.get("ALIGNER_SMOLLM2_HF")
    if not path or not (Path(path) / "config.json").is_file():
        pytest.skip("ALIGNER_SMOLLM2_HF does not name a Hugging Face folder of SmolLM2 (see tools/smollm2.py --hf_dir)")
    return path


def _body(rank, folder, grids):
    import torch.distributed as dist
    import transformers

    from aligner.models.build import build_model
    from aligner.models.hf import load_hf
    from aligner.models.hf_config import shape_of
    from aligner.models.hf_folder import SafeTensors, read_config

    shape = shape_of(read_config(Path(folder)))
    tokens = torch.randint(0, shape.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    want, found = torch.empty(2, 24, shape.vocab_size), []
    for topology in topologies(*grids, timeout=300):
        if not found:
            if rank == 0:
                model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
                with torch.no_grad():
                    want = model(tokens).logits
                del model
            dist.broadcast(want, src=0)
        chunks = build_model(shape, topology, head="lm", dtype=torch.float32, initialise=False)
        load_hf(chunks, shape, topology, SafeTensors(Path(folder)))
        out = forward(chunks, topology, tokens)
        worst = 0.0
        if topology.is_last_stage:
            worst = float((whole_logits(out, topology) - want).abs().max() / want.abs().max())
        found.append(worst)
    return found


@pytest.mark.parametrize("ranks, grids", [(3, [(3, 1, None, False)]), (2, [(1, 2, None, False), (1, 1, None, False)])])
def test_logits_are_hugging_faces(folder, ranks, grids):
    for results in run_ranks(_body, ranks, folder, grids, deadline=600):
        assert max(results) < TOLERANCE, dict(zip(map(str, grids), results))
