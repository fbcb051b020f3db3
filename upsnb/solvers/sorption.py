"""Diffusion through a porous medium that holds back part of the substance (Freundlich sorption), in float64."""

from collections.abc import Iterator

import numpy as np

from upsnb.errors import DataError
from upsnb.solvers.waves import refuse_negative

INLET = 1.0  # concentration held in the cell left of the domain
HIGHEST = 0.2  # of the constant concentrations that samples begin with
EMPTY = 1e-9  # least concentration that is told from none, where retardation is infinite
TOLERANCE = 1e-6
DRAWN = {"D": (2.5e-4, 1e-3), "n_f": (0.7, 1.0)}  # [domain lengths^2 per unit time], exponent


def retardation(u, por, rho_s, k_f, n_f):
    """How many times slower than in water the dissolved part spreads: 1 + d sorbed / d dissolved."""
    return 1 + (1 - por) / por * rho_s * k_f * n_f * np.maximum(u, EMPTY) ** (n_f - 1)


def diffusion_sorption(
    state: np.ndarray, times: np.ndarray, D: float, tolerance: float = TOLERANCE, **medium: float
) -> np.ndarray:
    """u_t = D / R(u) u_xx on (0, 1), one sample: (N,) to (T, N).

    On cell centres, with a ghost cell beyond each wall: `INLET` on the left; what leaves on the right is stirred into
    the other, u = -D u_x.

    Args:
        times: the first that of the state.
        D: diffusivity in water.
        tolerance: of the integrator, relative and absolute.
        medium: porosity, density and sorption, as `retardation` takes them.
    """
    import scipy.integrate  # here, because it takes a while and whoever reads a config would wait for it

    width = 1 / len(state)

    def slope(_, u):
        padded = np.concatenate([[INLET], u, [D * (u[-2] - u[-1]) / width]])
        return D / width**2 * np.diff(padded, 2) / retardation(u, **medium)

    options = {"lband": 1, "uband": 1, "rtol": tolerance, "atol": tolerance}
    solved = scipy.integrate.solve_ivp(slope, (times[0], times[-1]), state, "LSODA", times, **options)
    if not solved.success:
        raise DataError(f"diffusion-sorption with D = {D:g}, {medium}: {solved.message} -> take other parameters")
    return solved.y.T


def solve_diffusion_sorption(seed, samples, parameters, resolution, times, stretch=1.0) -> Iterator[dict]:
    """Diffusion-sorption from a constant; parameters D, por, rho_s, k_f and n_f.

    In the released files the constant is all that differs between samples. D or n_f of 0 is drawn for each (`DRAWN`).
    """
    refuse_negative(parameters)
    if not 0 < parameters["por"] <= 1:
        raise DataError(f"por is {parameters['por']:g} -> expected a porosity, above 0 and at most 1")
    tolerance = stretch * TOLERANCE
    for sample in samples:
        random = np.random.default_rng([seed, sample])
        start = random.uniform(0, HIGHEST)
        drawn = {name: random.uniform(*bounds) for name, bounds in DRAWN.items()}  # always, so that starts are the same
        own = {name: value for name, value in drawn.items() if parameters[name] == 0}
        solved = diffusion_sorption(np.full(resolution, start), times, tolerance=tolerance, **parameters | own)
        yield {"u": solved, **own}
