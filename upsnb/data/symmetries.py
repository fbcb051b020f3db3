"""Symmetries of the equations: images of a solution that are solutions too."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def augment(batch, family: str, draws: np.ndarray) -> None:
    """Replace each pair by an image of itself under its equation's symmetries.

    Args:
        draws: (B, 2) in [0, 1); what decides which image.
    """
    if family == "advection1d":  # linear, with constant coefficients on a circle: shift and sign
        shift = (draws[:, 0] * batch.inputs.shape[-1]).astype(np.int64)
        sign = np.where(draws[:, 1] < 0.5, -1.0, 1.0)
        batch.inputs, batch.targets = shift_and_sign((batch.inputs, batch.targets), shift, sign)
    elif family == "darcy2d":  # isotropic, on a square
        element = (draws[:, 0] * 8).astype(np.int64)
        batch.inputs, batch.targets = (transform_square(x, element) for x in (batch.inputs, batch.targets))


def shift_and_sign(fields: tuple[Tensor, ...], shift: np.ndarray, sign: np.ndarray) -> tuple[Tensor, ...]:
    """Roll each sample along its last axis by `shift` cells and multiply it by `sign`; (B,) arrays."""
    device, size = fields[0].device, fields[0].shape[-1]
    index = (torch.arange(size) - torch.from_numpy(shift)[:, None]).remainder(size).to(device, non_blocking=True)
    factor = torch.from_numpy(sign).float().to(device, non_blocking=True)
    images = []
    for x in fields:
        lead = (len(x),) + (1,) * (x.dim() - 2)
        images.append(x.gather(-1, index.view(*lead, size).expand_as(x)) * factor.view(*lead, 1))
    return tuple(images)


def transform_square(x: Tensor, element: np.ndarray) -> Tensor:
    """Apply one of the square's eight symmetries (bits: flip x, flip y, transpose) to each sample (B, ..., n, n)."""
    for bit, image in ((1, lambda f: f.flip(-1)), (2, lambda f: f.flip(-2)), (4, lambda f: f.transpose(-1, -2))):
        chosen = torch.from_numpy((element & bit) > 0).to(x.device, non_blocking=True)
        x = torch.where(chosen.view(-1, *(1,) * (x.dim() - 1)), image(x), x)
    return x


def invert_square(x: Tensor, element: np.ndarray) -> Tensor:
    """Undo `transform_square` with the same elements."""
    for bit, image in ((4, lambda f: f.transpose(-1, -2)), (2, lambda f: f.flip(-2)), (1, lambda f: f.flip(-1))):
        chosen = torch.from_numpy((element & bit) > 0).to(x.device, non_blocking=True)
        x = torch.where(chosen.view(-1, *(1,) * (x.dim() - 1)), image(x), x)
    return x
