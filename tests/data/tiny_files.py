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
