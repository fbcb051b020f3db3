"""A Fourier neural operator (arXiv 2010.08895), one network a dataset: the peer, and the shortest whole model.

`model.settings`: `width` channels, `modes` kept of each axis, `depth` blocks; all optional.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from upsnb.config import RunConfig
from upsnb.data.spec import DatasetSpec
from upsnb.models.geometry import grid_points
from upsnb.models.surrogate import Surrogate

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class FourierBlock(nn.Module):
    """GELU of a product with learned matrices in Fourier space, plus a pointwise one: (B, W, *grid) to the same."""

    def __init__(self, width: int, modes: tuple[int, ...]):
        super().__init__()
        self.modes = modes
        kept = (*(2 * m for m in modes[:-1]), modes[-1])  # both signs of each axis, but for the halved last one
        # Real and imaginary parts as plain numbers: optimizers, casts and shards need to know of no complex ones.
        self.spectral = nn.Parameter(torch.rand(width, width, *kept, 2) / width**2)
        self.pointwise = CONVOLUTIONS[len(modes) - 1](width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        axes, sizes = tuple(range(2, x.dim())), x.shape[2:]
        with torch.autocast(x.device.type, enabled=False):  # no half precision in Fourier space
            waves = torch.fft.rfftn(x.float(), dim=axes, norm="forward")
            for axis, m in zip(axes[:-1], self.modes):
                waves = torch.cat((waves.narrow(axis, 0, m), waves.narrow(axis, waves.shape[axis] - m, m)), dim=axis)
            waves = waves.narrow(-1, 0, self.modes[-1])
            waves = torch.einsum("bi...,io...->bo...", waves, torch.view_as_complex(self.spectral.float()))
            for axis, m in zip(axes[:-1], self.modes):
                gap = (*waves.shape[:axis], x.shape[axis] - 2 * m, *waves.shape[axis + 1 :])
                low, high = waves.split(m, dim=axis)
                waves = torch.cat((low, waves.new_zeros(gap), high), dim=axis)
            changed = torch.fft.irfftn(waves, s=sizes, dim=axes, norm="forward")
        return F.gelu(changed.to(x.dtype) + self.pointwise(x))


class FNO(Surrogate):
    """Frames, parameters and coordinates as channels, lifted, changed by Fourier blocks, and brought to frames."""

    def __init__(self, specs: dict[str, DatasetSpec], width: int = 32, modes: int = 12, depth: int = 4):
        super().__init__(specs)
        self.networks = nn.ModuleDict()
        for name, spec in specs.items():
            conv, kept = CONVOLUTIONS[spec.num_dims - 1], tuple(min(modes, size // 2) for size in spec.grid_shape)
            channels = spec.input_frames * spec.input_channels + spec.num_parameters + 1 + spec.num_dims
            lift = nn.Sequential(conv(channels, 2 * width, 1), nn.GELU(), conv(2 * width, width, 1))
            outputs = spec.output_frames * spec.output_channels
            project = nn.Sequential(conv(width, 2 * width, 1), nn.GELU(), conv(2 * width, outputs, 1))
            blocks = nn.ModuleList(FourierBlock(width, kept) for _ in range(depth))
            self.networks[name] = nn.ModuleDict({"lift": lift, "blocks": blocks, "project": project})

    def predict(self, name, x, parameters, relative_dt, points=None) -> Tensor:
        spec, network, grid = self.specs[name], self.networks[name], tuple(x.shape[3:])
        constants = torch.cat((parameters, relative_dt[:, None]), dim=1).reshape(len(x), -1, *(1,) * len(grid))
        places = grid_points(grid, x.device).T.reshape(1, -1, *grid).expand(len(x), -1, *grid)
        z = network["lift"](torch.cat((x.flatten(1, 2), constants.expand(-1, -1, *grid), places), dim=1))
        for block in network["blocks"]:
            z = block(z)
        change = network["project"](z).unflatten(1, (spec.output_frames, spec.output_channels))
        return change + x[:, -1:, : spec.output_channels] if spec.time_dependent else change

    def smallest_grid(self, name: str) -> tuple[int, ...]:
        *modes, last = self.networks[name]["blocks"][0].modes  # a grid must have the waves that the matrices are for
        return (*(2 * m for m in modes), max(2 * last - 2, 1))

    def blocks(self) -> list[nn.Module]:
        return [block for network in self.networks.values() for block in network["blocks"]]

    def parts(self) -> dict[str, list[nn.Module]]:
        return {name: [net["lift"], *net["blocks"], net["project"]] for name, net in self.networks.items()}


def build(config: RunConfig, specs: dict[str, DatasetSpec]) -> FNO:
    """The model of `model.settings`."""
    return FNO(specs, **config.model.settings)
