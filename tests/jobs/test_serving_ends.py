"""How the served critic is missed and how it ends: absent, told to stop in the middle of a request, ranks that cannot go on.

Contract: every wait ends within its deadline with one sentence; every process ends by itself; a token is asked for where there is one."""

import contextlib
import re
import signal
from pathlib import Path

import psutil
import pytest

from aligner.config.groups import CriticClientConfig
from aligner.runtime.errors import ContractError
from aligner.serving import access, protocol
from aligner.serving.client import RemoteCritic
from aligner.serving.endpoint import read_endpoint
from aligner.serving.kserve import Connection
from aligner.serving.protocol import INFER, RequestFailed
from tests.jobs.harness import free_port
from tests.jobs.serving_job import (
    CONTRACT,
    STUCK,
    Job,
    check_answer,
    make_rows,
)

# ---- no critic


def test_absent_critic_at_an_explicit_endpoint(tmp_path):
    port = free_port()
    config = CriticClientConfig(endpoint=f"127.0.0.1:{port}", connect_timeout=2.0)
    said = []
    with pytest.raises(ContractError) as error:
        RemoteCritic(CONTRACT, config, endpoint_file=tmp_path / "critic.json", say=said.append)
    assert (
        f"127.0.0.1:{port}" in str(error.value)
        and "critic.endpoint" in str(error.value)
        and "connection refused" in str(error.value)
    )
    assert said and re.search("giving up in [0-2] s", said[0])


def test_absent_endpoint_file(tmp_path):
    said = []
    with pytest.raises(
        ContractError, match=f"{tmp_path}/critic.json is not there after 1 s.*run.name.*critic.connect_timeout"
    ):
        RemoteCritic(
            CONTRACT, CriticClientConfig(connect_timeout=1.0), endpoint_file=tmp_path / "critic.json", say=said.append
        )
    assert len(said) == 1


# ---- ends


def test_sigterm_during_a_request_then_token(tmp_path):
    """A job with a token; told to end while a request runs, it answers that one, refuses the next, and leaves nothing behind."""
    job = Job(tmp_path / "run", token_file=str(tmp_path / "token"), deterministic=True)
    try:
        client = job.client(trains=True)
        assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
        check_answer(make_rows(1), client.infer(make_rows(1)).result(60))
        _check_token_is_asked_for(job, (tmp_path / "token").read_text().strip())
        running = job.sleeping(client)
        # As Slurm does: to every process of a step. What serves the request that runs must outlive it.
        helpers = [p for rank in job.ranks for p in psutil.Process(rank.pid).children(recursive=True)]
        for p in [*helpers, *job.ranks]:
            for number in (signal.SIGTERM, signal.SIGUSR1):
                p.send_signal(number)
        assert len(helpers) > 6 and running.result(60).values.shape == (3, 64)
        with pytest.raises(RequestFailed):
            client.infer(make_rows(2)).result(60)
        assert job.wait() == [0, 0]
        assert "ended: it was told to stop by a signal" in job.output(0)
        assert not job.endpoint_file.exists()
        client.close()
    finally:
        job.end()


def _check_token_is_asked_for(job: Job, token: str) -> None:
    info = read_endpoint(job.endpoint_file)
    arrays = protocol.encode_rows(make_rows(1))
    right = access.headers(token)
    for headers in (
        {},
        access.headers("x" * 43),
        {access.GATE_HEADER: right[access.GATE_HEADER]},
        {access.TOKEN_HEADER: token},
    ):
        with pytest.raises(RequestFailed, match="without the right token"):
            protocol.decode_answer(Connection(info.host, info.port, timeout=30).infer(INFER, arrays, headers), width=64)
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            assert token not in command.read_text(errors="replace")


def test_ranks_stuck_in_a_collective_end_the_job(tmp_path):
    """One rank raised, the other waits for it inside a collective: the actor gets the sentence, and both processes end."""
    job = Job(tmp_path / "run")
    try:
        client = job.client()
        with pytest.raises(
            RequestFailed, match="rank 1: ValueError: rank 1 left alone; the other ranks did not come out"
        ):
            client.infer(make_rows(1, r0=STUCK)).result(60)
        assert all(code != 0 for code in job.wait())
        client.close()
    finally:
        job.end()
