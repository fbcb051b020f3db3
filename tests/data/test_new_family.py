"""A family is one row and one solver: nothing else has to know its name."""

from dataclasses import replace

import numpy as np
import pytest

from upsnb import hardware, overlays
from upsnb.config import DatasetConfig, RunConfig
from upsnb.data import datasets
from upsnb.data.families import FAMILIES
from upsnb.errors import ConfigError
from upsnb.models import chosen
from upsnb.report.data_report import samples
from upsnb.report.figures import RunFigures
from upsnb.runs.handle import Run


def solve_heat(seed, samples, parameters, resolution, times):
    """Exact solutions of u_t = D u_xx with period 1."""
    x = (np.arange(resolution) + 0.5) / resolution
    for sample in samples:
        draws = np.random.default_rng([seed, sample])
        wave, phase = draws.integers(1, 4), draws.uniform(0, 2 * np.pi)
        decay = np.exp(-parameters["D"] * (2 * np.pi * wave) ** 2 * times[:, None])
        yield {"u": 1 + decay * np.sin(2 * np.pi * wave * x + phase)}


HEAT = replace(
    FAMILIES["advection1d"],
    name="heat1d",
    title="1D heat",
    time_range=(0.0, 1.0),
    parameters={"D": 0.02},
    given_frames=2,
    solve=solve_heat,
    file_stem="1D_Heat_Sols",
    symmetries=(),
    check=None,
)


@pytest.fixture
def heat_config(monkeypatch, tiny_config, tmp_path):
    monkeypatch.setitem(FAMILIES, "heat1d", HEAT)

    def make(**overlay) -> RunConfig:
        generate = {"num_samples": 20, "resolution": 32, "num_times": 11, "parameter": 0.01}
        heat = {"family": "heat1d", "input_frames": 2, "output_frames": 2, "generate": generate}
        changes = {"data.datasets": {"heat": heat}, "data.root": str(tmp_path / "data"), **overlay}
        return overlays.resolve(changes, base=tiny_config(("advection",)))

    return make


def test_a_row_and_a_solver_are_a_family(heat_config, train_here, tmp_path):
    config = heat_config(**{"training.lambda_conservation": 0.1})
    events = train_here(config, tmp_path / "run")
    assert events[-1]["kind"] == "end"
    assert "conservation" in next(event for event in events if event["kind"] == "step")["losses"]
    assert [path.name for path in (tmp_path / "data" / "generated").iterdir()] == [
        "1D_Heat_Sols_D0.01_n20_x32_t11_seed0.hdf5"
    ]
    assert samples(datasets.open_dataset("heat", config, tmp_path / "data")).axes
    assert RunFigures.of(Run.attach(tmp_path / "run")).prediction("heat").axes


def test_its_memory_is_predicted_before_there_is_data(heat_config, tmp_path):
    config = heat_config()
    (outline,) = datasets.outlines(config, tmp_path).values()
    assert outline.spec.grid_shape == (32,) and outline.num_bytes == 4 * 20 * 11 * 32
    assert chosen.build(config, {"heat": outline.spec}).specs["heat"].family == "heat1d"


@pytest.mark.parametrize(
    ("overlay", "problem"),
    [
        ({"training.lambda_positivity": 0.1}, "training.lambda_positivity: acts on .*darcy2d.* only"),
        ({"data.datasets.heat.augment": True}, "data.datasets.heat.augment: no symmetry of heat1d is known"),
        ({"data.datasets.heat.family": "reacdiff1d"}, "heat.generate.parameter: reacdiff1d has Nu, rho"),
        ({"data.datasets.heat.generate": {"parameters": {"rho": 1.0}}}, "parameters.rho: heat1d has no such parameter"),
        ({"data.datasets.heat.family": "heat2d"}, "choose 'advection1d' or .* or 'heat1d'"),
    ],
)
def test_what_its_row_does_not_have_is_refused(heat_config, overlay, problem):
    with pytest.raises(ConfigError, match=problem):
        heat_config(**overlay)


def test_what_is_not_said_of_generated_data_is_its_rows(tmp_path):
    def name(**generate) -> str:
        return datasets.generated_path(DatasetConfig.model_validate(generate), tmp_path).name

    assert name(family="reacdiff1d", generate={"parameters": {"rho": 2.0}}) == (
        "ReacDiff_Nu0.5_rho2_n128_x128_t41_seed0.hdf5"
    )
    assert name(family="shallowwater2d", generate={"resolution": 16}) == "2D_rdb_n128_x16_t26_seed0_v2.hdf5"
    longer = name(family="kuramoto1d", generate={"until": 120.0})
    assert longer == "1D_KuramotoSivashinsky_nu1_n128_x128_t41_until120_seed0.hdf5"
    assert name(family="kuramoto1d", generate={"until": 32.0}) == "1D_KuramotoSivashinsky_nu1_n128_x128_t41_seed0.hdf5"
    assert name(family="darcy2d", generate={"parameter": 0.1}) == "2D_DarcyFlow_beta0.1_n128_x64_seed0.hdf5"


def test_generating_says_how_far_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "PROGRESS_S", 0.0)
    config, said = DatasetConfig.model_validate({"family": "darcy2d", "generate": {"num_samples": 3}}), []
    datasets.ensure_generated(config, tmp_path, said.append)
    assert [line.partition(": ")[2] for line in said] == ["", *(f"{n} of 3 samples" for n in (1, 2, 3))]


@pytest.mark.parametrize(
    ("generate", "cores", "memory_gib", "shared"),
    [
        ({"num_samples": 128}, 16, 64.0, 1),  # over before another process has started
        ({"num_samples": 2048}, 16, 64.0, 16),
        ({"num_samples": 2048}, 16, 0.5, 4),
        ({"num_samples": 2048}, 16, 0.0, 1),  # nobody knows
        ({"num_samples": 5, "resolution": 1024}, 16, 64.0, 5),
    ],
)
def test_as_many_processes_generate_as_there_are_cores_and_memory_for(
    tmp_path, monkeypatch, generate, cores, memory_gib, shared
):
    asked = []
    monkeypatch.setattr(hardware, "num_cores", lambda: cores)
    monkeypatch.setattr(hardware, "host_memory_gib", lambda: memory_gib)
    monkeypatch.setattr(datasets, "generate", lambda *settings: asked.append(settings[-1]))
    config = DatasetConfig.model_validate({"family": "darcy2d", "generate": generate})
    datasets.ensure_generated(config, tmp_path, lambda message: None)
    assert asked == [shared]
