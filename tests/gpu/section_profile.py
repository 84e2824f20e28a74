"""Where the time of a policy update goes: torch.profiler's list of the ten most expensive operators."""

import time

import torch
from gpu_models import half_billion_checkpoint, one_rank

CARDS = {
    "H100": 990e12,
    "H200": 990e12,
    "A100": 312e12,
    "B200": 2250e12,
}  # dense bf16 FLOP/s by the vendor's datasheets


def profile(section) -> None:
    from aligner.config.groups import ModelConfig, OptimConfig
    from aligner.models.policy import Policy, PolicyLoss
    from aligner.ops.policy_loss import Objective
    from aligner.parallel.device import peak_memory_bytes
    from aligner.parallel.startup import start

    folder = half_billion_checkpoint(section.work, on_gpu=section.on_gpu)
    rows, columns = (32, 256) if section.on_gpu else (2, 64)
    policy = Policy(
        ModelConfig(str(folder)),
        OptimConfig(lr=1e-6),
        start(one_rank(), seed=1),
        loss=PolicyLoss(objective=Objective(entropy_bonus=0.01)),
        micro_batch_size=16,
        reference=None,
    )
    batch, rollouts = fake_batch(policy.shape.vocab_size, rows, columns)
    policy.train(batch)  # the optimizer's state and the allocator's blocks
    forward = timed(lambda: policy.logprobs(rollouts, temperature=1.0))
    update = timed(lambda: policy.train(batch))
    parameters = sum(p.numel() for p in policy.model.plain_chunks[0].parameters())
    section.facts |= {
        "parameters": parameters,
        "dtype": str(policy.model.dtype),
        "tokens": rows * columns,
        "logprobs_seconds": round(forward, 4),
        "update_seconds": round(update, 4),
        "update_tokens_per_second": round(rows * columns / update),
        "peak_gb": round(peak_memory_bytes() / 1e9, 2),
    }
    peak = next((v for card, v in CARDS.items() if section.on_gpu and card in torch.cuda.get_device_name()), None)
    if peak:
        section.facts["model_flops_utilisation"] = round(6 * parameters * rows * columns / update / peak, 3)
    top = profiled(lambda: policy.train(batch), on_gpu=section.on_gpu)
    (section.out / "profile.txt").write_text(top)
    print(top)


def fake_batch(vocabulary: int, rows: int, columns: int):
    """A mini-batch of whole rows, the second half of each the response, and its Rollouts."""
    from aligner.data.batch import Rollouts
    from aligner.models.policy import PolicyMiniBatch

    generator = torch.Generator().manual_seed(8)
    tokens = torch.randint(3, vocabulary, (rows, columns), generator=generator)
    lengths, prompts = torch.full((rows,), columns), torch.full((rows,), columns // 2)
    mask = (torch.arange(columns) >= columns // 2).expand(rows, columns).contiguous()
    old = torch.full((rows, columns), -10.0)
    batch = PolicyMiniBatch(tokens, lengths, mask, old, torch.randn(rows, columns, generator=generator))
    ended = torch.zeros(rows, dtype=torch.bool)
    return batch, Rollouts(tokens, lengths, prompts, mask, torch.arange(rows), ended, torch.zeros(rows, columns))


def timed(call, repeats: int = 3) -> float:
    """Seconds of the fastest of a few calls."""
    from aligner.parallel.device import synchronise

    best = float("inf")
    for _ in range(repeats):
        synchronise()
        began = time.perf_counter()
        call()
        synchronise()
        best = min(best, time.perf_counter() - began)
    return best


def profiled(call, *, on_gpu: bool) -> str:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    with record(activities=activities) as found:
        call()
    averages, parts = found.key_averages(), []
    for key in ("self_device_time_total", "self_cpu_time_total") if on_gpu else ("self_cpu_time_total",):
        parts.append(f"{key}\n{averages.table(sort_by=key, row_limit=10, max_name_column_width=60)}")
    return "\n".join(parts)
