"""Tiny files in PDEBench's layouts, to be read as they are or broken first."""

from pathlib import Path

import h5py
import numpy as np


def advection_arrays(num_samples: int = 20, points: int = 16, frames: int = 5, beta: float = 0.5) -> dict:
    """Datasets of a tiny correct advection file: moving sines."""
    x = ((np.arange(points) + 0.5) / points).astype(np.float32)
    times = np.linspace(0, 2 + 2 / (frames - 1), frames + 1).astype(np.float32)
    phases = np.arange(num_samples)[:, None, None]
    tensor = np.sin(2 * np.pi * (x - beta * times[:-1, None]) + phases).astype(np.float32)
    return {"tensor": tensor, "x-coordinate": x, "t-coordinate": times}


def darcy_arrays(num_samples: int = 20, points: int = 8) -> dict:
    """Datasets of a tiny file in Darcy's layout; values tell samples apart, they solve nothing."""
    centres = ((np.arange(points) + 0.5) / points).astype(np.float32)
    nu = np.full((num_samples, points, points), 0.1, dtype=np.float32)
    nu[:, : points // 2] = 1.0
    tensor = np.arange(num_samples * points**2, dtype=np.float32).reshape(num_samples, 1, points, points)
    times = 0.25 * np.arange(10, dtype=np.float32)
    return {"nu": nu, "tensor": tensor, "x-coordinate": centres, "y-coordinate": centres, "t-coordinate": times}


def write(path: Path, arrays: dict, **attributes) -> Path:
    """Write datasets and attributes as one HDF5 file."""
    with h5py.File(path, "w") as handle:
        for key, values in arrays.items():
            handle[key] = values
        handle.attrs.update(attributes)
    return path


def own_fields(
    num_samples: int = 10, frames: int = 6, grid: tuple[int, ...] = (8, 12), channels: int = 2
) -> np.ndarray:
    """Drifting waves (n, t, C, *grid), float64, periodic along every axis."""
    draw = np.random.default_rng(0)
    places = np.meshgrid(*(np.arange(size) / size for size in grid), indexing="ij")
    phases = draw.uniform(0, 1, (num_samples, channels, len(grid)))
    fields = np.empty((num_samples, frames, channels, *grid))
    for index in np.ndindex(num_samples, frames, channels):
        shifts = phases[index[0], index[2]] + 0.05 * index[1]
        fields[index] = sum(np.sin(2 * np.pi * (x + shift)) for x, shift in zip(places, shifts, strict=True))
    return fields


def well_file(path: Path, num_samples: int = 10, frames: int = 6, points: int = 8) -> Path:
    """A file in The Well's layout: two scalars, one of them constant, a vector and a tensor, periodic in x."""
    fields = own_fields(num_samples, frames, (points, points), 7).astype(np.float32)
    along = np.moveaxis(fields, 2, -1)
    arrays = {
        "t0_fields/density": (along[..., 0], True),
        "t0_fields/depth": (along[0, 0, ..., 0], False),
        "t1_fields/velocity": (along[..., 1:3], True),
        "t2_fields/strain": (along[..., 3:].reshape(*along.shape[:-1], 2, 2), True),
    }
    with h5py.File(path, "w") as handle:
        handle.attrs.update(
            {"grid_type": "cartesian", "n_spatial_dims": 2, "n_trajectories": num_samples, "viscosity": 0.1}
        )
        handle.attrs["simulation_parameters"] = ["viscosity", "forcing"]
        for key, (values, varies) in arrays.items():
            handle[key] = values
            said = {"sample_varying": varies, "time_varying": varies, "dim_varying": [True, True]}
            handle[key].attrs.update(said)
        handle["dimensions/time"] = np.linspace(0, 1, frames, dtype=np.float32)
        handle["dimensions"].attrs["spatial_dims"] = ["x", "y"]
        for axis in "xy":
            handle[f"dimensions/{axis}"] = np.arange(points, dtype=np.float32) / points
            boundary = handle.create_group(f"boundary_conditions/{axis}_boundary")
            boundary.attrs["associated_dims"] = [axis]
            boundary.attrs["bc_type"] = "PERIODIC" if axis == "x" else "WALL"
        handle["scalars/forcing"] = np.linspace(1, 2, num_samples, dtype=np.float32)
        handle["scalars/forcing"].attrs.update({"sample_varying": True, "time_varying": False})
    return path
