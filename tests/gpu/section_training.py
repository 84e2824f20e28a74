"""The policy and the critic on this device against the same computation on the CPU, against Hugging Face, and across a checkpoint."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from gpu_models import FAMILIES, one_rank, tiny_checkpoint
from torch import Tensor

ROWS, COLUMNS, VOCABULARY, TEMPERATURE = 6, 64, 250, 0.8
UPDATES = 3


def training(section) -> None:
    folders = {family: tiny_checkpoint(section.work, family) for family in FAMILIES}
    cpu_file = section.work / "cpu_numbers.pt"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    cpu = subprocess.Popen([sys.executable, __file__, str(section.work), str(cpu_file)], env=environment)
    own = {
        (family, dtype): numbers(folders[family][1], dtype) for family in FAMILIES for dtype in ("float32", "bfloat16")
    }
    for family in FAMILIES:
        from_hf = hugging_face_logprobs(folders[family][0])
        section.at_most(
            f"{family}/hugging_face_logprobs", difference(own[family, "float32"]["logprobs"], from_hf), 1e-4
        )
    if cpu.wait() != 0:
        raise RuntimeError(f"the same computation on the CPU failed with exit code {cpu.returncode}; see the log")
    expected = torch.load(cpu_file)
    for family in FAMILIES:
        compare(section, f"{family}/float32", own[family, "float32"], expected[family], FLOAT32)
        compare(section, f"{family}/bfloat16", own[family, "bfloat16"], expected[family], BFLOAT16)


# Largest differences from float32 on the CPU. `weights`: of the root mean square of the whole update; Adam's first updates have the size
# of the learning rate whatever the gradient, so where a gradient is all but zero a rounding error decides their sign.
FLOAT32 = {"logprobs": 1e-4, "loss": 1e-4, "grad_norm": 1e-3, "weights": 0.05, "values": 1e-3, "critic_loss": 1e-3}
BFLOAT16 = {"logprobs": 0.25, "loss": 0.05, "grad_norm": 0.1, "weights": 0.8, "values": 0.1, "critic_loss": 0.05}


def compare(section, name: str, own: dict[str, Any], expected: dict[str, Any], limits: dict[str, float]) -> None:
    section.at_most(f"{name}/logprobs", difference(own["logprobs"], expected["logprobs"]), limits["logprobs"])
    section.at_most(f"{name}/values", difference(own["values"], expected["values"]), limits["values"])
    section.at_most(f"{name}/loss", relative(own["policy"], expected["policy"], "loss"), limits["loss"])
    # In bfloat16 of the first update: later on a token may lie on the other side of the clip, which is a step of the gradient.
    updates = slice(None) if name.endswith("float32") else slice(1)
    for side, found in (("own", own), ("cpu", expected)):
        section.facts[f"{name}/grad_norms_{side}"] = [round(update["grad_norm"], 4) for update in found["policy"]]
    gap = relative(own["policy"][updates], expected["policy"][updates], "grad_norm")
    section.at_most(f"{name}/grad_norm", gap, limits["grad_norm"])
    section.at_most(f"{name}/critic_loss", relative(own["critic"], expected["critic"], "loss"), limits["critic_loss"])
    moved = expected["after"] - expected["before"]
    share = (own["after"] - expected["after"]).norm() / moved.norm()
    section.at_most(f"{name}/weights", float(share), limits["weights"])


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def relative(own: list[dict[str, float]], expected: list[dict[str, float]], metric: str) -> float:
    """The largest difference of a metric over the updates, relative to 1 or to the metric where that is larger."""
    return max(abs(a[metric] - b[metric]) / max(1.0, abs(b[metric])) for a, b in zip(own, expected, strict=True))


def numbers(checkpoint: Path, dtype: str) -> dict[str, Any]:
    """Log-probs, three updates and the weights of a policy, three updates and the values of a critic, on this process's device."""
    from aligner.config.groups import Dtype, ModelConfig, OptimConfig
    from aligner.models.critic import CriticModel
    from aligner.parallel.startup import start

    topology = start(one_rank(), seed=1)
    model, optim = ModelConfig(str(checkpoint), dtype=Dtype(dtype)), OptimConfig(lr=1e-3)
    policy = make_policy(model, optim, topology)
    batch, rollouts = policy_batch()
    found = {"before": flat(policy), "logprobs": policy.logprobs(rollouts, temperature=TEMPERATURE)}
    found["policy"] = [policy.train(batch) for _ in range(UPDATES)]
    found["after"] = flat(policy)
    critic = CriticModel(model, optim, topology, micro_batch_size=2)
    found["critic"] = [critic.train(critic_batch()) for _ in range(UPDATES)]
    values, bootstrap = critic.values(batch.tokens, batch.lengths)
    found["values"] = torch.cat([values.flatten(), bootstrap])
    return found


def make_policy(model, optim, topology):
    from aligner.models.policy import Policy, PolicyLoss
    from aligner.ops.policy_loss import Objective

    loss = PolicyLoss(TEMPERATURE, Objective(entropy_bonus=0.01))
    return Policy(model, optim, topology, loss=loss, micro_batch_size=2, reference=None)


def flat(policy) -> Tensor:
    """All weights, as float32 on the CPU, in one vector."""
    return torch.cat([tensor.detach().float().cpu().flatten() for _, tensor in policy.export()])


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """tokens [B, S], lengths [B], mask [B, S] of rows of unlike length; the last has no response token."""
    generator = torch.Generator().manual_seed(3)
    lengths, prompts = torch.tensor([30, 9, 21, 40, 17, 12]), torch.tensor([5, 4, 20, 11, 9, 12])
    at = torch.arange(COLUMNS)
    tokens = torch.randint(3, VOCABULARY, (ROWS, COLUMNS), generator=generator)
    return torch.where(at < lengths[:, None], tokens, 0), lengths, (at >= prompts[:, None]) & (at < lengths[:, None])


def policy_batch():
    """A mini-batch with old log-probs near those of a random model, so that some ratios are clipped, and its rows as Rollouts."""
    from aligner.data.batch import Rollouts
    from aligner.models.policy import PolicyMiniBatch

    tokens, lengths, mask = rows()
    generator = torch.Generator().manual_seed(4)
    old = -5.5 + 0.5 * torch.randn(ROWS, COLUMNS, generator=generator)
    batch = PolicyMiniBatch(tokens, lengths, mask, old, torch.randn(ROWS, COLUMNS, generator=generator))
    nothing = torch.zeros(ROWS, dtype=torch.int64)
    return batch, Rollouts(tokens, lengths, nothing, mask, torch.arange(ROWS), nothing.bool(), torch.zeros(mask.shape))


def critic_batch():
    from aligner.models.critic import CriticMiniBatch

    tokens, lengths, mask = rows()
    generator = torch.Generator().manual_seed(5)
    old = 0.3 * torch.randn(ROWS, COLUMNS, generator=generator)
    return CriticMiniBatch(tokens, lengths, mask, old, torch.randn(ROWS, COLUMNS, generator=generator))


@torch.no_grad()
def hugging_face_logprobs(folder: Path) -> Tensor:
    """[B, S]: what policy.logprobs must be, by transformers in float32 on the same device."""
    import transformers

    from aligner.parallel.device import DEVICE

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).eval()
    tokens, _, mask = rows()
    logits = model(tokens.to(DEVICE)).logits.float() / TEMPERATURE
    chosen = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None].to(DEVICE))[..., 0].cpu()
    return torch.where(mask, torch.nn.functional.pad(chosen, (1, 0)), 0.0)


def checkpoint(section) -> None:
    """Two updates, a save, a third update; the same third update after loading; with and without sharded optimizer states, and with
    Adam's moments sent to the host and back between the updates."""
    from aligner.config.groups import Dtype, ModelConfig, OptimConfig
    from aligner.parallel.startup import start

    _, folder = tiny_checkpoint(section.work, "llama")
    topology, (batch, _) = start(one_rank(), seed=1), policy_batch()
    for distributed in (False, True):
        for dtype in ("float32", "bfloat16"):
            name = f"{'sharded' if distributed else 'plain'}/{dtype}"
            model, optim = ModelConfig(str(folder), dtype=Dtype(dtype)), OptimConfig(lr=1e-3, distributed=distributed)
            saved = section.work / "saved" / name
            try:
                across(section, name, lambda: make_policy(model, optim, topology), batch, saved)  # noqa: B023 - called at once
            except Exception as error:
                section.failures.append(f"{name}: {type(error).__name__}: {error}"[:300])


def across(section, name: str, make, batch, saved: Path) -> None:
    policy = make()
    for _ in range(2):
        policy.train(batch)
        policy.offload_optimizer()
        policy.restore_optimizer()
    policy.save(saved)
    expected, weights = policy.train(batch), flat(policy)
    resumed = make()
    resumed.load(saved)
    section.expect(resumed.step_count == 2, f"{name}: step_count is {resumed.step_count} after loading, not 2")
    found = resumed.train(batch)
    for metric in ("loss", "grad_norm"):
        section.at_most(f"{name}/{metric}", abs(found[metric] - expected[metric]), 1e-5)
    section.at_most(f"{name}/weights", difference(flat(resumed), weights), 1e-5 if name.endswith("32") else 1e-3)


def main() -> None:
    """The CPU's side: `section_training.py WORK FILE`, with no CUDA device visible."""
    work, file = map(Path, sys.argv[1:])
    torch.save({family: numbers(work / f"{family}-nemo", "float32") for family in FAMILIES}, file)


if __name__ == "__main__":
    main()
