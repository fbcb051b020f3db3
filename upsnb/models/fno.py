"""A Fourier neural operator (arXiv 2010.08895): the peer, and an example of a plain nn.Module as model.

`model.settings`: `width` channels, `modes` kept of each axis, `depth` blocks; all optional.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from upsnb.models.fourier import convolve, matrices
from upsnb.models.geometry import CONVOLUTIONS


class FourierBlock(nn.Module):
    """GELU of a product with learned matrices in Fourier space, plus a pointwise one: (B, W, *grid) to the same."""

    def __init__(self, width: int, modes: tuple[int, ...]):
        super().__init__()
        self.modes = modes
        self.spectral = matrices(width, width, modes, torch.rand)
        self.pointwise = CONVOLUTIONS[len(modes) - 1](width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(convolve(x, self.spectral, self.modes).to(x.dtype) + self.pointwise(x))


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
