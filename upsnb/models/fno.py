"""A Fourier neural operator (arXiv 2010.08895): the peer, and an example of a plain nn.Module as model.

`model.settings`: `width` channels, `modes` kept of each axis, `depth` blocks; all optional.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class FourierBlock(nn.Module):
    """GELU of a product with learned matrices in Fourier space, plus a pointwise one: (B, W, *grid) to the same."""

    def __init__(self, width: int, modes: tuple[int, ...]):
        super().__init__()
        self.modes = modes
        kept = (*(2 * m for m in modes[:-1]), modes[-1])  # both signs of each axis, but for the halved last one
        # Real and imaginary parts as plain numbers: optimizers, casts and shards need to know of no complex ones.
        spectral, n = torch.rand(width, width, *kept, 2) / width**2, len(kept)
        in_memory = spectral.permute(*range(2, n + 2), 0, n + 2, 1).contiguous()  # as they are multiplied
        self.spectral = nn.Parameter(in_memory.permute(n, n + 2, *range(n), n + 1))
        self.pointwise = CONVOLUTIONS[len(modes) - 1](width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        axes, sizes = tuple(range(2, x.dim())), x.shape[2:]
        with torch.autocast(x.device.type, enabled=False):  # no half precision in Fourier space
            waves = torch.fft.rfftn(x.float(), dim=axes, norm="forward")
            for axis, m in zip(axes[:-1], self.modes):
                waves = torch.cat((waves.narrow(axis, 0, m), waves.narrow(axis, waves.shape[axis] - m, m)), dim=axis)
            waves = waves.narrow(-1, 0, self.modes[-1])
            waves = product(waves, self.spectral.float())
            for axis, m in zip(axes[:-1], self.modes):
                gap = (*waves.shape[:axis], x.shape[axis] - 2 * m, *waves.shape[axis + 1 :])
                low, high = waves.split(m, dim=axis)
                waves = torch.cat((low, waves.new_zeros(gap), high), dim=axis)
            changed = torch.fft.irfftn(waves, s=sizes, dim=axes, norm="forward")
        return F.gelu(changed.to(x.dtype) + self.pointwise(x))


def product(waves: Tensor, spectral: Tensor) -> Tensor:
    """Each wave's matrix on its channels, in real numbers.

    (B, W, *kept) complex and (W, W', *kept, 2) to (B, W', *kept) complex.
    Torch multiplies batches of conjugated complex matrices one by one, which was half of a step on two CPU cores.
    """
    kept = waves.shape[2:]
    x = torch.view_as_real(waves).flatten(2, -2).permute(2, 3, 0, 1).flatten(1, 2)  # (K, 2 B, W)
    matrices = spectral.flatten(2, -2).permute(2, 0, 3, 1).flatten(2)  # (K, W, 2 W')
    # what came of either part, (K, B, 2, W'); not by chunks, whose sizes no exported program knows
    real, imaginary = (x @ matrices).unflatten(2, (2, -1)).unflatten(1, (2, -1)).unbind(1)
    y = torch.stack((real[:, :, 0] - imaginary[:, :, 1], real[:, :, 1] + imaginary[:, :, 0]), dim=-1)
    return torch.view_as_complex(y.permute(1, 2, 0, 3).contiguous()).unflatten(2, kept)


class FNO(nn.Module):
    """Channels and coordinates, lifted, changed by Fourier blocks, and brought to output channels."""

    def __init__(self, in_channels, out_channels, grid_shape, width: int = 32, modes: int = 12, depth: int = 4):
        super().__init__()
        conv, kept = CONVOLUTIONS[len(grid_shape) - 1], tuple(min(modes, size // 2) for size in grid_shape)
        channels = in_channels + len(grid_shape)
        self.lift = nn.Sequential(conv(channels, 2 * width, 1), nn.GELU(), conv(2 * width, width, 1))
        self.blocks = nn.ModuleList(FourierBlock(width, kept) for _ in range(depth))
        self.project = nn.Sequential(conv(width, 2 * width, 1), nn.GELU(), conv(2 * width, out_channels, 1))

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        z = self.lift(torch.cat((x, grid), dim=1))
        for block in self.blocks:
            z = block(z)
        return self.project(z)

    def smallest_grid(self) -> tuple[int, ...]:
        *modes, last = self.blocks[0].modes  # a grid must have the waves that the matrices are for
        return (*(2 * m for m in modes), max(2 * last - 2, 1))
