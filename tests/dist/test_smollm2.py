"""A real model, SmolLM2-135M (9 heads, 3 groups: TP 1 or 3), gives Hugging Face's logits on its grids.

Takes the Hugging Face folder that ALIGNER_SMOLLM2_HF names, or the model that `make demo` has left in .cache/."""

import os
from pathlib import Path

import pytest
import torch

from tests.dist.harness import end_workers, run_ranks, topologies
from tests.dist.test_hf_parity import forward, whole_logits

TOLERANCE = 1e-5  # of the largest logit


CACHE = Path(__file__).resolve().parents[2] / ".cache"
DEMO = CACHE / "SmolLM2-135M-Instruct"  # converted


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder; made from the demo's checkpoint where there is no other."""
    named = os.environ.get("ALIGNER_SMOLLM2_HF")
    if named:
        assert (Path(named) / "config.json").is_file(), f"ALIGNER_SMOLLM2_HF={named} is no Hugging Face folder"
        return named
    if not (DEMO / "model_config.yaml").is_file():
        pytest.skip(
            "needs SmolLM2: run `make demo` once, which leaves it in .cache/, or let ALIGNER_SMOLLM2_HF name a Hugging Face "
            "folder of it (tools/smollm2.py --hf_dir writes one)"
        )
    made = tmp_path_factory.mktemp("smollm2") / "hf"
    run_ranks(_to_hf, 1, DEMO, made)
    return str(made)


def _to_hf(rank, source, folder):
    from aligner.models.convert import nemo_to_hf

    nemo_to_hf(source, folder, progress=lambda said: None)


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
    end_workers()  # their memory
