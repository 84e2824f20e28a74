"""For every test: one thread, no network, the repository importable, and a record of the settings that code reads."""

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READS = "ALIGNER_CONFIG_READS"

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two busy threads on two busy cores collapse
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("ALIGNER_FAULT", None)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)  # for spawned jobs
if READS not in os.environ:  # before aligner.config is imported, here and in the jobs that tests start
    handle, os.environ[READS] = tempfile.mkstemp(prefix="aligner-reads-")
    os.close(handle)
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402 - after the environment is set


def pytest_unconfigure() -> None:
    file = Path(os.environ[READS])
    if file.name.startswith("aligner-reads-"):
        file.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def shared_data():
    """shared_data("a/b") is a file beside the checkout that tests read where it is there, and skip without."""

    def find(relative: str) -> Path:
        path = ROOT.parent / "shared" / "data" / relative
        if not path.exists():
            pytest.skip(f"needs the data file ../shared/data/{relative}, which is not beside this checkout")
        return path

    return find
