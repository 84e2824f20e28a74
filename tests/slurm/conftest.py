"""A Slurm for these tests, and what the runs on it share. Where there can be none the tests are skipped, with the line that installs it."""

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.slurm.cluster import NODES, Cluster, free_ports, missing


@pytest.fixture(scope="session")
def slurm():
    if reason := missing():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="aligner-slurm-"))  # not pytest's own: munge wants a path that all may pass
    cluster = Cluster(folder, free_ports(NODES + 1))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder)


@pytest.fixture
def cluster(slurm):
    """The same, empty again after the test."""
    yield slurm
    slurm.empty()
