"""How PDEBench files are laid out: what a family's files must hold, checked before a single field value is used."""

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import h5py
import numpy as np

from upsnb.errors import DataError, shown

AXES = ("x", "y", "z")
UPDATE_HINT = "it is an old release or a cut file: download the current one (or generate it, see upsnb.data.generate)"

MOST_NAMED = 8  # keys of a file in one message
DEFLATED = 1100  # largest factor that HDF5's own filters shrink by; deflate's is 1032
PARAMETERS = "beta|nu|rho|eta|zeta|m"  # that PDEBench's file names and attributes give


@dataclass(frozen=True)
class RemoteFile:
    """One file as published on DaRUS (doi:10.18419/darus-2986)."""

    name: str
    id: int  # of the data file in DaRUS
    md5: str
    parameter: float  # the first of the family's parameters
    size_gib: float


@dataclass(frozen=True)
class Family:
    """All that is asked of one PDE: a new family is a new row in families.FAMILIES, and a generator."""

    name: str
    title: str  # for figures
    layout: Literal["single_array", "grouped"]
    num_dims: int  # S
    input_channels: tuple[str, ...]
    output_channels: tuple[str, ...]
    input_keys: tuple[str, ...]  # dataset of each input channel
    output_keys: tuple[str, ...]  # dataset of each output channel
    time_dependent: bool
    periodic: tuple[bool, ...]  # one per space dimension
    domain: tuple[tuple[float, float], ...]  # physical, one pair per space dimension
    time_range: tuple[float, float]  # physical times of the first and last saved frame
    parameter_names: tuple[str, ...]  # file attributes that become conditioning inputs
    given_frames: int  # PDEBench's initial_step
    pdebench_test_side: Literal["first", "last"]
    generate: Callable[..., Path]  # (path, num_samples, parameter, resolution, seed[, num_times]): data without files
    file_stem: str  # of generated and of published files
    symmetries: str | None = None  # one of symmetries.GROUPS: images of a solution that are solutions too
    priors: tuple[str, ...] = ()  # the physics terms of the loss that hold (rules.PHYSICS_TERMS)
    zero_walls: bool = False  # outputs are zero in the ghost cells, half a cell outside the domain
    static_keys: tuple[str, ...] = ()  # datasets stored without a time axis
    check: Callable[["Header", h5py.File], list[str]] | None = None  # what only the field values can tell
    remote: tuple["RemoteFile", ...] = ()  # published files


@dataclass(frozen=True)
class Header:
    """One checked file before reduction: all that is known without reading its fields."""

    path: Path
    num_samples: int
    coordinates: tuple[np.ndarray, ...]  # 1-D float64, one per axis
    times: np.ndarray  # (Nt,) float64
    parameters: np.ndarray  # (num_samples, P) float32


def open_hdf5(path: Path) -> h5py.File:
    """Open one HDF5 file for reading, or say in words why it is none."""
    if not path.is_file():
        raise DataError(f"{path}: no such file -> check the path, or fetch it with upsnb.data.download")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty (0 bytes) -> delete it and download or generate it again")
    if not h5py.is_hdf5(path):
        raise DataError(f"{path}: not an HDF5 file -> expected a PDEBench .hdf5/.h5 file, is this an error page?")
    try:
        return h5py.File(path, "r")
    except Exception as error:  # whatever a damaged file runs into
        raise DataError(
            f"{path}: truncated or damaged ({in_one_line(error)}) -> download or generate it again"
        ) from error


def in_one_line(error: Exception) -> str:
    """What HDF5 says of an error, as far as it is of use."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _names(names: Collection[str]) -> str:
    """The first few names of keys or attributes."""
    listed = [name if name.isprintable() and len(name) < 60 else shown(name) for name in islice(names, MOST_NAMED)]
    return ", ".join(listed + ["..."] * (len(names) > MOST_NAMED)) or "none"


def _dataset(family: Family, path: Path, handle: h5py.File, key: str) -> h5py.Dataset:
    """A dataset of this file whose numbers are all in it.

    HDF5 follows a virtual dataset that is made of itself until the process crashes, opens whatever file an external
    link names, and gives zeros for what was declared and never written.
    """
    links, name = handle.id.links, key.encode()
    if links.exists(name) and links.get_info(name).type == h5py.h5l.TYPE_EXTERNAL:
        raise DataError(f"{path}: {key}: a link to another file -> name that file, or copy the values into this one")
    try:
        dataset = handle.get(key)
    except Exception:  # a link to itself
        dataset = None
    if not isinstance(dataset, h5py.Dataset):
        raise DataError(
            f"{path}: key {key!r} is missing or a group -> is this a {family.name} file? keys found: {_names(handle)}"
        )
    if dataset.shape is None or dataset.is_virtual or dataset.external or dataset.file.filename != handle.filename:
        raise DataError(f"{path}: {key}: holds no values of its own -> copy the values into this file")
    stored, needed = dataset.id.get_storage_size(), math.prod(dataset.shape) * dataset.dtype.itemsize
    if needed > stored * (DEFLATED if dataset.id.get_create_plist().get_nfilters() else 1):
        raise DataError(
            f"{path}: {key}: shape {dataset.shape} takes {needed / 2**30:.3g} GiB, {stored / 2**30:.3g} GiB are there"
            " -> it was never written to its end, download or generate it again"
        )
    return dataset


def _parameter(family: Family, path: Path, handle: h5py.File, name: str) -> float:
    """One PDE parameter of a file: its attribute, else what the file name says (beta0.4, Eta1.e-8)."""
    found = handle.attrs.get(name)
    if found is None:
        match = re.search(rf"(?<![a-z]){name}(\d+(?:\.\d*)?(?:e[+-]?\d+)?)", path.name, re.IGNORECASE)
        if match is None:
            others = re.findall(rf"(?<![a-z])({PARAMETERS})(?=\d)", path.name, re.IGNORECASE)
            others += [other for other in handle.attrs if re.fullmatch(PARAMETERS, other, re.IGNORECASE)]
            remedy = f"set this attribute to the {name} that its values were made with"
            if others:
                remedy = f"it gives {_names(others)}, so another equation's: it cannot be read as {family.name}"
            raise DataError(
                f"{path}: attribute {name!r} is missing (found: {_names(handle.attrs)}) and the file name does not give"
                f" it -> {remedy}"
            )
        found = match.group(1)
    try:
        value = float(np.asarray(found).item())
    except (ValueError, TypeError):
        value = np.nan
    if not np.isfinite(value):
        raise DataError(f"{path}: attribute {name!r} is {shown(found)} -> expected one finite number")
    return value


def _coordinate(family: Family, path: Path, handle: h5py.File, key: str, needed: int) -> np.ndarray:
    """First `needed` entries of a 1-D coordinate, float64, increasing and evenly spaced."""
    dataset = _dataset(family, path, handle, key)
    if dataset.ndim != 1 or dataset.shape[0] < needed:
        raise DataError(f"{path}: {key}: shape {dataset.shape}, expected at least ({needed},) -> {UPDATE_HINT}")
    if dataset.dtype.kind not in "fiu":
        raise DataError(f"{path}: {key}: dtype {dataset.dtype}, expected numbers -> {UPDATE_HINT}")
    values = dataset[:needed].astype(np.float64)
    if not np.isfinite(values).all():
        raise DataError(f"{path}: {key}: holds NaN or infinity -> {UPDATE_HINT}")
    steps = np.diff(values)
    # float32 coordinates near 1 are good to 6e-8, spacings down to 1e-3: one part in a hundred is far above rounding
    if needed > 1 and not (steps.min() > 0 and np.ptp(steps) <= 0.01 * steps.mean()):
        raise DataError(f"{path}: {key}: not increasing in even steps -> {UPDATE_HINT}")
    return values


def single_array_header(family: Family, path: Path, handle: h5py.File) -> Header:
    """Check one single-array file: keys, axes, dtypes, shapes, coordinates, parameters."""
    shapes = {}
    for key in dict.fromkeys(family.input_keys + family.output_keys):
        dataset = _dataset(family, path, handle, key)
        shape, dtype = dataset.shape, dataset.dtype
        axes = "sample", *(() if key in family.static_keys else ("time",)), *AXES[: family.num_dims]
        if len(shape) != len(axes):
            raise DataError(f"{path}: {key}: shape {shape}, expected axes [{', '.join(axes)}] -> wrong family?")
        if dtype.kind != "f" or dtype.itemsize < 4:
            raise DataError(f"{path}: {key}: dtype {dtype}, expected float32 (or float64) -> convert the file")
        if 0 in shape:
            raise DataError(f"{path}: {key}: shape {shape} holds no values -> download or generate it again")
        shapes[key] = (shape[0], shape[-family.num_dims :])
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{key} {(samples, *grid)}" for key, (samples, grid) in shapes.items())
        raise DataError(f"{path}: samples and grids differ between keys ({listed}) -> {UPDATE_HINT}")
    num_samples, grid = next(iter(shapes.values()))
    if len({handle[key].shape[1] for key in family.output_keys if key not in family.static_keys}) > 1:
        raise DataError(f"{path}: {', '.join(family.output_keys)}: numbers of frames differ -> {UPDATE_HINT}")

    coordinates = []
    for axis, points, (low, high) in zip(AXES, grid, family.domain, strict=False):
        values = _coordinate(family, path, handle, f"{axis}-coordinate", points)
        step = (values[-1] - values[0]) / max(points - 1, 1)
        # Points are cell centres, possibly strided: they stay inside and miss the domain's length by a cell at most.
        inside = values[0] >= low - 1e-4 and values[-1] <= high + 1e-4
        if not inside or abs(points * step - (high - low)) > 1.01 * step:
            raise DataError(
                f"{path}: {axis}-coordinate runs from {values[0]:g} to {values[-1]:g}, {family.name} covers"
                f" ({low:g}, {high:g}) -> {UPDATE_HINT}"
            )
        coordinates.append(values)

    num_times = handle[family.output_keys[0]].shape[1]
    times = np.zeros(1)
    if family.time_dependent:
        times = _coordinate(family, path, handle, "t-coordinate", num_times)  # the file has one entry more: not a frame
        if not np.allclose(times[[0, -1]], family.time_range, atol=1e-3 * family.time_range[1]):
            raise DataError(
                f"{path}: t-coordinate runs from {times[0]:g} to {times[-1]:g} over {num_times} frames, {family.name}"
                f" runs from {family.time_range[0]:g} to {family.time_range[1]:g} -> {UPDATE_HINT}"
            )
    elif num_times != 1:
        raise DataError(f"{path}: {family.output_keys[0]}: {num_times} frames, expected 1 -> wrong family?")
    row = [_parameter(family, path, handle, name) for name in family.parameter_names]
    parameters = np.tile(np.asarray(row, dtype=np.float32), (num_samples, 1))
    return Header(path, num_samples, tuple(coordinates), times, parameters)


def single_array_block(handle: h5py.File, family: Family, key: str, samples: slice, frames: np.ndarray, stride: int):
    """Read consecutive samples of one dataset: (n, t, *grid), any float; static datasets get t = 1."""
    dataset = handle[key]
    if key in family.static_keys:
        block = dataset[samples][:, None]
    else:
        # Whole rows, strided in numpy: HDF5 reads a strided contiguous row element by element.
        steps = np.unique(np.diff(frames))
        if len(frames) == 1 or (len(steps) == 1 and steps[0] > 0):
            step = int(steps[0]) if len(frames) > 1 else 1
            block = dataset[samples, int(frames[0]) : int(frames[-1]) + 1 : step]
        else:
            low = int(frames.min())
            block = dataset[samples, low : int(frames.max()) + 1][:, frames - low]
    return block[(slice(None), slice(None)) + (slice(None, None, stride),) * family.num_dims]


# How each layout is checked and read; "grouped" files join here with the first family that needs them.
LAYOUTS: dict[str, tuple[Callable, Callable]] = {"single_array": (single_array_header, single_array_block)}
