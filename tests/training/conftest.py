"""Run folders with checkpoints."""

import pytest
from saved import Events, state

from upsnb.training import checkpoint
from upsnb.training.parallel import Ranks


@pytest.fixture
def make_saver(tmp_path):
    """`make_saver()`: a writer of checkpoints into the test's folder, as a newly started process has it."""
    made = []

    def make(folder=tmp_path):
        made.append(checkpoint.Saver(folder, Ranks(), Events()))
        return made[-1]

    yield make
    for saver in made:
        saver.close()


@pytest.fixture(scope="module")
def trained(tiny_config, train_here, tmp_path_factory):
    """The folder of a tiny run that trained to its end; to be copied."""
    folder = tmp_path_factory.mktemp("trained")
    train_here(tiny_config(("darcy",), **{"training.ema_decay": 0.9}), folder)
    return folder


@pytest.fixture
def folder(tmp_path, make_saver):
    """A run folder with checkpoints of steps 1 (the best), 2, 3 and 4."""
    saver = make_saver()
    for step in range(1, 5):
        saver.save(state(step), ("best",) if step == 1 else ())
    return tmp_path
