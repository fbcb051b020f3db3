"""Products with learned matrices in Fourier space: convolutions as wide as the domain."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from upsnb.data.spec import DatasetSpec
from upsnb.models.geometry import resample


class Propagator(nn.Module):
    """The linear part of a forecast: what each wave of the given frames adds to the last of them, at first nothing.

    A linear equation with constant coefficients multiplies each wave by a matrix, the exponential of its symbol times
    the time step, exact for a step of any size. Exponential integrators (Cox and Matthews, J. Comput. Phys. 176, 2002)
    solve that part of an equation so and approximate the others; here the matrices are learned, and tokens are for the
    others. Between walls, fields are continued as in a mirror, which makes them even functions of twice the period.
    """

    def __init__(self, spec: DatasetSpec, modes: int):
        super().__init__()
        self.spec = spec
        self.modes = tuple(
            min(modes, size // 2) if wraps else min(2 * modes, size)
            for size, wraps in zip(spec.grid_shape, spec.periodic)
        )
        given, out = spec.input_frames * spec.input_channels, spec.output_frames * spec.output_channels
        self.spectral = matrices(given, out, self.modes, torch.zeros)

    def forward(self, x: Tensor) -> Tensor:
        """Normalised (B, T, C, *grid) of any resolution -> (B, T_out, C_out, *grid) float32."""
        spec, z = self.spec, x.float().flatten(1, 2)
        grid, walls = tuple(z.shape[2:]), [axis for axis, wraps in enumerate(spec.periodic, 2) if not wraps]
        for axis in walls:
            z = torch.cat((z, z.flip(axis)), dim=axis)
        if any(size < 2 * most for size, most in zip(z.shape[2:], self.modes)):  # too coarse to have these waves
            return resample(self(resample(x, spec.grid_shape, spec.periodic)), grid, spec.periodic)
        z = convolve(z, self.spectral, self.modes)
        for axis in walls:
            z = z.narrow(axis, 0, grid[axis - 2])
        return z.unflatten(1, (spec.output_frames, spec.output_channels))


def matrices(given: int, out: int, modes: tuple[int, ...], draw: Callable[..., Tensor]) -> nn.Parameter:
    """One complex matrix for each wave that is kept, (given, out, *kept, 2), laid out as they are multiplied.

    Real and imaginary parts as plain numbers: optimizers, casts and shards need to know of no complex ones.

    Args:
        modes: of each axis, with either sign; the last axis has one alone, for real fields have conjugate twins.
        draw: torch.rand or torch.zeros.
    """
    kept = (*(2 * m for m in modes[:-1]), modes[-1])
    spectral, n = draw(given, out, *kept, 2) / (given * out), len(kept)
    in_memory = spectral.permute(*range(2, n + 2), 0, n + 2, 1).contiguous()
    return nn.Parameter(in_memory.permute(n, n + 2, *range(n), n + 1))


def convolve(x: Tensor, spectral: Tensor, modes: tuple[int, ...]) -> Tensor:
    """(B, C, *grid) -> (B, C', *grid) float32 of the waves that are kept; others vanish.

    Args:
        spectral: (C, C', *kept, 2), as from `matrices`.
    """
    axes, sizes = tuple(range(2, x.dim())), x.shape[2:]
    with torch.autocast(x.device.type, enabled=False):  # no half precision in Fourier space
        waves = torch.fft.rfftn(x.float(), dim=axes, norm="forward")
        for axis, m in zip(axes[:-1], modes):
            waves = torch.cat((waves.narrow(axis, 0, m), waves.narrow(axis, waves.shape[axis] - m, m)), dim=axis)
        waves = waves.narrow(-1, 0, modes[-1])
        waves = product(waves, spectral.float())
        for axis, m in zip(axes[:-1], modes):
            gap = (*waves.shape[:axis], x.shape[axis] - 2 * m, *waves.shape[axis + 1 :])
            low, high = waves.split(m, dim=axis)
            waves = torch.cat((low, waves.new_zeros(gap), high), dim=axis)
        # As irfftn, but a real field has a real mean along its last axis and a real shortest wave, whatever came of the
        # matrices: where they are not, cuFFT gives something else than the CPU, which reads their real parts alone
        # (pytorch issue 154496).
        waves = torch.fft.ifftn(waves, dim=axes[:-1], norm="forward") if axes[1:] else waves
        turns = torch.arange(modes[-1], device=x.device)
        waves = torch.complex(waves.real, waves.imag * (2 * turns % sizes[-1] != 0))
        return torch.fft.irfft(waves, n=sizes[-1], dim=-1, norm="forward")


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
