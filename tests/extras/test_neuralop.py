"""neuraloperator's FNO through the seam, in the environment that `make test` builds for it."""

import pytest
import torch

from upsnb import overlays
from upsnb.runs import runfolder
from upsnb.training.trained import load_model

pytest.importorskip("neuralop", reason="neuraloperator is not here -> make test runs this in .extras")

GAS = {"family": "cfd1d", "generate": {"num_samples": 10, "resolution": 16, "num_times": 13}}


def test_it_trains_on_three_families_at_once_and_is_saved_as_tensors_alone(tiny_config, train_here, tmp_path):
    settings = overlays.flatten(overlays.read(runfolder.project_root() / "params/models/neuralop.yaml"))
    settings["model.settings"] = {"width": 8, "modes": 8, "depth": 2}
    two_steps = {"training.batch_size": 16, "training.ema_decay": 0.9}
    events = train_here(tiny_config(**settings, **two_steps, **{"data.datasets.gas": GAS}), tmp_path)
    assert events[-1]["reason"] == "epochs" and sum(event["kind"] == "step" for event in events) >= 2
    model = load_model(tmp_path)
    assert all(isinstance(value, torch.Tensor) for value in model.state_dict().values())
    for name, grid in (("advection", (32,)), ("gas", (16,)), ("darcy", (16, 16)), ("darcy", (24, 24))):
        spec = model.specs[name]
        given = torch.ones(1, spec.input_frames, spec.input_channels, *grid)
        y = model(name, given, torch.ones(1, spec.num_parameters), spec.dt)
        assert y.shape == (1, spec.output_frames, spec.output_channels, *grid) and y.isfinite().all()
