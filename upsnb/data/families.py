"""PDEBench families, one table row each. No torch in here.

Ids and MD5 of published files are from pdebench/data_download/pdebench_data_urls.csv of the PDEBench repository; ids
elsewhere may be stale.
"""

from functools import partial

import h5py
import numpy as np

from upsnb.data.finite_volumes import solve_burgers, solve_dams, solve_gas
from upsnb.data.generate import solve_advection, solve_darcy, steady_darcy
from upsnb.data.layouts import BLOCK_BYTES, Family, Header, RemoteFile

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


def _gas(dims: int, resolution: int, num_times: int) -> Family:
    """The row of compressible flow in a periodic box."""
    return Family(
        name=f"compressible{dims}d",
        title=f"{dims}D compressible flow",
        layout="single_array",
        num_dims=dims,
        channels={name: name for name in ("density", "pressure", *("Vx", "Vy", "Vz")[:dims])},
        periodic=(True,) * dims,
        domain=((-1.0, 1.0),) if dims == 1 else ((0.0, 1.0),) * dims,
        time_range=(0.0, 1.0),
        parameters={"eta": 0.01, "zeta": 0.01} | ({} if dims == 1 else {"M": {2: 0.1, 3: 1.0}[dims]}),
        file_stem=f"{dims}D_CFD_Rand",
        solve=partial(solve_gas, dims),
        resolution=resolution,
        num_times=num_times,
    )


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="advection1d",
            title="1D advection",
            layout="single_array",
            num_dims=1,
            channels={"u": "tensor"},
            periodic=(True,),
            domain=((0.0, 1.0),),
            time_range=(0.0, 2.0),
            parameters={"beta": 1.0},
            file_stem="1D_Advection_Sols",
            solve=solve_advection,
            symmetries="shift and sign",
            priors=("conservation",),
            check=_check_advection_speed,
            remote=(
                RemoteFile("1D_Advection_Sols_beta0.1.hdf5", 255672, "b4be2fc3383f737c76033073e6d2ccfb", 0.1, 7.7),
                RemoteFile("1D_Advection_Sols_beta0.2.hdf5", 255671, "d47b52c1be4b6bcaa8748a8df2f5fbb8", 0.2, 7.7),
                RemoteFile("1D_Advection_Sols_beta0.4.hdf5", 255674, "d595bbfd2c659df995a93cd40d6ea568", 0.4, 7.7),
                RemoteFile("1D_Advection_Sols_beta0.7.hdf5", 255666, "f89030c240a1e90b55649776854a84c2", 0.7, 7.7),
                RemoteFile("1D_Advection_Sols_beta1.0.hdf5", 255675, "1fe41923a4123db55bf4e89bea32e142", 1.0, 7.7),
                RemoteFile("1D_Advection_Sols_beta2.0.hdf5", 255677, "0e9beff98693089c38e213a1f2b9ac43", 2.0, 7.7),
                RemoteFile("1D_Advection_Sols_beta4.0.hdf5", 255676, "a87b03ff425496360e2732921805f47d", 4.0, 7.7),
                RemoteFile("1D_Advection_Sols_beta7.0.hdf5", 255664, "72a286ad2fcba574bd20bc045ba82d58", 7.0, 7.7),
            ),
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
            steady=lambda fields, beta: solve_darcy(fields[0], beta)[None],
            symmetries="square",
            priors=("boundary", "positivity"),
            zero_walls=True,
            remote=(
                RemoteFile("2D_DarcyFlow_beta0.01_Train.hdf5", 133217, "d05c287d4c0b7d3178b0097084238251", 0.01, 1.3),
                RemoteFile("2D_DarcyFlow_beta0.1_Train.hdf5", 133218, "294f9a03a4aa16b0e386469ca8b471be", 0.1, 1.3),
                RemoteFile("2D_DarcyFlow_beta1.0_Train.hdf5", 133219, "81694ed31306ff2e5f6b76349b0b4389", 1.0, 1.3),
                RemoteFile("2D_DarcyFlow_beta10.0_Train.hdf5", 133220, "a7f23cf8011fc211b180828af39b7d1a", 10.0, 1.3),
                RemoteFile("2D_DarcyFlow_beta100.0_Train.hdf5", 133221, "7c09f3b1bb097737d3fd52ffb0c6f1c8", 100.0, 1.3),
            ),
        ),
        Family(
            name="burgers1d",
            title="1D Burgers",
            layout="single_array",
            num_dims=1,
            channels={"u": "tensor"},
            periodic=(True,),
            domain=((0.0, 1.0),),
            time_range=(0.0, 2.0),
            parameters={"Nu": 0.01},
            file_stem="1D_Burgers_Sols",
            solve=solve_burgers,
            resolution=256,
            priors=("conservation",),
        ),
        *(
            _gas(dims, resolution, num_times)
            for dims, resolution, num_times in ((1, 256, 101), (2, 64, 21), (3, 24, 21))
        ),
        Family(
            name="shallow_water2d",
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
            num_times=101,
            symmetries="square",
            priors=("positivity",),
        ),
    )
}
