"""Is a model worth it? Its error and its time for a trajectory beside those of the equation's own solver, made cheap.

A model has to beat a solver that errs as much as it does, not the one that made its data: comparisons with needlessly
exact solvers are the commonest flaw of papers on surrogates (McGreivy and Hakim, Nature Machine Intelligence 6, 2024,
arXiv 2407.07218). So the solver is asked on coarser and coarser grids, and with longer steps where it has a choice. On
a CPU both have one core. Samples are drawn anew: no split of the run is looked at.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from upsnb.config import DatasetConfig, RunConfig
from upsnb.data import datasets
from upsnb.data.families import family_of
from upsnb.data.layouts import Family
from upsnb.errors import DataError, RunError
from upsnb.models import inference
from upsnb.models.surrogate import Surrogate
from upsnb.report import style
from upsnb.report.file import finish, number
from upsnb.runs import runfolder
from upsnb.runs.handle import Run
from upsnb.training import metrics, precision

FORMAT, KIND = 1, "worth"
SAMPLES = 16  # of each dataset, which model and solver have all at once
SEED = 730_501  # of these, apart from those of files that people generate
COARSER = (1, 2, 4, 8)  # times as far between grid points as in the data
LEAST_POINTS = 4  # along an axis
REPEATS, ENOUGH_S = 5, 1.0  # of a measurement, of which the shortest counts: no more once so much time has passed
FAR_APART = 0.7  # errors of two solvers over each other that both have a label
TOO_COARSE = 0.5  # nRMSE at the first time from which a coarser grid does not hold the state that it begins with
ALIKE = 1.1  # ratio of times that says nothing
OF_NO_USE = 0.5  # nRMSE of a forecast from which it does not matter how fast it comes


@dataclass(frozen=True)
class Task:
    """New samples of one dataset's equation, and how its solver is asked for them."""

    family: Family
    points: int  # along each axis, where the data were solved
    stride: int  # of these points, those that the data keep
    times: np.ndarray  # (T,) float64, of all frames
    given: int  # first frames, which a model is shown; 0: nothing changes in time
    groups: tuple[tuple[range, dict[str, float]], ...]  # numbers of samples that share parameters, and these

    @property
    def num_samples(self) -> int:
        return sum(len(samples) for samples, _ in self.groups)

    @property
    def parameters(self) -> np.ndarray:
        """(n, P) float32."""
        return np.array([list(own.values()) for samples, own in self.groups for _ in samples], np.float32)

    @cached_property
    def fields(self) -> dict[str, np.ndarray]:
        """The truth by channel: of the solver as it makes data."""
        return self.solve(self.points)

    def solve(self, points: int, stretch: float = 1.0, num_times: int | None = None) -> dict[str, np.ndarray]:
        """Fields by channel, (n, T, *grid), (n, *grid) of those that a model is given."""
        longer = {"stretch": stretch} if stretch != 1 else {}
        found = [
            sample
            for samples, parameters in self.groups
            for sample in self.family.solve(SEED, samples, parameters, points, self.times[:num_times], **longer)
        ]
        return {name: np.stack([sample[name] for sample in found]) for name in found[0]}

    def outputs(self, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        """What a model forecasts, from fields on any grid, on the data's: (n, T, C, *grid) float64."""
        values = np.stack([fields[name] for name in self.family.channels], axis=2)
        return self._kept(_finer(values, self.points // values.shape[-1], self.family))

    def inputs(self) -> np.ndarray:
        """What a model is given, (n, T_in, C_in, *grid) float32."""
        shown = [self.outputs(self.fields)[:, : self.given]] if self.given else []
        if self.family.given:
            given = self._kept(np.stack([self.fields[name] for name in self.family.given], axis=1))[:, None]
            shown.append(np.repeat(given, max(self.given, 1), axis=1))
        return np.concatenate(shown, axis=2).astype(np.float32)

    def _kept(self, values: np.ndarray) -> np.ndarray:
        return values[(..., *self.family.num_dims * (slice(None, None, self.stride),))]

    def seconds(self, points: int, stretch: float) -> float:
        """Processor time of the solver for a trajectory, from the last frame that a model is shown to the end."""
        if not self.given:
            drawn = self.solve(points)
            given = np.stack([drawn[name] for name in self.family.given], axis=1)
            rows = list(zip(given, self.parameters.tolist(), strict=True))
            return _seconds(lambda: [self.family.steady(fields, *own) for fields, own in rows]) / len(rows)
        # Without what it takes to draw a state, which may have to settle first.
        before = _seconds(lambda: self.solve(points, stretch, self.given))
        return max(_seconds(lambda: self.solve(points, stretch)) - before, 1e-9) / self.num_samples


def solved(config: RunConfig) -> dict[str, DatasetConfig]:
    """The datasets whose equation has a solver here."""
    return {name: chosen for name, chosen in config.data.datasets.items() if family_of(chosen).solve}


def measure(
    run: Run,
    folder: Path,
    which: str = "latest",
    stage: str | None = None,
    device: str = "cpu",
    log: Callable[[str], None] = print,
) -> dict:
    """Weigh a run's model against the solvers of its equations; the report, also written into the folder with a figure.

    Args:
        which, stage, device: as of `Run.load_model`.
    Raises:
        DataError: data that cannot be read.
        RunError: the run has no such checkpoint or stage, or none of its datasets an equation that is solved here.
    """
    config, root = run.current_config, runfolder.project_root()
    if not solved(config):
        raise RunError(f"{run.folder}: no dataset has an equation that is solved here -> data.families has those")
    model, rows = run.load_model(which, device, stage), {}
    datasets.generate_missing(config, root, log)
    for name in solved(config):
        task = _task(name, config, model, root)
        rows[name] = _solvers(task, lambda said, name=name: log(f"{name}: {said}"))
        rows[name]["model"] = _model(name, task, model)
        rows[name]["as_good"] = _as_good(rows[name])
    report = {"format": FORMAT, "kind": KIND, "run": run.folder.name, "weights": stage or which}
    where = "one core" if torch.device(device).type == "cpu" else torch.cuda.get_device_name(device)
    report = finish({**report, "model_on": where, "solver_on": "one core", "datasets": rows}, folder)
    write_figures(folder)
    return report


def _task(name: str, config: RunConfig, model: Surrogate, root: Path) -> Task:
    chosen, spec = config.data.datasets[name], model.specs[name]
    source = datasets.open_files(name, config, root / config.data.root)
    if len(set(source.grid_shape)) > 1:
        grid = " x ".join(map(str, source.grid_shape))
        raise DataError(f"data.datasets.{name}: has a grid of {grid} -> solvers take as many points along each axis")
    stride = config.training.time_stride
    frames = np.arange(0, source.num_times, stride)
    times = source.family.time_range[0] + source.dt * frames
    known = np.unique(source.parameters, axis=0)
    own = known[np.linspace(0, len(known) - 1, min(SAMPLES, len(known))).astype(int)]
    numbers = np.array_split(np.arange(SAMPLES), len(own))
    groups = tuple(
        (range(part[0], part[-1] + 1), dict(zip(spec.parameter_names, row.tolist(), strict=True)))
        for part, row in zip(numbers, own, strict=True)
    )
    given = spec.input_frames if spec.time_dependent else 0
    points = source.grid_shape[0] * chosen.reduced_resolution
    return Task(source.family, points, chosen.reduced_resolution, times, given, groups)


def _solvers(task: Task, log: Callable[[str], None]) -> dict:
    """What the solver reaches, the cheapest first: only those that no cheaper one beats."""
    truth, found = task.outputs(task.fields), []
    for coarser in COARSER:
        points = task.points // coarser
        if task.points % coarser or points < LEAST_POINTS:
            continue
        log(f"solving on {points} points along an axis")
        for stretch in task.family.stretches:
            exact = coarser == stretch == 1
            try:
                with np.errstate(all="ignore"):  # on too coarse a grid some break down
                    fields = truth if exact else task.outputs(task.solve(points, stretch))
            except DataError:
                continue
            if task.given and _error(fields[:, :1], truth[:, :1]) > TOO_COARSE:
                continue
            error = 0.0 if exact else _error(fields[:, task.given :], truth[:, task.given :])
            if np.isfinite(error):
                found.append({"points": points, "stretch": stretch, "error": error, "exact": exact})
                found[-1]["ms"] = 1e3 * task.seconds(points, stretch)
    found.sort(key=lambda row: row["ms"])
    front = [row for at, row in enumerate(found) if all(row["error"] < cheaper["error"] for cheaper in found[:at])]
    persistence = None
    if task.given:
        stays = np.repeat(truth[:, task.given - 1 : task.given], truth.shape[1] - task.given, axis=1)
        persistence = _error(stays, truth[:, task.given :])
    return {
        "grid": list(truth.shape[3:]),
        "frames": truth.shape[1] - task.given,
        "samples": task.num_samples,
        "solver": front,
        "persistence": persistence,
    }


def _model(name: str, task: Task, model: Surrogate) -> dict:
    """Error and time of the model."""
    inputs, truth = torch.from_numpy(task.inputs()), task.outputs(task.fields)[:, task.given :]
    device, threads = next(model.parameters()).device, torch.get_num_threads()

    def ask() -> np.ndarray:
        drawn = inference.predict(model, inputs, name, task.parameters, truth.shape[1])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return drawn.numpy()

    torch.set_num_threads(1)
    try:
        with precision.highest(), warnings.catch_warnings(action="ignore"):  # a sample may be far from all others
            error = _error(ask(), truth)
            clock = time.process_time if device.type == "cpu" else time.perf_counter
            return {"error": error, "ms": 1e3 * _seconds(ask, clock) / task.num_samples}
    finally:
        torch.set_num_threads(threads)


def _seconds(act: Callable, clock: Callable[[], float] = time.process_time) -> float:
    """The shortest of some."""
    took, began = [], time.perf_counter()
    while len(took) < REPEATS and (not took or time.perf_counter() - began < ENOUGH_S):
        before = clock()
        act()
        took.append(clock() - before)
    return min(took)


def _error(found: np.ndarray, truth: np.ndarray) -> float:
    """nRMSE, mean over samples, frames and channels, as a run reports it."""
    statistics = metrics.sample_statistics(torch.from_numpy(found), torch.from_numpy(truth))
    return float(metrics.nrmse_per_sample(statistics).mean())


def _finer(fields: np.ndarray, factor: int, family: Family) -> np.ndarray:
    """Values in cells, on a grid that is finer by a factor along each of the last axes, by cubic splines."""
    if factor == 1:
        return fields
    from scipy import ndimage  # here, because it takes a while and few need it

    mode, dims = "grid-wrap" if all(family.periodic) else "nearest", family.num_dims
    lead, grid = fields.shape[:-dims], fields.shape[-dims:]
    finer = [ndimage.zoom(field, factor, order=3, mode=mode, grid_mode=True) for field in fields.reshape(-1, *grid)]
    return np.stack(finer).reshape(*lead, *(factor * size for size in grid))


def _as_good(row: Mapping) -> dict | None:
    """The cheapest solver that errs no more than the model; None where nothing can be said of the model."""
    error = row["model"]["error"]
    return next((solver for solver in row["solver"] if solver["error"] <= error), None)


# -- in words and pictures -----------------------------------------------------------------------------------------


def named(solver: Mapping) -> str:
    """Which way of solving it is."""
    longer = f", time {solver['stretch']:g} times as coarse" if solver["stretch"] != 1 else ""
    return "the solver that made the data" if solver["exact"] else f"the solver on {solver['points']} points{longer}"


def finding(name: str, row: Mapping) -> str:
    """Whether the model pays, in a sentence."""
    model, solver = row["model"], row["as_good"]
    said = f"{name}: the model errs by {number(model['error'])}"
    if model["error"] is None or not model["error"] < OF_NO_USE:
        return f"{said} of the fields: too much for its speed to matter"
    took = f"{said} in {number(model['ms'], 3)} ms a trajectory; {named(solver)} errs no more in"
    times = solver["ms"] / model["ms"]
    told = f"{rounded(times)} times as long" if times >= 1 else f"{rounded(1 / times)} times less"
    if 1 / ALIKE < times < ALIKE:
        told = "about as long"
    return f"{took} {number(solver['ms'], 3)} ms, {told}"


def rounded(value: float) -> str:
    """To two digits, however large."""
    return number(float(f"{value:.2g}"), 9)


def summary(report: Mapping) -> str:
    """A sentence for each dataset."""
    lines = [finding(name, row) for name, row in report["datasets"].items()]
    return "\n".join([*lines, f"Model on {report['model_on']}, solver on {report['solver_on']}, in Python both."])


@style.styled
def draw(report: Mapping) -> Figure:
    """Error over time for a trajectory, a panel for each dataset."""
    rows = report["datasets"]
    columns = min(len(rows), 3)
    lines = -(-len(rows) // columns)
    said = "Down and left is better. Grey: points along an axis. Dotted: the time of the solver that made the data."
    figure = style.empty_figure(max(4.8, 3.2 * columns), 2.9 * lines, said)
    for ax, (name, row) in zip(figure.subplots(lines, columns, squeeze=False).flat, rows.items(), strict=False):
        _panel(ax, name, row)
    for ax in figure.axes[len(rows) :]:
        ax.remove()
    style.shared_legend(figure, 4)
    return figure


def _panel(ax: Axes, name: str, row: Mapping) -> None:
    model, cheaper = row["model"], [solver for solver in row["solver"] if not solver["exact"]]
    times, errors = ([solver[key] for solver in cheaper] for key in ("ms", "error"))
    ax.plot(times, errors, "o-", color=style.BLACK, markersize=4, label="its solver, made cheaper")
    labelled = np.inf
    for solver in row["solver"]:
        if solver["exact"]:
            ax.axvline(solver["ms"], color=style.BLACK, linestyle=":", label="the one that made the data")
        elif solver["error"] < FAR_APART * labelled:  # others would lie on its label
            labelled = solver["error"]
            longer = f", time x {solver['stretch']:g}" if solver["stretch"] != 1 else ""
            style.note(ax, solver["ms"], solver["error"], f"{solver['points']}{longer}", color=style.GREY)
    known = style.positive([model["error"]])
    ax.plot([model["ms"]], known, "*", color=style.VERMILLION, markersize=11, label="model")
    if row["persistence"]:
        ax.axhline(row["persistence"], **style.ROLES["persistence"], label="persistence")
    ax.set(xscale="log", yscale="log", title=f"{name}, {row['frames']} frame{'s' * (row['frames'] > 1)}")
    ax.margins(x=0.15)  # for the last label
    ax.set(xlabel=style.label("time for a trajectory", "ms"), ylabel=style.label("nRMSE"))


write_figures = style.writer(lambda report: {"worth": draw(report)})
