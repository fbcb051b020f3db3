"""What somebody brings along trains as it is on equations of different kinds, and forecasts them."""

import numpy as np
import pytest
from made_runs import of

from upsnb import overlays
from upsnb.data import datasets
from upsnb.runs.handle import Run

UNET = """
import torch
from torch import nn

class UNet(nn.Module):
    def __init__(self, in_channels, out_channels, num_dims, width=8):
        super().__init__()
        conv, self.mode = getattr(nn, f"Conv{num_dims}d"), ("linear", "bilinear", "trilinear")[num_dims - 1]
        up = [in_channels, width, 2 * width, 4 * width]
        self.down = nn.ModuleList(conv(a, b, 3, padding=1) for a, b in zip(up, up[1:]))
        self.up = nn.ModuleList(conv(a + b, b, 3, padding=1) for a, b in zip(up[:1:-1], up[-2:0:-1]))
        self.pool = getattr(nn, f"AvgPool{num_dims}d")(2)
        self.out = conv(width, out_channels, 1)

    def forward(self, x):
        kept = []
        for layer in self.down:
            x = nn.functional.gelu(layer(self.pool(x) if kept else x))
            kept.append(x)
        for layer, same in zip(self.up, kept[-2::-1]):
            x = nn.functional.interpolate(x, same.shape[2:], mode=self.mode)
            x = nn.functional.gelu(layer(torch.cat((x, same), dim=1)))
        return self.out(x)
"""
MLP = """
import math
from torch import nn

class MLP(nn.Module):
    def __init__(self, in_channels, out_channels, grid_shape):
        super().__init__()
        self.shape = out_channels, *grid_shape
        sizes = in_channels * math.prod(grid_shape), 64, 64, math.prod(self.shape)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in zip(sizes, sizes[1:-1])))
        self.last = nn.Linear(sizes[-2], sizes[-1])

    def forward(self, x):
        return self.last(self.layers(x.flatten(1))).unflatten(1, self.shape)
"""
FAMILIES = {  # a line, a plane without time, several channels
    "advection": {"family": "advection1d", "generate": {"num_samples": 20, "resolution": 32, "num_times": 13}},
    "darcy": {"family": "darcy2d", "generate": {"num_samples": 20, "resolution": 16}},
    "gas": {"family": "cfd1d", "generate": {"num_samples": 10, "resolution": 16, "num_times": 13}},
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text"), [("UNet", UNET), ("MLP", MLP)])
def test_it_trains_on_three_families_at_once(tmp_path, monkeypatch, data_root, train_here, name, text):
    assert len(text.strip().splitlines()) <= 30
    (tmp_path / "my_model.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    config = overlays.resolve(
        overlays.flatten(
            {
                "data": {"root": str(data_root), "datasets": FAMILIES},
                "model": {"build": f"my_model.py:{name}", "append_parameters": True},
                "optimizer": {"name": "adamw", "lr": 3e-3},
                "training": {"device": "cpu", "batch_size": 8},
                "stages.operator.epochs": 12,
            }
        )
    )
    for dataset in config.data.datasets.values():
        datasets.ensure_generated(dataset, data_root, lambda message: None)
    events = train_here(config, tmp_path / "run")
    for family in FAMILIES:
        losses = [event["loss"] for event in of(events, "step", datasets=[family])]
        half = len(losses) // 2
        assert sum(losses[half:]) < 0.9 * sum(losses[:half]), f"it learns {family}"
    run = Run(tmp_path / "run")
    for family in FAMILIES:
        spec = run.load_model().specs[family]
        given = np.ones((1, spec.input_frames, spec.input_channels, *spec.grid_shape), np.float32)
        parameters = [0.1] * spec.num_parameters
        assert run.predict(given, family, parameters=parameters).shape[3:] == spec.grid_shape
