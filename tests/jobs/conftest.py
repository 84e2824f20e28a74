"""What job tests share: the warm process that ranks are forked from, a converted tiny model, and a launcher that cleans up."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.harness import DEADLINE, REPO, ForkServer, Launcher, environment
from tests.tiny import write_model


@pytest.fixture(scope="session")
def fork_server():
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def tiny_model(fork_server, tmp_path_factory) -> Path:
    """A converted tiny Llama of four layers."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder / "hf")
    return converted(folder)


@pytest.fixture(scope="session")
def tiny_reward_model(fork_server, tmp_path_factory) -> Path:
    """A converted tiny reward model; the Hugging Face folder lies beside it as `hf`."""
    folder = tmp_path_factory.mktemp("reward")
    write_model(folder / "hf", seed=5, scores=True)
    return converted(folder)


def converted(folder: Path) -> Path:
    """`folder`/hf as `folder`/nemo, by the command that users convert with."""
    command = [sys.executable, str(REPO / "convert_hf_to_nemo.py"), "--hf_checkpoint", str(folder / "hf")]
    done = subprocess.run(
        [*command, "--output_dir", str(folder / "nemo")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    return folder / "nemo"


@pytest.fixture
def jobs(fork_server, tiny_model, tmp_path):
    """Starts jobs whose runs lie under this test's folder; none outlives the test."""
    launcher = Launcher(fork_server, tmp_path, tiny_model)
    yield launcher
    launcher.end()


@pytest.fixture(scope="module")
def shared_jobs(fork_server, tiny_model, tmp_path_factory):
    """The same for runs that several tests of a file read."""
    launcher = Launcher(fork_server, tmp_path_factory.mktemp("runs"), tiny_model)
    yield launcher
    launcher.end()
