"""Does a learned first guess save an exact solver work? Iterations of conjugate gradients on Darcy flow, by guess.

    python benchmarks/steady_prior.py --run outputs/RUN    # two minutes; writes outputs/reference/steady_prior/

Steady Darcy flow is solved to a residual of 1e-8 of its right-hand side, with and without the simplest preconditioner,
from zero, from the forecasts of a run that was trained on it, and from the exact solution with errors of known size:
what a better surrogate would bring. Those are random fields, smooth over a share of the domain, in relative L2.
"""

import time
from pathlib import Path

import numpy as np
import scipy.sparse
import torch
from keep import arguments, save
from scipy.sparse.linalg import cg

from upsnb.runs.handle import Run
from upsnb.runs.runfolder import REPORT
from upsnb.solvers.darcy import darcy_matrix, draw_permeability, solve_darcy

SEED = 10_000  # of permeabilities that no run was trained on
SIZES, LENGTHS = (0.05, 0.015, 0.005, 0.0015), (0.25, 0.06, 0.0)
ZERO, FORECAST = "zero", "the run's forecast"


def solved(matrix, right: np.ndarray, guess: np.ndarray, preconditioned: bool) -> tuple[int, float]:
    """Iterations, and seconds."""
    inverse, steps = scipy.sparse.diags_array(1 / matrix.diagonal()) if preconditioned else None, []
    began = time.perf_counter()
    _, failed = cg(matrix, right, guess, rtol=1e-8, maxiter=20_000, M=inverse, callback=steps.append)
    assert not failed
    return len(steps), time.perf_counter() - began


def error(shape: tuple[int, int], length: float, draws: np.random.Generator) -> np.ndarray:
    """White noise, smoothed over a share of the domain, of mean square 1."""
    waves = [np.fft.fftfreq(size, 1 / size) for size in shape]
    wavenumber = np.hypot(waves[0][:, None], waves[1])
    drawn = np.fft.ifft2(np.fft.fft2(draws.normal(size=shape)) * np.exp(-((np.pi * length * wavenumber) ** 2) / 2)).real
    return drawn / np.sqrt(np.square(drawn).mean())


def guesses(nu: np.ndarray, exact: np.ndarray, forecast: np.ndarray | None, draws: np.random.Generator) -> dict:
    """Every guess by its name."""
    size, told = np.sqrt(np.square(exact).mean()), {ZERO: np.zeros_like(exact)}
    if forecast is not None:
        told[FORECAST] = forecast
    for relative in SIZES:
        for length in LENGTHS:
            told[f"{relative:g} off, {length:g}"] = exact + relative * size * error(nu.shape, length, draws)
    return told


def main() -> None:
    parser = arguments(__doc__, "steady_prior")
    parser.add_argument("--run", type=Path, help="folder of a run that was trained on generated Darcy flow")
    parser.add_argument("--samples", type=int, default=20)
    args = parser.parse_args()
    run, rows = Run.attach(args.run) if args.run else None, {}
    model = run.load_model(stage="operator") if run else None
    points = next(iter(model.specs.values())).grid_shape[0] if model else 64
    fields = np.stack([draw_permeability(SEED, sample, points) for sample in range(args.samples)])
    forecasts = [None] * len(fields)
    if model:
        name, spec = next(iter(model.specs.items()))
        inputs = torch.from_numpy(fields[:, None, None]).float()
        with torch.no_grad():
            forecasts = model(name, inputs, torch.ones(len(fields), spec.num_parameters), 0.0)[:, 0, 0].double().numpy()
    for sample, (nu, forecast) in enumerate(zip(fields, forecasts)):
        matrix, exact = darcy_matrix(nu), solve_darcy(nu, 1.0)
        right, draws = np.full(nu.size, 1.0 / nu.size), np.random.default_rng([SEED, sample])
        for guess, start in guesses(nu, exact, forecast, draws).items():
            off = np.linalg.norm(start - exact) / np.linalg.norm(exact)
            left = np.linalg.norm(right - matrix @ start.ravel()) / np.linalg.norm(right)
            for preconditioned in (False, True):
                iterations, seconds = solved(matrix, right, start.ravel(), preconditioned)
                found = {"off": off, "residual": left, "iterations": iterations, "seconds": seconds}
                rows.setdefault(guess, {}).setdefault("jacobi" if preconditioned else "plain", []).append(found)
    told = {
        guess: {
            kind: {key: float(np.median([one[key] for one in each])) for key in each[0]} for kind, each in kinds.items()
        }
        for guess, kinds in rows.items()
    }
    for kinds in told.values():
        for kind, found in kinds.items():
            found["saved"] = 1 - found["iterations"] / told[ZERO][kind]["iterations"]
    save({"format": 1, "kind": "steady_prior", "points": points, "samples": len(fields), "guesses": told},
         args.output / REPORT)  # fmt: skip


if __name__ == "__main__":
    main()
