"""CPU threads are set at the border of each phase, in the actor job and in the critic job."""

import pytest
import torch

from aligner.algorithms.assemble import thread_setter
from aligner.config.jobs import ActorConfig
from aligner.runtime.recorder import PHASES, Recorder
from tests.unit.test_critic_job import ScriptedCritic, batch, job


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("training", "generating", "wanted"),
    [(0, 0, {}), (1, 3, {"train": 1, "generate": 3, "validate": 3})],
)
def test_of_the_actor(training, generating, wanted):
    config = ActorConfig()
    config.parallel.training_threads, config.engine.threads = training, generating
    recorder = Recorder(config, None, resumed=None, on_phase=thread_setter(config))
    found = {}
    for phase in (*PHASES, *reversed(PHASES)):
        with recorder.phase(phase):
            assert found.setdefault(phase, torch.get_num_threads()) == torch.get_num_threads()
    assert found == {phase: wanted.get(phase, 2) for phase in PHASES}


@pytest.mark.parametrize(("setting", "wanted"), [(0, 2), (1, 1)])
def test_of_the_critic(setting, wanted):
    class Watched(ScriptedCritic):
        def train(self, rows):
            found.append(torch.get_num_threads())
            return super().train(rows)

    found = []
    served = job(Watched(fails_at=4))
    served.config.parallel.training_threads = setting
    served.train(1, batch(4))
    with pytest.raises(RuntimeError):
        served.train(2, batch(4))
    assert set(found) == {wanted} and torch.get_num_threads() == 2
