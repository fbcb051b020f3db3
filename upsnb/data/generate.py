"""Data without a download, in files laid out exactly as PDEBench's; exact advection and steady Darcy flow."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import yaml

from upsnb.data.layouts import AXES, Family, Sample
from upsnb.errors import DataError

GENERATOR = "upsnb.data.generate"  # value of the attribute that tells these files from released ones

# Initial states after the appendix of the PDEBench paper (arXiv 2210.07182): two sines of random integer wavenumber,
# amplitude and phase, then |u| with a random sign and a window, a tenth of the samples each. Where the paper gives no
# number it is read off 200 samples made with its generator: two draws from 1..4, a wave drawn twice counts double (so
# 8 occurs), waves not drawn stay as constants (offset std 0.6); windows are 0.45 wide, 0.01 soft, start in 0.10..0.135.
MAX_WAVENUMBER = 4
CHANCE = 0.1
WINDOW_START, WINDOW_WIDTH, WINDOW_SOFTNESS = (0.10, 0.135), 0.45, 0.01

# Darcy permeability: a smooth random field cut at zero. Compared with 298 samples of PDEBench's generator: boundaries
# crossed along a line 1.08 (1.13 there), autocorrelation 0.64 (0.65) at 1/8 and 0.31 (0.36) at 1/4 of the domain, share
# of nu = 1 in 0.12..0.88 (0.14..0.79) for 5..95 % of the samples. Its blobs are less compact: 53 % one piece (89 %).
PERMEABILITY = (0.1, 1.0)
CORRELATION_LENGTH = 0.3
NUM_FEATURES = 128
DARCY_TIMES = np.arange(10, dtype=np.float32) * np.float32(0.25)  # released files carry them; the one frame is steady


@dataclass(frozen=True)
class Waves:
    """Initial states of n samples as formulas; arrays float64, first axis the sample."""

    wavenumbers: np.ndarray  # (n, MAX_WAVENUMBER) whole numbers, 0 for a constant
    amplitudes: np.ndarray  # (n, MAX_WAVENUMBER) in 0..1
    phases: np.ndarray  # (n, MAX_WAVENUMBER) in 0..2 pi
    folds: np.ndarray  # (n,) 0, or the sign put before |u|
    windows: np.ndarray  # (n,) left edge of the window, NaN without one


def draw_waves(seed: int, samples: np.ndarray) -> Waves:
    """Random initial states; sample i of a seed is the same however many are drawn."""
    rows = []
    for sample in samples:
        random = np.random.default_rng([seed, int(sample)])
        drawn = np.bincount(random.integers(1, MAX_WAVENUMBER + 1, size=2), minlength=MAX_WAVENUMBER + 1)[1:]
        wavenumbers = drawn * np.arange(1, MAX_WAVENUMBER + 1)
        amplitudes, phases = random.uniform(size=MAX_WAVENUMBER), random.uniform(0, 2 * np.pi, size=MAX_WAVENUMBER)
        fold = random.choice([-1.0, 1.0]) if random.uniform() < CHANCE else 0.0
        window = random.uniform(*WINDOW_START) if random.uniform() < CHANCE else np.nan
        rows.append((wavenumbers, amplitudes, phases, fold, window))
    return Waves(*(np.array(column, dtype=np.float64) for column in zip(*rows, strict=True)))


def initial_state(waves: Waves, x: np.ndarray) -> np.ndarray:
    """u0 of every sample at positions x, any shape, period 1: (n, *x.shape) float64."""
    x = np.asarray(x, dtype=np.float64) % 1.0
    state = np.zeros((len(waves.folds), *x.shape))

    def per_sample(values):
        return values.reshape(-1, *(1,) * x.ndim)

    for k in range(MAX_WAVENUMBER):
        wavenumber, amplitude, phase = (
            per_sample(values[:, k]) for values in (waves.wavenumbers, waves.amplitudes, waves.phases)
        )
        state += amplitude * np.sin(2 * np.pi * wavenumber * x + phase)
    folds, left = per_sample(waves.folds), per_sample(waves.windows)
    state = np.where(folds != 0, folds * np.abs(state), state)
    return np.where(np.isnan(left), state, window(x, left) * state)


def window(x: np.ndarray, left: np.ndarray | float) -> np.ndarray:
    """1 from `left` on, 0 outside."""
    return 0.5 * (np.tanh((x - left) / WINDOW_SOFTNESS) - np.tanh((x - left - WINDOW_WIDTH) / WINDOW_SOFTNESS))


def advection_solution(waves: Waves, beta: float, x: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Exact solution of u_t + beta u_x = 0 with period 1: u0(x - beta t) as (n, T, N) float64."""
    return initial_state(waves, x[None, :] - beta * times[:, None])


def solve_advection(seed: int, samples: range, parameters: dict, resolution: int, times) -> Iterator[Sample]:
    """Exact 1D advection on cell centres; beta is the speed [domain lengths per unit time], of any sign."""
    x = (np.arange(resolution) + 0.5) / resolution
    for sample in samples:
        yield {"u": advection_solution(draw_waves(seed, [sample]), parameters["beta"], x, times)[0]}


def draw_permeability(seed: int, sample: int, resolution: int) -> np.ndarray:
    """nu of one sample on cell centres: (resolution, resolution) float64, 0.1 or 1, never uniform.

    The same seed and sample give the same field at every resolution, only finer: data for resolution transfer. (But
    for fields so nearly uniform that one of two resolutions misses their only spot.)
    """
    centres = (np.arange(resolution) + 0.5) / resolution
    random = np.random.default_rng([seed, sample])
    while True:  # a uniform field, about 1 in 200, is drawn again: it would occur many times, in training and in test
        # Random Fourier features of a Gaussian kernel: the field is a formula, so any grid can sample it.
        frequencies = random.normal(scale=1 / CORRELATION_LENGTH, size=(2, NUM_FEATURES))
        phases = random.uniform(0, 2 * np.pi, size=NUM_FEATURES)
        along_x = np.exp(1j * (centres[:, None] * frequencies[0] + phases))
        along_y = np.exp(1j * centres[:, None] * frequencies[1])
        above = (along_x @ along_y.T).real > 0
        if above.any() and not above.all():
            return np.where(above, PERMEABILITY[1], PERMEABILITY[0])


def solve_darcy(nu: np.ndarray, beta: float) -> np.ndarray:
    """Steady pressure of -div(nu grad u) = beta on the unit square.

    Finite volumes with arithmetic face means and u = 0 in ghost cells, half a cell outside the domain: this is what
    PDEBench's relaxation tends to. On 298 of its samples the solution scores a median nRMSE of 0.001; harmonic means
    give 0.016, u = 0 on the domain's edge itself 0.07.

    Args:
        nu: (N, N) positive, on cell centres.
    Returns:
        (N, N) float64 pressure on the same points.
    """
    import scipy.sparse.linalg  # here, because it takes a while and whoever reads a config would wait for it

    nu = np.pad(np.asarray(nu, dtype=np.float64), 1, mode="edge")  # the ghost cells' nu is their neighbour's
    faces_x = 0.5 * (nu[1:, 1:-1] + nu[:-1, 1:-1])  # (N + 1, N)
    faces_y = 0.5 * (nu[1:-1, 1:] + nu[1:-1, :-1])  # (N, N + 1)
    n = len(nu) - 2
    centre = faces_x[1:] + faces_x[:-1] + faces_y[:, 1:] + faces_y[:, :-1]
    to_next_y = np.where(np.arange(n) < n - 1, -faces_y[:, 1:], 0.0).ravel()[:-1]  # a row's last cell has no next
    to_next_x = -faces_x[1:-1].ravel()
    matrix = scipy.sparse.diags_array(
        [centre.ravel(), to_next_y, to_next_y, to_next_x, to_next_x], offsets=[0, 1, -1, n, -n], format="csc"
    )
    # Symmetric and positive definite: no pivoting, and an ordering of A + A^T, four times faster than the default.
    options = {"SymmetricMode": True}
    factor = scipy.sparse.linalg.splu(matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options=options)
    return factor.solve(np.full(n * n, beta / n**2)).reshape(n, n)


def steady_darcy(seed: int, samples: range, parameters: dict, resolution: int, times) -> Iterator[Sample]:
    """Steady 2D Darcy flows, nu in {0.1, 1}, and beta the constant forcing; unlike PDEBench's, relaxed."""
    for sample in samples:
        nu = draw_permeability(seed, sample, resolution)
        yield {"nu": nu, "pressure": solve_darcy(nu, parameters["beta"])[None]}


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A file that is to be made."""

    family: Family
    num_samples: int
    parameters: dict[str, float]
    resolution: int  # grid points per axis
    times: np.ndarray  # (T,) float64, saved ones
    seed: int

    @property
    def grid(self) -> tuple[int, ...]:
        return (self.resolution,) * self.family.num_dims

    @property
    def coordinates(self) -> dict[str, np.ndarray]:
        """Cell centres of every axis, float32."""
        unit = (np.arange(self.resolution) + 0.5) / self.resolution
        axes = zip(AXES, self.family.domain, strict=False)
        return {axis: (low + (high - low) * unit).astype(np.float32) for axis, (low, high) in axes}

    def __str__(self) -> str:
        made = self.num_samples, self.parameters, self.resolution, len(self.times), self.seed
        return f"{self.family.name} {made}"


def generate(
    family: Family,
    path: str | os.PathLike,
    num_samples: int,
    parameters: dict[str, float] | None = None,
    resolution: int | None = None,
    num_times: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write solutions of a family's equation as one file of its layout, in float32.

    Args:
        path: an existing file is replaced, at once, when the new one is complete. What a call has done that was
            interrupted stays beside it, and the same call goes on from there.
        parameters: those that are not the row's own.
        resolution: grid points per axis; None: the row's, as for `num_times`.
        progress: called with (samples done, of all).

    Raises:
        DataError: impossible settings, or a solution that is not finite.
    """
    path = Path(path)
    resolution = family.resolution if resolution is None else resolution
    num_times = family.num_times if num_times is None else num_times
    parameters = {name: float(value) for name, value in {**family.parameters, **(parameters or {})}.items()}
    frames = {"num_times": (num_times, 2)} if family.time_dependent else {}
    _check(family, path, parameters, num_samples=(num_samples, 1), resolution=(resolution, 4), **frames)
    times = np.linspace(*family.time_range, num_times) if family.time_dependent else np.zeros(1)
    plan = Plan(family, num_samples, parameters, resolution, times, seed)
    begin, add = WRITERS[family.layout]
    with _unfinished(path, str(plan)) as handle:
        if "done" not in handle.attrs:  # begun now
            handle.attrs["generator"], handle.attrs["seed"] = GENERATOR, seed
            begin(handle, plan)
            handle.attrs["done"] = 0
        done = int(handle.attrs["done"])
        solutions = family.solve(seed, range(done, num_samples), parameters, resolution, times)
        for sample, fields in enumerate(solutions, done):
            if not all(np.isfinite(values).all() for values in fields.values()):
                raise DataError(f"{path}: sample {sample} is not finite -> choose other parameters, or a finer grid")
            add(handle, plan, sample, fields)
            handle.attrs["done"] = sample + 1
            handle.flush()  # else a killed process leaves nothing that can be read
            if progress is not None:
                progress(sample + 1, num_samples)
        del handle.attrs["done"]
    return path


def _begin_single_array(handle: h5py.File, plan: Plan) -> None:
    family, times = plan.family, plan.times
    handle.attrs.update(plan.parameters)
    # one time more than is saved, as in the released files; static ones carry the times of a relaxation
    later = np.append(times, 2 * times[-1] - times[-2]).astype(np.float32) if family.time_dependent else DARCY_TIMES
    handle["t-coordinate"] = later
    for axis, centres in plan.coordinates.items():
        handle[f"{axis}-coordinate"] = centres
    for key in family.channels.values():
        handle.create_dataset(key, (plan.num_samples, len(times), *plan.grid), np.float32)
    for key in family.given.values():
        handle.create_dataset(key, (plan.num_samples, *plan.grid), np.float32)


def _add_to_single_array(handle: h5py.File, plan: Plan, sample: int, fields: Sample) -> None:
    for channel, key in {**plan.family.channels, **plan.family.given}.items():
        handle[key][sample] = fields[channel]


def _begin_grouped(handle: h5py.File, plan: Plan) -> None:
    """Nothing that samples share: each group has all of its own."""


def _add_group(handle: h5py.File, plan: Plan, sample: int, fields: Sample) -> None:
    """One group; entries of `fields` that are no channel are numbers of this sample's own."""
    name, channels = f"{sample:04d}", plan.family.channels
    if name in handle:  # begun by a call that was interrupted
        del handle[name]
    group = handle.create_group(name)
    own = {key: float(value) for key, value in fields.items() if key not in channels}
    told = {**plan.parameters, **own, "seed": plan.seed, "sample": sample}
    group.attrs["config"] = yaml.safe_dump({"name": plan.family.name, "sim": told}, sort_keys=False)
    data = np.stack([fields[channel] for channel in channels], axis=-1).astype(np.float32)
    group.create_dataset("data", data=data, compression="lzf")
    for axis, values in {**plan.coordinates, "t": plan.times.astype(np.float32)}.items():
        group.create_dataset(f"grid/{axis}", data=values, compression="lzf")


def _begin_many_arrays(handle: h5py.File, plan: Plan) -> None:
    family, times = plan.family, plan.times
    handle.attrs["config"] = yaml.safe_dump({**plan.parameters, "seed": plan.seed}, sort_keys=False)
    handle.attrs["latestIndex"] = len(times) - 1
    handle["t"] = np.tile(times.astype(np.float32), (plan.num_samples, 1))
    for channels, frames in ((family.channels, (len(times),)), (family.given, ())):
        for key in dict.fromkeys(channels.values()):
            shape = (*frames, *plan.grid, list(channels.values()).count(key))
            chunks = (1,) * (1 + len(frames)) + shape[len(frames) :]
            handle.create_dataset(key, (plan.num_samples, *shape), np.float32, chunks=chunks, compression="lzf")


def _add_to_many_arrays(handle: h5py.File, plan: Plan, sample: int, fields: Sample) -> None:
    for channels in (plan.family.channels, plan.family.given):
        for key in dict.fromkeys(channels.values()):
            parts = [fields[channel] for channel, own in channels.items() if own == key]
            handle[key][sample] = np.stack(parts, axis=-1)


WRITERS = {  # how each layout is begun, and how it takes one sample
    "single_array": (_begin_single_array, _add_to_single_array),
    "grouped": (_begin_grouped, _add_group),
    "many_arrays": (_begin_many_arrays, _add_to_many_arrays),
}


@contextmanager
def _unfinished(path: Path, plan: str) -> Iterator[h5py.File]:
    """A file beside the final one, renamed when complete: a reader sees the old file, the new one or none.

    What was interrupted stays, for the next call with the same plan; what failed does not.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        handle = h5py.File(part, "a")
        if handle.attrs.get("plan") != plan:  # nobody's, or of other settings
            handle.close()
            handle = h5py.File(part, "w")
    except BlockingIOError:  # another process is making the same
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        handle = h5py.File(part, "w")
    except OSError:  # killed while it was written
        handle = h5py.File(part, "w")
    handle.attrs["plan"] = plan
    try:
        with handle:
            yield handle
            del handle.attrs["plan"]
        os.replace(part, path)
    except Exception:
        part.unlink(missing_ok=True)
        raise


def _check(family: Family, path: Path, parameters: dict[str, float], **settings: tuple[int, int]) -> None:
    for name, (value, least) in settings.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
            raise DataError(f"{path}: {name} is {value!r} -> expected a whole number of at least {least}")
    for name, value in parameters.items():
        if name not in family.parameters:
            known = ", ".join(family.parameters) or "none"
            raise DataError(f"{path}: {family.name} has no {name!r} -> its parameters are {known}")
        if not np.isfinite(value):
            raise DataError(f"{path}: {name} is {value!r} -> expected a finite number")
