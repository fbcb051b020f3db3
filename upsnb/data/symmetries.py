"""Symmetries of equations: groups whose elements turn a solution into another one; a family's row names its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def shift_and_sign(fields: tuple[Tensor, ...], draws: np.ndarray) -> tuple[Tensor, ...]:
    """Roll each sample along its last axis and perhaps change its sign: linear equations with constant coefficients."""
    size, device = fields[0].shape[-1], fields[0].device
    shift = torch.from_numpy((draws[:, 0] * size).astype(np.int64)).to(device, non_blocking=True)
    sign = torch.from_numpy(np.where(draws[:, 1] < 0.5, -1.0, 1.0)).float().to(device, non_blocking=True)
    index = (torch.arange(size, device=device) - shift[:, None]).remainder(size)
    images = []
    for x in fields:
        lead = (len(x),) + (1,) * (x.dim() - 2)
        images.append(x.gather(-1, index.view(*lead, size).expand_as(x)) * sign.view(*lead, 1))
    return tuple(images)


SQUARE = (  # generators of the square's group, by bit: each is its own inverse
    (1, lambda field: field.flip(-1)),
    (2, lambda field: field.flip(-2)),
    (4, lambda field: field.transpose(-1, -2)),
)


def transform_square(x: Tensor, element: np.ndarray, generators=SQUARE) -> Tensor:
    """Apply one of the square's eight symmetries (bits: flip x, flip y, transpose) to each sample (B, ..., n, n)."""
    for bit, image in generators:
        chosen = torch.from_numpy((element & bit) > 0).to(x.device, non_blocking=True)
        x = torch.where(chosen.view(-1, *(1,) * (x.dim() - 1)), image(x), x)
    return x


def invert_square(x: Tensor, element: np.ndarray) -> Tensor:
    """Undo `transform_square` with the same elements."""
    return transform_square(x, element, SQUARE[::-1])


def random_square(fields: tuple[Tensor, ...], draws: np.ndarray) -> tuple[Tensor, ...]:
    """One of the square's symmetries for each sample: isotropic equations on a square."""
    element = (draws[:, 0] * 8).astype(np.int64)
    return tuple(transform_square(x, element) for x in fields)


def average_square(forecast: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Mean of a forecast over the square's eight symmetries, each turned back."""
    total = 0
    for element in range(8):
        elements = np.full(len(inputs), element)
        total = total + invert_square(forecast(transform_square(inputs, elements)), elements)
    return total / 8


@dataclass(frozen=True)
class Group:
    """What can be done with the symmetries of an equation.

    draw: replaces each sample of some fields by an image of itself, the same one in all fields. Takes (B, ..., *grid)
        tensors and (B, 2) draws in [0, 1), which decide the image.
    average: a forecast averaged over all elements; None where there are too many.
    """

    draw: Callable[[tuple[Tensor, ...], np.ndarray], tuple[Tensor, ...]]
    average: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] | None = None


GROUPS = {"shift and sign": Group(shift_and_sign), "square": Group(random_square, average_square)}
