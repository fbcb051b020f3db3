"""Flows with shocks, solved by finite volumes: 1D Burgers, compressible Navier-Stokes in 1D to 3D, 2D shallow water.

One scheme for all: at every face values of polynomials of degree four where the flow is smooth, and limited linear ones
(MUSCL, monotonized central slopes) where it is not; an approximate Riemann solver; three-stage strong-stability-
preserving Runge-Kutta steps. It is conservative, free of oscillations at shocks, and keeps waves of sixteen cells.
Written from the equations: HLLC after Toro, Riemann Solvers and Numerical Methods for Fluid Dynamics, chapter 10.
Inside, arrays are float64 (variable, *grid, sample): neighbours in any direction are then whole slices of memory. Every
sample has its own time steps, so what it becomes does not depend on which others are solved beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from upsnb.errors import DataError
from upsnb.solvers.waves import WINDOW_START, Sample, blocks, draw_waves, initial_state, refuse_negative, window

GAMMA = 5 / 3  # ratio of specific heats, of a gas of single atoms
GRAVITY = 1.0
CFL = 1.0  # cells that waves may cross in a step, summed over directions; at 1.2 some gases in 3D break down
GHOSTS = 3  # cells beyond each end that a face there is reconstructed from
JUMP = 0.1  # from side to side of a face, of the steps around it: where there is more, the flow is not smooth
ROUNDING = 1e-9  # of a state's largest number: such jumps say nothing of the flow
STEEP = 1.0  # steps around a face, of a positive variable beside it: likewise

# Cells per kept cell and axis.
FINER = {1: 2, 2: 1, 3: 1}
BURGERS_FINER, DAM_FINER = 4, 2
BLOCK_CELLS = 16384  # solved at a time: few enough for fast memory, enough for NumPy's calls to pay

# Random gases: ranges are read off PDEBench's small files.
DENSITY = (1.0, 10.0)
PRESSURE_PER_DENSITY = (1.0, 10.0)
WAVE_PRESSURE = (20.0, 100.0)
WAVE_CONTRAST = 0.4
WINDOWED = 0.5  # of the fields in 1D, of the samples in 2D and 3D; a tenth of those of advection and Burgers
GAS_WINDOW_START = (0.1, 0.3)
CONTRAST = (0.02, 0.3)
MAX_WAVENUMBER = 4

BASIN = (-2.5, 2.5)
DAM = {"dam_radius": (0.3, 0.7), "inner_height": (1.5, 2.5), "x": (-0.5, 0.5), "y": (-0.5, 0.5)}


@dataclass(frozen=True)
class Flow:
    """What a conservation law tells the scheme; arrays (variable, *grid, sample).

    A vector's components are variables 1 to d. Sweeps along other axes exchange axes and components: flux and stress
    know the first axis only.
    """

    cell: float  # width, the same along every axis
    flux: Callable[[np.ndarray, np.ndarray], np.ndarray]  # through faces, from both sides' variables: may change them
    rate: Callable[[np.ndarray], np.ndarray]  # (n,) cells that waves cross per unit time, from the variables
    primitive: Callable[[np.ndarray], np.ndarray] = lambda state: state  # reconstructed variables, from conserved ones
    stress: Callable[[np.ndarray, np.ndarray], None] | None = None  # taken off the flux, in place
    diffuse: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None  # exactly, over times (n,): split off
    positive: Collection[int] = ()  # reconstructed variables that are never negative
    periodic: bool = True


def _faces(values: np.ndarray, positive: Collection[int], rounding: np.ndarray) -> np.ndarray:
    """Values on both sides of all N + 1 faces along the first axis, from N + 6 cells.

    They are those of the polynomials of degree four with the averages of five cells, the side's own in the middle, and
    differ across a face by a fifth difference: next to nothing where the flow is smooth. Where that is more, shocks and
    contacts are told by it (Krivodonova et al., Applied Numerical Mathematics 48, 2004), and all variables get limited
    slopes; so they do where one that has to be positive changes by as much as it is.
    """
    faces = np.empty((2, len(values), values.shape[1] - 2 * GHOSTS + 1, *values.shape[2:]))
    rough = np.zeros(faces.shape[2:], dtype=bool)
    for number, (variable, left, right) in enumerate(zip(values, *faces, strict=True)):  # one at a time, in fast memory
        steps = _steps(variable)
        second = _steps(steps)  # differences about each cell but the outermost
        fourth = _steps(_steps(second))  # about each cell beside a face
        fourth *= 1 / 60
        own = second[1:-1] * (-1 / 12)
        own += fourth
        own += 0.5 * variable[2:-2]
        mean = own[:-1] + own[1:]
        half = fourth[:-1] - fourth[1:]  # of the jump, from left to right
        np.add(mean, half, out=left)
        np.subtract(mean, half, out=right)
        sizes = abs(steps)
        around = sizes[1:-3] + sizes[3:-1]
        around += sizes[2:-2]
        if number in positive:
            rough |= around > STEEP * np.minimum(variable[2:-3], variable[3:-2])
        around *= JUMP / 2
        around += rounding
        rough |= abs(half) > around
    if len(spots := np.flatnonzero(rough)):
        near = [spots + k * rough[0].size for k in range(1, 5)]  # two cells on either side
        for variable, left, right in zip(*(whole.reshape(len(values), -1) for whole in (values, *faces)), strict=True):
            b, c, d, e = (variable[cells] for cells in near)
            across = d - c
            left[spots] = c + _limited(c - b, across)
            right[spots] = d - _limited(across, e - d)
    return faces


def _steps(values: np.ndarray) -> np.ndarray:
    """From each cell to the next one, along the first axis."""
    return values[1:] - values[:-1]


def _limited(back: np.ndarray, ahead: np.ndarray) -> np.ndarray:
    """Half of a cell's monotonized central slope, from the steps to its neighbours."""
    half = 0.25 * (back + ahead)
    least, most = np.minimum(back, ahead), np.maximum(back, ahead)
    return np.maximum(np.minimum(half, np.maximum(least, 0)), np.minimum(most, 0))


def _change(state: np.ndarray, flow: Flow) -> np.ndarray:
    """Time derivative of the conserved variables."""
    values, total = flow.primitive(state), np.zeros_like(state)
    rounding = ROUNDING * abs(values).max(axis=tuple(range(values.ndim - 1)))  # of each sample
    for axis in range(1, state.ndim - 1):
        order = np.arange(len(state))
        if axis > 1:
            order[[1, axis]] = axis, 1
        # A copy with ghost cells at both ends: from the other end, or equal to the last one, to let waves out.
        moved = values.swapaxes(1, axis)
        ghosted = np.empty((len(state), moved.shape[1] + 2 * GHOSTS, *moved.shape[2:]))
        for variable, source in enumerate(order):
            ghosted[variable, GHOSTS:-GHOSTS] = moved[source]
        inner = ghosted[:, GHOSTS:-GHOSTS]
        ghosted[:, :GHOSTS] = inner[:, -GHOSTS:] if flow.periodic else inner[:, :1]
        ghosted[:, -GHOSTS:] = inner[:, :GHOSTS] if flow.periodic else inner[:, -1:]
        flux = flow.flux(*_faces(ghosted, flow.positive, rounding))
        if flow.stress is not None:
            flow.stress(flux, ghosted)
        along = total.swapaxes(1, axis)
        for variable, source in enumerate(order):
            along[source] -= flux[variable, 1:] - flux[variable, :-1]
    total *= 1 / flow.cell
    return total


def evolve(state: np.ndarray, flow: Flow, times: np.ndarray) -> np.ndarray:
    """Follow conserved variables from times[0] on.

    Args:
        state: (variable, *grid, n) cell averages at times[0].
        times: (T,) increasing.
    Returns:
        (T, variable, *grid, n) at all times.
    Raises:
        DataError: a density, pressure or height that is no longer positive, or steps without end.
    """
    frames = np.empty((len(times), *state.shape))
    frames[0] = state
    running = np.arange(state.shape[-1])  # which samples are not at their end
    time, frame = np.full(len(running), times[0]), np.ones(len(running), dtype=int)
    while len(running) and len(times) > 1:
        with np.errstate(invalid="ignore"):
            limit = CFL / flow.rate(flow.primitive(state))
        if not (limit > 1e-9 * (times[-1] - times[0])).all():
            broken = time[np.argmin(np.nan_to_num(limit))]
            raise DataError(f"no flow after t = {broken:g}: density or pressure would be negative -> take a finer grid")
        steps = np.ceil((times[frame] - time) / limit)  # equal ones up to the next frame
        step = (times[frame] - time) / steps
        if flow.diffuse is not None:
            state = flow.diffuse(state, step / 2)
        ahead = state + step * _change(state, flow)
        ahead = 0.75 * state + 0.25 * (ahead + step * _change(ahead, flow))
        state = (state + 2 * (ahead + step * _change(ahead, flow))) / 3
        if flow.diffuse is not None:
            state = flow.diffuse(state, step / 2)
        time = np.where(steps == 1, times[frame], time + step)
        for sample in np.flatnonzero(steps == 1):
            frames[frame[sample], ..., running[sample]] = state[..., sample]
        frame = frame + (steps == 1)
        going = frame < len(times)
        if not going.all():
            running, time, frame = running[going], time[going], frame[going]
            state = np.compress(going, state, axis=-1)
    return frames


def burgers(initial: np.ndarray, nu: float, times: np.ndarray) -> np.ndarray:
    """Solve u_t + (u^2 / 2)_x = (nu / pi) u_xx with period 1.

    The flux is Godunov's, exact for the Riemann problem. Diffusion is the exact flow of the three-point Laplacian, half
    of it before and half after each step: it never limits the step, and makes no new extrema.

    Args:
        initial: (n, N) cell averages.
        nu: not negative; 0 gives the inviscid equation.
    Returns:
        (n, T, N) float64.
    """
    points = initial.shape[1]
    decay = 4 * points**2 * np.sin(np.pi * np.arange(points // 2 + 1) / points) ** 2 * nu / np.pi

    def flux(left, right):
        return np.maximum(np.maximum(left, 0) ** 2, np.minimum(right, 0) ** 2) / 2

    def rate(values):
        return np.abs(values).max(axis=(0, 1)) * points + 1e-12

    def diffuse(state, step):
        waves = np.fft.rfft(state, axis=1)
        waves *= np.exp(-decay[:, None] * step)
        return np.fft.irfft(waves, n=points, axis=1)

    flow = Flow(1 / points, flux, rate, diffuse=diffuse if nu else None)
    return evolve(initial.T[None].astype(np.float64), flow, times)[:, 0].transpose(2, 0, 1)


def compressible(initial: np.ndarray, eta: float, zeta: float, cell: float, times: np.ndarray) -> np.ndarray:
    """Solve the compressible Navier-Stokes equations of an ideal gas in a periodic box.

    Mass, momentum and the energy p / (GAMMA - 1) + density |v|^2 / 2 are conserved. The viscous stress, which does work
    as well, is density * (eta (grad v + grad v^T - 2/3 div v) + zeta div v), and nothing conducts heat: so it is in
    PDEBench's files, whose densities this follows from their first frame to 1e-3 in 1D. Their paper has no density in
    it: eta and zeta would be dynamic, not kinematic viscosities.

    Args:
        initial: (n, 2 + d, *grid), density, d velocities, pressure: cell averages.
        eta, zeta: shear and bulk viscosity over density, not negative.
        cell: width of a cell.
    Returns:
        (n, T, 2 + d, *grid) float64, in the order of `initial`.
    """
    dims = initial.ndim - 2
    velocity = slice(1, 1 + dims)

    def conserved(values):
        density, moving, pressure = values[0], values[velocity], values[-1]
        energy = pressure / (GAMMA - 1) + 0.5 * density * (moving**2).sum(axis=0)
        return np.concatenate([density[None], density * moving, energy[None]])

    def primitive(state):
        values = np.empty_like(state)
        values[0] = state[0]
        np.divide(state[velocity], state[0], out=values[velocity])
        kinetic = 0.5 * (state[velocity] * values[velocity]).sum(axis=0)
        np.multiply(state[-1] - kinetic, GAMMA - 1, out=values[-1])
        return values

    def rate(values):
        # two roots: a quotient of two negative numbers has one
        sound = np.sqrt(GAMMA * values[-1]) / np.sqrt(values[0])
        crossing = dims * sound + np.abs(values[velocity]).sum(axis=0)
        smearing = CFL * 2.2 * (dims * eta + eta / 3 + zeta) / cell  # stable up to 1 as well, with these differences
        return (crossing + smearing).reshape(-1, values.shape[-1]).max(axis=0) / cell

    def stress(flux, ghosted):
        b, c, d, e = (ghosted[:, k : ghosted.shape[1] - 5 + k] for k in range(1, 5))
        middle = (7 * (c[:-1] + d[:-1]) - (b[:-1] + e[:-1])) * (1 / 12)
        slopes = (15 * (d[velocity] - c[velocity]) - (e[velocity] - b[velocity])) * (1 / (12 * cell))
        divergence, sigma = slopes[0].copy(), eta * slopes
        for other in range(1, dims):
            for part, target, factor in ((0, sigma[other], eta), (other, divergence, 1.0)):
                # Central differences across.
                value = middle[1 + part]
                near, far = (np.roll(value, -k, other) - np.roll(value, k, other) for k in (1, 2))
                target += (8 * near - far) * (factor / (12 * cell))
        sigma[0] += eta * slopes[0] + (zeta - 2 / 3 * eta) * divergence
        sigma *= middle[0]
        flux[velocity] -= sigma
        flux[-1] -= (middle[velocity] * sigma).sum(axis=0)

    # Waves of one cell's width lose this share per unit time; the scheme itself takes far more.
    felt = (eta + zeta) / cell**2 > 1e-4
    flow = Flow(cell, _hllc, rate, primitive, stress if felt else None, positive=(0, 1 + dims))
    state = conserved(np.moveaxis(np.asarray(initial, dtype=np.float64), 0, -1).copy())
    frames = evolve(state, flow, times)
    return np.moveaxis(np.stack([primitive(frame) for frame in frames]), -1, 0)


def _hllc(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Flux of an ideal gas through faces, from density, velocities and pressure on either side, which it overwrites.

    HLLC: two outer waves and the contact between them.
    """
    u_left, u_right = left[1], right[1]
    sound_left, sound_right = (np.sqrt(GAMMA * side[-1] / side[0]) for side in (left, right))
    slowest = np.minimum(u_left - sound_left, u_right - sound_right)
    fastest = np.maximum(u_left + sound_left, u_right + sound_right)
    mass_left, mass_right = left[0] * (slowest - u_left), right[0] * (fastest - u_right)
    contact = right[-1] - left[-1]
    contact += mass_left * u_left
    contact -= mass_right * u_right
    contact /= mass_left - mass_right
    # The side of the contact on which the face lies, and its outer wave.
    on_left = contact > 0
    one_way = slowest.max() > 0 or fastest.min() < 0  # somewhere all waves go one way
    values, outer = right, fastest
    np.copyto(values, left, where=on_left)
    np.copyto(outer, slowest, where=on_left)
    density, u, pressure = values[0], values[1], values[-1]
    kinetic = u * u
    for across in values[2:-1]:
        kinetic += across * across
    kinetic *= 0.5 * density
    energy = pressure / (GAMMA - 1)
    energy += kinetic
    # The state between the outer wave and the contact.
    outward = outer - u
    squeeze = outward / (outer - contact)
    push = density * outward
    push *= contact - u
    push += pressure
    energy += (push * contact - pressure * u) / outward
    energy *= squeeze
    squeeze *= density
    if one_way:  # there the face sees the state on its side as it is
        past = np.where(on_left, outer > 0, outer < 0)
        for inside, outside in ((squeeze, density), (contact, u), (push, pressure)):
            inside[past] = outside[past]
        energy[past] = (pressure / (GAMMA - 1) + kinetic)[past]
    flux = np.empty_like(values)
    np.multiply(squeeze, contact, out=flux[0])
    np.multiply(flux[0], contact, out=flux[1])
    flux[1] += push
    np.multiply(flux[0], values[2:-1], out=flux[2:-1])
    energy += push
    np.multiply(energy, contact, out=flux[-1])
    return flux


def shallow_water(height: np.ndarray, cell: float, times: np.ndarray) -> np.ndarray:
    """Height of water that is at rest at first, on a flat ground; waves leave through the boundary.

    Args:
        height: (n, *grid) positive, one axis or two.
        cell: width of a cell.
    Returns:
        (n, T, *grid) float64.
    """

    def primitive(state):
        return np.concatenate([state[:1], state[1:] / state[0]])

    def rate(values):
        waves = (len(values) - 1) * np.sqrt(GRAVITY * values[0]) + np.abs(values[1:]).sum(axis=0)
        return waves.reshape(-1, values.shape[-1]).max(axis=0) / cell

    def flux(left, right):
        """HLL: two waves, one state between them."""
        waves = [np.sqrt(GRAVITY * side[0]) for side in (left, right)]
        slowest = np.minimum(np.minimum(left[1] - waves[0], right[1] - waves[1]), 0)
        fastest = np.maximum(np.maximum(left[1] + waves[0], right[1] + waves[1]), 0)
        width = fastest - slowest
        from_left = left[0] * (left[1] - slowest) * fastest / width
        from_right = right[0] * (fastest - right[1]) * slowest / width
        flux = np.empty_like(left)
        np.add(from_left, from_right, out=flux[0])
        np.multiply(from_left, left[1:], out=flux[1:])
        flux[1:] += from_right * right[1:]
        flux[1] += 0.5 * GRAVITY * (fastest * left[0] ** 2 - slowest * right[0] ** 2) / width
        return flux

    state = np.zeros((height.ndim, *height.shape[1:], len(height)))
    state[0] = np.moveaxis(height, 0, -1)
    frames = evolve(state, Flow(cell, flux, rate, primitive, positive=(0,), periodic=False), times)[:, 0]
    return np.moveaxis(frames, -1, 0)


# -- random initial states, and what is made of them -------------------------------------------------------------------


def draw_gas(seed: int, sample: int, dims: int, resolution: int, mach: float | None = None) -> np.ndarray:
    """Density, velocities and pressure of one sample on cell centres of the unit box: (2 + dims, *grid) float64.

    Density and pressure vary around a background of random size, and are positive whatever is drawn.

    Args:
        mach: root mean square of |v| over the sound's speed in the background, before a window may be laid over both;
            None, in one dimension only, takes waves as they are drawn for Burgers' equation.
    """
    centres = (np.arange(resolution) + 0.5) / resolution
    random = np.random.default_rng(np.random.SeedSequence((seed, sample), spawn_key=(1,)))
    density = random.uniform(*DENSITY)
    pressure = density * random.uniform(*PRESSURE_PER_DENSITY)
    if mach is None:
        pressure = random.uniform(*WAVE_PRESSURE)
        edges = np.where(random.random(3) < WINDOWED, random.uniform(*WINDOW_START, size=3), np.nan)
        waves = replace(draw_waves(seed, 3 * sample + np.arange(3)), windows=edges)
        velocity, *swings = initial_state(waves, centres)
        contrasts = (WAVE_CONTRAST, WAVE_CONTRAST)
    else:
        fields = np.stack([_smooth_field(random, dims, centres) for _ in range(dims + 2)])
        contrasts = random.uniform(*CONTRAST, size=2)
        if random.random() < WINDOWED:
            for axis in range(dims):
                fields = fields.swapaxes(axis + 1, -1)
                fields *= window(centres, random.uniform(*GAS_WINDOW_START))
                fields = fields.swapaxes(axis + 1, -1)
        velocity, swings = mach * np.sqrt(GAMMA * pressure / density / dims) * fields[:dims], fields[dims:]
    density, pressure = (
        mean * np.exp(contrast * swing)
        for mean, contrast, swing in zip((density, pressure), contrasts, swings, strict=True)
    )
    return np.stack([density, *np.reshape(velocity, (dims, *density.shape)), pressure])


def _smooth_field(random: np.random.Generator, dims: int, centres: np.ndarray) -> np.ndarray:
    """A periodic field of mean 0 and variance 1 from waves of up to MAX_WAVENUMBER, as much in every shell."""
    numbers = np.arange(-MAX_WAVENUMBER, MAX_WAVENUMBER + 1)
    length = np.sqrt(sum(axis**2 for axis in np.meshgrid(*dims * [numbers])))
    waves = random.normal(size=length.shape) + 1j * random.normal(size=length.shape)
    waves = np.where(length > 0, waves * np.maximum(length, 1) ** ((1 - dims) / 2), 0)
    waves = waves + np.flip(waves).conj()  # a real field's
    field = waves / np.linalg.norm(waves)
    for _ in range(dims):
        field = np.tensordot(field, np.exp(2j * np.pi * np.outer(numbers, centres)), axes=(0, 0))
    return field.real


def draw_dam(seed: int, sample: int) -> dict[str, float]:
    """Where one sample's round dam stands and how high the water is in it; outside it is 1.

    PDEBench draws the radius alone: on its grid that gives 81 different dams, so that every dam of the test samples is
    a training sample's as well.
    """
    random = np.random.default_rng([seed, sample])
    return {name: random.uniform(*limits) for name, limits in DAM.items()}


def dam_height(dam: dict[str, float], resolution: int) -> np.ndarray:
    """Height of the water before the dam breaks, averaged over cells: (resolution, resolution) float64."""
    low, high = BASIN
    fine = low + (high - low) * (np.arange(8 * resolution) + 0.5) / (8 * resolution)
    inside = np.hypot(fine[:, None] - dam["x"], fine - dam["y"]) < dam["dam_radius"]
    return 1 + (dam["inner_height"] - 1) * _coarser(inside, 8, 2)


def _coarser(values: np.ndarray, factor: int, dims: int) -> np.ndarray:
    """Averages over `factor` cells along each of the last `dims` axes."""
    grid = [part for size in values.shape[-dims:] for part in (size // factor, factor)]
    return values.reshape(*values.shape[:-dims], *grid).mean(axis=tuple(range(1 - 2 * dims, 0, 2)))


def solve_burgers(seed: int, samples: range, parameters: dict, resolution: int, times) -> Iterator[Sample]:
    """1D Burgers flows from the initial states of advection; Nu / pi is the diffusion."""
    refuse_negative(parameters)
    fine = BURGERS_FINER * resolution
    centres = (np.arange(fine) + 0.5) / fine
    for block in blocks(samples, BLOCK_CELLS // fine):
        solution = burgers(initial_state(draw_waves(seed, block), centres), parameters["Nu"], times)
        yield from ({"u": values} for values in _coarser(solution, BURGERS_FINER, 1))


def solve_gas(dims: int, seed: int, samples: range, parameters: dict, resolution: int, times) -> Iterator[Sample]:
    """Compressible flows in `dims` dimensions; M is their Mach number at first, where there are more than one."""
    refuse_negative(parameters)
    fine = FINER[dims] * resolution
    names = ("density", *("Vx", "Vy", "Vz")[:dims], "pressure")
    cell = (2.0 if dims == 1 else 1.0) / fine  # the published boxes: (-1, 1), and the unit square and cube
    for block in blocks(samples, BLOCK_CELLS // fine**dims):
        initial = np.stack([draw_gas(seed, sample, dims, fine, parameters.get("M")) for sample in block])
        solution = compressible(initial, parameters["eta"], parameters["zeta"], cell, times)
        for frames in _coarser(solution, FINER[dims], dims):
            yield dict(zip(names, frames.swapaxes(0, 1), strict=True))


def solve_dams(seed: int, samples: range, parameters: dict, resolution: int, times) -> Iterator[Sample]:
    """Round dams that break in still water; a sample tells its own dam beside its fields."""
    fine = DAM_FINER * resolution
    for sample in samples:
        dam = draw_dam(seed, sample)
        solution = shallow_water(dam_height(dam, fine)[None], (BASIN[1] - BASIN[0]) / fine, times)
        yield {"height": _coarser(solution, DAM_FINER, 2)[0], **dam}
