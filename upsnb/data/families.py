"""PDEBench's eleven families and two of our own, one table row each; a user's come with the settings. No torch here."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import h5py
import numpy as np

from upsnb.data.custom import custom_family
from upsnb.data.layouts import BLOCK_BYTES, Family, Header
from upsnb.solvers.darcy import solve_darcy, steady_darcy
from upsnb.solvers.finite_volumes import solve_burgers, solve_dams, solve_gas
from upsnb.solvers.projection import solve_incompressible_flow
from upsnb.solvers.sorption import solve_diffusion_sorption
from upsnb.solvers.spectral import (
    solve_fitzhugh_nagumo,
    solve_kolmogorov_flow,
    solve_kuramoto_sivashinsky,
    solve_reaction_diffusion,
)
from upsnb.solvers.waves import solve_advection

if TYPE_CHECKING:
    from upsnb.config import DatasetConfig  # which asks the table below

MOST_MISFIT = 0.25  # of a frame, relative, that a speed leaves which explains it


def _check_advection_speed(header: Header, handle: h5py.File) -> list[str]:
    """Whether u(x - beta t) is what the file holds: coordinates and keys are right in wrong files as well.

    Of 16 samples the median counts: PDEBench's own numerical error is below 0.01, and a tenth of the samples has edges
    that coarse grids miss. Viscous Burgers flow leaves 0.6 and more at any speed.
    """
    times, points, beta = header.times, len(header.coordinates[0]), float(header.parameters[0, 0])
    if len(times) < 2 or points < 16:  # too coarse for the waves
        return []
    # A tenth of the domain is far enough to tell 1x from 2x and too short for the usual waves to come round again.
    frame = int(np.clip(np.rint(0.1 / max(abs(beta * times[1]), 1e-9)), 1, len(times) - 1))
    count = np.clip(BLOCK_BYTES // (32 * points), 1, 16)
    samples = np.unique(np.linspace(0, header.num_samples - 1, count).astype(int))
    first, later = (np.stack([handle["tensor"][n, k] for n in samples]).astype(np.float64) for k in (0, frame))
    if not (np.isfinite(first).all() and np.isfinite(later).all()):
        return []  # reading says which sample
    waves, moved, k = np.fft.rfft(first), np.fft.rfft(later), np.arange(points // 2 + 1)
    spread = np.linalg.norm(later - later.mean(axis=1, keepdims=True), axis=1) + 1e-30

    def misfit(speed: float) -> float:
        shifted = np.fft.irfft(waves * np.exp(-2j * np.pi * k * speed * times[frame]), n=points)
        return float(np.median(np.linalg.norm(shifted - later, axis=1) / spread))

    if misfit(beta) <= MOST_MISFIT:
        return []
    both = (waves.conj() * moved).sum(axis=0)
    both[0] = 0  # a mean does not move
    shift = int(np.fft.irfft(both, n=16 * points).argmax()) / (16 * points)
    speed = (shift + np.rint(beta * times[frame] - shift)) / times[frame]
    factor = min((0.5, 2.0), key=lambda factor: misfit(factor * beta))
    if misfit(factor * beta) <= min(misfit(speed) + 0.02, MOST_MISFIT):
        found = f"waves move at {factor * beta:g}, {factor:g} times beta {beta:g}"
        remedy = "advection files from before Aug 2023 are wrong in time by 2, download the current one"
    elif misfit(speed) <= MOST_MISFIT:
        found, remedy = f"waves move at {speed:.3g} and beta is {beta:g}", "correct the file's attribute beta"
    else:
        found = f"u(x - {beta:g} t) misses frame {frame} by {misfit(beta):.0%} of it, and no other speed explains it"
        remedy = "another equation's values, or noise: they cannot be read as advection1d"
    return [f"{header.path}: tensor: {found} -> {remedy}"]


def _check_flow_is_periodic(header: Header, handle: h5py.File) -> list[str]:
    """Whether the gas may leave: such files have the same layout as those of periodic boxes."""
    if "trans" not in header.path.name.lower().split("_"):
        return []
    found = f"{header.path}: 'trans' in its name means open ends, and this family is periodic"
    return [f"{found} -> take a file with 'periodic' in its name"]


def _steady_pressure(fields: np.ndarray, beta: float) -> np.ndarray:
    return solve_darcy(fields[0], beta)[None]


def _logistic(u: np.ndarray) -> np.ndarray:
    return u * (1 - u)


RING = {"layout": "single_array", "num_dims": 1, "channels": {"u": "tensor"}, "periodic": (True,)}
BOX = {"layout": "single_array", "time_range": (0.0, 1.0), "check": _check_flow_is_periodic}
GAS = {"density": "density", "pressure": "pressure", "Vx": "Vx", "Vy": "Vy", "Vz": "Vz"}
GAS_2D = {channel: key for channel, key in GAS.items() if channel != "Vz"}
GAS_1D = {channel: key for channel, key in GAS_2D.items() if channel != "Vy"}


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            **RING,
            name="advection1d",
            title="1D advection",
            domain=((0.0, 1.0),),
            time_range=(0.0, 2.0),
            parameters={"beta": 1.0},
            file_stem="1D_Advection_Sols",
            solve=solve_advection,
            symmetries=("shift", "sign"),  # linear, on a circle
            priors=("conservation",),
            check=_check_advection_speed,
        ),
        Family(
            **RING,
            name="burgers1d",
            title="1D Burgers' equation",
            domain=((0.0, 1.0),),
            time_range=(0.0, 2.0),
            parameters={"Nu": 0.01},  # diffusion is Nu / pi
            file_stem="1D_Burgers_Sols",
            solve=solve_burgers,
            edition=2,
            resolution=128,
            symmetries=("shift", "turn"),
            vectors=(("u",),),
            priors=("conservation",),
        ),
        Family(
            **RING,
            name="reacdiff1d",
            title="1D reaction-diffusion",
            domain=((0.0, 1.0),),
            time_range=(0.0, 1.0),
            parameters={"Nu": 0.5, "rho": 1.0},
            file_stem="ReacDiff",
            solve=solve_reaction_diffusion,
            stretches=(1.0, 10.0, 100.0),
            resolution=128,
            symmetries=("shift", "turn"),
            priors=("positivity",),
            mean_rate=("rho", _logistic),
        ),
        Family(
            name="diffsorp1d",
            title="1D diffusion-sorption",
            layout="grouped",
            num_dims=1,
            channels={"u": "data"},
            periodic=(False,),
            domain=((0.0, 1.0),),
            time_range=(0.0, 500.0),
            parameters={"D": 5e-4, "por": 0.29, "rho_s": 2880.0, "k_f": 3.5e-4, "n_f": 0.874},
            file_stem="1D_diff-sorp",
            solve=solve_diffusion_sorption,
            stretches=(1.0, 100.0, 1e4),
            resolution=128,
            priors=("positivity",),
        ),
        Family(
            **BOX,
            name="cfd1d",
            title="1D compressible Navier-Stokes",
            num_dims=1,
            channels=GAS_1D,
            periodic=(True,),
            domain=((-1.0, 1.0),),
            parameters={"eta": 0.01, "zeta": 0.01},
            file_stem="1D_CFD_Rand",
            solve=partial(solve_gas, 1),
            edition=2,
            resolution=128,
            symmetries=("shift", "turn"),
            vectors=(("Vx",),),
        ),
        Family(
            name="darcy2d",
            title="2D Darcy flow",
            layout="single_array",
            num_dims=2,
            channels={"pressure": "tensor"},
            given={"nu": "nu"},
            periodic=(False, False),
            domain=((0.0, 1.0), (0.0, 1.0)),
            time_range=(0.0, 0.0),
            parameters={"beta": 1.0},
            file_stem="2D_DarcyFlow",
            given_frames=1,
            solve=steady_darcy,
            steady=_steady_pressure,
            symmetries=("turn",),  # isotropic, on a square
            priors=("boundary", "positivity"),
            zero_walls=True,
        ),
        Family(
            name="shallowwater2d",
            title="2D shallow water",
            layout="grouped",
            num_dims=2,
            channels={"height": "data"},
            periodic=(False, False),
            domain=((-2.5, 2.5), (-2.5, 2.5)),
            time_range=(0.0, 1.0),
            parameters={},
            file_stem="2D_rdb",
            solve=solve_dams,
            edition=2,
            resolution=32,
            num_times=26,
            symmetries=("turn",),
            priors=("positivity",),
        ),
        Family(
            name="diffreact2d",
            title="2D diffusion-reaction",
            layout="grouped",
            num_dims=2,
            channels={"activator": "data", "inhibitor": "data"},
            periodic=(False, False),
            domain=((-1.0, 1.0), (-1.0, 1.0)),
            time_range=(0.0, 5.0),
            parameters={"Du": 1e-3, "Dv": 5e-3, "k": 5e-3},
            file_stem="2D_diff-react",
            solve=solve_fitzhugh_nagumo,
            stretches=(1.0, 4.0, 16.0),
            num_times=26,
            symmetries=("turn",),
        ),
        Family(
            **BOX,
            name="cfd2d",
            title="2D compressible Navier-Stokes",
            num_dims=2,
            channels=GAS_2D,
            periodic=(True, True),
            domain=((0.0, 1.0), (0.0, 1.0)),
            parameters={"M": 0.1, "eta": 0.01, "zeta": 0.01},
            file_stem="2D_CFD_Rand",
            solve=partial(solve_gas, 2),
            edition=2,
            resolution=32,
            num_times=21,
            symmetries=("shift", "turn"),
            vectors=(("Vx", "Vy"),),
        ),
        Family(
            name="incompressible2d",
            title="2D incompressible Navier-Stokes",
            layout="many_arrays",
            num_dims=2,
            channels={"Vx": "velocity", "Vy": "velocity", "particles": "particles"},
            given={"Fx": "force", "Fy": "force"},
            periodic=(False, False),
            domain=((0.0, 1.0), (0.0, 1.0)),
            time_range=(0.0, 5.0),
            parameters={"NU": 0.01},
            file_stem="ns_incom_inhom_2d",
            solve=solve_incompressible_flow,
            resolution=32,
            num_times=21,
            symmetries=("turn",),
            vectors=(("Vx", "Vy"), ("Fx", "Fy")),
        ),
        Family(
            **BOX,
            name="cfd3d",
            title="3D compressible Navier-Stokes",
            num_dims=3,
            channels=GAS,
            periodic=(True, True, True),
            domain=((0.0, 1.0), (0.0, 1.0), (0.0, 1.0)),
            parameters={"M": 1.0, "eta": 1e-8, "zeta": 1e-8},
            file_stem="3D_CFD_Rand",
            solve=partial(solve_gas, 3),
            edition=2,
            resolution=12,
            num_times=21,
            symmetries=("shift", "turn"),
            vectors=(("Vx", "Vy", "Vz"),),
        ),
        Family(
            **RING,
            name="kuramoto1d",
            title="1D Kuramoto-Sivashinsky",
            domain=((0.0, 64.0),),
            time_range=(0.0, 32.0),
            parameters={"nu": 1.0},
            file_stem="1D_KuramotoSivashinsky",
            solve=solve_kuramoto_sivashinsky,
            stretches=(1.0, 2.0, 4.0, 8.0),
            resolution=128,
            symmetries=("shift", "turn"),
            vectors=(("u",),),
            priors=("conservation",),
        ),
        Family(
            name="kolmogorov2d",
            title="2D Kolmogorov flow",
            layout="single_array",
            num_dims=2,
            channels={"vorticity": "tensor"},
            periodic=(True, True),
            domain=((0.0, 2 * np.pi), (0.0, 2 * np.pi)),
            time_range=(0.0, 4.0),
            parameters={"nu": 0.02, "drag": 0.1},
            file_stem="2D_Kolmogorov",
            solve=solve_kolmogorov_flow,
            stretches=(1.0, 2.0, 4.0),
            num_times=21,
            symmetries=("shift x",),  # the force is the same all along x
            priors=("conservation",),
        ),
    )
}


def family_of(dataset: DatasetConfig) -> Family:
    """All that is asked of a dataset's equation."""
    return custom_family(dataset.custom) if dataset.custom else FAMILIES[dataset.family]
