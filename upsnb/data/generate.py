"""Data without a download: what solvers yield, in files laid out exactly as PDEBench's."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import yaml

from upsnb.data.layouts import AXES, Family, cell_centres
from upsnb.errors import DataError
from upsnb.solvers.processes import solve
from upsnb.solvers.waves import Sample

DONE = "done"  # which samples are, in a file that is being made
DARCY_TIMES = np.arange(10, dtype=np.float32) * np.float32(0.25)  # released files carry them; the one frame is steady


@dataclass(frozen=True)
class Plan:
    """A file that is to be made."""

    family: Family
    num_samples: int
    parameters: dict[str, float]
    resolution: int  # grid points per axis
    times: np.ndarray  # (T,) float64, saved ones
    seed: int

    @property
    def sizes(self) -> dict[str, int]:
        """Of the axes that all arrays share."""
        grid = dict.fromkeys(AXES, self.resolution)
        return {"sample": self.num_samples, "time": len(self.times), **grid}

    @property
    def coordinates(self) -> dict[str, np.ndarray]:
        """Cell centres of every axis, float32."""
        centres = cell_centres(self.family, (self.resolution,) * self.family.num_dims)
        return {axis: values.astype(np.float32) for axis, values in zip(AXES, centres, strict=False)}

    def __str__(self) -> str:
        made = self.num_samples, self.parameters, self.resolution, len(self.times), self.seed
        return f"{self.family.name} {made}"


def generate(
    family: Family,
    path: str | os.PathLike,
    num_samples: int,
    parameters: dict[str, float] | None = None,
    resolution: int | None = None,
    num_times: int | None = None,
    seed: int = 0,
    until: float | None = None,
    progress: Callable[[int, int], None] | None = None,
    processes: int = 1,
) -> Path:
    """Write solutions of a family's equation as one file of its layout, in float32.

    Args:
        path: an existing file is replaced, at once, when the new one is complete. What a call has done that was
            interrupted stays beside it, and the same call goes on from there.
        parameters: those that are not the row's own.
        resolution: grid points per axis; None: the row's, as for `num_times` and `until`, the last of them.
        progress: called with (samples done, of all).
        processes: how many share the samples.

    Raises:
        DataError: impossible settings, or a solution that is not finite.
    """
    path = Path(path)
    resolution = family.resolution if resolution is None else resolution
    num_times = family.num_times if num_times is None else num_times
    parameters = {name: float(value) for name, value in {**family.parameters, **(parameters or {})}.items()}
    frames = {"num_times": (num_times, 2)} if family.time_dependent else {}
    _check(family, path, parameters, num_samples=(num_samples, 1), resolution=(resolution, 4), **frames)
    start, end = family.time_range[0], until or family.time_range[1]
    if family.time_dependent and end <= start:
        raise DataError(f"{path}: the last time is {end:g} -> it must come after {start:g}, the first")
    times = np.linspace(start, end, num_times) if family.time_dependent else np.zeros(1)
    plan = Plan(family, num_samples, parameters, resolution, times, seed)
    begin, add = WRITERS[family.layout]
    with _unfinished(path, str(plan)) as handle:
        if DONE not in handle:  # begun now
            handle.attrs["generator"], handle.attrs["seed"] = "upsnb.data.generate", seed
            if end != family.time_range[1]:  # released files have no such attribute: theirs is the family's
                handle.attrs["until"] = end
            begin(handle, plan)
            handle[DONE] = np.zeros(num_samples, dtype=bool)
        left = np.flatnonzero(~handle[DONE][:])
        solutions = solve(family.solve, seed, left, (parameters, resolution, times), processes)
        for done, (sample, fields) in enumerate(solutions, num_samples - len(left) + 1):
            if not all(np.isfinite(values).all() for values in fields.values()):
                raise DataError(f"{path}: sample {sample} is not finite -> choose other parameters, or a finer grid")
            add(handle, plan, sample, fields)
            handle[DONE][sample] = True
            handle.flush()  # else a killed process leaves nothing that can be read
            if progress is not None:
                progress(done, num_samples)
        del handle[DONE]
    return path


def _begin_single_array(handle: h5py.File, plan: Plan) -> None:
    family, times = plan.family, plan.times
    handle.attrs.update(plan.parameters)
    # one time more than is saved, as in the released files; static ones carry the times of a relaxation
    later = np.append(times, 2 * times[-1] - times[-2]).astype(np.float32) if family.time_dependent else DARCY_TIMES
    handle["t-coordinate"] = later
    for axis, centres in plan.coordinates.items():
        handle[f"{axis}-coordinate"] = centres
    for key, array in family.arrays.items():
        handle.create_dataset(key, [plan.sizes[axis] for axis in array.axes], np.float32)


def _begin_grouped(handle: h5py.File, plan: Plan) -> None:
    """Nothing that samples share: each group has all of its own."""


def _add_group(handle: h5py.File, plan: Plan, sample: int, fields: Sample) -> None:
    """One group; entries of `fields` that are no channel are numbers of this sample's own."""
    name, channels = f"{sample:04d}", plan.family.channels
    if name in handle:  # begun by a call that was interrupted
        del handle[name]
    group = handle.create_group(name)
    own = {key: float(value) for key, value in fields.items() if key not in channels}
    told = {**plan.parameters, **own, "seed": plan.seed, "sample": sample}
    group.attrs["config"] = yaml.safe_dump({"name": plan.family.name, "sim": told}, sort_keys=False)
    data = np.stack([fields[channel] for channel in channels], axis=-1).astype(np.float32)
    group.create_dataset("data", data=data, compression="lzf")
    for axis, values in {**plan.coordinates, "t": plan.times.astype(np.float32)}.items():
        group.create_dataset(f"grid/{axis}", data=values, compression="lzf")


def _begin_many_arrays(handle: h5py.File, plan: Plan) -> None:
    family, times = plan.family, plan.times
    handle.attrs["config"] = yaml.safe_dump({**plan.parameters, "seed": plan.seed}, sort_keys=False)
    handle.attrs["latestIndex"] = len(times) - 1
    handle["t"] = np.tile(times.astype(np.float32), (plan.num_samples, 1))
    for key, array in family.arrays.items():
        sizes = plan.sizes | {"channel": len(array.channels)}
        chunks = sizes | {"sample": 1, "time": 1}
        shape, chunk = (tuple(lengths[axis] for axis in array.axes) for lengths in (sizes, chunks))
        handle.create_dataset(key, shape, np.float32, chunks=chunk, compression="lzf")


def _add_to_arrays(handle: h5py.File, plan: Plan, sample: int, fields: Sample) -> None:
    for key, array in plan.family.arrays.items():
        values = [fields[channel] for channel in array.channels]
        handle[key][sample] = np.stack(values, axis=-1) if "channel" in array.axes else values[0]


WRITERS = {  # how each layout is begun, and how it takes one sample
    "single_array": (_begin_single_array, _add_to_arrays),
    "grouped": (_begin_grouped, _add_group),
    "many_arrays": (_begin_many_arrays, _add_to_arrays),
}


@contextmanager
def _unfinished(path: Path, plan: str) -> Iterator[h5py.File]:
    """A file beside the final one, renamed when complete: a reader sees the old file, the new one or none.

    What was interrupted stays, for the next call with the same plan; what failed does not.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        handle = h5py.File(part, "a")
        if handle.attrs.get("plan") != plan or DONE not in handle:  # nobody's, of other settings, or an old version's
            handle.close()
            handle = h5py.File(part, "w")
    except BlockingIOError:  # another process is making the same
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        handle = h5py.File(part, "w")
    except OSError:  # killed while it was written
        handle = h5py.File(part, "w")
    handle.attrs["plan"] = plan
    try:
        with handle:
            yield handle
            del handle.attrs["plan"]
        os.replace(part, path)
    except Exception:
        part.unlink(missing_ok=True)
        raise


def _check(family: Family, path: Path, parameters: dict[str, float], **settings: tuple[int, int]) -> None:
    for name, (value, least) in settings.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
            raise DataError(f"{path}: {name} is {value!r} -> expected a whole number of at least {least}")
    for name, value in parameters.items():
        if name not in family.parameters:
            known = ", ".join(family.parameters) or "none"
            raise DataError(f"{path}: {family.name} has no {name!r} -> its parameters are {known}")
        if not np.isfinite(value):
            raise DataError(f"{path}: {name} is {value!r} -> expected a finite number")
