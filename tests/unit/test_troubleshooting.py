"""docs/troubleshooting.md quotes what the code says: each message is made here, or by a test of whole jobs that the page names."""

import ast
import re
import socket
import sysconfig
import time
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aligner.algorithms import updates
from aligner.algorithms.generation import Pending
from aligner.algorithms.records import DriftAlarm
from aligner.config.groups import CriticClientConfig, ParallelConfig, RunConfig, ServingConfig
from aligner.config.jobs import ActorConfig
from aligner.config.load import load
from aligner.data.batch import Score
from aligner.data.jsonl import read_jsonl
from aligner.models import digests
from aligner.models.model_config import read_model_config
from aligner.parallel.environment import gloo_problem
from aligner.parallel.placement import tensor_problems
from aligner.parallel.probe import Figure, slow_warning
from aligner.parallel.startup import Launch, _join, detect_launch
from aligner.parallel.topology import grid_problems
from aligner.rewards.verifiers import TaskVerifier
from aligner.runtime.errors import disk_full_is_named
from aligner.runtime.run_folder import RunFolder
from aligner.runtime.signals import StopSignals
from aligner.serving import hello, triton_server
from aligner.serving.client import RemoteCritic
from aligner.serving.control import Control
from aligner.serving.ending import Ending
from aligner.serving.endpoint import EndpointInfo, write_endpoint
from aligner.serving.link import CRITIC, Link
from aligner.serving.protocol import JobLost

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
COMMENT = re.compile(r'<!-- test: (\S+)::(\w+) "(.+)" -->')


def entries() -> dict[str, str]:
    """Heading -> the text below it."""
    parts = re.split(r"^### (.+)$", re.sub(r"^## .+$", "", PAGE, flags=re.M), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


ENTRIES = entries()


def quoted(text: str) -> list[str]:
    """The messages of an entry."""
    return [line.removeprefix("> ") for line in text.splitlines() if line.startswith("> ")]


def pattern(message: str) -> str:
    """… stands for anything but nothing."""
    return ".+?".join(map(re.escape, message.split("…")))


def raised(act, *args, **how) -> str:
    with pytest.raises(Exception) as error:
        act(*args, **how)
    return str(error.value)


def logged(caplog, act) -> str:
    caplog.clear()
    act()
    return caplog.records[-1].getMessage()


OURS = hello.Contract("a" * 64, "c" * 64, vocab_size=8, max_length=9, reward_kind="task", run_id="mine", train_rows=6)


def contract_problem(**other) -> str:
    theirs = {**vars(OURS), "train_rows": None, "mini_batch_size": 3, "step": 0, **other}
    (problem,) = hello.problems(OURS, hello.Contract(**theirs))
    return problem


def waiting(tmp_path, *, endpoint=None, stale=False) -> tuple[str, str]:
    """What a client says at once, and what it ends with, where no critic job is."""
    said, file = [], tmp_path / "critic.json"
    with socket.socket() as closed:  # bound, so that nobody else can listen there
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        if stale:
            write_endpoint(file, EndpointInfo("127.0.0.1", port, pid=1, run_id="mine", grid="", started=0.0))
        config = CriticClientConfig(endpoint=f"127.0.0.1:{port}" if endpoint else None, connect_timeout=0.3)
        return raised(RemoteCritic, OURS, config, endpoint_file=file, say=said.append), said[0]


def folders(tmp_path) -> str:
    control = SimpleNamespace(_run_folder=tmp_path)
    request = {"nonce": {"name": "0" * 32, "text": "x", "folder": "/elsewhere"}}
    return Control._folder_problems(control, request)[0]


def taken_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        return raised(triton_server.check_port_free, "127.0.0.1", taken.getsockname()[1], key="serving.port")


def second_lock(tmp_path) -> str:
    folder = RunFolder.of(RunConfig(name="mine", dir=str(tmp_path)))
    lock = folder.lock("actor")
    said = raised(folder.lock, "actor")
    lock.release()
    return said


def not_met() -> str:
    launch = Launch(1, 2, local_rank=1, local_world_size=2, master_addr="127.0.0.1", master_port=9, kind="slurm")
    return raised(_join, launch, timedelta(seconds=0.5))


def unresolved() -> str:
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    nodes = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "n[1-2]"}
    return raised(detect_launch, step | nodes, can_resolve=lambda host: False)


def without_libpython(monkeypatch) -> str:
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: 0)
    return raised(triton_server.check_python)


def full_disk(tmp_path) -> str:
    def write():
        with disk_full_is_named(tmp_path, "the checkpoint of step 3"):
            raise OSError(28, "No space left on device")

    return raised(write)


def lost() -> str:
    said = []
    link = Link(OURS, CriticClientConfig(endpoint="127.0.0.1:9"), endpoint_file=Path("x"), token_file=None,
                watch=SimpleNamespace(info=None), say=said.append, proves_folder=False, peer=CRITIC)  # fmt: skip
    raised(link.reconnect, JobLost("infer at node7:4000: connection refused"), timeout=0.1, then=print)
    return said[0]


def idle() -> str:
    reception = SimpleNamespace(last_spoken=time.monotonic() - 60)
    loop, control = SimpleNamespace(last_call=0.0), SimpleNamespace(stop_requested=False, commits=0)
    return Ending(reception, control, loop, None, lambda: False, ServingConfig(idle_timeout=30.0))()


def stopped() -> str:
    stop = StopSignals()
    stop.ask()
    return raised(stop.end_wait, "waiting for the critic job")


def drift(caplog) -> str:
    metrics = {"drift/mean": 0.7, "drift/max": 3.0, "refit/staleness": 0.0}
    return logged(caplog, lambda: DriftAlarm(0.5).check(4, metrics))


def failed_score() -> str:
    pending, scored = Pending(), Future()
    scored.set_result([Score(0.0, error="ZeroDivisionError: division by zero")])
    pending.add([SimpleNamespace(sample_id=17, finish_reason="stop")], None, scored)
    return raised(pending.local, 5.0)


def evaluates() -> str:
    verifier = TaskVerifier(answer="task", format_credit=0.0, allow_eval=False)
    return raised(verifier.prepare, {"task": "countdown", "config": {}, "seed": 1, "index": 0})


def slow() -> str:
    groups = [((0, 1), 1), ((2, 3), 9), ((4, 5), 1)]
    figures = [Figure("tensor", ranks, 1.0, float(seconds)) for ranks, seconds in groups]
    figures += [Figure("data", ranks, 1.0, float(seconds)) for ranks, seconds in [((0, 2, 4), 1), ((1, 3, 5), 9)]]
    return slow_warning(figures, 10**6, ["n1"] * 3 + ["n2"] * 3)


def skipped(caplog) -> str:
    batch, update = SimpleNamespace(tokens=torch.zeros(1)), {"empty": 0.0, "skipped": 1.0}
    keep = {"step": 5, "keep_batch": lambda name, tensors: f"; the batch is in {name}.pt"}
    return logged(caplog, lambda: updates.train_in_turn([batch], lambda b: update, **keep))


def short_limit() -> str:
    overrides = ["model.checkpoint=x", "data.task=chain_sum", "run.max_time=30"]
    return raised(load, ActorConfig, overrides)


def no_json(tmp_path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{\n')
    return raised(read_jsonl, file, lambda value, where: value, what="prompts", needs="a prompt")


def misfit() -> str:
    shape = SimpleNamespace(
        num_attention_heads=8, num_query_groups=2, ffn_hidden_size=8, padded_vocab_size=128, num_layers=2
    )
    return grid_problems(ParallelConfig(tensor=4), 4, shape)[0]


def damaged(tmp_path, monkeypatch) -> str:
    """On one rank: what needs a process group is left out."""
    monkeypatch.setattr(digests, "gather_objects", lambda found, group: [found])
    monkeypatch.setattr(digests, "agree", lambda error, topology: None)
    alone = SimpleNamespace(rank=0, world_size=1, cpu_group=None, is_reporter=True)
    (tmp_path / "weights").write_text("saved")
    digests.write_digests(tmp_path, alone, known={})
    (tmp_path / "weights").write_text("saveD")
    return raised(digests.check_digests, tmp_path, alone)


MAKE = {
    "The actor waits for its critic": lambda tmp_path: waiting(tmp_path)[1],
    "Nobody answers at the given address": lambda tmp_path: waiting(tmp_path, endpoint=True)[0],
    "The endpoint file is stale": lambda tmp_path: waiting(tmp_path, stale=True)[0],
    "The jobs see different run folders": folders,
    "Another run's critic": lambda: contract_problem(run_id="theirs"),
    "The tokenizers differ": lambda: contract_problem(tokenizer_fingerprint="b" * 64),
    "The critic's mini-batch does not divide the step": lambda: contract_problem(mini_batch_size=4),
    "The port is taken": taken_port,
    "The run is held by another job": second_lock,
    "The grid does not fit the model": misfit,
    "A tensor-parallel group is on two nodes": lambda: tensor_problems(["a"] * 3 + ["b"], 2)[0],
    "The ranks do not meet": not_met,
    "A node's name does not resolve": unresolved,
    "An interface that is not there": lambda: (
        gloo_problem({"GLOO_SOCKET_IFNAME": "x"}, ["lo"]) + ": correct or unset it"
    ),
    "This Python cannot serve": without_libpython,
    "A Hugging Face folder where a converted checkpoint belongs": lambda tmp_path: raised(read_model_config, tmp_path),
    "A line of a prompt file is refused": no_json,
    "The critic job was lost": lost,
    "A node is held by a critic that nobody uses": idle,
    "Stopped while waiting": stopped,
    "The time limit is too short": short_limit,
    "The disk is full": full_disk,
    "A checkpoint is damaged": damaged,
    "Engine and trainer drift apart": drift,
    "A score failed": failed_score,
    "A task is refused because its scorer evaluates text": evaluates,
    "One rank or group is slow": slow,
    "Updates are skipped": skipped,
}


def test_every_entry_is_tested_one_way_or_the_other():
    elsewhere = {heading for heading, text in ENTRIES.items() if COMMENT.search(text)}
    assert elsewhere | MAKE.keys() == ENTRIES.keys() and not elsewhere & MAKE.keys()
    assert all(quoted(ENTRIES[heading]) for heading in MAKE)
    assert 15 <= len(ENTRIES) <= 40


@pytest.mark.parametrize("heading", MAKE)
def test_the_code_says_it(heading, tmp_path, caplog, monkeypatch):
    given = {"tmp_path": tmp_path, "caplog": caplog, "monkeypatch": monkeypatch}
    wanted = MAKE[heading].__code__.co_varnames[: MAKE[heading].__code__.co_argcount]
    said = MAKE[heading](**{name: given[name] for name in wanted})
    (message,) = quoted(ENTRIES[heading])
    assert re.search(pattern(message), said, flags=re.S), said


@pytest.mark.parametrize("heading", [heading for heading, text in ENTRIES.items() if COMMENT.search(text)])
def test_the_named_test_says_it(heading):
    """The test exists and holds the words, which are in the message too; the message's words stand in the code."""
    text = ENTRIES[heading]
    path, name, words = COMMENT.search(text).groups()
    source = (ROOT / path).read_text()
    (function,) = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == name]
    assert words in ast.get_source_segment(source, function)
    code = "\n".join(file.read_text() for file in (ROOT / "aligner").rglob("*.py"))
    for message in quoted(text):
        assert words in message
        for part in [part.strip(" ;,.()") for part in message.removeprefix("error: ").split("…")]:
            assert part.split(" SIGKILL")[0] in code, part


def test_settings_that_the_page_names_exist():
    from aligner.config import keys
    from aligner.config.jobs import JOBS

    known = {key for job in JOBS.values() for key in keys.docs(job)}
    groups = {key.split(".")[0] for key in known}
    named = set(re.findall(r"`(\w+\.\w+)(?:=[^`]*)?`", PAGE))
    assert {
        name for name in named if name.split(".")[0] in groups and not name.endswith((".json", ".py", ".yaml"))
    } <= known
