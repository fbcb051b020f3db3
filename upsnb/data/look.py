"""What any HDF5 or NumPy file holds, and the row that would train on it: guessed, each guess with its reason."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path

import h5py
import numpy as np
import yaml
from pydantic import ValidationError

from upsnb.config import DatasetConfig
from upsnb.data.custom import array_of, open_arrays, problems
from upsnb.data.families import FAMILIES, family_of
from upsnb.data.layouts import AXES, in_one_line
from upsnb.data.numpy_files import NumpyFile
from upsnb.data.source import open_source, thinned
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


@dataclass(frozen=True)
class Found:
    """One array of a file, or several that are one for each sample."""

    shape: tuple[int, ...]
    dtype: np.dtype
    paths: tuple[str, ...]


NOTHING = Found((), np.dtype(float), ())


@dataclass
class Row:
    """A row being guessed, and why it is so."""

    values: dict
    reasons: dict[str, str] = field(default_factory=dict)  # by setting, or by array
    checks: list[str] = field(default_factory=list)


def recognise(files: Sequence[Path]) -> dict[str, str]:
    """Each family, and why files cannot be read as it; an empty text where they can."""
    found = {}
    for name in FAMILIES:
        try:
            open_source(name, files)
            found[name] = ""
        except DataError as error:
            found[name] = str(error)
    return found


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

    with open_arrays(path) as handle:
        try:
            if isinstance(handle, NumpyFile):
                arrays = {name: handle.header(name) for name in islice(handle, MOST_SEEN)}
            else:
                note("", handle) or handle.visititems(note)  # follows no links
        except DataError:
            raise
        except Exception as error:  # whatever a damaged file runs into
            found = f"{path}: cannot be read ({in_one_line(error)})"
            raise DataError(f"{found} -> truncated or damaged, download or make it again") from error
    return _together(arrays), attributes[:MOST_LISTED]


def _together(arrays: dict[str, tuple]) -> dict[str, Found]:
    alike: dict[tuple, list[str]] = {}
    for name, (shape, dtype) in arrays.items() if not any(name.startswith(WELL) for name in arrays) else ():
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
    if found.dtype.kind not in "iufb" or 0 in found.shape:
        return "no numbers"
    try:
        with open_arrays(path) as handle:
            array = array_of(path, handle, found.paths[0])
            chunk = math.prod(getattr(array, "chunks", None) or (0,)) * found.dtype.itemsize
            if chunk > MOST_CHUNK:
                return f"not looked at (chunks of {chunk / 2**20:,.0f} MiB)"
            room, rest = MOST_VALUES, []
            for size in reversed(found.shape[1:]):
                rest.insert(0, slice(0, min(size, room)))
                room = max(1, room // size)
            first = found.shape[0] if found.shape else 0
            places = sorted({0, first // 2, max(first - 1, 0)}) if len(found.shape) > 1 else [slice(0, MOST_VALUES)]
            pieces = [array[(place, *rest)] for place in places] if found.shape else [array[()]]
            values = np.concatenate([np.ravel(piece).astype(np.float64) for piece in pieces])
    except Exception as error:  # whatever a damaged file runs into
        said = in_one_line(error).removeprefix(f"{path}: {found.paths[0]}: ")
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
    arrays, _ = survey(path)
    try:
        row = (_well if any(name.startswith(WELL) for name in arrays) else _guessed)(path, arrays)
    except DataError:
        raise
    except Exception as error:  # whatever a damaged file, or one that only looks like The Well's, runs into
        raise DataError(
            f"{path}: no row can be guessed ({in_one_line(error)}) -> write it by hand, docs/data.md"
        ) from error
    name = re.sub(r"\W+", "_", path.stem, flags=re.ASCII).strip("_")[:50] or "own"
    opened = _tried(path, row)
    lines = ["data:", f"  root: {_plain(str(path.absolute().parent))}", "  datasets:", f"    {name}_data:"]
    lines += [f"      family: {OWN}"]
    lines += [f"      files: {_plain([path.name])}", "      custom:", "        arrays:"]
    for key, array in row.values["arrays"].items():
        lines.append(f"          {_plain(key)}: {_plain(array)}{_because(row, key)}")
    for setting, value in row.values.items():
        if setting != "arrays" and value not in (None, [], {}):
            lines.append(f"        {setting}: {_plain(value)}{_because(row, setting)}")
    return [*lines, *(f"# check: {check}" for check in row.checks), f"# {opened}"]


def _plain(value) -> str:
    """A value as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf, sort_keys=False).removesuffix("...\n").strip()


def _because(row: Row, setting: str) -> str:
    return f"  # {row.reasons[setting]}" if setting in row.reasons else ""


def _tried(path: Path, row: Row) -> str:
    """Open the file by the row and guess from their values which axes are periodic; what came of it."""
    try:
        values = {"family": OWN, "files": [str(path)], "custom": row.values}
        dataset = DatasetConfig.model_validate_json(json.dumps(values))
        wrong = [f"{setting}: {found} -> {remedy}" for setting, found, remedy in problems(dataset)]
        if wrong:
            return f"not a row yet: {wrong[0]}"
        source = open_source(family_of(dataset), path)
        told = f"opens: {source.num_samples} samples, {source.num_times} frames, grid {source.grid_shape}"
        if "periodic" not in row.reasons and math.prod(source.grid_shape) <= MOST_POINTS:
            fields = source.read(thinned(np.arange(source.num_samples), FEW), [source.num_times - 1])[1]
            across = [_across(np.moveaxis(fields, 3 + axis, 0)) for axis in range(len(source.grid_shape))]
            row.values["periodic"] = [ratio <= MEETING for ratio in across]
            steps = ", ".join(f"{axis} {ratio:.2g}" for axis, ratio in zip(AXES, across))
            row.reasons["periodic"] = f"guess: the step across the edge, in usual steps: {steps}"
            row.checks.append("periodic: fields that are zero on walls meet across the edge as well")
        return told
    except ValidationError as error:
        return f"not a row yet: {in_one_line(error)}"
    except DataError as error:
        return "does not open: " + " ".join(str(error).split())


def _across(fields: np.ndarray) -> float:
    """The step from the last to the first point of the first axis, in steps between neighbours."""
    usual = np.abs(np.diff(fields, axis=0)).mean()
    return float(np.abs(fields[0] - fields[-1]).mean() / usual) if usual > 0 else math.inf


def _base(key: str) -> str:
    """A name for a channel, from an array's path."""
    parts = (re.sub(r"[^\w-]+", "_", part, flags=re.ASCII).strip("_") for part in reversed(key.split("/")))
    return next(filter(None, parts), "u")[:30]


COORDINATE = re.compile(r"(t|x|y|z)(?:ime)?s?(?:[-_ ]?(?:coord\w*|grid|axis))?", re.IGNORECASE)


def _guessed(path: Path, arrays: dict[str, Found]) -> Row:
    """A row by names and lengths alone."""
    several = any("*" in key for key in arrays)
    lengths, coordinates, aside = {}, {}, set()
    for key, found in arrays.items():
        named = COORDINATE.fullmatch(key.rpartition("/")[2])
        if named and len(found.shape) in (1, 2) and found.dtype.kind in "iuf":
            axis = {"t": "time"}.get(named[1].lower(), named[1].lower())
            if len(found.shape) == 1 or axis == "time":
                lengths[axis], coordinates[axis] = found.shape[-1], key if axis == "time" else found.paths[0]
                aside.add(key)
    fields, small = {}, {}
    for key, found in arrays.items():
        shape = found.shape if "*" in key else found.shape[1:]
        if key in aside or found.dtype.kind != "f" or ("*" not in key and several and len(found.shape) < 2):
            continue
        if math.prod(shape) > FEW and max(shape) > FEW:
            fields[key] = shape
        elif "*" in key or found.shape:
            small[key] = found
    if not fields:
        found = f"{path}: no array of floating numbers in it looks like fields of several samples"
        raise DataError(f"{found} -> write the row by hand, docs/data.md says how")
    lengths = {axis: size for axis, size in lengths.items() if any(size in shape for shape in fields.values())}
    long = [{size for size in shape if size > FEW} for shape in fields.values()]
    static_only = len(fields) > 1 and "time" not in lengths and all(len(sizes) == 1 for sizes in long)
    known = set(lengths)
    row, bases = Row({"arrays": {}}), Counter(map(_base, fields))
    for key, shape in sorted(fields.items(), key=lambda item: -len(item[1])):  # small ones are like the large ones
        axes, why = _axes(shape, lengths, static_only)
        lengths = dict(zip(axes, shape)) | lengths
        channels = math.prod(size for axis, size in zip(axes, shape) if axis == "channel")
        base = _base(key) if bases[_base(key)] == 1 else _base(key.replace("/", "_"))
        row.values["arrays"][key] = {
            "axes": ([] if "*" in key else ["sample"]) + axes,
            "channels": [base] if "channel" not in axes else [f"{base}{number}" for number in range(channels)],
        }
        row.reasons[key] = f"guess: {'one for each sample' if '*' in key else 'samples first'}; {why}"
    _sides(row)
    axes = [axis for axis in AXES if any(axis in array["axes"] for array in row.values["arrays"].values())]
    row.values["periodic"] = [False] * len(axes)
    _places(path, row, [coordinates[axis] for axis in axes if axis in known], len(axes))
    if any("time" in array["axes"] for array in row.values["arrays"].values()):
        if "time" in known:
            row.values["times"] = coordinates["time"]
        else:
            row.values["time_step"] = 1.0
            row.reasons["time_step"] = "guess: no array of times is there"
    samples = next((arrays[key].shape[0] for key in fields if "*" not in key), None)
    for key, found in small.items():
        if samples is not None and "*" not in key and found.shape in ((samples,), *((samples, n) for n in range(1, 9))):
            width, base = math.prod(found.shape[1:]), _base(key)
            own = [base] if width == 1 else [f"{base}{number}" for number in range(width)]
            row.values.setdefault("parameters", {}).update(dict.fromkeys(own, key))
            row.reasons["parameters"] = "guess: as many as samples"
    row.checks.append("axes and their order; what is only an input needs given: true; the domain, the time_step")
    return row


def _axes(shape: tuple[int, ...], lengths: dict[str, int], static: bool) -> tuple[list[str], str]:
    """Names for the axes of one sample, and why."""
    axes: list[str | None] = [None] * len(shape)
    why = []
    for axis in ("time", *AXES):
        place = next((n for n, size in enumerate(shape) if axes[n] is None and size == lengths.get(axis)), None)
        if place is not None and len(shape) > 1:
            axes[place] = axis
            why.append(f"{shape[place]} as in the array of {axis}")
    left = [n for n, axis in enumerate(axes) if axis is None]
    for place in dict.fromkeys([*left[-1:], *left[:1], *left[1:2]]):
        if len(shape) > 1 and shape[place] <= FEW < max(shape) and "channel" not in axes:
            axes[place] = "channel"
            why.append(f"{shape[place]} are so few that they are channels")
            left.remove(place)
    sizes = [shape[n] for n in left]
    if not static and not {"time"} & {*axes, *lengths} and len(left) > 1:
        if len(left) == 3 and sizes[0] == sizes[1] != sizes[2] or len(left) == 4 and sizes[0] == sizes[1] == sizes[2]:
            place = left.pop()
            why.append("equal axes are space, the last one time")
        elif len(left) != 3 or len(set(sizes)) > 1:
            place = left.pop(0)
            why.append("the first axis after samples is time")
        else:
            place = None
            why.append("three equal axes are space")
        if place is not None:
            axes[place] = "time"
    for place, axis in zip(left, (axis for axis in AXES if axis not in axes)):
        axes[place] = axis
    return [axis or "channel" for axis in axes], ", ".join(why) or "the rest is space"


def _sides(row: Row) -> None:
    """Which arrays are given: those without a time beside others with one, else the first of several."""
    arrays = row.values["arrays"]
    timed = [key for key, array in arrays.items() if "time" in array["axes"]]
    given = [key for key in arrays if key not in timed] if timed else []
    if not timed and len(arrays) > 1:
        likely = [
            key
            for key in arrays
            if re.match(r"(x|in|input\w*|a|coeff\w*|nu|k|kappa|perm\w*|f|force|source)$", _base(key), re.I)
        ]
        given = likely[:1] or list(arrays)[:1]
        row.checks.append("which array is the input (given: true): that was guessed from names")
    for key in given:
        arrays[key]["given"] = True


def _places(path: Path, row: Row, keys: list[str], num_dims: int) -> None:
    """Coordinates and the domain that they cover, where every axis has some."""
    if len(keys) != num_dims:
        row.checks.append(f"domain: {', '.join(AXES[:num_dims])} run from 0 to 1 as long as it is left out")
        return
    row.values["domain"], row.values["coordinates"] = [], keys
    with open_arrays(path) as handle:
        for key in keys:
            values = np.asarray(array_of(path, handle, key)[()], dtype=np.float64)
            half = 0.5 * (values[-1] - values[0]) / max(len(values) - 1, 1)
            first, last = values[0], values[-1]
            ends = ((first, last), (first, last + 2 * half), (first - half, last + half))
            texts = min(([f"{low:.6g}", f"{high:.6g}"] for low, high in ends), key=lambda pair: len("".join(pair)))
            row.values["domain"].append([float(text) for text in texts])
    row.reasons["domain"] = "guess: the roundest ends that these points can have"


# -- The Well ------------------------------------------------------------------------------------------------------


def _well(path: Path, arrays: dict[str, Found]) -> Row:
    """A row for The Well's layout, which says of itself what its axes are (polymathic-ai.org/the_well)."""
    row = Row({"arrays": {}, "vectors": []})
    with open_arrays(path) as handle:
        told = handle["dimensions"].attrs.get("spatial_dims", ()) if "dimensions" in handle else ()
        dims = [_text(name) for name in np.ravel(told)] or AXES[: int(handle.attrs["n_spatial_dims"])]
        for rank, group in enumerate(WELL):
            for key in (key for key in arrays if key.startswith(f"{group}/")):
                attributes = handle[key].attrs
                varies = [bool(v) for v in np.ravel(attributes.get("dim_varying", [True] * len(dims)))]
                axes = ["sample"] * bool(attributes.get("sample_varying", True))
                axes += ["time"] * bool(attributes.get("time_varying", True))
                axes += [axis for axis, here in zip(AXES, varies) if here] + ["channel"] * rank
                parts = ((_base(key), "".join(ends)) for ends in product(dims, repeat=rank))
                array = {"axes": axes, "channels": ["_".join(filter(None, part)) for part in parts]}
                row.values["arrays"][key] = array | ({} if "time" in axes else {"given": True})
                row.values["vectors"] += [array["channels"]] if rank == 1 else []
        wraps = set()
        for group in handle.get("boundary_conditions", {}).values():
            if _text(group.attrs.get("bc_type", "")).lower() == "periodic":
                wraps |= {_text(name) for name in np.ravel(group.attrs.get("associated_dims", ()))}
        row.values["periodic"] = [name in wraps for name in dims]
        row.reasons["periodic"] = "as boundary_conditions say"
        for name in (_text(name) for name in np.ravel(handle.attrs.get("simulation_parameters", ()))):
            place = f"scalars/{name}"
            here = place if place in arrays and not handle[place].attrs.get("time_varying", False) else f"@{name}"
            row.values.setdefault("parameters", {})[_base(name)] = here
        if _text(handle.attrs.get("grid_type", "cartesian")).lower() != "cartesian":
            row.checks.append(f"grid_type is {_text(handle.attrs['grid_type'])}, and models here know boxes only")
    if "dimensions/time" in arrays:
        row.values["times"] = "dimensions/time"
    keys = [f"dimensions/{name}" for name in dims if len(arrays.get(f"dimensions/{name}", NOTHING).shape) == 1]
    _places(path, row, keys, len(dims))
    row.checks.append(
        "files: The Well keeps its splits in folders, and data.split makes its own out of all files named"
    )
    return row


def _text(value) -> str:
    value = np.ravel(value)[0] if np.size(value) else ""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
