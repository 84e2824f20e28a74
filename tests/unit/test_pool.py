"""The pool's promise: a score or an error for every response, whatever the user's function does, and no process left behind."""

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from aligner.config.reward import RewardConfig, RewardKind, RewardPart
from aligner.data.batch import ScoreRow
from aligner.rewards.pool import WorkerPool, WorkerProcess
from aligner.rewards.source import build_reward, verifier_spec

FUNCTIONS = '''
import os, subprocess, sys, time

def act(response, sample):
    """Does what the response says."""
    if response == "hang": time.sleep(1000)
    if response == "spin":
        while True: pass
    if response == "exit": os._exit(3)
    if response == "sysexit": sys.exit(4)
    if response == "kill": os.kill(os.getpid(), 9)
    if response == "raise": raise KeyError("mine")
    if response == "recurse": act(response, sample) + 1
    if response == "memory": return len(bytearray(4 << 30))
    if response == "files": return len([open(os.devnull) for _ in range(1000)])
    if response == "large":
        with open(sample["path"], "wb") as file:
            for _ in range(100): file.write(bytes(1 << 20))
    if response == "print": print("{}", flush=True); os.write(1, b"rubbish" + b"\\n")
    if response == "stdin": return len(sys.stdin.read())
    if response == "child": return subprocess.Popen(["sleep", "1000"]).pid
    if response == "environment": return {k: 1 for k in os.environ}
    if response == "modules": return float("torch" in sys.modules or "numpy" in sys.modules)
    if response == "pid": return os.getpid()
    if response == "large number": return 1e300
    if response.startswith("fork and return"): os.fork()
    if response.startswith("fork and exit") and os.fork() == 0: sys.exit(0)
    if response.startswith("fork and raise") and os.fork() == 0: raise KeyError("the child's")
    if response == "fork and wait":
        child = os.fork()
        if child == 0: sys.exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if response == "fork and die" and os.fork() != 0: os._exit(5)
    if response == "speak":
        for pipe in range(3, 20):
            try: os.write(pipe, sample["line"].encode() + b"\\n")
            except OSError: pass  # not open, or the pipe of the requests
    return len(response)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def make(file, name="act", workers=1, timeout=30.0, **more):
    spec = {"kind": "function", "function": f"{file}:{name}"}
    return WorkerPool(spec, workers=workers, timeout=timeout, memory_mb=1024, **more)


@pytest.fixture(scope="module")
def pool(file):
    made = make(file)
    yield made
    made.close()


def ask(pool, *responses, **sample):
    return pool.submit([{"response": r, "sample": {"ended": True, **sample}} for r in responses]).result(timeout=100)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # no such file, or no such process any more
        return False


def gone(pids, within=20.0):
    """A bounded wait: the kernel ends processes in its own time."""
    until = time.monotonic() + within
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


def test_scores_come_in_order_over_several_workers(file):
    pool = make(file, workers=2)
    try:
        texts = ["x" * n for n in range(50)]
        assert [s.value for s in ask(pool, *texts)] == list(range(50))
        assert ask(pool) == []
        assert len(set(pool.pids)) == 2
    finally:
        pool.close()


@pytest.mark.parametrize(
    "response,message",
    [
        ("exit", "exit code 3"),
        ("kill", "SIGKILL"),
        ("sysexit", "SystemExit: 4"),
        ("raise", r"KeyError: 'mine' \(.*mine.py:\d+\)"),
        ("recurse", "RecursionError"),
        ("memory", "MemoryError"),
        ("files", "OSError: .*Too many open files"),
    ],
)
def test_a_failure_is_an_error_for_that_response_alone(pool, response, message):
    before, failed, after = ask(pool, "ab", response, "abc")
    assert (before.value, before.error, after.value, after.error) == (2.0, None, 3.0, None)
    assert math.isnan(failed.value), "a failure must never look like a reward"
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(failed.error)


@pytest.mark.parametrize("response", ["hang", "spin"])
def test_a_response_that_takes_too_long_is_an_error_and_its_process_is_replaced(file, response):
    pool = make(file, timeout=3.0)
    try:
        (first,) = pool.pids
        failed, after = ask(pool, response, "abc")
        assert "did not answer before its deadline (reward.timeout=3 s)" in failed.error
        assert after.value == 3.0
        assert gone([first]) and pool.pids != [first]
    finally:
        pool.close()


@pytest.mark.parametrize("response", ["hang", "raise", "exit", "memory", "large number"])
def test_a_response_that_cannot_be_scored_may_earn_what_is_set_and_is_counted(file, response, caplog):
    pool = make(file, timeout=3.0, failed_score=-1.0)
    try:
        before, failed, after = ask(pool, "ab", response, "abc")
        assert (before.value, before.parts, after.value, after.parts) == (2.0, {}, 3.0, {})
        assert (failed.value, failed.parts, failed.error) == (-1.0, {"failed": 1.0}, None)
        assert "a response could not be scored and earns reward.failed_score=-1" in caplog.text
    finally:
        pool.close()


def test_what_fails_before_it_is_scored_stays_an_error():
    """A sample without a right answer is the data's fault, not the response's."""
    spec = verifier_spec(RewardConfig(kind=RewardKind.exact))
    pool = WorkerPool(spec, workers=1, timeout=10.0, memory_mb=1024, failed_score=0.0)
    try:
        good, bad = pool.submit([{"response": "7", "sample": {"answer": "7"}}, {"response": "7", "sample": {}}]).result(
            100
        )
        assert (good.value, good.error) == (1.0, None)
        assert math.isnan(bad.value) and "has no field answer for its right answer" in bad.error
    finally:
        pool.close()


def test_a_pattern_that_backtracks_without_end_is_ended_at_the_deadline():
    part = RewardPart(kind=RewardKind.regex, pattern="(a+)+$")
    spec = verifier_spec(RewardConfig(kind=RewardKind.parts, parts=[part]))
    pool = WorkerPool(spec, workers=1, timeout=3.0, memory_mb=1024)
    try:
        stuck, after = pool.submit([{"response": r, "sample": {}} for r in ("a" * 50 + "b", "baa")]).result(100)
        assert "did not answer before its deadline (reward.timeout=3 s)" in stuck.error and math.isnan(stuck.value)
        assert (after.value, after.parts) == (1.0, {"regex": 1.0})
    finally:
        pool.close()


def test_a_file_that_grows_without_end_is_stopped(pool, tmp_path):
    (score,) = ask(pool, "large", path=str(tmp_path / "large"))
    assert score.error and (tmp_path / "large").stat().st_size <= 64 << 20


def test_what_a_function_prints_or_reads_does_not_touch_the_protocol(pool):
    assert [s.value for s in ask(pool, "print", "stdin", "abc")] == [5.0, 0.0, 3.0]


@pytest.mark.parametrize("way", ["return", "exit", "raise"])
def test_a_child_that_comes_back_from_the_function_does_not_answer(file, way):
    texts = [f"fork and {way}" + "x" * n for n in range(30)]
    pool = make(file)
    try:
        pids = pool.pids
        scores = ask(pool, *texts, "a", "ab", "abc")
        assert [s.error for s in scores] == [None] * 33
        assert [s.value for s in scores] == [*map(len, texts), 1.0, 2.0, 3.0]
        assert pool.pids == pids, "the process that was asked goes on"
    finally:
        pool.close()


def test_a_child_ends_with_its_own_exit_code(pool):
    assert [s.value for s in ask(pool, "fork and wait", "abc")] == [7.0, 3.0]


def test_a_child_does_not_answer_for_a_worker_that_died(file):
    pool = make(file)
    try:
        failed, after = ask(pool, "fork and die", "abc")
        assert math.isnan(failed.value) and "exit code 5" in failed.error
        assert after.value == 3.0
    finally:
        pool.close()


def test_a_file_that_forks_when_it_is_imported_gives_one_worker(tmp_path):
    path = tmp_path / "forks.py"
    path.write_text("import os\nos.fork()\ndef f(response, sample): return len(response)")
    pool = make(path, "f")
    try:
        texts = ["x" * n for n in range(30)]
        assert [s.value for s in ask(pool, *texts)] == list(range(30))
    finally:
        pool.close()


@pytest.mark.parametrize(
    "line,message",
    [
        ("rubbish", "its reply is not JSON"),
        ("5", "its reply is not an object"),
        ('{"parts": {"reward": 9}}', "its reply is not to request 2"),
        ('{"number": 1, "parts": {"reward": 9}}', "its reply is not to request 2"),
        ('{"number": 2, "parts": {"reward": NaN}}', "its reply is not finite numbers"),
        ('{"number": 2, "parts": [9]}', "its reply is not finite numbers"),
        ('{"number": 2}', "its reply makes no sense"),
    ],
)
def test_a_line_that_is_no_reply_is_an_error_and_the_process_is_replaced(file, line, message):
    pool = make(file)
    try:
        (first,) = pool.pids
        before, failed, after = ask(pool, "ab", "speak", "abc", line=line)
        assert message in failed.error and math.isnan(failed.value)
        assert (before.value, after.value) == (2.0, 3.0)
        assert gone([first]) and pool.pids != [first]
    finally:
        pool.close()


def test_a_number_that_is_infinite_in_float32_is_an_error(pool):
    large, after = ask(pool, "large number", "abc")
    assert "act returned 'reward': 1e+300" in large.error and math.isnan(large.value)
    assert after.value == 3.0


@pytest.mark.parametrize("error", [KeyError("parts"), MemoryError(), SystemExit(1), KeyboardInterrupt()])
@pytest.mark.parametrize("killing_fails", [False, True])
def test_whatever_goes_wrong_in_its_thread_each_response_is_answered(file, monkeypatch, error, killing_fails):
    pool = make(file)
    first, answers, whole_kill = pool._slots[0].worker, iter([error]), WorkerProcess.kill

    def ask_once_in_vain(*arguments):
        for raised in answers:
            raise raised
        return WorkerPool.ask(pool, *arguments)

    def kill(worker):
        whole_kill(worker)
        if worker is first and killing_fails:
            raise PermissionError("not yours")

    monkeypatch.setattr(pool, "ask", ask_once_in_vain)
    monkeypatch.setattr(WorkerProcess, "kill", kill)
    try:
        failed, *rest = ask(pool, "a", "ab", "abc")
        assert "the verifier failed: " in failed.error and math.isnan(failed.value)
        assert ("could not be ended: not yours" in failed.error) == killing_fails
        assert [s.value for s in rest] == [2.0, 3.0]
        assert gone([first.pid]) and pool.pids != [first.pid]
    finally:
        pool.close()


def test_no_token_reaches_a_worker_and_torch_is_not_imported(file, monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "ALIGNER_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    pool = make(file)
    try:
        environment, modules = ask(pool, "environment", "modules")
        assert "PATH" in environment.parts and not [
            name for name in environment.parts if "TOKEN" in name or "KEY" in name
        ]
        assert modules.value == 0.0
    finally:
        pool.close()


def test_large_and_odd_texts_travel_whole(pool):
    texts = ["x" * (1 << 20), "é\u2028\n\x00🙂", "\ud83d"]
    assert [s.value for s in ask(pool, *texts)] == [len(t) for t in texts]


def test_a_process_that_does_not_come_up_again_fails_the_rest_at_once(tmp_path):
    path = tmp_path / "once.py"
    path.write_text("import os\ndef f(response, sample):\n    os._exit(1)\n")
    pool = make(path, "f")
    try:
        path.write_text("raise ValueError('no more')")
        errors = [s.error for s in ask(pool, *"abcdefgh")]
        assert "exit code 1" in errors[0] and all("no more" in e for e in errors[1:])
        assert "did not start again 3 times" in errors[-1]
    finally:
        pool.close()


@pytest.mark.parametrize(
    "text,message", [("def g(r, s): return 1", "has no function f"), ("import sys; sys.exit(3)", "SystemExit: 3")]
)
def test_a_function_is_checked_at_the_start(tmp_path, text, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        make(path, "f")


def test_a_start_that_hangs_has_a_deadline(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text("import time; time.sleep(1000)")
    with pytest.raises(RuntimeError, match="a verifier process did not start: it did not answer"):
        make(path, "f", start_timeout=2.0)


def test_the_queue_is_bounded(file):
    pool = make(file, max_queued=10)
    try:
        with pytest.raises(RuntimeError, match="11 more would exceed 10: raise reward.workers"):
            ask(pool, *["a"] * 11)
        assert len(ask(pool, *["a"] * 10)) == 10
    finally:
        pool.close()


def test_closing_ends_processes_and_fails_what_waits(file):
    pool = make(file, workers=2)
    pids = pool.pids
    waiting = pool.submit([{"response": "hang", "sample": {"ended": True}}] * 5)
    pool.close()
    pool.close()
    assert gone(pids)
    assert all("closed" in s.error for s in waiting.result(timeout=1))
    with pytest.raises(RuntimeError, match="closed"):
        ask(pool, "a")


def test_what_a_function_started_ends_with_its_worker(file):
    pool = make(file)
    child = int(ask(pool, "child")[0].value)
    assert alive(child)
    pool.close()
    assert gone([child])


def test_nothing_is_left_when_the_parent_is_killed(file):
    """One worker is busy in a loop that never looks up, the other one idle."""
    script = f"""
        import time
        from aligner.rewards.pool import WorkerPool
        pool = WorkerPool({{"kind": "function", "function": "{file}:act"}}, workers=2, timeout=1000, memory_mb=1024)
        pool.submit([{{"response": "spin", "sample": {{}}}}])
        print(*pool.pids, flush=True)
        time.sleep(1000)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(alive(pid) for pid in pids)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
    assert gone(pids)


class Letters:
    """A tokenizer of letters, for the reward source alone."""

    def decode(self, ids):
        return "".join(chr(i) for i in ids)

    def response_text(self, ids, stop_strings):
        return self.decode(ids)


def test_build_reward_decodes_and_tells_the_function_of_the_sample(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def f(r, s): return {'reward': len(r), 'ended': s['ended'], 'x': s['x'], 'prompt': len(s['prompt'])}"
    )
    reward = build_reward(RewardConfig(kind=RewardKind.function, function=f"{path}:f"), Letters())
    try:
        rows = [ScoreRow(1, [65, 66], [67], True, {"x": 7}), ScoreRow(2, [65], [67, 68], False, {"x": 8})]
        first, second = reward.score(rows).result(timeout=100)
    finally:
        reward.close()
    assert (first.value, first.parts) == (1.0, {"ended": 1.0, "x": 7.0, "prompt": 2.0})
    assert (second.value, second.parts) == (2.0, {"ended": 0.0, "x": 8.0, "prompt": 1.0})


def test_build_reward_scores_a_task():
    pytest.importorskip("reasoning_gym")
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 50}
    fields = {"task": "chain_sum", "config": config, "seed": 1234, "index": 0}  # 0 + 1
    reward = build_reward(RewardConfig(format_credit=0.3), Letters())
    try:
        (score,) = reward.score([ScoreRow(1, [65], [ord("1")], True, fields)]).result(timeout=120)
    finally:
        reward.close()
    assert score.value == pytest.approx(1.3)
    assert score.parts == {"accuracy": 1.0, "well_formed": 1.0, "format": 1.0}


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"kind": RewardKind.model}, "scored by the reward model inside the critic or the reward job"),
        ({"kind": RewardKind.function}, "needs reward.function=file.py:name"),
        (
            {"kind": RewardKind.function, "function": "a.py:f", "format_credit": 0.3},
            "reward.format_credit=0.3 needs reward.kind=task",
        ),
        ({"kind": RewardKind.function, "function": "none.py:f"}, "there is no file"),
        ({"answer": "last"}, "reward.answer=last"),
    ],
)
def test_build_reward_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        build_reward(RewardConfig(**settings), Letters())
