"""A U-Net (arXiv 1505.04597) in 1, 2 or 3 dimensions: down to coarser grids, and up again beside what it saw there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from upsnb.models.geometry import CONVOLUTIONS, pad_axis

POOLS = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
GROUPS = 8  # of a norm: no statistics over a batch, so that microbatches and ranks change nothing


class Block(nn.Module):
    """Twice a convolution over 3 points, a norm and GELU: (B, C, *grid) to (B, width, *grid).

    A periodic axis goes on at its other end; behind a wall there are zeros, by which the network sees where it is.
    """

    def __init__(self, in_channels: int, width: int, periodic: tuple[bool, ...]):
        super().__init__()
        conv, behind_walls = CONVOLUTIONS[len(periodic) - 1], tuple(int(not wraps) for wraps in periodic)
        self.wrapped = [axis for axis, wraps in enumerate(periodic, 2) if wraps]
        self.convs = nn.ModuleList(conv(size, width, 3, padding=behind_walls) for size in (in_channels, width))
        self.norms = nn.ModuleList(nn.GroupNorm(GROUPS, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms):
            for axis in self.wrapped:
                x = pad_axis(x, axis, 1, 1, True)
            x = F.gelu(norm(conv(x)))
        return x


class UNet(nn.Module):
    """`depth` times half the points and twice the channels, and the way back; any grid.

    Args:
        width: channels on the given grid, a multiple of 8.
    """

    def __init__(
        self, in_channels: int, out_channels: int, periodic: tuple[bool, ...], width: int = 32, depth: int = 3
    ):
        super().__init__()
        self.periodic, kind, widths = periodic, len(periodic) - 1, [width * 2**level for level in range(depth + 1)]
        down = [Block(before, after, periodic) for before, after in zip((in_channels, *widths), widths)]
        up = [Block(2 * after, after, periodic) for after in widths[-2::-1]]
        self.blocks = nn.ModuleList((*down, *up))
        self.halve = nn.ModuleList(CONVOLUTIONS[kind](2 * after, after, 1) for after in widths[-2::-1])
        self.project = CONVOLUTIONS[kind](width, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        depth, seen = len(self.halve), []
        for block in self.blocks[:depth]:
            seen.append(block(x))
            x = coarser(seen[-1], self.periodic)
        x = self.blocks[depth](x)
        for block, halve, beside in zip(self.blocks[depth + 1 :], self.halve, reversed(seen)):
            x = block(torch.cat((beside, finer(halve(x), beside.shape[2:])), dim=1))
        return self.project(x)


def coarser(x: Tensor, periodic: tuple[bool, ...]) -> Tensor:
    """The larger of each two points; an odd axis goes on as its boundary asks, by its first point or by its last."""
    for axis, wraps in enumerate(periodic, 2):
        if x.shape[axis] % 2:
            x = pad_axis(x, axis, 0, 1, wraps)
    return POOLS[len(periodic) - 1](x, 2)


def finer(x: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Every point twice, but for what made an odd axis even."""
    for axis, size in enumerate(grid, 2):
        x = x.repeat_interleave(2, dim=axis).narrow(axis, 0, size)
    return x
