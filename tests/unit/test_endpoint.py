"""Finding the other job and giving up on it: endpoint files, tokens, binds, and clients whose server is absent, silent or cut off.

Contract: whatever is wrong ends in one sentence that names the file or the address and the setting, within the deadline."""

import json
import pickle
import re
import signal
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aligner.config.groups import CriticClientConfig
from aligner.runtime.errors import ContractError, Stopped
from aligner.runtime.exit_codes import ExitCode
from aligner.runtime.signals import StopSignals
from aligner.serving import access, link, protocol, watchdog
from aligner.serving.client import RemoteCritic
from aligner.serving.endpoint import (
    EndpointInfo,
    parse_address,
    read_endpoint,
    remove_endpoint,
    wait_for,
    write_endpoint,
)
from aligner.serving.hello import Contract
from aligner.serving.kserve import Connection
from aligner.serving.protocol import CONTROL, RequestFailed
from aligner.serving.remote_reward import RemoteReward
from aligner.serving.status import main as status_main

INFO = EndpointInfo(host="node7", port=8000, pid=12, run_id="r", grid="dp2", started=1.5, job_id="99", token_file="/x")
CONTRACT = Contract("f" * 64, "c" * 64, vocab_size=100, max_length=256, reward_kind="task", run_id="r")


# ---- files


def test_endpoint_files_are_whole_and_ours(tmp_path):
    file = tmp_path / "endpoints" / "critic.json"
    assert read_endpoint(file) is None
    write_endpoint(file, INFO)
    assert read_endpoint(file) == INFO
    assert [p.name for p in file.parent.iterdir()] == ["critic.json"]
    successor = replace(INFO, pid=13)
    write_endpoint(file, successor)
    remove_endpoint(file, INFO)
    assert read_endpoint(file) == successor
    remove_endpoint(file, successor)
    assert read_endpoint(file) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"host": "a"}'])
def test_other_files_are_no_endpoint_files(tmp_path, text):
    (tmp_path / "critic.json").write_text(text)
    with pytest.raises(ValueError, match=r"critic\.json is not an endpoint file .*; remove it"):
        read_endpoint(tmp_path / "critic.json")


def test_fields_of_a_later_release_are_ignored(tmp_path):
    (tmp_path / "critic.json").write_text(json.dumps({**INFO.__dict__, "later": 1}))
    assert read_endpoint(tmp_path / "critic.json") == INFO


@pytest.mark.parametrize("text", ["host", "host:", ":80", "host:0", "host:65536", "host:http"])
def test_addresses(text):
    assert parse_address("a.b:81", key="k") == ("a.b", 81)
    with pytest.raises(ValueError, match=f"^critic.endpoint={text} is not host:port$"):
        parse_address(text, key="critic.endpoint")


def test_tokens(tmp_path):
    file = tmp_path / "endpoints" / "critic.token"
    token = access.make_token(file)
    assert len(token) >= 40 and access.make_token(file) == token
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    with pytest.raises(ValueError, match="mode 0640, readable by others; chmod 600"):
        access.read_token(file)
    file.chmod(0o600)
    file.write_text("short\n")
    with pytest.raises(ValueError, match="holds 5 characters"):
        access.read_token(file)
    with pytest.raises(ValueError, match="No such file"):
        access.read_token(tmp_path / "absent")


def test_who_is_allowed():
    assert access.allowed(None, None) and access.headers(None) == {}
    sent = access.headers("t" * 40)
    assert access.allowed("t" * 40, sent)
    for parameters in (
        None,
        {},
        {access.TOKEN_HEADER: "t"},
        {access.TOKEN_HEADER: 1},
        {access.GATE_HEADER: sent[access.GATE_HEADER]},
    ):
        assert not access.allowed("t" * 40, parameters)
    assert "t" * 8 not in sent[access.GATE_HEADER]  # what Triton's command line shows


def test_binds(monkeypatch):
    assert access.resolve_bind("auto", {}) == "127.0.0.1"
    assert access.resolve_bind("auto", {"SLURM_JOB_ID": "1"}) == "127.0.0.1"  # a batch script outside a step
    assert access.resolve_bind("localhost", {}) == "127.0.0.1"
    assert access.resolve_bind("lo", {"SLURM_STEP_ID": "0"}) == "127.0.0.1"  # a network interface
    monkeypatch.setattr(access, "node_address", lambda: "10.0.0.7")
    assert access.resolve_bind("auto", {"SLURM_STEP_ID": "0"}) == "10.0.0.7"
    assert access.is_loopback("127.0.0.2") and not access.is_loopback("0.0.0.0")
    with pytest.raises(ValueError, match="serving.bind=no-such-host.invalid is no address"):
        access.resolve_bind("no-such-host.invalid", {})
    with pytest.raises(ValueError, match="serving.bind=192.0.2.1 is no address of this host"):
        access.resolve_bind("192.0.2.1", {})  # reserved for documentation


# ---- waiting


def test_waiting_says_so_at_once_and_ends():
    said, attempts = [], []

    def attempt(info):
        attempts.append(info)
        if len(attempts) < 3:
            raise ConnectionError("connection refused")

    found = iter([None, INFO, INFO, INFO])
    assert (
        wait_for(lambda: next(found), attempt, timeout=30, say=said.append, what="the job", advice="start it") == INFO
    )
    assert said == ["waiting for it: the job is not there; giving up in 30 s"]


def test_waiting_gives_up_with_the_last_state():
    def attempt(info):
        raise ConnectionError("connection refused")

    with pytest.raises(TimeoutError) as error:
        wait_for(lambda: INFO, attempt, timeout=0.1, say=lambda text: None, what="the job", advice="start it")
    assert str(error.value) == "the job at node7:8000 does not answer (connection refused) after 0 s; start it"


# ---- servers that misbehave


@contextmanager
def misbehaving(answer):
    """A TCP server on loopback; answer(connection, request bytes) is all that it does. Yields its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def serve():
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=handle, args=(connection,), daemon=True).start()

    def handle(connection):
        with connection:
            data = connection.recv(65536)
            length = int(re.search(rb"Content-Length: (\d+)|$", data)[1] or 0)
            while data and len(data) < data.index(b"\r\n\r\n") + 4 + length:
                data += connection.recv(65536)
            answer(connection, data)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@contextmanager
def nobody():
    """A port on loopback at which nobody listens, and nobody else can meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def http(body: bytes, status="200 OK", extra="") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{extra}\r\n".encode() + body


REQUEST = {"request": protocol.text_array("{}")}
BAD_ANSWERS = {
    "closed": (b"", ConnectionError, "the server closed the connection"),
    "not http": (b"SSH-2.0-OpenSSH\r\n", ConnectionError, "SSH"),
    "cut": (http(b"abc")[:-1], ConnectionError, "the server closed the connection"),
    "another server": (http(b"<html>hello</html>"), ConnectionError, "not one of an aligner control endpoint"),
    "an error": (http(b'{"error": "wrong shape"}', "400 Bad"), RequestFailed, "status 400: wrong shape"),
    "starting": (http(b'{"error": "unknown model"}', "400 Bad"), ConnectionError, "unknown model"),
    "a dead backend": (http(b'{"error": "stub is not healthy"}', "500 Internal"), ConnectionError, "not healthy"),
    "no token": (http(b"", "403 Forbidden"), RequestFailed, "without the right token"),
    "wrong sizes": (
        http(b'{"outputs": []}abc', extra="Inference-Header-Content-Length: 15\r\n"),
        ConnectionError,
        "not one of an aligner control endpoint",
    ),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_bad_answers_become_one_sentence(name):
    data, kind, sentence = BAD_ANSWERS[name]
    with misbehaving(lambda c, _: c.sendall(data)) as port, pytest.raises(kind, match=sentence) as error:
        Connection("127.0.0.1", port, timeout=10).infer(CONTROL, REQUEST, {})
    assert "\n" not in str(error.value)


def test_silence_ends_at_the_timeout():
    with misbehaving(lambda c, _: time.sleep(5)) as port, pytest.raises(TimeoutError, match="no answer within 0 s"):
        Connection("127.0.0.1", port, timeout=0.2).infer(CONTROL, REQUEST, {})


def test_another_thread_can_cut_a_call():
    with misbehaving(lambda c, _: time.sleep(30)) as port:
        connection = Connection("127.0.0.1", port, timeout=60)
        threading.Timer(0.3, connection.cut, ["the critic job is gone"]).start()
        with pytest.raises(ConnectionError, match="^the critic job is gone$"):
            connection.infer(CONTROL, REQUEST, {})


def outputs(endpoint, arrays) -> bytes:
    """A server's answer, in the form of the specification."""
    from aligner.serving.kserve import DATATYPES, pack

    blobs = [pack(f, arrays[f.name]) for f in endpoint.outputs]
    head = json.dumps(
        {
            "outputs": [
                {
                    "name": f.name,
                    "shape": list(arrays[f.name].shape),
                    "datatype": DATATYPES[f.dtype],
                    "parameters": {"binary_data_size": len(b)},
                }
                for f, b in zip(endpoint.outputs, blobs)
            ]
        }
    ).encode()
    return http(head + b"".join(blobs), extra=f"Inference-Header-Content-Length: {len(head)}\r\n")


def fake_critic(on_other):
    """Ready, says hello, and leaves every other request to on_other."""

    def answer(connection, data):
        if b"/v2/health/ready" in data:
            connection.sendall(http(b""))
        elif b'"hello"' in data:
            reply = {"contract": {**CONTRACT.as_dict(), "step": 0}, "warnings": [], "max_rows": 8}
            reply |= {"draining": False, "instance": "i1", "weights_undefined": None}
            empty = protocol.text_array("")
            connection.sendall(outputs(CONTROL, {"reply": protocol.text_array(json.dumps(reply)), "error": empty}))
        else:
            on_other(connection)

    return answer


def hanging():
    """An event, and what to do on a request: set it, and answer nothing for 100 s."""
    arrived = threading.Event()

    def hang(connection):
        arrived.set()
        time.sleep(100)

    return arrived, hang


def connect(port: int, **settings) -> RemoteCritic:
    config = CriticClientConfig(endpoint=f"127.0.0.1:{port}", **settings)
    return RemoteCritic(CONTRACT, config, endpoint_file="unused", say=lambda text: None)


def test_a_stop_ends_the_wait_for_a_job_that_is_not_there(tmp_path):
    """Not after the minutes that were left: a scheduler kills what does not end."""
    stop, began = StopSignals(), time.monotonic()
    threading.Timer(0.3, stop._note, [signal.SIGTERM, None]).start()
    how = {"endpoint_file": tmp_path / "critic.json", "say": lambda text: None, "stop": stop}
    with pytest.raises(Stopped, match="^told to stop by SIGTERM while waiting for the critic job; ") as error:
        RemoteCritic(CONTRACT, CriticClientConfig(connect_timeout=600), **how)
    assert error.value.exit_code is ExitCode.REQUEUE and time.monotonic() - began < 60
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)  # the other ranks get it


def test_a_stop_ends_the_wait_for_a_job_that_was_lost():
    with misbehaving(fake_critic(lambda c: None)) as port:
        config = CriticClientConfig(endpoint=f"127.0.0.1:{port}", reconnect_timeout=600)
        stop = StopSignals()
        critic = RemoteCritic(CONTRACT, config, endpoint_file="unused", say=lambda text: None, stop=stop)
    asked = critic.prepare_save(1, Path("folder"))
    threading.Timer(0.3, stop.ask).start()
    with pytest.raises(Stopped, match="told to stop by run.max_time while waiting for the critic job"):
        asked.result(60)
    critic.close()


def test_a_reward_job_is_spoken_of_as_one(tmp_path):
    config = CriticClientConfig(endpoint="127.0.0.1:9", connect_timeout=0.3)
    with pytest.raises(ContractError) as error:
        RemoteReward(CONTRACT, config, endpoint_file=tmp_path / "reward.json", keeps_alive=False, say=lambda text: None)
    said = str(error.value)
    assert said.startswith("the reward job at 127.0.0.1:9 does not answer") and "critic" not in said
    assert "start serve_reward_model.py there, or correct reward.endpoint=127.0.0.1:9" in said


def test_a_request_has_a_deadline():
    with misbehaving(fake_critic(lambda c: time.sleep(5))) as port:
        critic = connect(port, request_timeout=0.3, reconnect_timeout=0.0)
        assert critic.critic_contract.step == 0 and critic.max_rows == 8
        with pytest.raises(
            RequestFailed, match=rf"^control at 127.0.0.1:{port}: no answer within 0 s \(critic.request_timeout\)$"
        ):
            critic.commit(1)
        critic.close()


def test_the_watchdog_ends_calls_to_a_dead_server(monkeypatch):
    monkeypatch.setattr(watchdog, "PROBE_EVERY", 0.05)
    arrived, hang = hanging()
    with misbehaving(fake_critic(hang)) as port:
        critic = connect(port, reconnect_timeout=0.0)
        future = critic.prepare_save(1, "folder")
        assert arrived.wait(60)
        time.sleep(0.3)  # in which probes succeed
        assert not future.done()
    # the listener is gone, but the call's own connection stays open and silent
    with pytest.raises(
        RequestFailed, match="the critic job is gone: 3 readiness probes in a row failed .connection refused."
    ):
        future.result(30)
    critic.close()


def test_a_server_of_another_version_is_refused():
    def answer(connection, data):
        reply = {"contract": {**CONTRACT.as_dict(), "protocol": 3}, "draining": False}
        arrays = {"reply": protocol.text_array(json.dumps(reply)), "error": protocol.text_array("")}
        connection.sendall(http(b"") if b"ready" in data else outputs(CONTROL, arrays))

    with (
        misbehaving(answer) as port,
        pytest.raises(ContractError, match="the critic job version 3.*the actor job is older"),
    ):
        connect(port)


def test_the_refusal_of_a_critic_of_version_1_is_understood():
    """It knows neither kinds of failures nor instances: an empty reply, and its sentence."""
    sentence = "the two jobs do not fit together: the actor job speaks protocol version 2, the critic job version 1"

    def answer(connection, data):
        arrays = {"reply": protocol.text_array(""), "error": protocol.text_array(sentence)}
        connection.sendall(http(b"") if b"ready" in data else outputs(CONTROL, arrays))

    with misbehaving(answer) as port, pytest.raises(ContractError, match=f"refuses: {sentence}"):
        connect(port)


def test_absent_critic_is_named_within_its_deadline():
    with (
        nobody() as port,
        pytest.raises(
            ContractError,
            match=rf"critic job at 127.0.0.1:{port} .connection refused|does not answer.*critic.endpoint=127",
        ),
    ):
        connect(port, connect_timeout=0.5)
    assert link.EXPLICIT_TIMEOUT == 10.0


def test_closing_ends_what_is_in_flight():
    arrived, hang = hanging()
    with misbehaving(fake_critic(hang)) as port:
        critic = connect(port)
        future = critic.prepare_save(1, "folder")
        assert arrived.wait(60)
        critic.close()
        with pytest.raises(RequestFailed, match="the actor closed the connection"):
            future.result(30)


def test_what_a_thread_begins_after_the_end_is_cut():
    watch, late = watchdog.Watchdog(threading.Event()), Connection("127.0.0.1", 9, timeout=1.0)
    watch.end("the actor closed the connection")
    with watch.over(late):
        assert late.cut_reason == "the actor closed the connection"


def test_proxies_are_ignored(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with misbehaving(fake_critic(lambda c: None)) as port:
        connect(port).close()


def test_the_token_beside_the_endpoint_file_is_sent(tmp_path):
    """critic.endpoint names no token file: the run folder's own is used."""
    token = access.make_token(tmp_path / "critic.token")
    seen = []
    critic = fake_critic(lambda c: None)

    def answer(connection, data):
        seen.append(data)
        critic(connection, data)

    with misbehaving(answer) as port:
        config = CriticClientConfig(endpoint=f"127.0.0.1:{port}")
        RemoteCritic(CONTRACT, config, endpoint_file=tmp_path / "critic.json", say=lambda text: None).close()
    assert any(f"{access.TOKEN_HEADER}: {token}".encode() in data for data in seen)


def test_status_of_nobody(capsys, tmp_path):
    with nobody() as port:
        assert status_main([f"127.0.0.1:{port}"]) == 1
    assert capsys.readouterr().err == f"error: no status from 127.0.0.1:{port}: connection refused\n"
    assert status_main(["nonsense"]) == 1


def test_unused_ports_and_taken_ones():
    from aligner.serving import triton_server

    port = triton_server.free_port("127.0.0.1")
    triton_server.check_port_free("127.0.0.1", port, key="serving.port")
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ValueError, match=f"serving.port={port} cannot be bound"),
    ):
        triton_server.check_port_free("127.0.0.1", port, key="serving.port")
    assert np.iinfo(np.uint16).max >= port > 0
