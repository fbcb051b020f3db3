"""A clean room around each test, and the tiny data, configs and models that tests of training share."""

import gc
import os
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo  # the first step of any optimizer imports it
from made_runs import START, TOKENS
from real_files import SMALL_FILES

from upsnb import overlays
from upsnb.config import LatentConfig, OperatorConfig, RunConfig
from upsnb.data import datasets
from upsnb.data.batches import Loader
from upsnb.data.families import FAMILIES
from upsnb.data.spec import DatasetSpec
from upsnb.models.ups import UPS
from upsnb.runs import runfolder
from upsnb.runs.events import last_events
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup
from upsnb.worker import loop

GENERATED = {
    "advection": {"num_samples": 20, "resolution": 32, "num_times": 13, "parameter": 0.4, "seed": 0},
    "darcy": {"num_samples": 20, "resolution": 16, "parameter": 1.0, "seed": 0},
}


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Sums in one order, and no slower beside another job: in what tests of a file share as well."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def what_is_imported_is_no_garbage():
    """Each stage of a training ends with a collection, which would walk 300,000 objects of modules every time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_room():
    """Fixed random states inside; everything process-wide as it was found afterwards."""
    environment, folder = dict(os.environ), Path.cwd()
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    grad, deterministic = torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    torch.manual_seed(0), np.random.seed(0), random.seed(0)  # noqa: NPY002
    yield
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)
    torch.set_rng_state(states[0]), np.random.set_state(states[1]), random.setstate(states[2])  # noqa: NPY002


class Clock:
    """Stands for `time.perf_counter`: a look takes 0.1 ms, and all else as long as a test says."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1e-4
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def of_tokens(monkeypatch):
    """Runs that are made up are of a language model, as their start events say."""
    for key, value in TOKENS.items():
        monkeypatch.setitem(START, key, value)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The clock that durations are measured with, the same on a slow machine as on a fast one."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


@pytest.fixture
def slow_reading(monkeypatch, clock):
    """`slow_reading(0.05)`: every batch takes so many seconds to arrive."""

    def install(seconds: float) -> None:
        epoch = Loader.epoch

        def slow(self, *arguments):
            for batch in epoch(self, *arguments):
                clock.advance(seconds)
                yield batch

        monkeypatch.setattr(Loader, "epoch", slow)

    return install


@pytest.fixture(scope="module")
def cache() -> dict:
    """What the tests of a file share."""
    return {}


@pytest.fixture
def shared_data() -> Path:
    """Folder of small real PDEBench files beside the repository; not part of it."""
    if not SMALL_FILES.is_dir():
        pytest.skip("needs the small PDEBench files in ../shared/data/pdebench-small, beside the repository")
    return SMALL_FILES


@pytest.fixture(scope="session")
def data_root(tmp_path_factory) -> Path:
    """Folder of data that is generated once a session."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def tiny_config(data_root):
    """`tiny_config(**{"training.batch_size": 4})`: a config of both datasets that trains in seconds, data in place.

    `names` leaves out datasets.
    """

    def make(names=("advection", "darcy"), **overlay) -> RunConfig:
        chosen = {
            "advection": {"family": "advection1d", "input_frames": 2, "output_frames": 2},
            "darcy": {"family": "darcy2d"},
        }
        base = {
            "data.root": str(data_root),
            "data.datasets": {name: {**chosen[name], "generate": GENERATED[name]} for name in names},
            "latent": {"dim": 32, "tokens": 16},
            "operator.pdet": {"hidden_dim": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0},
            "training": {"device": "cpu", "threads_per_rank": 1, "batch_size": 8},
            "stages.operator.epochs": 1,
            "checkpoint.interval": 100000,
        }
        config = overlays.resolve({**overlays.flatten(base), **overlays.flatten(overlay)})
        for dataset in config.data.datasets.values():
            datasets.ensure_generated(dataset, data_root, lambda message: None)
        return config

    return make


@pytest.fixture
def tiny_setup(tiny_config):
    """`tiny_setup(**overlay)`: everything a step needs, on one rank."""

    def make(names=("advection", "darcy"), **overlay) -> Setup:
        return Setup.build(tiny_config(names, **overlay), Path(), Ranks(), lambda message: None)

    return make


@pytest.fixture(scope="session")
def train_here():
    """`train_here(config, folder)`: train on one rank in this process; the run's events.

    `at_step` is called with each step before it is taken; the folder is continued where it holds a run.
    """

    def train(config: RunConfig, folder: Path, at_step=lambda step: None, ranks=None) -> list[dict]:
        class Beat(runfolder.Heartbeat):
            def beat(self, step):
                super().beat(step)
                at_step(step)

        if not (folder / runfolder.MANIFEST).exists():
            runfolder.create(config, folder)
        events = runfolder.EventWriter(folder)
        try:
            loop.train(config, folder, ranks or Ranks(), events, Beat(folder, 0))
        finally:
            events.close()
        found = runfolder.read_events(folder)
        assert not [event for event in found if " are damaged or lack " in event.get("message", "")]
        return found

    return train


@pytest.fixture(scope="session")
def killed_and_continued(train_here):
    """`killed_and_continued(config, folder, 7)`: folders of a run that was never stopped, and of one that was.

    The second begins as what is on the disk of the first when so many steps of a stage are taken, as after a kill.
    """

    def train(config: RunConfig, folder: Path, num_steps: int, stage: str = "operator") -> tuple[Path, Path]:
        whole, cut, taken = folder / "whole", folder / "cut", set()

        def copy(step):
            if last_events(whole, ("start",))["start"]["stage"] == stage:
                taken.add(step)
            if len(taken) == num_steps and not cut.exists():
                shutil.copytree(whole, cut)

        train_here(config, whole, copy)
        train_here(overlays.apply(config, {"checkpoint.resume": True}), cut)
        assert runfolder.read_events(cut, ("start",))[-1]["step"] > 0, "from a checkpoint"
        return whole, cut

    return train


def make_spec(family: str = "advection1d", **changes) -> DatasetSpec:
    """A dataset's spec without a dataset: 32 periodic cells, or 16 x 16 closed ones, in patches of 4."""
    common = {"input_channels": 1, "output_channels": 1, "num_parameters": 1, "tokens": 16}
    statistics = {"input_mean": (0.3,), "input_std": (0.7,), "output_mean": (-0.2,), "output_std": (1.5,)}
    condition = {"parameter_mean": (0.4,), "parameter_std": (1.0,)}
    if family == "advection1d":
        shape = {"grid_shape": (32,), "periodic": (True,), "input_frames": 2, "output_frames": 2}
        own = {"name": "advection", "family": family, "time_dependent": True, "dt": 0.05, **shape, "tokens": 8}
    else:
        shape = {"grid_shape": (16, 16), "periodic": (False, False), "input_frames": 1, "output_frames": 1}
        own = {"name": "darcy", "family": family, "time_dependent": False, "dt": 0.0, **shape}
    row = FAMILIES[family]
    said = {"parameter_names": tuple(row.parameters), "priors": row.priors}
    return DatasetSpec(**{**common, **statistics, **condition, **own, **said, **changes})


def perturb(module: torch.nn.Module, scale: float = 0.3) -> torch.nn.Module:
    """Add noise to every weight: a new block is the identity and hides what it would do."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += scale * parameter.shape[-1] ** -0.5 * torch.randn(parameter.shape, generator=generator)
    return module


def make_model(specs, inverse: bool = False, hidden_dim: int = 32, drop_path: float = 0.0, **operator) -> UPS:
    """A small operator with perturbed weights, in evaluation mode."""
    pdet = {"hidden_dim": hidden_dim, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0, "drop_path": drop_path}
    config = OperatorConfig.model_validate({"pdet": pdet, **operator})
    torch.manual_seed(3)
    return perturb(UPS(LatentConfig(dim=32), config, {spec.name: spec for spec in specs}, inverse)).eval()


@pytest.fixture(name="make_spec")
def make_spec_fixture():
    return make_spec


@pytest.fixture(name="make_model")
def make_model_fixture():
    return make_model


@pytest.fixture(name="perturb")
def perturb_fixture():
    return perturb
