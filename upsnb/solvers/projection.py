"""Incompressible flow in a box with walls, driven by a force on the dye that it carries, in float64.

The grid is staggered: velocity is known on the faces between cells, u (N - 1, N) and v (N, N - 1), and is zero on the
walls; pressure and dye on cell centres. Then the cells' divergence can be taken away exactly.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np

from upsnb.solvers.spectral import resample_square
from upsnb.solvers.waves import refuse_negative

GRID = 16  # points on which random fields are drawn: the shortest of their waves fit on it
COURANT = 0.4  # cells that velocity crosses in a step; 0.5 keeps the dye within its bounds
TINY = 1e-30  # keeps 0 / 0 from a dye that is constant


def carried_dye(u, v, dye, force, nu, times, length=1.0, courant=COURANT) -> Iterator[tuple]:
    """Velocity and dye at each of the times, the first that of the states.

    velocity_t + velocity . grad velocity = -grad p + nu lap velocity + dye force, div velocity = 0, no slip;
    dye_t + div(velocity dye) = 0. Differences that neither make nor lose kinetic energy, van Leer's limited slopes for
    the dye, and two stages a step (Heun), each projected.

    Args:
        u, v: along x (N - 1, N) and y (N, N - 1); what divergence they have is taken away first.
        dye: (N, N).
        force: (2, N, N) on cell centres.
        length: of the box's sides.
    """
    width = length / len(dye)
    pushes = [_pairs(force[axis], axis) / 4 for axis in (0, 1)]
    project = projection(len(dye))

    def slopes(u, v, dye):
        u_slope, v_slope = _momentum(u, v, 0, width, nu), _momentum(v, u, 1, width, nu)
        u_slope += pushes[0] * _pairs(dye, 0)
        v_slope += pushes[1] * _pairs(dye, 1)
        lost = divergence(_flux(u, dye, 0), _flux(v, dye, 1))
        return u_slope, v_slope, lost / -width

    state, time = [*project(u, v), dye], times[0]
    yield tuple(state)
    for goal in times[1:]:
        while goal - time > 1e-9 * goal:
            # below the step at which diffusion would grow, and what the fastest cell allows
            fastest = np.abs(state[0]).max() + np.abs(state[1]).max() + TINY
            longest = min(0.9 * width**2 / (4 * max(nu, TINY)), courant * width / fastest)
            step = (goal - time) / math.ceil((goal - time) / longest)
            first = slopes(*state)
            ahead = [value + step * slope for value, slope in zip(state, first, strict=True)]
            ahead[:2] = project(*ahead[:2])
            second = slopes(*ahead)
            state = [value + step / 2 * (a + b) for value, a, b in zip(state, first, second, strict=True)]
            state[:2] = project(*state[:2])
            time += step
        yield tuple(state)


def random_field(random: np.random.Generator, resolution: int) -> np.ndarray:
    """Mean 0, standard deviation 1, of the same waves at every resolution: (N, N).

    As in the small published file: nothing longer than half the box, amplitudes fall as the sixth power of wavenumbers.
    """
    wavenumbers = np.hypot(np.fft.fftfreq(GRID, 1 / GRID)[:, None], np.arange(GRID // 2 + 1))
    amplitudes = np.where((wavenumbers >= 2) & (wavenumbers < 7), np.maximum(wavenumbers, 1) ** -6, 0)
    field = np.fft.irfft2(amplitudes * np.fft.rfft2(random.normal(size=(GRID, GRID))), (GRID, GRID))
    return resample_square(field / field.std(), resolution)


def solve_incompressible_flow(seed, samples, parameters, resolution, times):
    """2D incompressible Navier-Stokes from random velocity, dye and force; parameter NU."""
    refuse_negative(parameters)
    for sample in samples:
        random = np.random.default_rng([seed, sample])
        vx, vy, dye, fx, fy = (random_field(random, resolution) for _ in range(5))
        states = carried_dye(_pairs(vx, 0) / 2, _pairs(vy, 1) / 2, dye, np.stack([fx, fy]), parameters["NU"], times)
        velocity, dyes = zip(*((centred(u, v), dye) for u, v, dye in states), strict=True)
        velocity = np.stack(velocity, axis=1)
        yield {"Vx": velocity[0], "Vy": velocity[1], "particles": np.stack(dyes), "Fx": fx, "Fy": fy}


def projection(num_cells: int) -> Callable:
    """A function that takes from u, v the gradient that holds all their divergence: exact, by cosines."""
    modes = np.arange(num_cells)
    cosines = np.cos(np.pi / num_cells * modes[:, None] * (modes + 0.5)) * np.sqrt(2 / num_cells)
    cosines[0] /= np.sqrt(2)
    eigenvalues = 2 - 2 * np.cos(np.pi / num_cells * modes)
    eigenvalues = eigenvalues[:, None] + eigenvalues
    eigenvalues[0, 0] = 1  # a constant pressure does nothing

    def project(u, v):
        pressure = cosines.T @ (cosines @ divergence(u, v) @ cosines.T / -eigenvalues) @ cosines
        return u - _steps(pressure, 0), v - _steps(pressure, 1)

    return project


def divergence(u, v):
    """Of each cell, times its width: (N, N)."""
    return _steps(_walled(u, 0), 0) + _steps(_walled(v, 1), 1)


def centred(u, v):
    """Velocity on cell centres: (2, N, N)."""
    return np.stack([_pairs(_walled(u, 0), 0), _pairs(_walled(v, 1), 1)]) / 2


def _momentum(u, v, axis, width, nu):
    """Slope of the velocity u along an axis, v the other, but for pressure and force."""
    walled, other = _walled(u, axis), 1 - axis
    middle = _pairs(walled, axis)  # twice u, on centres
    corners = _pairs(u, other) * _pairs(v, axis)  # four times u v, on the corners inside
    carried = _steps(middle * middle, axis) + _steps(_walled(corners, other), other)
    across, ends = _walled(u, other), (slice(None),) * other + ([0, -1],)
    across[ends] = -u[ends]  # zero on the wall, half a cell beyond the centres
    bent = _steps(_steps(walled, axis), axis) + _steps(_steps(across, other), other)
    return nu / width**2 * bent - carried / (4 * width)


def _flux(u, dye, axis):
    """Dye through the faces inside, from the side where the velocity comes from."""
    steps = _steps(dye, axis)
    sizes = np.abs(steps)
    slopes = _low(steps, axis) * _high(sizes, axis) + _high(steps, axis) * _low(sizes, axis)
    half = _walled(slopes / (2 * _pairs(sizes, axis) + TINY), axis)  # zero in the cells at the walls
    before, after = _low(dye + half, axis), _high(dye - half, axis)
    return (u * (before + after) + np.abs(u) * (before - after)) / 2


def _walled(values, axis):
    """With zeros on both walls."""
    walled = np.zeros([size + 2 * (each == axis) for each, size in enumerate(values.shape)])
    walled[(slice(None),) * axis + (slice(1, -1),)] = values
    return walled


def _low(values, axis):
    return values[(slice(None),) * axis + (slice(None, -1),)]


def _high(values, axis):
    return values[(slice(None),) * axis + (slice(1, None),)]


def _steps(values, axis):
    """Differences of neighbours."""
    return _high(values, axis) - _low(values, axis)


def _pairs(values, axis):
    """Sums of neighbours."""
    return _low(values, axis) + _high(values, axis)
