"""Data without a download: exact advection and steady Darcy flow, in files laid out exactly as PDEBench's."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from upsnb.errors import DataError

GENERATOR = "upsnb.data.generate"  # value of the attribute that tells these files from released ones

# Initial states after the appendix of the PDEBench paper (arXiv 2210.07182): two sines of random integer wavenumber,
# amplitude and phase, then |u| with a random sign and a window, a tenth of the samples each. Where the paper gives no
# number it is read off 200 samples made with its generator: two draws from 1..4, a wave drawn twice counts double (so
# 8 occurs), waves not drawn stay as constants (offset std 0.6); windows are 0.45 wide, 0.01 soft, start in 0.10..0.135.
MAX_WAVENUMBER = 4
CHANCE = 0.1
WINDOW_START, WINDOW_WIDTH, WINDOW_SOFTNESS = (0.10, 0.135), 0.45, 0.01
TIME_END = 2.0

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
    edges = np.tanh((x - left) / WINDOW_SOFTNESS) - np.tanh((x - left - WINDOW_WIDTH) / WINDOW_SOFTNESS)
    return np.where(np.isnan(left), state, 0.5 * edges * state)


def advection_solution(waves: Waves, beta: float, x: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Exact solution of u_t + beta u_x = 0 with period 1: u0(x - beta t) as (n, T, N) float64."""
    return initial_state(waves, x[None, :] - beta * times[:, None])


def generate_advection(
    path: str | os.PathLike,
    num_samples: int,
    beta: float,
    resolution: int = 256,
    num_times: int = 41,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write exact 1D advection solutions on cell centres, times 0..2, as one PDEBench file.

    Args:
        path: an existing file is replaced, at once, when the new one is complete.
        beta: speed [domain lengths per unit time]; any sign.
        progress: called with (samples done, of all).
    """
    _check(path, num_samples=(num_samples, 1), resolution=(resolution, 2), num_times=(num_times, 2))
    if not np.isfinite(beta):
        raise DataError(f"{path}: beta is {beta!r} -> expected a finite number")
    x = (np.arange(resolution) + 0.5) / resolution
    times = np.arange(num_times + 1) * (TIME_END / (num_times - 1))  # one more than saved, as in the released files
    with _new_file(path, beta, seed) as handle:
        handle["t-coordinate"], handle["x-coordinate"] = times.astype(np.float32), x.astype(np.float32)
        tensor = handle.create_dataset("tensor", (num_samples, num_times, resolution), dtype=np.float32)
        for start, stop in _blocks(num_samples, num_times * resolution):
            waves = draw_waves(seed, np.arange(start, stop))
            tensor[start:stop] = advection_solution(waves, beta, x, times[:-1])
            if progress is not None:
                progress(stop, num_samples)
    return Path(path)


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


def generate_darcy(
    path: str | os.PathLike,
    num_samples: int,
    beta: float = 1.0,
    resolution: int = 64,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write steady 2D Darcy flows, nu in {0.1, 1}, as one PDEBench file; unlike PDEBench's they are fully relaxed.

    Args:
        path: an existing file is replaced, at once, when the new one is complete.
        beta: the constant forcing; pressure is proportional to it.
        progress: called with (samples done, of all).
    """
    _check(path, num_samples=(num_samples, 1), resolution=(resolution, 4))
    if not (np.isfinite(beta) and beta != 0):
        raise DataError(f"{path}: beta is {beta!r} -> expected a finite number other than 0 (the pressure would be 0)")
    centres = ((np.arange(resolution) + 0.5) / resolution).astype(np.float32)
    with _new_file(path, beta, seed) as handle:
        handle["t-coordinate"], handle["x-coordinate"], handle["y-coordinate"] = DARCY_TIMES, centres, centres
        all_nu = handle.create_dataset("nu", (num_samples, resolution, resolution), dtype=np.float32)
        tensor = handle.create_dataset("tensor", (num_samples, 1, resolution, resolution), dtype=np.float32)
        for sample in range(num_samples):
            nu = draw_permeability(seed, sample, resolution)
            all_nu[sample], tensor[sample, 0] = nu, solve_darcy(nu, beta)
            if progress is not None:
                progress(sample + 1, num_samples)
    return Path(path)


@contextmanager
def _new_file(path: str | os.PathLike, beta: float, seed: int) -> Iterator[h5py.File]:
    """Write beside the final path and rename when complete: a reader sees the old file, the new one or none."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with h5py.File(temporary, "w") as handle:
            handle.attrs["beta"], handle.attrs["generator"], handle.attrs["seed"] = float(beta), GENERATOR, seed
            yield handle
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _blocks(num_samples: int, sample_size: int) -> Iterator[tuple[int, int]]:
    """Ranges of samples of about a million values: float64 temporaries stay near 50 MB."""
    block = max(1, 2**20 // sample_size)
    for start in range(0, num_samples, block):
        yield start, min(start + block, num_samples)


def _check(path: str | os.PathLike, **settings: tuple[int, int]) -> None:
    for name, (value, least) in settings.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
            raise DataError(f"{path}: {name} is {value!r} -> expected a whole number of at least {least}")
