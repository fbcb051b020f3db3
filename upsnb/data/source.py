"""Samples out of files: a lazy reader, and named splits. No torch in here."""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from upsnb.data import custom, layouts
from upsnb.data.families import FAMILIES
from upsnb.data.layouts import AXES, BLOCK_BYTES, Family, Header, open_hdf5, read_block, told_as
from upsnb.errors import MOST_LISTED, DataError

MOST_POINTS = 4096  # of one initial state, over all channels
MOST_NAMED = 3  # files in one message
DAMAGED = "truncated or damaged, download it again"
LAYOUTS: dict[str, tuple[Callable, Callable]] = {  # how each layout is opened and checked
    "single_array": (open_hdf5, layouts.single_array_header),
    "grouped": (open_hdf5, layouts.grouped_header),
    "many_arrays": (open_hdf5, layouts.many_arrays_header),
    "custom": (custom.open_arrays, custom.custom_header),
}


@dataclass
class Source:
    """Samples of one family from one or several files, read on demand; fork and spawn safe, picklable."""

    family: Family
    files: tuple[Path, ...]
    num_samples: int
    num_times: int  # frames after reduction
    grid_shape: tuple[int, ...]  # after reduction
    parameters: np.ndarray  # (num_samples, P) float32
    coordinates: tuple[np.ndarray, ...]  # 1-D float32, physical, after reduction, one per axis
    times: np.ndarray  # (T,) float32, physical, after reduction
    dt: float  # physical time between frames after reduction, 0 where static
    file_of_sample: np.ndarray  # (num_samples,) int64
    groups: tuple[tuple[str, ...], ...]  # of each grouped file, its samples
    reduced_resolution: int
    reduced_resolution_t: int
    num_cells: tuple[int, ...]  # before reduction
    _handles: dict = field(default_factory=dict, repr=False, compare=False)  # (process id, file) -> open file

    def __getstate__(self):
        return self.__dict__ | {"_handles": {}}

    @property
    def ghosts(self) -> list[tuple[float, float]]:
        """By axis, how far the ghost cells lie before the first point and after the last one, in distances of points.

        They are one cell outside, as they were solved: of every second one of 128 cells, half a distance and a whole.
        """
        stride, sizes = self.reduced_resolution, zip(self.num_cells, self.grid_shape, strict=True)
        return [(1 / stride, (cells - stride * (points - 1)) / stride) for cells, points in sizes]

    @property
    def mirrors(self) -> bool:
        """Whether mirror images lie on its own points."""
        return all(wraps or before == after for wraps, (before, after) in zip(self.family.periodic, self.ghosts))

    def close(self) -> None:
        """Close this process's files; reading again opens them again."""
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()

    def _handle(self, index: int):
        key = (os.getpid(), index)  # a forked worker opens its own
        if key not in self._handles:
            self._handles[key] = LAYOUTS[self.family.layout][0](self.files[index])
        return self._handles[key]

    def read(self, samples, times=slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """Read some samples, in any order, and check that every value is finite.

        Args:
            samples: one index or (n,) integers into 0..num_samples-1.
            times: slice or integers into the reduced frames.
        Returns:
            inputs (n, t, C_in, *grid), targets (n, t, C_out, *grid), float32, physical units. Where there is a time,
            targets are the first channels of inputs, and given fields stand in every frame; nu and pressure with
            t = 1 for Darcy.
        """
        samples = np.atleast_1d(np.asarray(samples))
        if samples.ndim != 1 or (samples.size and samples.dtype.kind not in "iu"):
            raise DataError(f"{self.family.name}: samples must be integers, got {samples.dtype} {samples.shape}")
        if samples.size and not (samples.min() >= 0 and samples.max() < self.num_samples):
            found = f"{samples.min()}..{samples.max()}"
            raise DataError(f"{self.family.name}: samples {found} asked for -> only 0..{self.num_samples - 1} exist")
        samples = samples.astype(np.int64)  # of an empty list, too
        frames = np.atleast_1d(np.arange(self.num_times)[times]) * self.reduced_resolution_t
        if frames.size == 0:
            raise DataError(f"{self.family.name}: no frame in {times} -> there are {self.num_times} frames")
        family = self.family
        targets = self._read_fields(list(family.channels), samples, frames)
        if not family.given:
            return targets, targets
        given = self._read_fields(list(family.given), samples, frames[:1])
        if not family.time_dependent:
            return given, targets
        given = np.broadcast_to(given, (*targets.shape[:2], *given.shape[2:]))
        inputs = np.concatenate((targets, given), axis=2)
        return inputs, inputs[:, :, : targets.shape[2]]

    def _read_fields(self, channels: list[str], samples: np.ndarray, frames: np.ndarray) -> np.ndarray:
        """(n, t, C, *grid) float32: runs of neighbouring samples are read at once."""
        out = np.empty((len(samples), len(frames), len(channels), *self.grid_shape), dtype=np.float32)
        first_of_file = np.searchsorted(self.file_of_sample, np.arange(len(self.files)))
        raw = 4 * len(channels) * len(frames) * int(np.prod(self.grid_shape))
        longest = max(1, BLOCK_BYTES // (raw * self.reduced_resolution**self.family.num_dims))
        files = self.file_of_sample[samples]
        ends = np.flatnonzero((np.diff(samples) != 1) | (np.diff(files) != 0)) + 1
        for run in np.split(np.arange(len(samples)), ends):
            for rows in (run[start : start + longest] for start in range(0, len(run), longest)):
                file = int(files[rows[0]])
                low = int(samples[rows[0]] - first_of_file[file])
                for key, array in self.family.arrays.items():
                    if places := [channels.index(name) for name in array.channels if name in channels]:
                        block = self._read_block(file, key, slice(low, low + len(rows)), frames)
                        out[rows[0] : rows[-1] + 1, :, places] = block
        return out

    def _read_block(self, file: int, key: str, samples: slice, frames: np.ndarray) -> np.ndarray:
        path = self.files[file]
        with told_as(f"{path}: {key}: samples {samples.start}..{samples.stop - 1} cannot be read", DAMAGED):
            block = read_block(self._handle(file), self.family, key, samples, frames, self.groups[file])
        block = block[(..., *(slice(None, None, self.reduced_resolution),) * self.family.num_dims)]
        with np.errstate(over="ignore"):  # a float64 value beyond float32 becomes inf and is reported below
            block = block.astype(np.float32, copy=False)
        finite = np.isfinite(block)
        if not finite.all():
            sample, frame = np.argwhere(~finite)[0][:2]
            bad = np.flatnonzero(~finite.reshape(len(block), -1).all(axis=1)) + samples.start
            raise DataError(
                f"{path}: {key}: NaN or infinity in sample {samples.start + sample}, first at frame {frames[frame]}"
                f" (samples of this block with any: {', '.join(map(str, bad[:10]))}{'...' if len(bad) > 10 else ''})"
                " -> leave them out or download the file again"
            )
        return block

    def blocks(self, samples: np.ndarray, frames: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Samples and reduced frames in pieces whose arrays take about BLOCK_BYTES, or are one frame of one sample."""
        raw = 4 * self.family.stored_channels * math.prod(self.grid_shape)
        at_once = min(max(1, BLOCK_BYTES // raw), len(frames))
        num_samples = max(1, BLOCK_BYTES // (raw * at_once))
        for start in range(0, len(samples), num_samples):
            for first in range(0, len(frames), at_once):
                yield samples[start : start + num_samples], frames[first : first + at_once]

    def read_all(self, times=slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """Read all samples as `read` does, file by file."""
        family, block = self.family, max(1, -(-self.num_samples // 100))
        shape = (self.num_samples, len(np.arange(self.num_times)[times]))
        inputs = np.empty((*shape, len(family.input_channels), *self.grid_shape), dtype=np.float32)
        targets = inputs[:, :, : len(family.channels)]
        if not family.time_dependent:
            targets = np.empty((*shape, len(family.channels), *self.grid_shape), dtype=np.float32)
        for start in range(0, self.num_samples, block):
            stop = min(start + block, self.num_samples)
            inputs[start:stop], some = self.read(np.arange(start, stop), times)
            if not family.time_dependent:
                targets[start:stop] = some
        return inputs, targets


def open_source(
    family: str | Family,
    files: str | os.PathLike | Sequence[str | os.PathLike],
    reduced_resolution: int = 1,
    reduced_resolution_t: int = 1,
    num_samples: int | None = None,
) -> Source:
    """Check the headers of all files, then return a Source; every problem is reported at once.

    Args:
        family: a row, or the name of one in the table.
        files: one or several files of one family: any parameters, but one grid and one set of times.
        reduced_resolution: stride over every space axis, as PDEBench does it.
        reduced_resolution_t: stride over saved frames.
        num_samples: cap per file; None takes all.
    """
    if isinstance(family, str):
        if family not in FAMILIES:
            raise DataError(f"unknown family {family!r} -> one of {', '.join(FAMILIES)}")
        family = FAMILIES[family]
    open_file, check = LAYOUTS[family.layout]
    paths = [Path(files)] if isinstance(files, str | os.PathLike) else [Path(file) for file in files]
    problems = [] if paths else [f"no files given for {family.name} -> name at least one"]
    problems += [f"{path}: given twice -> its samples would be in training and test" for path in _repeated(paths)]
    if problems:
        raise _summary(family, problems)

    headers = []
    for path in paths:
        try:
            with told_as(f"{path}: cannot be read", DAMAGED), open_file(path) as handle:
                header = check(family, path, handle)
                problems += family.check(header, handle) if family.check else []
                problems += _reduction_problems(family, header, reduced_resolution, reduced_resolution_t)
                headers.append(header)
        except DataError as error:
            problems.append(str(error))
    for other in headers[1:]:
        problems += _mismatch(headers[0], other)
    if problems:
        raise _summary(family, problems)

    counts = [header.num_samples if num_samples is None else min(num_samples, header.num_samples) for header in headers]
    coordinates = tuple(axis[::reduced_resolution].astype(np.float32) for axis in headers[0].coordinates)
    times = headers[0].times[::reduced_resolution_t]
    return Source(
        family=family,
        files=tuple(paths),
        num_samples=sum(counts),
        num_times=len(times),
        grid_shape=tuple(len(axis) for axis in coordinates),
        parameters=np.concatenate([header.parameters[:n] for header, n in zip(headers, counts, strict=True)]),
        coordinates=coordinates,
        times=times.astype(np.float32),
        dt=float(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0,
        file_of_sample=np.repeat(np.arange(len(paths)), counts),
        groups=tuple(header.groups for header in headers),
        reduced_resolution=reduced_resolution,
        reduced_resolution_t=reduced_resolution_t,
        num_cells=tuple(map(len, headers[0].coordinates)),
    )


def _summary(family: Family, problems: list[str]) -> DataError:
    noun = "problem" if len(problems) == 1 else "problems"
    more = [f"and {len(problems) - MOST_LISTED} more"] if len(problems) > MOST_LISTED else []
    return DataError("\n  ".join([f"{len(problems)} {noun} in {family.name} data", *problems[:MOST_LISTED], *more]))


def _repeated(paths: list[Path]) -> list[Path]:
    resolved = [path.resolve() for path in paths]
    return [path for index, path in enumerate(paths) if resolved[index] in resolved[:index]]


def _reduction_problems(family: Family, header: Header, stride: int, stride_t: int) -> list[str]:
    """A stride must leave two points on an axis, as far apart across a periodic one's end, and two frames of a time."""
    problems = []
    for axis, wraps, values in zip(AXES, family.periodic, header.coordinates, strict=False):
        if wraps and len(values) % stride:
            problems.append(
                f"{header.path}: reduced_resolution {stride} does not divide {len(values)} points in {axis}"
            )
        elif len(values[::stride]) < 2:
            problems.append(
                f"{header.path}: reduced_resolution {stride} is too large for {len(values)} points in {axis}"
            )
    if stride_t > 1 and len(header.times[::stride_t]) < 2:
        problems.append(f"{header.path}: reduced_resolution_t {stride_t} is too large for {len(header.times)} frames")
    return [f"{problem} -> choose a smaller one" for problem in problems]


def _mismatch(first: Header, other: Header) -> list[str]:
    """Files mixed in one source must share grid and times."""
    pairs = [(axis, *pair) for axis, *pair in zip(AXES, first.coordinates, other.coordinates, strict=False)]
    for axis, one, two in [*pairs, ("t", first.times, other.times)]:
        if len(one) != len(two):
            found = f"{len(one)} and {len(two)} points in {axis}"
        elif not np.allclose(one, two, rtol=1e-5, atol=1e-3 * np.ptp(one) / max(len(one) - 1, 1)):
            found = f"{axis} from {one[0]:g} and from {two[0]:g}"
        else:
            continue
        return [f"{first.path} and {other.path}: {found} -> mix only files of one grid and one set of times"]
    return []


def split_samples(
    source: Source, convention: str, validation_fraction: float = 0.1, test_fraction: float = 0.1
) -> dict[str, np.ndarray]:
    """Split every file on its own, without randomness; validation lies between training and test.

    Args:
        convention: "pdebench" (test is where PDEBench's own loader of this layout takes it), "first" or "last"; or
            "distinct": where PDEBench takes it, out of all files at once, and samples that begin alike stay together.
        validation_fraction: of each file's samples, rounded down; 0 gives no validation split.
        test_fraction: of each file's samples, rounded down as PDEBench does.
    Returns:
        "train", "validation", "test": sorted int64 indices, disjoint, together all samples.
    """
    side = convention if convention in ("first", "last") else source.family.pdebench_test_side
    wholes = [(path, np.flatnonzero(source.file_of_sample == index)) for index, path in enumerate(source.files)]
    if convention == "distinct":
        wholes = [(", ".join(map(str, source.files[:MOST_NAMED])), np.arange(source.num_samples))]
        alike = first_alike(initial_states(source, wholes[0][1]))
    parts: dict[str, list[np.ndarray]] = {"train": [], "validation": [], "test": []}
    for where, samples in wholes:
        fractions = {"validation": validation_fraction, "test": test_fraction}
        sizes = {name: int(len(samples) * fraction + 1e-9) for name, fraction in fractions.items()}
        from_test = samples if side == "first" else samples[::-1]
        ends = np.cumsum([sizes["test"], sizes["validation"]])
        if convention == "distinct":
            from_test, ends = _kept_together(from_test, alike, ends)
        cuts = dict(zip(("test", "validation", "train"), np.split(from_test, ends), strict=True))
        for name, part in cuts.items():
            if len(part) < 1 and not (name == "validation" and validation_fraction == 0):
                raise DataError(
                    f"{where}: the {name} split would be empty: {len(samples)} samples, validation_fraction"
                    f" {validation_fraction:g}, test_fraction {test_fraction:g} -> take more samples or other fractions"
                    + ", or data.split.convention: distinct, which splits all files at once"
                    * (len(source.files) > 1)
                )
            parts[name].append(np.sort(part))
    return {name: np.concatenate(pieces).astype(np.int64) for name, pieces in parts.items()}


def _kept_together(samples: np.ndarray, alike: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Samples in an order in which those that begin alike follow each other, and ends that no such row lies across."""
    groups = alike[samples]
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    order = np.argsort(first[group], kind="stable")
    edges = np.flatnonzero(
        np.diff(first[group][order], prepend=-1, append=-1)
    )  # where a row of equals begins, and the end
    return samples[order], [int(edges[edges >= end][0]) for end in ends]


# -- initial states ----------------------------------------------------------------------------------------------------


def thinned(samples: np.ndarray, most: int) -> np.ndarray:
    """At most so many of them, evenly from all over."""
    count = min(len(samples), most)
    return np.asarray(samples)[np.arange(count) * len(samples) // max(count, 1)]


def initial_states(source: Source, samples: np.ndarray) -> np.ndarray:
    """What a forecast starts from, (n, K) float32: the first frame on at most MOST_POINTS points, and the parameters.

    Each channel has a mean square norm of 1 over these samples, each parameter a variance of 1 over the source: none is
    lost beside another.
    """
    channels, stride = len(source.family.input_channels), 1
    while channels * np.prod([-(-size // stride) for size in source.grid_shape]) > MOST_POINTS:
        stride += 1
    points = (slice(None), slice(None), *[slice(None, None, stride)] * len(source.grid_shape))
    blocks = (block for block, _ in source.blocks(samples, np.zeros(1, int)))
    # copies, because a view would keep all points
    states = np.concatenate([source.read(block, [0])[0][:, 0][points].copy() for block in blocks])
    axes = (0, *range(2, states.ndim))
    scale = np.sqrt(np.square(states, dtype=np.float64).mean(axis=axes) * states[0, 0].size)
    states /= np.where(scale > 0, scale, 1).reshape(1, -1, *(1,) * (states.ndim - 2))
    known = source.parameters.astype(np.float64)
    spread = known.std(axis=0)
    parameters = (known[samples] - known.mean(axis=0)) / np.where(spread > 0, spread, 1)
    return np.concatenate([states.reshape(len(states), -1), parameters.astype(np.float32)], axis=1)


def identities(source: Source, samples: np.ndarray) -> np.ndarray:
    """What tells samples apart whatever their file is called, (n,) uint64: a hash of first frame and parameters."""
    found = []
    for block, frames in source.blocks(samples, np.zeros(1, int)):
        for state, parameters in zip(source.read(block, frames)[0], source.parameters[block], strict=True):
            text = state.tobytes() + np.asarray(parameters, np.float32).tobytes()
            found.append(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))
    return np.array(found, np.uint64)


def first_alike(states: np.ndarray) -> np.ndarray:
    """Of each state the index of the first one that is equal to it but for float32's rounding, (n,) int64.

    Compared in steps of 2^-20 of the largest value: neighbours across an edge count as two, which errs on the side of
    calling samples different.
    """
    rounded = np.rint(states / (np.abs(states).max() or 1.0) * 2**20).astype(np.int32)
    first: dict[bytes, int] = {}
    return np.array([first.setdefault(row.tobytes(), number) for number, row in enumerate(rounded)], dtype=np.int64)


def nearest_states(asked: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each state the index of the nearest known one, the first of equals, and their relative distance |a - b| / |a|.

    In float64, because fields of two values are often equally far away, and float32's rounding, which depends on the
    machine and on the number of states, would choose among them.
    """
    chosen = np.concatenate([_nearest(block, known) for block in np.array_split(asked, -(-len(asked) // 256))])
    distance = np.linalg.norm(asked - known[chosen], axis=1)
    return chosen, distance / np.maximum(np.linalg.norm(asked, axis=1), 1e-30)


def _nearest(asked: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Indices (n,) of the nearest states; few are wide at a time."""
    wide = asked.astype(np.float64)
    own = np.square(wide).sum(axis=1)
    parts = (part.astype(np.float64) for part in np.array_split(known, -(-len(known) // 1024)))
    squares = np.concatenate([own[:, None] + np.square(part).sum(axis=1) - 2 * wide @ part.T for part in parts], axis=1)
    equal = squares.min(axis=1) + 1e-12 * own
    return (squares <= equal[:, None]).argmax(axis=1)
