"""Every family trains and is evaluated, from its small real file; the two that have none from generated data."""

import json

import numpy as np
import pytest
import torch
from real_files import REAL_FILES, SMALL_FILES

from upsnb import overlays
from upsnb.data import datasets
from upsnb.data.families import FAMILIES
from upsnb.memory import predict
from upsnb.report import data_report, figures, results
from upsnb.runs import runfolder
from upsnb.runs.handle import Run

REDUCED = {  # family -> points and frames between those that are kept
    "advection1d": (8, 2), "burgers1d": (8, 2), "reacdiff1d": (4, 5), "diffsorp1d": (8, 5), "cfd1d": (4, 5),
    "darcy2d": (4, 1), "shallowwater2d": (2, 1), "diffreact2d": (2, 3), "cfd2d": (3, 1), "incompressible2d": (3, 1),
    "cfd3d": (1, 1),
}  # fmt: skip
FNO = {"model.build": "upsnb.models.fno:FNO", "model.settings": {"width": 8, "modes": 4, "depth": 2}}


@pytest.fixture
def family_config(tiny_config, data_root):
    def make(name: str, **overlay):
        family = FAMILIES[name]
        frames = 2 if family.time_dependent else 1
        chosen = {"family": name, "input_frames": frames, "output_frames": frames, "augment": bool(family.symmetries)}
        if name in REAL_FILES:
            if not SMALL_FILES.is_dir():
                pytest.skip("needs the small PDEBench files in ../shared/data/pdebench-small, beside the repository")
            if "turn" in family.symmetries and not all(family.periodic) and REDUCED[name][0] > 1:
                chosen["augment"] = False  # some cells between walls are no mirror image of themselves
            reduced = dict(zip(("reduced_resolution", "reduced_resolution_t"), REDUCED[name]))
            chosen |= {
                "files": [str(SMALL_FILES / REAL_FILES[name])],
                "num_samples": 8 if family.time_dependent else 32,
                **reduced,
            }
        else:
            chosen["generate"] = {"num_samples": 4, "resolution": 16, "num_times": 13}
        changes = {"data.datasets": {name: chosen}, "data.split": {"validation_fraction": 0.0, "test_fraction": 0.5}}
        physics = {f"training.lambda_{prior}": 0.1 for prior in family.priors if prior != "boundary"}
        config = overlays.resolve({**changes, **physics, **overlay}, base=tiny_config(("darcy",)))
        datasets.generate_missing(config, data_root, lambda message: None)
        return config

    return make


@pytest.mark.parametrize(
    ("name", "overlay"), [*((name, {}) for name in FAMILIES), ("incompressible2d", FNO), ("cfd3d", FNO)]
)
def test_a_family_trains_and_its_report_says_what_each_channel_reached(
    family_config, train_here, tmp_path, name, overlay
):
    config, family = family_config(name, **overlay), FAMILIES[name]
    events = train_here(config, tmp_path)
    assert events[-1]["kind"] == "end" and events[-1]["reason"] == "epochs"
    (result,) = json.loads((tmp_path / runfolder.EVALUATION).read_text())["datasets"][name].values()
    rollout = ["rollout_nrmse"] if family.time_dependent else []
    for kind in ("nrmse", *rollout):
        assert list(result["per_channel"][kind]) == list(family.channels)
        assert np.mean(list(result["per_channel"][kind].values())) == pytest.approx(result[f"{kind}_mean"], rel=1e-5)
    assert result["nrmse_median"] <= result["nrmse_p90"]
    run = Run.attach(tmp_path)
    told = list(results.table(results.run_numbers(run))["dataset"])
    several = [f"{name}: {channel}" for channel in family.channels] if len(family.channels) > 1 else []
    leak = result.get("leak")  # of dams of few radii, and of a gas that is one number
    distinct = [f"{name}: {leak['distinct']['num_samples']} distinct samples"] if leak and leak["distinct"] else []
    assert told == [*distinct, name, *several]
    figure = figures.RunFigures.of(run).prediction(name)
    if family.num_dims > 1:
        assert figure.axes[0].get_xlim() == pytest.approx(family.domain[0])
    assert ("middle of z" in " ".join(figure.get_suptitle().split())) == (family.num_dims == 3)


@pytest.mark.parametrize("name", ["incompressible2d", "cfd3d"])
def test_what_a_family_keeps_on_the_device_is_predicted(family_config, tmp_path, name):
    config = family_config(name)
    (outline,) = datasets.outlines(config, tmp_path).values()
    dataset = datasets.open_dataset(name, config, tmp_path)
    assert outline.num_bytes == dataset.num_bytes == dataset.source.read_all()[0].nbytes
    shape = ("grid_shape", "input_channels", "output_channels", "num_parameters")
    assert all(getattr(outline.spec, key) == getattr(dataset.spec, key) for key in shape)
    assert predict.predict(config, tmp_path).nbytes > dataset.num_bytes
    assert data_report.samples(dataset).axes


def test_given_fields_stay_in_every_call_of_a_rollout(make_model, make_spec):
    statistics = {f"{side}_{key}": (value,) * count for side, count in (("input", 3), ("output", 1))
                  for key, value in (("mean", 0.0), ("std", 1.0))}  # fmt: skip
    spec = make_spec("advection1d", input_channels=3, **statistics)
    model, seen = make_model([spec]), []
    encode = model.encode
    model.encode = lambda name, x: seen.append(x) or encode(name, x)
    given = torch.randn(2, 2, 3, 32)
    given[:, :, 1:] = given[:, :1, 1:]  # as files are read: the same in every frame
    forecast = model.rollout(spec.name, given, torch.zeros(2, 1), spec.dt, 5)
    assert forecast.shape == (2, 5, 1, 32) and len(seen) == 3
    assert all(torch.equal(x[:, :, 1:], given[:, :, 1:]) for x in seen)
    torch.testing.assert_close(seen[1][:, :, 0], forecast[:, :2, 0])
