"""A trained model on other data than it was trained on: other parameters, grids, initial states, somebody's files.

What training or validation has seen is left out, whatever its file is called, and the rest is judged as a run's test
split is at its end. The run's own errors stand beside.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from upsnb import overlays
from upsnb.config import DatasetConfig, RunConfig
from upsnb.data import datasets
from upsnb.data.datasets import Dataset
from upsnb.data.families import family_of
from upsnb.data.source import Source, identities
from upsnb.data.spec import DatasetSpec
from upsnb.errors import ConfigError, DataError, Problem
from upsnb.models.surrogate import Surrogate
from upsnb.report import results
from upsnb.report.figures import RunFigures, read_evaluation
from upsnb.report.file import finish, number
from upsnb.rules import did_you_mean
from upsnb.runs import runfolder
from upsnb.runs.events import EventWriter
from upsnb.runs.handle import Run
from upsnb.training import precision, workload
from upsnb.training.parallel import Ranks

FORMAT, KIND = 1, "transfer"
SPLIT = "transfer"  # what the judged samples are called beside "test"
ASKED = ("data.root", "data.download", "data.datasets.", "evaluation.")  # settings that may differ from the run's
SAME_STEP = 1e-3  # relative difference of time steps that is none
OF_ENSEMBLES = ("members", "crps", "mean_nrmse", "spread_skill", "coverage")


@dataclass(frozen=True)
class Judged(Dataset):
    """Samples that are judged, none of which was trained on; their spec is the trained one, on their own grid."""

    home: Dataset | None = None  # what was trained on, if it is here and lies on the same grid

    @cached_property
    def training_mean(self) -> np.ndarray:
        """What a forecast says that looks at nothing; without what was trained on, the judged samples' own mean."""
        at_home = self.home is not None and len(self.home.frames) == len(self.frames)
        return self.home.training_mean if at_home else super().training_mean

    def twins(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """No training sample begins as one of these does."""
        return self.splits[split], np.full(len(self.splits[split]), np.inf)


def transfer(
    run: Run,
    changes: Mapping,
    folder: Path | None = None,
    which: str = "latest",
    stage: str | None = None,
    device: str = "cpu",
    log: Callable[[str], None] = print,
) -> Path:
    """Judge a run's model on other data; the folder that then holds `report.json`, figures and examples.

    Args:
        changes: settings over the run's own, in any written form: `{"data.datasets.advection.files": [...]}`, or
            `generate`, `reduced_resolution`, `num_samples` of a dataset. All that differ are judged, and no others.
        folder: a new one under the run's `logging.root` where it is empty.
        which, stage, device: as of `Run.load_model`.
    Raises:
        ConfigError: changes of what training has decided, of no dataset, or of one that the model does not know.
        DataError: files that cannot be read, of another family or time step, or with nothing that was not seen.
        RunError: the run has no such checkpoint or stage.
    """
    own = run.current_config
    config = overlays.resolve(dict(changes), base=own, where="what is asked of it")
    settings = overlays.difference(own, config)
    model, root = run.load_model(which, device, stage), runfolder.project_root()
    chosen = {name: config.data.datasets[name] for name in _asked(own, config, model)}
    config = config.model_copy(update={"data": config.data.model_copy(update={"datasets": chosen})})
    datasets.generate_missing(config, root, log)
    judged, about, opens_test = {}, {}, False
    for name in chosen:
        judged[name], about[name], of_test = _open(name, own, config, model, root)
        opens_test |= of_test
    folder = folder or runfolder.new_folder(f"{run.folder.name}-{KIND}", own.logging.root)
    folder.mkdir(parents=True, exist_ok=True)
    if opens_test:  # before, so that no look at it goes uncounted
        _note(run, which, stage)
    ranks, said = Ranks(device=torch.device(device)), _progress(judged, config, log)
    with precision.highest():
        found = workload.of(config).evaluate(
            model, judged, SPLIT, ranks, said, examples=folder / runfolder.EXAMPLES, final=True
        )
    ensembles = {name: result["ensemble"] for name, result in found.items() if "ensemble" in result}
    for name, result in found.items():
        if not judged[name].spec.time_dependent and judged[name].home is None:
            result["baseline"] = "their own mean"
    beside = results.scalar_metrics(read_evaluation(run.folder, run.events()))
    scores = results.scalar_metrics({"datasets": {name: {SPLIT: result} for name, result in found.items()}})
    report = {
        "format": FORMAT,
        "kind": KIND,
        "run": run.folder.name,
        "weights": stage or which,
        "about": about,
        "datasets": {name: scores[name] | beside.get(name, {}) for name in scores},
        "ensembles": {name: {key: drawn[key] for key in OF_ENSEMBLES} for name, drawn in ensembles.items()},
        "settings": settings,
    }
    results.write_figures(RunFigures(folder, config, [], SPLIT, found))
    finish(report, folder)
    return folder


def _asked(own: RunConfig, config: RunConfig, model: Surrogate) -> list[str]:
    """Datasets whose data are others than the run's."""
    changed, datasets_then = overlays.difference(own, config), own.data.datasets
    problems = [
        Problem(path, "training has decided it", f"change {', '.join(ASKED)} alone")
        for path in changed
        if not f"{path}.".startswith(ASKED)
    ]
    moved = own.data.root != config.data.root
    names = [
        name for name, row in config.data.datasets.items() if row != datasets_then.get(name) or (moved and row.files)
    ]
    problems += [
        Problem(f"data.datasets.{name}", "the model was not trained on it", did_you_mean(name, model.specs))
        for name in names
        if name not in model.specs
    ]
    if not problems and not names:
        remedy = "name other files, or another `generate`, of one of its datasets"
        problems = [Problem("data.datasets", "are those of the run", remedy)]
    if problems:
        raise ConfigError(problems, "what is asked of it")
    return names


def _open(name: str, own: RunConfig, config: RunConfig, model: Surrogate, root: Path) -> tuple[Judged, dict, bool]:
    """A dataset to be judged, what is to be said of it, and whether samples of the run's test split are in it."""
    chosen, spec, where = config.data.datasets[name], model.specs[name], f"data.datasets.{name}"
    if (family := family_of(chosen)).name != spec.family:
        raise DataError(f"{where}.family: is {family.name}, and the model was trained on {spec.family} -> name its own")
    source = datasets.open_files(name, config, root / config.data.root)
    frames = np.arange(0, source.num_times, own.training.time_stride)
    _check_times(where, source, frames, chosen, spec, own.training.time_stride)
    if why := model.refuses(name, source.grid_shape):
        raise DataError(f"{where}: has a grid of {' x '.join(map(str, source.grid_shape))} -> {why}")
    everything, seen = np.arange(source.num_samples), np.zeros(source.num_samples, bool)
    home, of_test = _home(name, own, config, replace(spec, grid_shape=source.grid_shape), root), False
    if home is not None:
        keys = identities(source, everything)
        parts = {split: np.isin(keys, identities(home.source, samples)) for split, samples in home.splits.items()}
        seen, of_test = parts["train"] | parts["validation"], bool(parts["test"].any())
    samples = everything[~seen]
    if not len(samples):
        raise DataError(f"{where}: all {source.num_samples} samples were seen in training -> name other data")
    about = {
        "files": [path.name for path in source.files],
        "grid": list(source.grid_shape),
        "trained_grid": list(spec.grid_shape),
        "samples": len(samples),
        "seen": None if home is None else int(seen.sum()),  # None: nobody can say
        "parameters": _ranges(spec, *(end(source.parameters[samples], axis=0) for end in (np.min, np.max))),
        "trained_parameters": _ranges(spec, spec.parameter_low, spec.parameter_high),
    }
    splits = {"train": samples, SPLIT: samples}
    judged = Judged(name, source, splits, frames, replace(spec, grid_shape=source.grid_shape), False, home)
    return judged, about, of_test


def _ranges(spec: DatasetSpec, low: Sequence[float], high: Sequence[float]) -> dict[str, list[float]]:
    return {name: [float(a), float(b)] for name, a, b in zip(spec.parameter_names, low, high)}


def _check_times(
    where: str, source: Source, frames: np.ndarray, chosen: DatasetConfig, spec: DatasetSpec, stride: int
) -> None:
    if not spec.time_dependent:
        return
    dt = source.dt * stride
    if abs(dt / spec.dt - 1) > SAME_STEP:
        ratio = spec.dt / dt * chosen.reduced_resolution_t
        whole = ratio > 0.5 and abs(ratio / round(ratio) - 1) < SAME_STEP
        remedy = f"set {where}.reduced_resolution_t to {round(ratio)}" if whole else "name data with its steps"
        raise DataError(f"{where}: time steps of {dt:g}, and the model was trained on steps of {spec.dt:g} -> {remedy}")
    if len(frames) < (needed := datasets.least_frames(source.family, spec)):
        raise DataError(f"{where}: has {len(frames)} frames, and {needed} are needed -> name longer trajectories")


def _home(name: str, own: RunConfig, config: RunConfig, spec: DatasetSpec, root: Path) -> Dataset | None:
    """What the run was trained on, at the asked stride; None where it is not here, or lies on another grid then."""
    same = {"reduced_resolution": config.data.datasets[name].reduced_resolution}
    rows = own.data.datasets | {name: own.data.datasets[name].model_copy(update=same)}
    at_stride = own.model_copy(update={"data": own.data.model_copy(update={"datasets": rows})})
    for folder in (own.data.root, config.data.root):  # where it was, or where the others have moved
        with suppress(DataError):
            source, splits = datasets.open_split(name, at_stride, root / folder)
            frames = np.arange(0, source.num_times, own.training.time_stride)
            return Dataset(name, source, splits, frames, spec, False) if source.grid_shape == spec.grid_shape else None
    return None


def _note(run: Run, which: str, stage: str | None) -> None:
    """Tell the run that its test split was looked at once more."""
    last = run.events()[-1]
    events = EventWriter(run.folder, stage=last["stage"])
    events.write("opened", last["step"], split="test", weights=stage or which)
    events.close()


def _progress(judged: Mapping[str, Dataset], config: RunConfig, log: Callable[[str], None]) -> Callable[[], None]:
    calls = sum(-(-len(dataset.splits[SPLIT]) // config.evaluation.samples_per_call) for dataset in judged.values())
    done, say = itertools.count(), datasets.paced(log)
    return lambda: say(f"{min(next(done), calls)} of {calls} groups of samples")


def summary(report: Mapping) -> str:
    """What was judged, and its errors above those of the run's own split."""
    lines = []
    for name, about in report["about"].items():
        told = {key: _range(*ends) for key, ends in about["parameters"].items()}
        then = {key: _range(*ends) for key, ends in about["trained_parameters"].items()}
        told["grid"], then["grid"] = (" x ".join(map(str, about[key])) for key in ("grid", "trained_grid"))
        differs = {key: f" (trained on {then[key]})" for key in told if told[key] != then.get(key, told[key])}
        what = ", ".join([*about["files"], *(f"{key} {value}{differs.get(key, '')}" for key, value in told.items())])
        left_out = f", {about['seen']} more were seen in training" if about["seen"] else ""
        if about["seen"] is None:
            left_out = ", not compared with those that were trained on"
        lines.append(f"{name}: {what}: {about['samples']} samples{left_out}")
    for name, drawn in report["ensembles"].items():
        worth = (
            f"CRPS {number(drawn['crps'])} standard deviations, spread over skill {number(drawn['spread_skill'], 3)}"
        )
        lines.append(f"{name}: {drawn['members']} members: {worth}, nRMSE of their mean {number(drawn['mean_nrmse'])}")
    return "\n".join([*lines, results.table(report).to_string(index=False)])


def _range(low: float, high: float) -> str:
    return number(low) if low == high else f"{number(low)} to {number(high)}"
