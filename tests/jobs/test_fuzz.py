"""A served critic of two ranks under thousands of hostile requests (fuzzing.py); a few hundred are in test_serving.py."""

import pytest

from tests.jobs.fuzzing import fuzz
from tests.jobs.serving_job import Job


@pytest.mark.faults
def test_twelve_thousand_hostile_requests(tmp_path):
    job = Job(tmp_path / "fuzzed", max_rows=64)
    try:
        for seed in (2, 3):
            names = fuzz(job, 6000, seed=seed)
            print(f"\n{sum(names.values())} requests, {len(names)} kinds: {dict(names.most_common(8))}")
    finally:
        job.end()
