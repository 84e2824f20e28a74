"""What the job tests rely on: the warm process's messages, played here."""

import json
import queue
import threading
from types import SimpleNamespace

from tests.jobs.harness import ForkServer


def test_a_pid_that_is_given_again_has_no_exit_code_yet():
    server = ForkServer.__new__(ForkServer)
    told = [{"started": 7}, {"ended": 7, "code": -15}, {"started": 7}, {"started": 8}, {"ended": 8, "code": 0}]
    server._process = SimpleNamespace(stdout=[json.dumps(message).encode() for message in told])
    server._started, server._codes, server._changed = queue.Queue(), {}, threading.Condition()
    server._read()
    assert (server.code(7), server.code(8)) == (None, 0)
