"""What a run leaves: both jobs by the launcher's command, as users start them, and a critic-free run on a user's prompts and reward."""

import json
import math
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.jobs.harness import (
    ACTOR_SETTINGS,
    CRITIC_SETTINGS,
    DEADLINE,
    MARK,
    REPO,
    Launcher,
    environment,
    leftovers,
    processes,
    user_data,
)

EVERY_STEP = {
    "step",
    "reward/mean",
    "kl/mean",
    "response/length",
    "time/step",
    "time/refit",
    "time/generate",
    "time/logprobs",
    "time/critic_wait",
    "time/train",
    "tokens_per_second",
    "critic/explained_variance",
    "memory/peak_bytes",
    "refit/staleness",
    "refit/overlapped_seconds",
    "drift/mean",
    "drift/max",
    "drift/ratio",
    "drift/effective",
}
VALIDATED = {"val/reward", "val/accuracy", "val/accuracy_ci95"}


@pytest.fixture(scope="module")
def launched(shared_jobs: Launcher):
    """One run of launch/local/ppo.py: the actor as plain python, the critic under torchrun on two ranks."""
    mark = uuid.uuid4().hex
    command = [sys.executable, str(REPO / "launch/local/ppo.py"), "--critic-ranks", "2"]
    command += ["--critic-log", str(shared_jobs.runs / "critic.out"), "--both", *shared_jobs.both("launched")]
    open_to_others = ("serving.bind=0.0.0.0", "serving.advertise_host=127.0.0.1")
    command += ["--actor", *ACTOR_SETTINGS, "logging.tensorboard=true", "--critic", *CRITIC_SETTINGS, *open_to_others]
    done = subprocess.run(
        command, env=environment(**{MARK: mark}), cwd="/", capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{(shared_jobs.runs / 'critic.out').read_text()}"
    return shared_jobs.run("launched"), done, mark


def test_it_ends_by_itself_and_says_where_the_report_is(launched):
    run, done, mark = launched
    assert f"report: {run.path}/report.html" in done.stdout
    assert "Traceback" not in done.stderr
    assert leftovers(lambda: processes(mark=mark)) == []
    assert not (run.path / "endpoints" / "critic.json").exists()
    assert run.pairs == ["step_000003"]


def test_the_token_is_in_its_file_alone(launched):
    """The critic bound an address that others reach, so it asked for a token; nothing that the run leaves or said tells it."""
    run, done, _ = launched
    file = run.path / "endpoints" / "critic.token"
    token = file.read_text().strip()
    assert file.stat().st_mode & 0o777 == 0o600 and len(token) >= 32
    told = [done.stdout, done.stderr] + [
        f.read_bytes().decode(errors="replace") for f in all_files(run.path) if f != file
    ]
    told.append((run.path.parent / "critic.out").read_text())
    assert len(told) > 20 and not any(token in text for text in told)


def all_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_metrics(launched):
    run, _, _ = launched
    rows = run.rows
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert all(math.isfinite(value) for value in row.values())
        parts = sum(v for k, v in row.items() if k.startswith("time/") and k != "time/step")
        assert parts == pytest.approx(row["time/step"], rel=0.05)
    for row in rows[1:]:
        assert row.keys() >= EVERY_STEP
    for row in (rows[0], rows[3]):
        assert row.keys() >= VALIDATED
    assert [row["weight_version"] for row in rows[1:]] == [0, 1, 2]
    assert all(row["drift/max"] < 1e-4 for row in rows[1:])  # float32: the engine and Megatron agree
    assert list((run.path / "tensorboard").glob("events.*"))


def test_samples_have_their_provenance(launched):
    run, _, _ = launched
    ids, certificates = [], []
    for step, version in ((1, 0), (2, 0), (3, 1)):
        for sample in run.samples(step):
            assert re.fullmatch(r"chain_sum:\d+", sample["origin"]) and sample["prompt"].endswith("=")
            assert sample["weight_version"] == version and sample["finish_reason"] in ("stop", "length")
            assert {"response", "score", "parts", "kl", "advantage_mean"} <= sample.keys()
            ids.append(sample["sample_id"])
        certificates += {sample["certificate"] for sample in run.samples(step)}
    assert ids == list(range(24))
    first, second, third = certificates  # of the weights that sampled: the first two steps trained the critic alone
    assert re.fullmatch("sampled:[0-9a-f]{32}", first) and first == second != third
    held_out = {s["prompt"] for s in run.validation(3)}
    assert not held_out & {s["prompt"] for step in (1, 2, 3) for s in run.samples(step)}


def test_the_report_needs_nothing_else(launched):
    run, _, _ = launched
    page = (run.path / "report.html").read_text()
    assert not re.search(r"(?:src|href)\s*=|url\(|@import", page) or not re.search(r"https?://(?!www\.w3\.org)", page)
    assert "127.0.0.1" in page and "TP1 x PP1 x DP2" in page  # both endpoints and grids are told
    for job in ("run.json", "run_critic.json"):
        assert str(json.loads((run.path / job).read_text())["pid"]) in page


def test_without_a_critic(jobs: Launcher, tmp_path):
    """GRPO on a user's prompts by the one setting that a run without a critic needs, two samples a prompt, groups of equal scores replaced,
    at a temperature other than 1, one update a rollout."""
    data, reward = user_data(tmp_path, prompts=12)
    settings = (
        "ppo.advantage=group_norm",
        "ppo.critic_warmup_steps=0",
        "ppo.samples_per_prompt=2",
        "ppo.dynamic_sampling=true",
        "ppo.kl_place=loss",
        "ppo.kl_estimator=k3",
        "ppo.mini_batch_size=16",
        "sampling.temperature=0.7",
        "run.max_steps=2",
    )
    jobs.actor("free", *data, *reward, *settings).finish()
    run = jobs.run("free")
    for row in run.rows[1:]:
        assert row["policy/ratio"] == pytest.approx(1.0, abs=1e-5)
        assert abs(row["policy/approximate_kl"]) < 1e-6 and row["drift/max"] < 1e-4
        assert row["weight_version"] == row["step"] and row["groups/equal"] == 0 < row["sampling/equal"]
    assert not list((run.path / "endpoints").glob("*"))
    consumed = 0
    for row in run.rows[1:]:  # the prompts behind each other; what a step consumed is what it sampled
        ids = [s["sample_id"] for s in run.samples(row["step"])]
        assert len(set(ids)) == 16 and ids == sorted(ids)
        assert 2 * consumed <= ids[0] and ids[-1] == 2 * (consumed + row["sampling/prompts"]) - 1
        consumed += row["sampling/prompts"]
        assert row["prompts_consumed"] == consumed
    samples = run.samples(1)
    assert all(a["score"] != b["score"] for a, b in zip(samples[::2], samples[1::2]))
    for a, b in zip(samples[::2], samples[1::2]):  # of two, the better one is one deviation above their mean
        assert a["advantage_mean"] == pytest.approx(1.0 if a["score"] > b["score"] else -1.0, abs=1e-4)
        assert a["advantage_min"] == a["advantage_max"] == pytest.approx(-b["advantage_min"], abs=1e-4)
    assert all(a["prompt"] == b["prompt"] for a, b in zip(samples[::2], samples[1::2]))
    assert any(a["response_ids"] != b["response_ids"] for a, b in zip(samples[::2], samples[1::2]))
    assert {s["origin"].partition(":")[0] for s in samples} == {f"{tmp_path}/train.jsonl"}
    for sample in samples:  # the reward, computed here
        line = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[int(sample["origin"].split(":")[1]) - 1])
        share = sum(c in "aeiou0123456789" for c in sample["response"]) / 8
        assert sample["score"] == pytest.approx(share + line["bonus"])


def test_a_reward_model_scores(jobs: Launcher, tiny_reward_model):
    """reward.kind=model in the critic job; as a part of a reward in a job of its own on two ranks, whose actor has no critic at all."""
    scored = ("reward.format_credit=0", "reward.kind=model", f"reward.checkpoint={tiny_reward_model}")
    settings = ("reward.kind=model", f"reward.checkpoint={tiny_reward_model}", "run.max_steps=2", "validation.every=0")
    jobs.alone("scored", *settings, critic=scored).finish()
    assert_scores_of(tiny_reward_model.parent / "hf", jobs.run("scored").samples(1))

    budget = ("reward.micro_batch_tokens=40", "serving.metrics_port=0")
    parts = "[{kind: model, weight: 0.5, name: taste}, {kind: regex, pattern: '[a-p]', weight: 2.0}]"
    mixed = ("reward.kind=parts", f"reward.parts={parts}")
    scoring = jobs.start("serve_reward_model.py", *jobs.both("apart"), *scored, *budget, *mixed, ranks=2)
    free = (
        "ppo.advantage=reinforce_baseline",
        "ppo.critic_warmup_steps=0",
    )
    budget = ("ppo.micro_batch_tokens=50", "ppo.reward_scale=batch")
    jobs.actor("apart", *settings, *free, *budget, *mixed, "reward.place=server").finish()
    scoring.finish()  # told that the run is complete
    samples = jobs.run("apart").samples(1)
    found = [float(bool(re.search("[a-p]", s["response"]))) for s in samples]
    assert [s["parts"]["regex"] for s in samples] == found and set(found) == {0.0, 1.0}
    assert [s["score"] for s in samples] == pytest.approx(
        [0.5 * s["parts"]["taste"] + 2 * s["parts"]["regex"] for s in samples]
    )
    assert_scores_of(tiny_reward_model.parent / "hf", [{**s, "score": s["parts"]["taste"]} for s in samples])
    assert not (jobs.run("apart").path / "endpoints" / "reward.json").exists() and scoring.leftovers() == []


@pytest.mark.faults
def test_three_jobs(jobs: Launcher, tiny_reward_model):
    """By the launcher: values of the critic job, scores of the reward job."""
    scored = ("reward.place=server", "reward.kind=model", f"reward.checkpoint={tiny_reward_model}")
    command = [sys.executable, str(REPO / "launch/local/ppo.py"), "--reward-ranks", "1"]
    for job in ("critic", "reward"):
        command += [f"--{job}-log", str(jobs.runs / f"{job}.out")]
    command += ["--actor", *ACTOR_SETTINGS, "--critic", *CRITIC_SETTINGS, "reward.format_credit=0"]
    command += ["--both", *jobs.both("three"), *scored]
    done = subprocess.run(command, env=environment(), cwd="/", capture_output=True, text=True, timeout=DEADLINE)
    said = "\n".join((jobs.runs / f"{job}.out").read_text() for job in ("critic", "reward"))
    assert done.returncode == 0, f"{done.stderr}\n{said}"
    run = jobs.run("three")
    assert_scores_of(tiny_reward_model.parent / "hf", run.samples(1))
    assert any(s["value_first"] != 0 for s in run.samples(3))
    assert list((run.path / "endpoints").glob("*.json")) == []


def assert_scores_of(folder: Path, samples: list[dict]) -> None:
    """Every recorded score is Hugging Face's of the same tokens."""
    import torch
    from transformers import LlamaForSequenceClassification

    model = LlamaForSequenceClassification.from_pretrained(folder).eval()
    assert len(samples) == 8
    for sample in samples:
        tokens = [byte_token(c) for c in sample["prompt"].encode()] + sample["response_ids"]
        with torch.no_grad():
            hidden = model.model(torch.tensor([tokens])).last_hidden_state[0, -1]
            want = model.score(hidden).item()
        assert sample["score"] == pytest.approx(want, abs=1e-5)


def byte_token(byte: int) -> int:
    """The tiny tokenizer's id of an ASCII byte: its alphabet in order of characters, after the special tokens."""
    from tokenizers import pre_tokenizers

    from tests.tiny import SPECIAL

    shown = chr(byte) if byte != 0x20 else chr(0x120)
    return len(SPECIAL) + sorted(pre_tokenizers.ByteLevel.alphabet()).index(shown)
