"""Random initial states of one-dimensional equations, and advection, which moves them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from upsnb.errors import DataError

Sample = dict[str, np.ndarray]  # channel -> (T, *grid) float64, (*grid) where it does not change in time

# Initial states after the appendix of the PDEBench paper (arXiv 2210.07182): two sines of random integer wavenumber,
# amplitude and phase, then |u| with a random sign and a window, a tenth of the samples each. Where the paper gives no
# number it is read off 200 samples made with its generator: two draws from 1..4, a wave drawn twice counts double (so
# 8 occurs), waves not drawn stay as constants (offset std 0.6); windows are 0.45 wide, 0.01 soft, start in 0.10..0.135.
MAX_WAVENUMBER = 4
CHANCE = 0.1
WINDOW_START, WINDOW_WIDTH, WINDOW_SOFTNESS = (0.10, 0.135), 0.45, 0.01


def refuse_negative(parameters: dict[str, float], *names: str) -> None:
    """What spreads something, or holds it back, would blow up with the sign turned; `names`: of these alone."""
    for name in names or parameters:
        if parameters[name] < 0:
            raise DataError(f"{name} is {parameters[name]:g} -> expected a number of at least 0")


def blocks(samples: range, at_once: int) -> Iterator[range]:
    """Samples in runs that are solved together: of so many, and of one at least."""
    size = max(1, at_once)
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


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
