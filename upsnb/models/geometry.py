"""Grids and unit coordinates: cell centres, padding as boundaries ask, blending between cells."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def grid_points(shape: tuple[int, ...], device=None) -> Tensor:
    """Cell centres of a grid in unit coordinates, (N, S) float32, last axis fastest."""
    axes = [(torch.arange(size, dtype=torch.float32, device=device) + 0.5) / size for size in shape]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, len(shape))


def pad_axis(x: Tensor, axis: int, before: int, after: int, periodic: bool) -> Tensor:
    """Pad one axis by wrapping around, at most once, or by repeating the edge.

    Made of slices, not by an index: its backward would add into rows that several threads share, and what torch 2.13
    generates for that on the CPU corrupts memory.
    """
    size = x.shape[axis]
    if periodic:
        return torch.cat((x.narrow(axis, size - before, before), x, x.narrow(axis, 0, after)), dim=axis)
    sizes = list(x.shape)
    sizes[axis] = before
    head = x.narrow(axis, 0, 1).expand(sizes)
    sizes[axis] = after
    tail = x.narrow(axis, size - 1, 1).expand(sizes)
    return torch.cat((head, x, tail), dim=axis)


def pad(x: Tensor, before: int, after: int, periodic: tuple[bool, ...]) -> Tensor:
    """Pad the last len(periodic) axes, each as its boundary asks."""
    for axis, wraps in zip(range(-len(periodic), 0), periodic):
        x = pad_axis(x, axis, before, after, wraps)
    return x


def neighbours(points_QS: Tensor, shape: tuple[int, ...], periodic: tuple[bool, ...]):
    """The 2^S grid cells around each point, with hat weights, for multilinear blending.

    Args:
        points_QS: (Q, S) unit coordinates.
    Returns:
        index (Q, 2^S) into the flattened grid; weight (Q, 2^S), summing to one; offset (Q, 2^S, S), point minus
        cell centre in cell widths. Beyond a closed edge the edge cell stands in, at its ghost's position.
    """
    # axis by axis with plain numbers: a small tensor made here would be a copy to the device, and wait for it
    position = [points_QS[:, axis] * size - 0.5 for axis, size in enumerate(shape)]
    index, weight, offset = [], [], []
    for corner in itertools.product((0, 1), repeat=len(shape)):
        cells = [p.floor() + step for p, step in zip(position, corner)]
        offset.append(torch.stack([p - cell for p, cell in zip(position, cells)], dim=-1))
        weight.append((1 - offset[-1].abs()).prod(-1))
        flat = 0
        for cell, size, wraps in zip(cells, shape, periodic):
            cell = cell.long()
            flat = flat * size + (cell % size if wraps else cell.clamp(0, size - 1))
        index.append(flat)
    return torch.stack(index, 1), torch.stack(weight, 1), torch.stack(offset, 1)


def sample_at(field: Tensor, points_QS: Tensor, periodic: tuple[bool, ...]) -> Tensor:
    """Multilinear interpolation of (..., *grid) at (Q, S) unit coordinates -> (..., Q)."""
    shape = field.shape[-len(periodic) :]
    index, weight, _ = neighbours(points_QS, tuple(shape), periodic)
    return (field.flatten(-len(periodic))[..., index] * weight).sum(-1)


def resample(field: Tensor, shape: tuple[int, ...], periodic: tuple[bool, ...]) -> Tensor:
    """Bring (..., *grid) to another grid of the same domain: cell averages downwards, multilinear otherwise."""
    old = tuple(field.shape[-len(shape) :])
    if old == tuple(shape):
        return field
    lead = field.shape[: -len(shape)]
    if all(a % b == 0 for a, b in zip(old, shape)):
        pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(shape) - 1]
        factor = tuple(a // b for a, b in zip(old, shape))
        return pool(field.reshape(-1, 1, *old), factor).reshape(*lead, *shape)
    return sample_at(field, grid_points(shape, field.device), periodic).reshape(*lead, *shape)
