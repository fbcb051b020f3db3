"""An example, small: of the file (`EXAMPLE`), or the one that a test is given by its `name`."""

import functools
from pathlib import Path

import pytest
from small_examples import COMMON, SMALL

from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.runs import handle
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """Folder of the data that all of these tests share, named by what they depend on, and of what is trained once."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="session")
def config_of(shared):
    """`config_of(name, **overlay)`: a tiny run of an example."""

    def make(example: str, **overlay) -> RunConfig:
        folders = {"data.root": str(shared / "data"), "logging.root": str(shared / "outputs")}
        layers = (overlays.flatten(layer) for layer in (COMMON, SMALL[example], folders, overlay))
        return overlays.resolve(functools.reduce(overlays.stack, layers))

    return make


@pytest.fixture
def name(request) -> str:
    return request.module.EXAMPLE


@pytest.fixture
def config(config_of, name):
    """`config(**overlay)`: a tiny run."""
    return functools.partial(config_of, name)


@pytest.fixture
def setup(config):
    """`setup(**overlay)`: everything a step of it needs."""
    return lambda **overlay: Setup.build(config(**overlay), Path(), Ranks(), lambda message: None)


@pytest.fixture(scope="session")
def finished(config_of, train_here, shared):
    """`finished(name)`: a run of two epochs that has ended."""

    @functools.cache
    def train(example: str) -> handle.Run:
        folder = shared / "finished" / example
        train_here(config_of(example, **{"stages.operator.epochs": 2, "training.ema_decay": 0.9}), folder)
        return handle.Run.attach(folder)

    return train
