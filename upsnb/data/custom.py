"""A family of a user's own: the row that its settings give instead of the table, and the files that it describes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import numpy as np

from upsnb.data.layouts import (
    AXES,
    Family,
    Header,
    array_sizes,
    cell_centres,
    check_place,
    each,
    even,
    is_elsewhere,
    names,
    open_hdf5,
    stored,
)
from upsnb.data.numpy_files import ENDINGS, NumpyFile
from upsnb.errors import DataError, shown
from upsnb.values import OWN, ArrayConfig, CustomConfig

if TYPE_CHECKING:
    from upsnb.config import DatasetConfig  # which asks the table of families, and so this file

REMEDY = "correct the file, or `custom` of its dataset: python -m upsnb data look FILE proposes it"

# -- the row -------------------------------------------------------------------------------------------------------


def custom_family(row: CustomConfig) -> Family:
    """The family that a row without contradictions describes."""
    arrays = row.arrays.items()
    channels, given = ({name: path for path, a in arrays if a.given == side for name in a.channels} for side in (0, 1))
    num_dims = len(row.periodic)
    return Family(
        name=OWN,
        title=row.title,
        layout="custom",
        num_dims=num_dims,
        channels=channels,
        periodic=row.periodic,
        domain=row.domain or ((0.0, 1.0),) * num_dims,
        time_range=(0.0, math.inf if row.times or row.time_step else 0.0),  # the last one is the file's
        parameters=dict.fromkeys(row.parameters, 0.0),
        file_stem="",
        solve=None,
        given=given,
        given_frames=1,
        symmetries=row.symmetries,
        vectors=row.vectors,
        priors=row.priors,
        units=row.units,
        custom=row,
        remedy=REMEDY,
    )


def problems(dataset: DatasetConfig) -> Iterator[tuple[str, str, str]]:
    """What is wrong with a dataset's row: a setting of the dataset, what was found, what to do."""
    row = dataset.custom
    if row is None or dataset.family != OWN:
        if row is not None or dataset.family == OWN:
            found = "is empty" if row is None else f"is there, and the family is {dataset.family}"
            yield "custom", found, "a row belongs to family: custom, python -m upsnb data look FILE proposes one"
        return
    if not dataset.files:
        yield "files", "is empty, and own data have no solver", "name the files that hold them"
    num_dims = len(row.periodic)
    if not 1 <= num_dims <= len(AXES):
        yield "custom.periodic", f"has {num_dims} values", "write true, or false for walls, for each of x, y, z"
        return
    for path, array in row.arrays.items():
        yield from (
            (f"custom.arrays.{path}.{setting}", *problem) for setting, *problem in _of_array(path, array, num_dims)
        )
    yield from ((f"custom.{setting}", *problem) for setting, *problem in _of_row(row, num_dims))


def _of_array(path: str, array: ArrayConfig, num_dims: int) -> Iterator[tuple[str, str, str]]:
    axes, found = AXES[:num_dims], f"is [{', '.join(array.axes)}]"
    counts = Counter(array.axes)
    if any(count > 1 for axis, count in counts.items() if axis != "channel"):
        yield "axes", found, "name each axis once"
    if strange := counts.keys() & set(AXES[num_dims:]):
        remedy = f"take out {min(strange)}, or say if it is periodic"
        yield "axes", f"{found}, and periodic has {num_dims} values", remedy
    if path.count("*") > 1 or ("*" in path and "sample" in counts):
        yield "axes", f"{found} in {path}", "name the samples once: by one * in the path or by an axis `sample`"
    needed = ["sample"] * ("*" not in path) + list(axes)
    missing = [axis for axis in needed if axis not in counts]
    if missing and not array.given:
        yield "axes", f"{found}: {', '.join(missing)} is missing", "name it where it lies, or set given: true"
    if array.given and "time" in counts:
        yield "axes", f"{found}, and what is given has no time", "predict it as well (given: false), or leave it out"
    if not array.channels or (len(array.channels) > 1 and "channel" not in counts):
        remedy = "name one for each, and the axis `channel` where there are several"
        yield "channels", f"{len(array.channels)} are named, and its axes are {found[3:]}", remedy


def _of_row(row: CustomConfig, num_dims: int) -> Iterator[tuple[str, str, str]]:
    fields = [array for array in row.arrays.values() if not array.given]
    timed = {"time" in array.axes for array in fields}
    sides = [{name for a in row.arrays.values() if a.given == side for name in a.channels} for side in (0, 1)]
    if not fields:
        yield "arrays", "has none that is predicted", "name one without given: true"
    elif len(timed) == 2:
        yield "arrays", "some have a time and others none", "set given: true where fields do not change"
    elif timed == {True} and (row.times is None) == (row.time_step is None):
        yield "time_step", "is as empty or full as times is", "write one of them: the step, or the path of the times"
    elif timed == {False} and (row.times or row.time_step):
        yield "time_step", "is there, and no array has an axis `time`", "name that axis, or leave times and step empty"
    elif timed == {False} and not sides[1]:
        yield "arrays", "nothing is given and nothing has a time", "set given: true where the input is"
    (channel, count), *_ = Counter(name for a in row.arrays.values() for name in a.channels).most_common(1) or [("", 0)]
    if count > 1:
        yield "arrays", f"the channel {channel} is there twice", "name each channel once"
    for setting, count in (("domain", len(row.domain)), ("coordinates", len(row.coordinates))):
        if count not in (0, num_dims):
            yield setting, f"has {count} entries, and periodic {num_dims}", "write one for each of x, y, z"
    for axis, (low, high) in zip(AXES, row.domain):
        if not low < high:
            yield "domain", f"{axis} from {low:g} to {high:g}", "write the lower end first"
    for name in row.units.keys() - (sides[0] | sides[1]):
        yield f"units.{name}", "no channel has this name", f"there are {', '.join(sorted(sides[0] | sides[1]))}"
    wraps, lengths = set(row.periodic), {high - low for low, high in row.domain}
    if {"shift", "shift x"} & set(row.symmetries) and not (row.periodic[0] or "shift" in row.symmetries and any(wraps)):
        yield "symmetries", "a shift needs an axis that is periodic", "take it out, or correct periodic"
    if "turn" in row.symmetries and (len(wraps) > 1 or len(lengths) > 1):
        yield "symmetries", "turn, and the axes differ in length or in their walls", "take it out"
    for vector in row.vectors:
        if len(vector) != num_dims or not any(set(vector) <= side for side in sides):
            remedy = f"name {num_dims} channels, all predicted or all given"
            yield "vectors", f"[{', '.join(vector)}]", remedy


# -- its files -----------------------------------------------------------------------------------------------------


def open_arrays(path: Path) -> h5py.File | NumpyFile:
    """Open a file by its ending."""
    return NumpyFile(path) if path.suffix.lower() in ENDINGS else open_hdf5(path)


def custom_header(family: Family, path: Path, handle: h5py.File | NumpyFile) -> Header:
    """Check that every array of the row is there, and that all agree on samples, times and grid."""
    row, groups = family.custom, _samples(family, path, handle)
    num_samples, num_times, grid = array_sizes(family, path, handle, groups)
    coordinates = cell_centres(family, grid)
    if row.coordinates:
        coordinates = tuple(
            check_place(family, path, key, _numbers(path, handle, key, [(points,)]), axis)
            for axis, (key, points) in enumerate(zip(row.coordinates, grid))
        )
    times = np.arange(num_times) * (row.time_step or 0.0)
    if row.times:
        times = _times(family, path, handle, groups, num_samples, num_times)
    return Header(path, num_samples, coordinates, times, _parameters(family, path, handle, groups, num_samples), groups)


def array_of(path: Path, handle: h5py.File | NumpyFile, key: str) -> h5py.Dataset | np.ndarray:
    """One array of a file, all of which is there; its values are read where it is indexed."""
    return handle[key] if isinstance(handle, NumpyFile) else stored(OWN, path, handle, key)


def _check_each(path: Path, key: str, groups: Sequence[str]) -> None:
    if "*" in key and not groups:
        raise DataError(f"{path}: {key}: samples are an axis of the arrays, and * stands for none -> {REMEDY}")


def _samples(family: Family, path: Path, handle) -> tuple[str, ...]:
    """What `*` stands for in the paths of this file, as people count; empty where samples are an axis."""
    found = {key: set(_matches(handle, key)) for key in family.custom.arrays if "*" in key}
    every = set().union(*found.values())
    for key, own in found.items():
        if every != own or not every:
            missing = f"there is none for the sample {shown(min(every - own))}" if every else "nothing is called so"
            raise DataError(f"{path}: {key}: {missing} -> {REMEDY}; keys found: {names(handle)}")
    return tuple(
        sorted(every, key=lambda name: [(len(p), p) if p.isdigit() else (0, p) for p in re.split(r"(\d+)", name)])
    )


def _matches(handle, key: str) -> Iterator[str]:
    """What `*` can stand for in a path; what only looks like a sample and has no such array in it is none."""
    head, _, tail = key.partition("*")
    folder, slash, prefix = head.rpartition("/")
    suffix = tail.partition("/")[0]
    if isinstance(handle, NumpyFile):
        below = {
            name.removeprefix(folder + slash).partition("/")[0] for name in handle if name.startswith(folder + slash)
        }
        exists = handle.__contains__
    else:
        below = handle if not folder else handle[folder] if is_elsewhere(handle, folder) == "" else ()
        below = below if isinstance(below, h5py.Group) else ()

        def exists(one: str) -> bool:
            return is_elsewhere(handle, one) is not None

    for name in below:
        middle = name[len(prefix) : len(name) - len(suffix)]
        if middle and name == prefix + middle + suffix and exists(key.replace("*", middle)):
            yield middle


def _numbers(path: Path, handle, key: str, shapes: list[tuple[int, ...]]) -> np.ndarray:
    """Finite numbers that are no field, float64, of one of these shapes: what is larger is not read."""
    array = array_of(path, handle, key)
    if tuple(array.shape) not in shapes or array.dtype.kind not in "iuf":
        expected = " or ".join(map(str, shapes))
        raise DataError(f"{path}: {key}: {array.dtype} of shape {array.shape}, expected numbers {expected} -> {REMEDY}")
    values = np.array(array[()], dtype=np.float64)  # a copy: the file will be closed
    if not np.isfinite(values).all():
        raise DataError(f"{path}: {key}: holds NaN or infinity -> {REMEDY}")
    return values


def _times(family: Family, path: Path, handle, groups, num_samples: int, num_times: int) -> np.ndarray:
    key = family.custom.times
    _check_each(path, key, groups)
    shapes = [(num_times,), (num_samples, num_times)][: 1 if "*" in key else 2]
    saved = np.vstack([_numbers(path, handle, one, shapes) for one in each(key, groups)])
    times = even(path, key, saved[0], "save evenly spaced times, earliest first")
    if not np.allclose(saved, times, rtol=0, atol=1e-3 * np.ptp(times) / max(num_times - 1, 1)):
        raise DataError(f"{path}: {key}: samples were saved at different times -> split the file")
    return times


def _parameters(family: Family, path: Path, handle, groups, num_samples: int) -> np.ndarray:
    """(num_samples, P) float32; parameters of one path are its columns, in the row's order."""
    parameters, columns = family.custom.parameters, {}
    for key in dict.fromkeys(parameters.values()):
        own = [name for name, other in parameters.items() if other == key]
        place, _, attribute = key.rpartition("@") if "@" in key else (key, "", "")
        _check_each(path, place, groups)
        several = [(num_samples, len(own)), *([(num_samples,)] * (len(own) == 1))] * ("*" not in place)
        shapes = [*several, (len(own),), *([()] * (len(own) == 1))]
        rows = [
            _attribute(path, handle, one, attribute, shapes) if attribute else _numbers(path, handle, one, shapes)
            for one in each(place, groups)
        ]
        values = np.stack(rows).reshape(-1, len(own))
        columns |= dict(zip(own, np.broadcast_to(values, (num_samples, len(own))).T))
    ordered = [columns[name] for name in parameters]
    return np.asarray(ordered, dtype=np.float32).reshape(len(ordered), num_samples).T


def _attribute(path: Path, handle, place: str, attribute: str, shapes: list[tuple[int, ...]]) -> np.ndarray:
    try:
        here = not place or is_elsewhere(handle, place) == ""
        values = np.asarray((handle[place] if place else handle).attrs[attribute] if here else None, dtype=np.float64)
    except Exception:  # no such group, no such attribute, no number; NumPy's files have none
        values = np.asarray(np.nan)
    if values.shape not in shapes or not np.isfinite(values).all():
        raise DataError(f"{path}: {place}@{attribute}: no such attribute with finite numbers -> {REMEDY}")
    return values
