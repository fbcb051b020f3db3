"""neuraloperator's FNO through the seam, in the environment that `make test` builds for it."""

import pytest
import torch

from upsnb import overlays
from upsnb.runs import runfolder
from upsnb.training.setup import load_model

# The module within: where tests/ is on the path, this folder counts as a package of that name.
pytest.importorskip("neuralop.models", reason="neuraloperator is not here -> make test runs this in .extras")


def test_it_trains_on_lines_and_planes_and_is_saved_as_tensors_alone(tiny_config, train_here, tmp_path):
    settings = overlays.flatten(overlays.read(runfolder.project_root() / "params/models/neuralop.yaml"))
    settings["model.settings"] = {"width": 8, "modes": 8, "depth": 2}
    two_steps = {"training.batch_size": 16, "training.ema_decay": 0.9}
    events = train_here(tiny_config(**settings, **two_steps), tmp_path)
    assert events[-1]["reason"] == "epochs" and sum(event["kind"] == "step" for event in events) >= 2
    model = load_model(tmp_path)
    assert all(isinstance(value, torch.Tensor) for value in model.state_dict().values())
    for name, grid in (("advection", (32,)), ("darcy", (16, 16)), ("darcy", (24, 24))):
        spec = model.specs[name]
        y = model(name, torch.ones(1, spec.input_frames, 1, *grid), torch.ones(1, 1), spec.dt)
        assert y.shape == (1, spec.output_frames, 1, *grid) and y.isfinite().all()
