"""From a dataset's config to checked files, splits, frames and training statistics."""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from upsnb import hardware
from upsnb.config import DatasetConfig, GenerateConfig, RunConfig
from upsnb.data.families import family_of
from upsnb.data.generate import generate
from upsnb.data.layouts import Family
from upsnb.data.source import Source, initial_states, nearest_states, open_source, split_samples, thinned
from upsnb.data.spec import DatasetSpec
from upsnb.errors import DataError

if TYPE_CHECKING:  # figures of datasets are drawn without torch
    import torch
    from torch import Tensor

    from upsnb.data.batch import Batch, Microbatch

Progress = Callable[[str], None]
PROGRESS_S = 5.0  # between two reports of how far long work is
SHARED_BYTES = 4 * 2**20  # of a file; less is generated before another process has started
PROCESS_GIB = 0.1  # of one that solves, before its samples
CONSTANT = 1e-7  # spread over size, below which float32 keeps nothing of a channel
MEAN_SAMPLES = 1024  # at most, of which the mean trajectory is the forecast of a baseline


@dataclass(frozen=True)
class Dataset:
    """One dataset, ready to be read: which samples train, and which frames form a pair."""

    name: str
    source: Source
    splits: dict[str, np.ndarray]  # "train", "validation", "test": sample indices
    frames: np.ndarray  # saved times the model uses, every time_stride-th
    spec: DatasetSpec
    augment: bool
    _twins: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, init=False, repr=False)

    @property
    def family(self) -> Family:
        return self.source.family

    @property
    def dt(self) -> float:
        return self.spec.dt

    @property
    def given_frames(self) -> int:
        """Frames given before a rollout: PDEBench's initial_step, and no fewer than the model reads."""
        return max(self.family.given_frames, self.spec.input_frames)

    @property
    def num_bytes(self) -> int:
        """Bytes of all samples in float32 after reduction."""
        values = len(self.frames) * self.family.stored_channels * math.prod(self.source.grid_shape)
        return 4 * self.source.num_samples * values

    @cached_property
    def training_mean(self) -> np.ndarray:
        """Mean target of the training split, (T, C, *grid) float32: a forecast that looks at nothing."""
        train = thinned(self.splits["train"], MEAN_SAMPLES)
        total = np.zeros((self.source.num_times, len(self.family.channels), *self.source.grid_shape))
        for samples, frames in self.source.blocks(train, self.frames):
            total[frames] += self.source.read(samples, frames)[1].sum(axis=0, dtype=np.float64)
        return (total[self.frames] / len(train)).astype(np.float32)

    def twins(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Of each sample of a split the training sample that begins most alike, and its distance.

        Reads the first frame of all, once.
        """
        if split not in self._twins:
            train = self.splits["train"]
            states = initial_states(self.source, np.concatenate([train, self.splits[split]]))
            nearest, distance = nearest_states(states[len(train) :], states[: len(train)])
            self._twins[split] = train[nearest], distance
        return self._twins[split]

    def pairs(self, split: str, calls: int = 1) -> np.ndarray:
        """All (sample, first frame) of a split that leave room for `calls` consecutive forecasts, (P, 2) int64."""
        if not self.family.time_dependent:
            samples = self.splits[split]
            return np.stack((samples, np.zeros_like(samples)), axis=1)
        length = self.spec.input_frames + calls * self.spec.output_frames
        starts = np.arange(len(self.frames) - length + 1)
        samples, first = np.meshgrid(self.splits[split], starts, indexing="ij")
        return np.stack((samples.ravel(), first.ravel()), axis=1)

    @property
    def about(self) -> dict:
        """What the start event says of it."""
        return {"files": [file.name for file in self.source.files], "grid": list(self.source.grid_shape)}

    def resident(self, device: torch.device) -> tuple[Tensor, ...]:
        """Inputs (N, T, C_in, *grid), targets and parameters of all samples on a device, physical units."""
        import torch

        inputs, targets = (torch.from_numpy(part) for part in self.source.read_all(self.frames))
        inputs = inputs.to(device)
        targets = inputs if self.family.time_dependent else targets.to(device)
        return inputs, targets, torch.from_numpy(self.source.parameters).to(device)

    def read(self, microbatch: Microbatch, calls: int, resident: tuple[Tensor, ...] | None = None) -> Batch:
        """A microbatch, augmented.

        Args:
            resident: gathered from there; None: read from the files into CPU tensors.
        """
        import torch

        from upsnb.data import symmetries
        from upsnb.data.batch import Batch

        spec, samples = self.spec, microbatch.pairs[:, 0]
        length = spec.input_frames + calls * spec.output_frames
        if resident is not None:
            inputs, targets, parameters = resident
            pairs = torch.from_numpy(microbatch.pairs).to(inputs.device, non_blocking=True)
            samples, parameters = pairs[:, 0], parameters[pairs[:, 0]]
            if spec.time_dependent:
                frames = inputs[samples[:, None], pairs[:, 1:] + torch.arange(length, device=inputs.device)]
            else:
                inputs, targets = inputs[samples], targets[samples]
        else:
            parameters = torch.from_numpy(self.source.parameters[samples])
            if spec.time_dependent:
                windows = [self.source.read(n, self.frames[first : first + length])[0] for n, first in microbatch.pairs]
                frames = torch.from_numpy(np.concatenate(windows))
            else:
                inputs, targets = (torch.from_numpy(part) for part in self.source.read(samples))
        if spec.time_dependent:
            inputs = frames[:, : spec.input_frames]
            targets = frames[:, spec.input_frames :, : spec.output_channels]
        if self.augment:
            inputs, targets = symmetries.images(self.family, inputs, targets, microbatch.draws)
        # One block each on the way to a device, and in one layout, whatever was drawn: a compiled graph is of one.
        inputs, targets = inputs.contiguous(), targets.contiguous()
        shown = None if self.augment else microbatch.pairs
        return Batch(self.name, inputs, targets, parameters, microbatch.seed, microbatch.turn, shown)


def least_frames(family: Family, chosen: DatasetConfig | DatasetSpec, calls: int = 1) -> int:
    """Frames that a trajectory needs, for so many calls in a row and for a rollout of one frame."""
    called = chosen.input_frames + calls * chosen.output_frames
    return max(called, max(family.given_frames, chosen.input_frames) + 1)


def paced(log: Progress) -> Progress:
    """Says what comes PROGRESS_S after what was said before, and leaves out what comes sooner."""
    told_s = time.monotonic()

    def say(message: str) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= PROGRESS_S:
            told_s = time.monotonic()
            log(message)

    return say


def find_files(name: str, config: DatasetConfig, root: Path) -> list[Path]:
    """The files a dataset names, globs expanded.

    Raises:
        DataError: a name that matches nothing, with the HDF5 files that are there.
    """
    found, missing = [], []
    for pattern in config.files:
        try:
            matches = sorted(root.glob(pattern)) if not Path(pattern).is_absolute() else [Path(pattern)]
        except (ValueError, IndexError, OSError):  # no pattern
            matches = []
        (found.extend(matches) if matches and matches[0].is_file() else missing.append(pattern))
    if missing:
        near = sorted(p.name for end in ("h*5", "np[yz]") for p in root.glob(f"*.{end}")) if root.is_dir() else []
        has = f"it has {', '.join(near[:8])}" if near else "it has no HDF5 files"
        raise DataError(
            f"data.datasets.{name}.files: {', '.join(missing)} not found in {root} ({has}) -> correct data.root or the "
            "name, set data.download: missing to fetch published ones, or leave files empty to generate data"
        )
    return found


def generated(config: DatasetConfig) -> GenerateConfig:
    """How a dataset's data are made, with what its family's row adds."""
    family, made = family_of(config), config.generate
    one = {} if made.parameter is None else dict.fromkeys(family.parameters, made.parameter)
    added = {
        "parameters": family.parameters | one | made.parameters,
        "resolution": made.resolution or family.resolution,
        "num_times": (made.num_times or family.num_times) if family.time_dependent else 1,
        "until": (made.until or family.time_range[1]) if family.time_dependent else None,
    }
    return made.model_copy(update=added)


def generated_path(config: DatasetConfig, root: Path) -> Path:
    """Where the generated file of these settings lives: the name says all that its content depends on."""
    family, made = family_of(config), generated(config)
    parts = [family.file_stem, *(f"{name}{value:g}" for name, value in made.parameters.items())]
    parts += [f"n{made.num_samples}", f"x{made.resolution}", *([f"t{made.num_times}"] if family.time_dependent else [])]
    if made.until not in (None, family.time_range[1]):
        parts.append(f"until{made.until:g}")
    parts.append(f"seed{made.seed}")
    if family.edition > 1:
        parts.append(f"v{family.edition}")
    return root / "generated" / f"{'_'.join(parts)}.hdf5"


def ensure_generated(config: DatasetConfig, root: Path, log: Progress) -> None:
    """Generate the dataset's file unless it is there; one process of a run calls this, the others wait.

    Raises:
        DataError: a sample is larger than this machine's memory, or the file than what is free of the disk.
    """
    if config.files or (path := generated_path(config, root)).is_file():
        return
    family, made = family_of(config), generated(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    sample = 4 * made.num_times * len(family.channels) * made.resolution**family.num_dims
    room, free = hardware.host_memory_gib(), shutil.disk_usage(path.parent).free / 2**30
    for what, size, there in (
        ("one sample is made in", 2 * sample / 2**30, room),
        ("the file takes", made.num_samples * sample / 2**30, free),
    ):
        if size > there > 0:
            raise DataError(
                f"{path.name}: {what} at least {size:,.1f} GiB, and {there:,.1f} GiB are there -> lower resolution, "
                "num_times or num_samples of its `generate`"
            )
    log(f"generating {path.name}")
    said = paced(log)

    def tell(done: int, of: int) -> None:
        said(f"generating {path.name}: {done} of {of} samples")

    processes = 1
    if made.num_samples * sample >= SHARED_BYTES:
        most = int(room / (PROCESS_GIB + 8 * sample / 2**30)) or 1  # in float64, and what a step makes of it
        processes = min(hardware.num_cores(), made.num_samples, most)
    size = made.num_samples, made.parameters, made.resolution, made.num_times
    generate(family, path, *size, made.seed, made.until, tell, processes)


def generate_missing(config: RunConfig, root: Path, log: Progress = print) -> None:
    """Generate the files of all datasets that name none and have none yet; `root` is the project's.

    Published files that are named and not there are fetched, where `data.download` says so.
    """
    for chosen in config.data.datasets.values():
        if config.data.download == "missing":
            fetch_missing(chosen, root / config.data.root, log)
        ensure_generated(chosen, root / config.data.root, log)


def fetch_missing(config: DatasetConfig, root: Path, log: Progress) -> None:
    """Fetch the files that a dataset names and that are not there; `..._first100.hdf5` names a file's first samples."""
    from upsnb.data import download  # here, because few need it and the network's modules take a while to import

    for name in config.files:
        path = root / name
        whole = re.fullmatch(r"(.+)_first(\d+)(\.h(?:df)?5)", path.name)
        if any(letter in name for letter in "*?[") or path.is_file():
            continue
        log(f"fetching {path.name}")
        if whole:
            download.get(whole[1] + whole[3], path.parent, int(whole[2]))
        else:
            download.get(path.name, path.parent)


def open_all(config: RunConfig, root: Path, log: Progress = print) -> dict[str, Dataset]:
    """Open every dataset of a config; `root` is the project's."""
    return {name: open_dataset(name, config, root / config.data.root, log) for name in config.data.datasets}


def open_files(name: str, config: RunConfig, root: Path) -> Source:
    """Open and check the files of one dataset; arguments as of `open_dataset`."""
    chosen = config.data.datasets[name]
    files = find_files(name, chosen, root) if chosen.files else [generated_path(chosen, root)]
    return open_source(
        family_of(chosen), files, chosen.reduced_resolution, chosen.reduced_resolution_t, chosen.num_samples
    )


def open_split(name: str, config: RunConfig, root: Path) -> tuple[Source, dict[str, np.ndarray]]:
    """The same, and the splits of its samples."""
    source, split = open_files(name, config, root), config.data.split
    return source, split_samples(source, split.convention, split.validation_fraction, split.test_fraction)


def open_dataset(name: str, config: RunConfig, root: Path, log: Progress = lambda message: None) -> Dataset:
    """Open, check and split one dataset and measure its training statistics.

    Args:
        log: told of every file with fewer samples than were asked for.

    Raises:
        DataError: files missing or wrong, an empty split, too few frames, a constant channel.
    """
    chosen, (source, splits) = config.data.datasets[name], open_split(name, config, root)
    family = source.family
    for path, count in zip(source.files, np.bincount(source.file_of_sample), strict=True):
        if chosen.num_samples is not None and count < chosen.num_samples:
            found = f"{chosen.num_samples} were asked for and {path.name} holds {count}"
            log(f"warning: data.datasets.{name}.num_samples: {found} -> all of them are taken")
    frames = np.arange(0, source.num_times, config.training.time_stride)
    calls = max(map(config.calls, config.stages.planned))
    if family.time_dependent:
        if len(frames) < (needed := least_frames(family, chosen, calls)):
            raise DataError(
                f"data.datasets.{name}: {len(frames)} frames after reduced_resolution_t and training.time_stride, but "
                f"{needed} are needed ({chosen.input_frames} in, {calls} x {chosen.output_frames} out, "
                f"{family.given_frames} given before a rollout) -> lower the strides or the frames per call"
            )
    if chosen.augment and "turn" in family.symmetries and not source.mirrors:
        raise DataError(
            f"data.datasets.{name}.augment: mirror images of cells between walls lie on other cells where "
            f"reduced_resolution is {chosen.reduced_resolution} -> augment: false, or another reduced_resolution"
        )
    inputs, outputs = _statistics(name, source, splits["train"], frames)
    parameters = source.parameters[splits["train"]].astype(np.float64)
    spread = parameters.std(axis=0)
    measured = {
        "input_mean": inputs[0],
        "input_std": inputs[1],
        "output_mean": outputs[0],
        "output_std": outputs[1],
        "parameter_mean": parameters.mean(axis=0),
        "parameter_std": np.where(spread > 0, spread, 1.0),  # one single value: nothing to scale by
        "parameter_low": parameters.min(axis=0),
        "parameter_high": parameters.max(axis=0),
    }
    if family.zero_walls and source.reduced_resolution > 1:
        measured["ghosts_before"], measured["ghosts_after"] = np.array(source.ghosts).T
    dt = source.dt * config.training.time_stride
    return Dataset(name, source, splits, frames, _spec(name, config, source.grid_shape, dt, measured), chosen.augment)


def _spec(name: str, config: RunConfig, grid: tuple[int, ...], dt: float, measured: dict) -> DatasetSpec:
    """What a model must know of a dataset: from its row, its settings, and what was measured of it."""
    chosen = config.data.datasets[name]
    family = family_of(chosen)
    return DatasetSpec(
        name=name,
        family=family.name,
        grid_shape=grid,
        periodic=family.periodic,
        input_channels=len(family.input_channels),
        output_channels=len(family.channels),
        input_frames=chosen.input_frames,
        output_frames=chosen.output_frames,
        num_parameters=len(family.parameters),
        time_dependent=family.time_dependent,
        dt=dt,
        tokens=chosen.tokens or config.latent.tokens,
        zero_walls=family.zero_walls,
        parameter_names=tuple(family.parameters),
        priors=family.priors,
        **{field: tuple(values.tolist()) for field, values in measured.items()},
    )


def _statistics(name: str, source: Source, train: np.ndarray, frames: np.ndarray) -> tuple[tuple, tuple]:
    """Mean and standard deviation per channel of inputs and outputs, over the training split only, in float64."""
    sums: list[list] = [[], []]
    for samples, some in source.blocks(train, frames):
        both = source.read(samples, some)
        for side, block in enumerate(both if both[0] is not both[1] else both[:1]):
            axes = tuple(axis for axis in range(block.ndim) if axis != 2)
            wide = block.astype(np.float64)
            sums[side].append((wide.sum(axis=axes), np.square(wide).sum(axis=axes), block.size // block.shape[2]))
    results = []
    for side in sums if sums[1] else sums[:1]:  # inputs and outputs may be one array
        total, squares, count = (sum(parts) for parts in zip(*side, strict=True))
        mean = total / count
        std = np.sqrt(np.maximum(squares / count - mean**2, 0))
        if (flat := std <= CONSTANT * np.sqrt(squares / count)).any():
            channel = int(np.argmax(flat))
            raise DataError(
                f"data.datasets.{name}: channel {channel} is constant ({mean[channel]:g}) over the training split of "
                f"{source.files[0]} -> there is nothing to learn from it: take more samples, or leave it out"
            )
        results.append((mean, std))
    return results[0], results[-1]


# -- in outline ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outline:
    """What memory depends on of a dataset; stands where a Dataset does."""

    spec: DatasetSpec
    num_bytes: int  # of all samples in float32


def outlines(config: RunConfig, root: Path) -> dict[str, Outline]:
    """Shapes of all datasets, from the settings where they are generated, else from the headers of their files."""
    return {name: _outline(name, chosen, config, root) for name, chosen in config.data.datasets.items()}


def _outline(name: str, chosen: DatasetConfig, config: RunConfig, root: Path) -> Outline:
    family = family_of(chosen)
    reduction, reduction_t = chosen.reduced_resolution, chosen.reduced_resolution_t
    if chosen.files:
        files = find_files(name, chosen, root / config.data.root)
        source = open_source(family, files, reduction, reduction_t, chosen.num_samples)
        grid, num_samples, num_times = source.grid_shape, source.num_samples, source.num_times
    else:
        made = generated(chosen)
        grid = (-(-made.resolution // reduction),) * family.num_dims
        num_samples = min(made.num_samples, chosen.num_samples or made.num_samples)
        num_times = -(-made.num_times // reduction_t)
    unscaled = {}  # no shape depends on statistics
    for side, of in (("input", family.input_channels), ("output", family.channels), ("parameter", family.parameters)):
        unscaled |= {f"{side}_mean": np.zeros(len(of)), f"{side}_std": np.ones(len(of))}
    spec = _spec(name, config, grid, 1.0 if family.time_dependent else 0.0, unscaled)
    frames = -(-num_times // config.training.time_stride)
    return Outline(spec, 4 * num_samples * frames * family.stored_channels * math.prod(grid))
