"""Reaction-diffusion, Kuramoto-Sivashinsky and Kolmogorov flow on Fourier or cosine modes, in float64.

Each equation is a function of states, parameters and times, for many samples at once; times begin with the states'
own. The `solve_` functions draw the states and are what families generate files with.
"""

import math
from collections.abc import Callable

import numpy as np

from upsnb.solvers.waves import blocks, draw_waves, initial_state, refuse_negative

BLOCK_VALUES = 2**22  # of frames that are in memory at once, 32 MiB
CIRCLE = np.exp(1j * np.pi * (np.arange(32) + 0.5) / 32)  # upper half: the operators are real, the lower is its mirror
RANGE_GRID = 4096  # points on which a wave's range is found: the same at every resolution
FORCING = 4  # waves of Kolmogorov flow's force
REACTION_STEP, CHAOS_STEP, PATTERN_STEP, FLOW_STEP = 5e-4, 0.1, 0.025, 0.05  # longest ones, which files are made with

# Chaos forgets its first state on its own: a random one is left to itself on one grid, whatever the file's, so that a
# sample is the same at every resolution. Flows begin at the attractor's vorticity, and the finer grid adds its waves.
BURN_IN = {"grid": 128, "time": 100.0, "step": 0.2}
FLOW_BURN_IN = {32: 9.0, 64: 1.0}  # points: time
FLOW_VORTICITY = 3.5  # its root mean square
STABLE = 2.8  # radians of an oscillation in a step of a fourth-order Runge-Kutta method, 2 sqrt 2
FINEST = 64  # steps in the place of one; a flow that wants more is no longer one


def etdrk4(linear: np.ndarray, step: float, nonlinear: Callable) -> Callable:
    """A function that advances modes of u' = linear u + nonlinear(u) by a step, to fourth order (Cox & Matthews 2002).

    The linear part is exact, so stiff decay does not limit the step. Coefficients are means over a circle around each
    eigenvalue, because their formulas cancel near zero (Kassam & Trefethen 2005).

    Args:
        linear: real eigenvalues [per unit time], broadcastable to the modes.
    """
    whole, half = np.exp(step * linear), np.exp(step * linear / 2)
    inner, first, middle, last = (np.zeros(np.shape(linear)) for _ in range(4))
    for point in CIRCLE:  # one by one: all at once they take 32 times the memory
        z = step * linear + point
        exp_half, square = np.exp(z / 2), z * z
        exp, weight = exp_half * exp_half, step / len(CIRCLE)
        per_cube = weight / (z * square)
        inner += weight * ((exp_half - 1) / z).real
        first += (per_cube * (-4 - z + exp * (4 - 3 * z + square))).real
        middle += 2 * (per_cube * (2 + z + exp * (z - 2))).real
        last += (per_cube * (-4 - 3 * z - square + exp * (4 - z))).real

    def advance(modes):
        slope = nonlinear(modes)
        a = half * modes + inner * slope
        slope_a = nonlinear(a)
        slope_b = nonlinear(half * modes + inner * slope_a)
        slope_c = nonlinear(half * a + inner * (2 * slope_b - slope))
        return whole * modes + first * slope + middle * (slope_a + slope_b) + last * slope_c

    return advance


def _march(state, times: np.ndarray, longest_step: float, method: Callable) -> list:
    """The state at each of the times; `method(step)` gives the function that advances it by a step."""
    states, before = [state], 0.0
    for interval in np.diff(times):
        if not math.isclose(interval, before, rel_tol=1e-9):
            num_steps = math.ceil(interval / longest_step - 1e-6)
            advance, before = method(interval / num_steps), interval
        for _ in range(num_steps):
            state = advance(state)
        states.append(state)
    return states


def resample(fields: np.ndarray, resolution: int) -> np.ndarray:
    """Periodic fields on the cell centres of another grid along their last axis, exact for the waves that it holds."""
    num_points = fields.shape[-1]
    wavenumbers = np.arange(num_points // 2 + 1)
    moved = np.fft.rfft(fields) * np.exp(1j * np.pi * wavenumbers * (1 / resolution - 1 / num_points))
    return np.fft.irfft(moved, resolution) * (resolution / num_points)


def resample_square(fields: np.ndarray, resolution: int) -> np.ndarray:
    """As `resample`, along the last two axes."""
    return resample(resample(fields, resolution).swapaxes(-1, -2), resolution).swapaxes(-1, -2)


# --- one dimension ----------------------------------------------------------------------------------------------------


def reaction_diffusion_states(seed: int, samples: np.ndarray, resolution: int) -> np.ndarray:
    """Advection's waves scaled to [0, 1], on cell centres: (n, N) float64."""
    waves = draw_waves(seed, samples)
    fine = initial_state(waves, np.arange(RANGE_GRID) / RANGE_GRID)
    low, high = fine.min(axis=1, keepdims=True), fine.max(axis=1, keepdims=True)
    return np.clip((initial_state(waves, (np.arange(resolution) + 0.5) / resolution) - low) / (high - low), 0, 1)


def reaction_diffusion(states, nu, rho, times, longest_step=REACTION_STEP):
    """u_t = nu u_xx + rho u (1 - u), period 1, second order in time (Strang): (n, N) to (n, T, N).

    Each half is exact: the logistic curve in every point, decay of every Fourier mode. Without them a step keeps
    neither the bounds [0, 1] nor the rate rho.
    """
    num_points = states.shape[-1]
    wavenumbers = 2 * np.pi * np.arange(num_points // 2 + 1)

    def method(step):
        decay, growth = np.exp(-nu * wavenumbers**2 * step), np.expm1(rho * step / 2)

        def react(u):
            return u * (1 + growth) / (1 + growth * u)

        return lambda u: react(np.fft.irfft(decay * np.fft.rfft(react(u)), num_points))

    return np.stack(_march(states, times, longest_step, method), axis=1)


def solve_reaction_diffusion(seed, samples, parameters, resolution, times, stretch=1.0):
    """1D reaction-diffusion of waves; parameters Nu and rho."""
    refuse_negative(parameters, "Nu")
    for block in blocks(samples, BLOCK_VALUES // (len(times) * resolution)):
        states = reaction_diffusion_states(seed, block, resolution)
        for fields in reaction_diffusion(states, parameters["Nu"], parameters["rho"], times, stretch * REACTION_STEP):
            yield {"u": fields}


def kuramoto_sivashinsky(states, length, nu, times, longest_step=CHAOS_STEP):
    """u_t + u u_x + u_xx + nu u_xxxx = 0 with period `length`: (n, N) to (n, T, N)."""
    num_points = states.shape[-1]
    wavenumbers = 2 * np.pi / length * np.arange(num_points // 2 + 1)
    half_slope = -0.5j * wavenumbers * (np.arange(num_points // 2 + 1) < num_points / 3)  # 2/3 rule: no aliasing

    def nonlinear(modes):
        return half_slope * np.fft.rfft(np.fft.irfft(modes, num_points) ** 2)

    linear = wavenumbers**2 - nu * wavenumbers**4
    modes = _march(np.fft.rfft(states), times, longest_step, lambda step: etdrk4(linear, step, nonlinear))
    return np.fft.irfft(np.stack(modes, axis=1), num_points)


def solve_kuramoto_sivashinsky(seed, samples, parameters, resolution, times, stretch=1.0):
    """Kuramoto-Sivashinsky on its attractor, period 64, mean zero; parameter nu."""
    refuse_negative(parameters)
    grid, end, step = BURN_IN.values()
    for block in blocks(samples, BLOCK_VALUES // (len(times) * max(resolution, grid))):
        modes = np.zeros((len(block), grid // 2 + 1), dtype=np.complex128)
        for row, sample in zip(modes, block, strict=True):
            row[1:9] = grid / 8 * np.random.default_rng([seed, sample]).normal(size=(8, 2)) @ [1, 1j]
        states = np.fft.irfft(modes, grid)
        states = kuramoto_sivashinsky(states, 64.0, parameters["nu"], np.array([0, end]), step)[:, -1]
        # A coarser grid does not carry the equation (64 points: 2 % in 0.8): it is solved here and sampled.
        states = resample(states, max(resolution, grid))
        for fields in kuramoto_sivashinsky(states, 64.0, parameters["nu"], times, stretch * CHAOS_STEP):
            yield {"u": resample(fields, resolution)}


# --- two dimensions ---------------------------------------------------------------------------------------------------


def wall_eigenvalues(num_points: int) -> np.ndarray:
    """Of the second derivative between walls 2 apart without flow through them: (N,)."""
    return -((np.pi / 2 * np.arange(num_points)) ** 2)


def fitzhugh_nagumo(states, diffusivities, k, times, longest_step=PATTERN_STEP):
    """Activator u and inhibitor v on (-1, 1)^2 without flow through the walls: (n, 2, N, N) to (n, T, 2, N, N).

    u_t = Du lap u + u - u^3 - k - v, v_t = Dv lap v + u - v, on cosines that have their nodes on cell centres.

    Args:
        diffusivities: Du, Dv.
    """
    import scipy.fft  # here, because it takes a while and whoever reads a config would wait for it

    bend = wall_eigenvalues(states.shape[-1])
    linear = np.asarray(diffusivities, dtype=np.float64)[:, None, None] * (bend[:, None] + bend)

    def to_modes(fields):
        return scipy.fft.dctn(fields, axes=(-2, -1))

    def nonlinear(modes):
        u, v = np.moveaxis(scipy.fft.idctn(modes, axes=(-2, -1)), 1, 0)
        return to_modes(np.stack([u - u * u * u - k - v, u - v], axis=1))

    modes = _march(to_modes(states), times, longest_step, lambda step: etdrk4(linear, step, nonlinear))
    return scipy.fft.idctn(np.stack(modes, axis=1), axes=(-2, -1))


def solve_fitzhugh_nagumo(seed, samples, parameters, resolution, times, stretch=1.0):
    """2D reaction-diffusion out of noise, normal in each cell of the file; parameters Du, Dv and k."""
    refuse_negative(parameters, "Du", "Dv")
    for block in blocks(samples, BLOCK_VALUES // (2 * len(times) * resolution**2)):
        states = [np.random.default_rng([seed, sample]).normal(size=(2, resolution, resolution)) for sample in block]
        diffusivities = parameters["Du"], parameters["Dv"]
        for fields in fitzhugh_nagumo(np.stack(states), diffusivities, parameters["k"], times, stretch * PATTERN_STEP):
            yield {"activator": fields[:, 0], "inhibitor": fields[:, 1]}


def kolmogorov_flow(states, nu, drag, forcing, times, longest_step=FLOW_STEP):
    """Vorticity w on (0, 2 pi)^2, periodic, pushed along x by sin(forcing y): (n, N, N) to (n, T, N, N).

    w_t + div(velocity w) = nu lap w - drag w - forcing cos(forcing y); forcing 0 is the flow left to itself. Where a
    sample is so fast that `longest_step` is unstable for the shortest waves, its steps are finer, and no other's.
    """
    num_points = states.shape[-1]
    kx = np.fft.fftfreq(num_points, 1 / num_points)[:, None]
    ky = np.arange(num_points // 2 + 1)
    squares = kx**2 + ky**2
    kept = (np.abs(kx) < num_points / 3) & (ky < num_points / 3)  # 2/3 rule: no aliasing
    to_stream = np.where(squares > 0, 1 / np.maximum(squares, 1), 0)
    y = 2 * np.pi / num_points * (np.arange(num_points) + 0.5)
    push = -forcing * np.fft.rfft2(np.broadcast_to(np.cos(forcing * y), (num_points,) * 2))

    def velocity(modes):
        stream = to_stream * modes
        return (np.fft.irfft2(1j * each * stream, (num_points,) * 2) for each in (ky, -kx))

    # With velocity (u, v) the curl of div(velocity velocity) needs uv and v^2 - u^2 alone: 4 transforms and not 5.
    def nonlinear(modes):
        u, v = velocity(modes)
        cross, difference = np.fft.rfft2(u * v), np.fft.rfft2(v * v - u * u)
        return kept * ((kx**2 - ky**2) * cross + kx * ky * difference) + push

    linear = -nu * squares - drag

    def method(step):
        finer = {1: etdrk4(linear, step, nonlinear)}  # by how many take the place of one

        def advance(modes):
            u, v = velocity(modes)
            turns = step * num_points / 3 * np.hypot(u, v).max(axis=(1, 2))  # of the shortest wave in a step [rad]
            counts, after = np.nan_to_num(np.ceil(turns / STABLE), nan=1.0, posinf=1.0).clip(1, FINEST), modes.copy()
            for count in np.unique(counts).astype(int).tolist():
                chosen = counts == count
                if count not in finer:
                    finer[count] = etdrk4(linear, step / count, nonlinear)
                for _ in range(count):
                    after[chosen] = finer[count](after[chosen])
            return after

        return advance

    modes = _march(kept * np.fft.rfft2(states), times, longest_step, method)
    return np.fft.irfft2(np.stack(modes, axis=1), (num_points,) * 2)


def solve_kolmogorov_flow(seed, samples, parameters, resolution, times, stretch=1.0):
    """Kolmogorov flow that has settled, as vorticity; parameters nu and drag."""
    refuse_negative(parameters)
    grid = min(FLOW_BURN_IN)
    constants = parameters["nu"], parameters["drag"], FORCING
    wavenumbers = np.hypot(np.fft.fftfreq(grid, 1 / grid)[:, None], np.arange(grid // 2 + 1))
    envelope = np.where(wavenumbers > 0, np.exp(-((wavenumbers / FORCING) ** 2)), 0)
    finer = 2 * math.ceil(resolution * 5 / 8)  # the 2/3 rule's loss of waves costs 1e-3 in 0.2 at 64 points, 2e-4 here
    for block in blocks(samples, BLOCK_VALUES // (len(times) * finer**2)):
        noise = np.stack([np.random.default_rng([seed, sample]).normal(size=(grid, grid)) for sample in block])
        states = np.fft.irfft2(envelope * np.fft.rfft2(noise), (grid, grid))
        states *= FLOW_VORTICITY / states.std(axis=(1, 2), keepdims=True)
        for points, time in FLOW_BURN_IN.items():
            states = kolmogorov_flow(resample_square(states, points), *constants, np.array([0, time]))[:, -1]
        for fields in kolmogorov_flow(resample_square(states, finer), *constants, times, stretch * FLOW_STEP):
            yield {"vorticity": resample_square(fields, resolution)}
