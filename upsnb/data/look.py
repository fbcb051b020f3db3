"""What any HDF5 or NumPy file holds, and the row that would train on it: guessed, and to be corrected."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import yaml
from pydantic import ValidationError

from upsnb.config import DatasetConfig
from upsnb.data.custom import array_of, open_arrays, problems
from upsnb.data.families import FAMILIES, family_of
from upsnb.data.layouts import AXES, Family, reason, told_as
from upsnb.data.numpy_files import NumpyFile
from upsnb.data.source import Source, open_source, thinned
from upsnb.errors import MOST_LISTED, DataError, shown
from upsnb.values import OWN

MOST_SEEN = 5000  # arrays of a file that are looked for
MOST_VALUES = 2**14  # of one array, in each of three places
MOST_CHUNK = 64 * 2**20  # bytes that HDF5 unpacks to read one value
FEW = 8  # an axis no longer than this may be one of channels
REPEATED = 4  # arrays of one shape, their names alike but for a number: one for each sample
MOST_POINTS = 2**22  # of a grid whose edges are compared
MEETING = 2.0  # steps across an edge that a periodic field may have, in usual steps
WELL = ("t0_fields", "t1_fields", "t2_fields")  # groups of scalars, vectors and tensors in The Well's files
COORDINATE = re.compile(r"(t|x|y|z)(?:ime)?s?(?:[-_ ]?(?:coord\w*|grid|axis))?", re.IGNORECASE)


class Found(NamedTuple):
    """One array of a file, or several that are one for each sample."""

    shape: tuple[int, ...]
    dtype: np.dtype
    paths: tuple[str, ...]


def recognise(files: Sequence[Path]) -> list[str]:
    """The families of the table that files can be read as."""
    found = []
    for name in FAMILIES:
        try:
            open_source(name, files)
        except DataError:
            continue
        found.append(name)
    return found


def open_unknown(files: Sequence[Path]) -> tuple[Source, list[str]]:
    """The files of one dataset by the family that they can be read as, else by the row that is proposed for them.

    Returns:
        The source, and what is to be said of its row, a line each: nothing where nothing was guessed.
    Raises:
        DataError: they can be read as several families, or by no row.
    """
    names = recognise(files)
    if len(names) > 1:
        found = f"{', '.join(map(str, files))}: can be read as {' and '.join(names)}"
        raise DataError(f"{found} -> name its family in a params file, and check that")
    if names:
        return open_source(names[0], files), []
    row, notes = _row(files[0])
    guessed = "read by a guessed row: python -m upsnb data look FILE -> correct it in a params file, and check that"
    return open_source(_family(files[0], row), files), [guessed] * ("axes" in notes)


# -- what is there -------------------------------------------------------------------------------------------------


def survey(path: Path) -> tuple[dict[str, Found], list[str]]:
    """Arrays of a file by path, those of single samples together under one `*`; and its first attributes, a line each.

    Raises:
        DataError: no HDF5 or NumPy file, or a damaged one.
    """
    arrays: dict[str, tuple] = {}
    attributes: list[str] = []

    def note(name: str, item) -> bool | None:
        if isinstance(item, h5py.Dataset) and item.shape is not None:
            arrays[name] = tuple(item.shape), item.dtype
        if len(attributes) < MOST_LISTED:
            attributes.extend(
                f"{name}@{key} = {shown(value)}" for key, value in islice(item.attrs.items(), MOST_LISTED)
            )
        return True if len(arrays) >= MOST_SEEN else None  # stop there

    remedy = "truncated or damaged, download or make it again"
    with open_arrays(path) as handle, told_as(f"{path}: cannot be read", remedy):
        if isinstance(handle, NumpyFile):
            arrays = {name: handle.header(name) for name in islice(handle, MOST_SEEN)}
        else:
            note("", handle) or handle.visititems(note)  # follows no links
    return _together(arrays), attributes[:MOST_LISTED]


def _together(arrays: dict[str, tuple]) -> dict[str, Found]:
    alike: dict[tuple, list[str]] = {}
    for name, (shape, dtype) in arrays.items() if not _is_well(arrays) else ():
        for number in re.finditer(r"\d+(?=[^/\d]*(?:/|$))", name):  # the last one of each part of the path
            alike.setdefault((f"{name[: number.start()]}*{name[number.end() :]}", shape, str(dtype)), []).append(name)
    found: dict[str, Found] = {}
    taken: set[str] = set()
    for (pattern, shape, _), several in sorted(alike.items(), key=lambda item: -len(item[1])):
        if len(several) >= REPEATED and not taken & set(several):
            taken |= set(several)
            found[pattern] = Found(shape, arrays[several[0]][1], tuple(several))
    rest = {name: Found(shape, dtype, (name,)) for name, (shape, dtype) in arrays.items() if name not in taken}
    return dict(sorted((rest | found).items()))


def contents(path: Path) -> list[str]:
    """The arrays of a file and what their values are like, and its attributes: a line each.

    Raises:
        DataError: no HDF5 or NumPy file, or a damaged one.
    """
    arrays, attributes = survey(path)
    lines = []
    for name, found in islice(arrays.items(), MOST_LISTED):
        many = f", {len(found.paths)} of them" if len(found.paths) > 1 else ""
        lines.append(f"{name}: {found.dtype} {found.shape}{many}, {_values(path, found)}")
    return lines + ["..."] * (len(arrays) > MOST_LISTED) + attributes


def _values(path: Path, found: Found) -> str:
    """The range of an array's values in three places, or why they were not looked at."""
    shape = found.shape
    if found.dtype.kind not in "iufb" or 0 in shape:
        return "no numbers"
    room = [slice(0, max(1, MOST_VALUES // math.prod(shape[axis + 1 :]))) for axis in range(len(shape))]
    starts = sorted({0, shape[0] // 2, shape[0] - 1}) if len(shape) > 1 else []
    places = [(slice(start, start + 1), *room[1:]) for start in starts] or [tuple(room)]
    try:
        with open_arrays(path) as handle:
            array = array_of(path, handle, found.paths[0])
            chunk = math.prod(getattr(array, "chunks", None) or (0,)) * found.dtype.itemsize
            if chunk > MOST_CHUNK:
                return f"not looked at (chunks of {chunk / 2**20:,.0f} MiB)"
            values = np.concatenate([np.ravel(array[place]) for place in places]).astype(np.float64)
    except Exception as error:  # whatever a damaged file runs into
        said = reason(error).removeprefix(f"{path}: {found.paths[0]}: ")
        return f"not looked at ({said.partition(' -> ')[0]})"
    finite = values[np.isfinite(values)]
    if not len(finite):
        return "nothing finite"
    return f"from {finite.min():.4g} to {finite.max():.4g}" + ", some not finite" * (len(finite) < len(values))


# -- a row for it --------------------------------------------------------------------------------------------------


def propose(path: Path) -> list[str]:
    """The params file that trains on a user's own file, a line each, with what was guessed and must be checked.

    Raises:
        DataError: nothing in there looks like fields.
    """
    row, notes = _row(path)
    told = _tried(path, row, notes)
    name = re.sub(r"\W+", "_", path.stem, flags=re.ASCII).strip("_")[:50] or "own"
    own = {f"{name}_data": {"family": OWN, "files": [path.name], "custom": row}}
    data = {"data": {"root": str(path.absolute().parent), "datasets": own}}
    lines = yaml.safe_dump(data, default_flow_style=None, width=math.inf, sort_keys=False).splitlines()
    for number, line in enumerate(lines):
        if said := notes.get(line.strip().partition(":")[0]):
            lines[number] += f"  # {said}"
    return [*lines, f"# check: {notes['check']}", f"# {told}"]


def _row(path: Path) -> tuple[dict, dict[str, str]]:
    """A row, and what is to be said of its settings: what `check` must, and of guesses that they are some."""
    arrays, _ = survey(path)
    # for a damaged file, and one that only looks like The Well's
    with told_as(f"{path}: no row can be guessed", "write it by hand, docs/data.md"), open_arrays(path) as handle:
        row, notes = (_well if _is_well(arrays) else _guessed)(path, handle, arrays)
    return {setting: value for setting, value in row.items() if value}, notes


def _family(path: Path, row: dict) -> Family:
    """The family that a row describes, or why it describes none."""
    try:
        values = {"family": OWN, "files": [str(path)], "custom": row}
        dataset = DatasetConfig.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise DataError(f"{path}: not a row yet: {reason(error)} -> write it by hand, docs/data.md") from error
    for setting, found, remedy in problems(dataset):
        raise DataError(f"{path}: not a row yet: {setting}: {found} -> {remedy}")
    return family_of(dataset)


def _tried(path: Path, row: dict, notes: dict[str, str]) -> str:
    """Open the file by the row and guess from their values which axes are periodic; what came of it."""
    try:
        source = open_source(_family(path, row), path)
        if "periodic" not in notes and math.prod(source.grid_shape) <= MOST_POINTS:
            fields = source.read(thinned(np.arange(source.num_samples), FEW), [source.num_times - 1])[1]
            across = [_across(np.moveaxis(fields, 3 + axis, 0)) for axis in range(len(source.grid_shape))]
            row["periodic"] = [ratio <= MEETING for ratio in across]
            steps = ", ".join(f"{axis} {ratio:.2g}" for axis, ratio in zip(AXES, across))
            notes["periodic"] = f"guess: steps across the edge, in usual ones: {steps}; small where fields are 0, too"
    except DataError as error:
        return "does not open: " + " ".join(str(error).split())
    return f"opens: {source.num_samples} samples, {source.num_times} frames, grid {source.grid_shape}"


def _across(fields: np.ndarray) -> float:
    """The step from the last to the first point of the first axis, in steps between neighbours."""
    usual = np.abs(np.diff(fields, axis=0)).mean()
    return float(np.abs(fields[0] - fields[-1]).mean() / usual) if usual > 0 else math.inf


def _channels(key: str, count: int = 1) -> list[str]:
    """Names for what an array holds, from its path."""
    parts = (re.sub(r"[^\w-]+", "_", part, flags=re.ASCII).strip("_") for part in reversed(key.split("/")))
    base = next(filter(None, parts), "u")[:30]
    return [base] if count == 1 else [f"{base}{number}" for number in range(count)]


def _guessed(path: Path, handle, arrays: dict[str, Found]) -> tuple[dict, dict[str, str]]:
    """A row by names and lengths alone."""
    coordinates, fields, small = {}, {}, {}
    for key, found in arrays.items():
        named = COORDINATE.fullmatch(key.rpartition("/")[2])
        axis = {"t": "time"}.get(named[1].lower(), named[1].lower()) if named else ""
        shape = found.shape if "*" in key else found.shape[1:]
        if axis and found.dtype.kind in "iuf" and 1 <= len(found.shape) <= 1 + (axis == "time"):
            coordinates[axis] = key if axis == "time" else found.paths[0], found.shape[-1]
        elif found.dtype.kind == "f" and max(shape, default=0) > FEW:
            fields[key] = shape
        elif found.dtype.kind == "f" and "*" not in key:
            small[key] = found.shape
    if not fields:
        found = f"{path}: no array of floating numbers in it looks like fields of several samples"
        raise DataError(f"{found} -> write the row by hand, docs/data.md says how")
    known = {axis: size for axis, (_, size) in coordinates.items() if any(size in s for s in fields.values())}
    long = [{size for size in shape if size > FEW} for shape in fields.values()]
    static = len(fields) > 1 and "time" not in known and all(len(sizes) == 1 for sizes in long)
    named, lengths, bases = {}, dict(known), Counter(_channels(key)[0] for key in fields)
    for key, shape in sorted(fields.items(), key=lambda item: -len(item[1])):  # small ones are like the large ones
        axes = _axes(shape, lengths, static)
        lengths = dict(zip(axes, shape)) | lengths
        count = math.prod(size for axis, size in zip(axes, shape) if axis == "channel")
        channels = _channels(key if bases[_channels(key)[0]] == 1 else key.replace("/", "_"), count)
        named[key] = {"axes": ["sample"] * ("*" not in key) + axes, "channels": channels}
    timed = [key for key, array in named.items() if "time" in array["axes"]]
    for key in [key for key in named if key not in timed] if timed else sorted(named)[: len(named) > 1]:
        named[key]["given"] = True
    space = [axis for axis in AXES if any(axis in array["axes"] for array in named.values())]
    row = {"arrays": named, "periodic": [False] * len(space)}
    notes = {"axes": "guess: by names and lengths", "domain": "guess: the roundest ends that these have"}
    row |= _places(path, handle, [coordinates[axis][0] for axis in space if axis in known], len(space))
    if timed and "time" in known:
        row["times"] = coordinates["time"][0]
    elif timed:
        row["time_step"], notes["time_step"] = 1.0, "guess: no array of times is there"
    samples = next((arrays[key].shape[0] for key in fields if "*" not in key), None)
    columns = {key: math.prod(shape[1:]) for key, shape in small.items() if shape[:1] == (samples,) and len(shape) < 3}
    row["parameters"] = {name: key for key, count in columns.items() for name in _channels(key, count)}
    notes["check"] = "axes and their order; what is only an input needs given: true; the domain (0 to 1), the time_step"
    return row, notes


def _axes(shape: tuple[int, ...], lengths: dict[str, int], static: bool) -> list[str]:
    """Names for the axes of one sample."""
    axes: list[str] = [""] * len(shape)
    left = list(range(len(shape)))

    def name(place: int, axis: str) -> None:
        axes[place] = axis
        left.remove(place)

    for axis in ("time", *AXES) if len(shape) > 1 else ():
        for place in [n for n in left if shape[n] == lengths.get(axis)][:1]:
            name(place, axis)
    for place in [n for n in (*left[-1:], *left[:1], *left[1:2]) if shape[n] <= FEW < max(shape)][:1]:
        name(place, "channel")
    sizes = [shape[n] for n in left]
    if not static and "time" not in {*axes, *lengths} and len(left) > 1:
        if len(left) > 2 and len(set(sizes[:-1])) == 1 != len(set(sizes)):
            name(left[-1], "time")  # equal axes are space
        elif len(left) != 3 or len(set(sizes)) > 1:
            name(left[0], "time")
    for place, axis in zip(list(left), [axis for axis in AXES if axis not in axes]):
        name(place, axis)
    return [axis or "channel" for axis in axes]


def _places(path: Path, handle, keys: list[str], num_dims: int) -> dict:
    """Coordinates and the domain that they cover, where every axis has some."""
    if len(keys) != num_dims:
        return {}
    domain = []
    for key in keys:
        values = np.asarray(array_of(path, handle, key)[()], dtype=np.float64)
        half = 0.5 * (values[-1] - values[0]) / max(len(values) - 1, 1)
        first, last = values[0], values[-1]
        ends = ((first, last), (first, last + 2 * half), (first - half, last + half))
        texts = min(([f"{low:.6g}", f"{high:.6g}"] for low, high in ends), key=lambda pair: len("".join(pair)))
        domain.append([float(text) for text in texts])
    return {"domain": domain, "coordinates": keys}


# -- The Well ------------------------------------------------------------------------------------------------------


def _is_well(arrays) -> bool:
    return any(name.startswith(WELL) for name in arrays)


def _well(path: Path, handle, arrays: dict[str, Found]) -> tuple[dict, dict[str, str]]:
    """A row for The Well's layout, which says of itself what its axes are (polymathic-ai.org/the_well)."""
    told = handle["dimensions"].attrs.get("spatial_dims", ()) if "dimensions" in handle else ()
    dims = [_text(name) for name in np.ravel(told)] or AXES[: int(handle.attrs["n_spatial_dims"])]
    named, vectors, wraps, parameters = {}, [], set(), {}
    for rank, group in enumerate(WELL):
        for key in (key for key in arrays if key.startswith(f"{group}/")):
            attributes = handle[key].attrs
            varies = [bool(v) for v in np.ravel(attributes.get("dim_varying", [True] * len(dims)))]
            axes = [axis for axis in ("sample", "time") if attributes.get(f"{axis}_varying", True)]
            axes += [axis for axis, here in zip(AXES, varies) if here] + ["channel"] * rank
            channels = ["_".join(filter(None, (*_channels(key), "".join(ends)))) for ends in product(dims, repeat=rank)]
            named[key] = {"axes": axes, "channels": channels} | ({} if "time" in axes else {"given": True})
            vectors += [[*channels]] if rank == 1 else []
    for group in handle.get("boundary_conditions", {}).values():
        if _text(group.attrs.get("bc_type", "")).lower() == "periodic":
            wraps |= {_text(name) for name in np.ravel(group.attrs.get("associated_dims", ()))}
    for name in (_text(name) for name in np.ravel(handle.attrs.get("simulation_parameters", ()))):
        place = f"scalars/{name}"
        here = place in arrays and not handle[place].attrs.get("time_varying", False)
        parameters |= dict.fromkeys(_channels(name), place if here else f"@{name}")
    row = {"arrays": named, "vectors": vectors, "periodic": [name in wraps for name in dims], "parameters": parameters}
    row["times"] = "dimensions/time" if "dimensions/time" in arrays else None
    keys = [key for key in (f"dimensions/{name}" for name in dims) if key in arrays and len(arrays[key].shape) == 1]
    row |= _places(path, handle, keys, len(dims))
    check = "files: The Well keeps its splits in folders, and data.split makes its own out of all files named"
    if (grid := _text(handle.attrs.get("grid_type", "cartesian"))).lower() != "cartesian":
        check += f"; grid_type is {grid}, and models here know boxes only"
    return row, {"periodic": "as boundary_conditions say", "check": check}


def _text(value) -> str:
    value = np.ravel(value)[0] if np.size(value) else ""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
