"""From run folders and datasets to figures: which arrays a figure shows, and what it is called. Needs no model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from upsnb.config import RunConfig
from upsnb.data.datasets import Dataset
from upsnb.data.families import family_of
from upsnb.report import plots, style
from upsnb.runs import runfolder
from upsnb.runs.events import NAMING, latest_start
from upsnb.runs.handle import Run
from upsnb.runs.throughput import steady_throughput, steady_windows, turns_with

SLICE = ", in the middle of z"
floats = partial(np.asarray, dtype=float)  # null, which JSON has for NaN and infinity, becomes NaN


def end_of_last_launch(events: list[dict]) -> dict:
    """The end event of the latest launch; empty while it has none, whatever earlier launches wrote."""
    marks = [event for event in events if event["kind"] in ("segment", "end")]
    return marks[-1] if marks and marks[-1]["kind"] == "end" else {}


def read_evaluation(folder: Path, events: list[dict]) -> dict:
    """evaluation.json of the latest launch; empty if that did not get there: an older one says nothing about it."""
    path = folder / runfolder.EVALUATION
    return json.loads(path.read_text()) if end_of_last_launch(events) and path.is_file() else {}


def once(draw):
    """A method that draws when first asked for a figure, and hands out the same one afterwards."""

    @wraps(draw)
    def drawn(self: RunFigures, *which: str) -> Figure:
        key = (draw.__name__, *which)
        if key not in self.drawn:
            self.drawn[key] = draw(self, *which)
        return self.drawn[key]

    return drawn


@dataclass(frozen=True)
class RunFigures:
    """Draws the figures of one run, each when first asked for; needs no model."""

    folder: Path
    config: RunConfig
    events: list[dict]
    split: str  # the one that was evaluated; empty if none was
    results: dict[str, dict]  # evaluation.json's, by dataset
    drawn: dict[tuple[str, ...], Figure] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, run: Run) -> RunFigures:
        events = run.events()
        evaluation = read_evaluation(run.folder, events)
        split = evaluation.get("split", "")
        results = {name: splits[split] for name, splits in evaluation.get("datasets", {}).items()}
        return cls(run.folder, run.config, events, split, results)

    @property
    def said(self) -> dict:
        """The latest start event: of what the run is, and in which units."""
        return NAMING | latest_start(self.events)

    @property
    def rolled_out(self) -> list[str]:
        """Datasets that have a time to roll out over."""
        return [name for name, result in self.results.items() if result["per_time"]]

    @once
    def prediction(self, name: str) -> Figure:
        """Truth, prediction and error: in 1-D of the median sample over space and time, else of each kept sample."""
        kept, family = self._examples(name), family_of(self.config.data.datasets[name])
        truth, forecast, inputs = kept["truth"][:, :, 0], kept["forecast"][:, :, 0], kept["inputs"][:, -1, 0]
        picks, nrmse = _picks(len(truth)), kept["nrmse"]
        what = f"{name}, {self.split} split"
        if truth.ndim == 3:
            i = len(picks) // 2
            times = kept["times"][-truth.shape[1] :]
            largest = np.max(np.abs(forecast[i] - truth[i]))
            title = (
                f"{what}: over {len(times)} frames the {picks[i]} sample (number {kept['samples'][i]}) has an nRMSE of "
                f"{nrmse[i]:.2g}, its largest error is {largest:.2g}"
            )
            return plots.prediction_truth_error_1d(family, kept["x"], truth[i], forecast[i], times, title=title)
        samples = [
            plots.FieldSample(
                pick, _upright(inputs[i]), _upright(truth[i, -1]), _upright(forecast[i, -1]), float(nrmse[i])
            )
            for i, pick in enumerate(picks)
        ]
        told = ", ".join(f"{value:.2g} ({pick})" for pick, value in zip(picks, nrmse))
        what += SLICE * (truth.ndim == 5)
        title = f"{what}, of {self.results[name]['num_samples']} samples: an nRMSE of {told}"
        return plots.prediction_truth_error_2d(family, samples, title=title)

    @once
    def rollout(self, name: str) -> Figure:
        """nRMSE as the self-fed forecast goes on, beside persistence."""
        result = self.results[name]
        per_time = {key: floats(value) for key, value in result["per_time"].items()}
        model, persistence = per_time["rollout_nrmse"], per_time["persistence_nrmse"]
        title = (
            f"{name}: after {len(model)} frames the model's nRMSE is {model[-1]:.2g}, persistence's "
            f"{persistence[-1]:.2g}; mean of {result['num_samples']} trajectories of the {self.split} split"
        )
        given_until, lasts = float(per_time["given_until"]), result.get("rollout_correlation_time")
        return plots.rollout_error(
            per_time["time"],
            {"model": model, "persistence": persistence},
            quartiles={"model": per_time["rollout_nrmse_quartiles"]},
            given_until=given_until,
            lost_at=given_until + lasts if result.get("rollout_correlation_lost") else None,
            title=title,
        )

    @once
    def spectrum(self, name: str) -> Figure:
        """Energy by wavenumber of truth, prediction and error at the last frame, mean over the whole split."""
        result, family = self.results[name], family_of(self.config.data.datasets[name])
        curves = {curve: floats(energy) for curve, energy in result["spectrum"].items()}
        wavenumber = curves.pop("wavenumber")
        lost = (wavenumber > 0) & (curves["error"] >= curves["truth"])
        when = f" at t = {result['per_time']['time'][-1]:.3g}" if result["per_time"] else ""
        found = (
            f"reaches the truth from wavenumber {wavenumber[lost][0]:.0f} on" if lost.any() else "stays below the truth"
        )
        if not np.isfinite(curves["error"]).all():
            found = "is not finite"
        title = (
            f"{name}{when}: the error's energy {found}; mean of all {result['num_samples']} samples of the "
            f"{self.split} split"
        )
        return plots.spectra(wavenumber, curves, quantity=plots.predicted(family), title=title)

    @once
    def losses(self) -> Figure:
        """Every loss term by step and dataset, and the validation error."""
        steps = latest(self.events, "step")
        terms: dict[tuple[str, str], dict[int, float | None]] = {}
        for number, step in steps.items():
            for kind, value in step["losses"].items():
                terms.setdefault((whose(step), kind), {})[number] = value
        curves = {term: floats([values.get(number) for number in steps]) for term, values in terms.items()}
        checks = latest(self.events, "eval")
        names = list(dict.fromkeys(name for event in checks.values() for name in event["val_nrmse"]))
        validation = {
            name: (list(checks), floats([event["val_nrmse"].get(name) for event in checks.values()])) for name in names
        }
        totals: dict[tuple[str, str | None], list[float | None]] = {}  # a stage has a loss of its own
        for step in steps.values():
            totals.setdefault((whose(step), step.get("stage")), []).append(step["loss"])
        staged = len({stage for _, stage in totals}) > 1
        ends = {f"{name} ({stage})" if staged else name: fall(losses) for (name, stage), losses in totals.items()}
        told = ", ".join(f"{which} {end['first']:.2g} to {end['last']:.2g}" for which, end in ends.items())
        of = "a stage's" if staged else "the"
        title = f"Training loss, from the first tenth of {of} steps to the last: {told}"
        if checks:
            told = ", ".join(f"{name} {values[-1]:.2g}" for name, (_, values) in validation.items())
            title += f"; validation {self.said['metric']} after step {next(reversed(checks)):,}: {told}"
        return plots.loss_terms(list(steps), curves, validation, metric=self.said["metric"], title=title)

    @once
    def throughput(self) -> Figure:
        """Samples per second of every step by dataset, the windows that the median is of, and its interval."""
        windows, steps = steady_windows(self.events), list(latest(self.events, "step").values())
        speed = steady_throughput(self.events)
        time_s, rates, steady = ([step[key] for step in steps] for key in ("time_s", "samples_per_s", "steady"))
        names, unit = list(map(whose, steps)), self.said["unit"]
        title = f"No window of steady steps: 0 {unit}/s can be claimed"
        if windows:
            of = {name: [r for r, n, counts in zip(rates, names, steady) if counts and n == name] for name in names}
            told = ", ".join(f"{np.median(those):.3g} {name}" for name, those in of.items() if those)
            title = (
                f"{speed['median']:.4g} {unit}/s while steady, the median over the time of {len(windows)} windows "
                f"of successive steps; of single steps: {told}"
            )
        ends = floats([speed["median"], *speed["ci95"]])
        numbers = [step["step"] for step in steps]
        turns = [
            np.interp((begin, numbers[-1] if end is None else end), numbers, time_s)
            for begin, end in turns_with(self.events)
        ]
        return plots.throughput(
            time_s,
            rates,
            steady,
            names,
            [window[:3] for window in windows],
            ends[0],
            tuple(ends[1:]),
            turns=turns,
            unit=unit,
            title=title,
        )

    @once
    def distribution(self) -> Figure:
        """Which share of the samples has which error: over the whole rollout where there is one."""
        scores, baselines, told = {}, {}, []
        for name, result in self.results.items():
            rollout = "rollout_" if "rollout_nrmse" in result["per_sample"] else ""
            curve = f"{name}{', rollout' * bool(rollout)}"
            scores[curve] = floats(result["per_sample"][f"{rollout}nrmse"])
            found = [result.get(f"{rollout}{key}_nrmse_mean") for key in ("persistence", "baseline")]
            baselines[curve] = result["baseline"], next((value for value in found if value is not None), np.nan)
            told.append(f"{name} {np.median(scores[curve]):.2g} and {np.max(scores[curve]):.2g}")
        title = f"nRMSE of the median sample and of the worst: {'; '.join(told)} ({self.split} split)"
        return plots.error_distribution(scores, baselines=baselines, title=title)

    def all(self) -> dict[str, Callable[[], Figure]]:
        """Every figure this run can show, by file name."""
        drawings: dict[str, Callable[[], Figure]] = {}
        if any(event["kind"] == "step" for event in self.events):
            drawings |= {"loss": self.losses, "throughput": self.throughput}
        from upsnb.training import workload  # loads torch, as nothing above does

        return drawings | workload.of(self.config).figures(self)

    def _examples(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.folder / runfolder.EXAMPLES) as file:
            return {key.removeprefix(f"{name}/"): file[key] for key in file.files if key.startswith(f"{name}/")}


@style.styled
def glance(folder: Path) -> Figure:
    """What a run made of one validation sample of each dataset when it last validated: truth, prediction, error.

    The same sample each time. Fields over the plane at the last frame; in 1-D over space, and time upwards.
    """
    with np.load(folder / runfolder.GLANCE) as file:
        kept = {key: file[key] for key in file.files}
    names = [key.removesuffix("/truth") for key in kept if key.endswith("/truth")]
    told = ", ".join(f"{name} {kept[f'{name}/nrmse'][0]:.2g}" for name in names)
    figure = style.empty_figure(7.2, 1.7 * len(names), f"One validation sample of each dataset, nRMSE: {told}")
    for row, name in zip(figure.subplots(len(names), 3, squeeze=False), names):
        truth, forecast = (kept[f"{name}/{what}"][0, :, 0] for what in ("truth", "forecast"))
        truth, forecast = (x if x.ndim == 2 else _upright(x[-1]) for x in (truth, forecast))
        shades = style.FIELD_COLOURS, style.value_range(truth)
        half = float(np.ptp(truth)) / 2 or 1.0  # a fixed range, so that errors fade as training goes on
        shown = {"truth": (truth, *shades), "prediction": (forecast, *shades)}
        shown[f"error, colours end at {half:.2g}"] = forecast - truth, style.ERROR_COLOURS, Normalize(-half, half)
        for ax, (what, (values, colours, norm)) in zip(row, shown.items()):
            style.draw_image(ax, values, (0.0, 1.0, 0.0, 1.0), colours, norm)
            ax.set(xticks=[], yticks=[], xlabel=what, aspect="equal" if truth.shape[0] == truth.shape[1] else "auto")
        row[0].set_ylabel(name)
    return figure


def answers(dataset: Dataset, found: Mapping[tuple[int, ...], tuple]) -> Figure:
    """One sample on several grids: what was given, the truth and the prediction; in 1-D of the last grid.

    Args:
        found: by grid shape, each a tensor (1, T, C, *grid) in physical units.
    """
    from upsnb.training import metrics  # loads torch, as nothing else about a report needs it

    family, rows, errors = dataset.family, [], []
    for grid, (given, truth, forecast) in found.items():
        nrmse = float(metrics.nrmse_per_sample(metrics.sample_statistics(forecast, truth))[0])
        size, last = " x ".join(map(str, grid)), (_upright(field[0, -1, 0]) for field in (given, truth, forecast))
        rows.append((truth[0, :, 0], forecast[0, :, 0]) if len(grid) == 1 else plots.FieldSample(size, *last, nrmse))
        errors.append(f"{nrmse:.2g} on {size} points")
    title = f"{dataset.name}, a test sample: an nRMSE of {', '.join(errors)}"
    if dataset.spec.num_dims > 1:
        return plots.prediction_truth_error_2d(family, rows, title=title + SLICE * (dataset.spec.num_dims == 3))
    (length,), (low, high) = grid, family.domain[0]
    x = low + (high - low) * (np.arange(length) + 0.5) / length
    times = dataset.source.times[dataset.frames][-truth.shape[1] :]
    return plots.prediction_truth_error_1d(family, x, *rows[-1], times, title=title)


def members(dataset: Dataset, truth, drawn) -> Figure:
    """What a model draws of one sample, beside the truth: over space and time in 1-D, else at the last time.

    Args:
        truth: (T, C, *grid) physical, the frames that are forecast.
        drawn: (members, T, C, *grid).
    """
    family, truth, drawn = dataset.family, np.asarray(truth)[:, 0], np.asarray(drawn)[:, :, 0]
    error, spread = np.sqrt(np.mean((drawn.mean(0) - truth) ** 2)), np.sqrt(drawn.var(0, ddof=1).mean())
    title = f"{dataset.name}, {len(drawn)} members of one sample: error of their mean {error:.2g}, spread {spread:.2g}"
    if truth.ndim == 2:
        times = dataset.source.times[dataset.frames][-len(truth) :]
        x = dataset.source.coordinates[0]
        return plots.members_1d(family, x, times, truth, drawn, title=title)
    fields = np.stack([_upright(member[-1]) for member in drawn])
    return plots.members_2d(family, _upright(truth[-1]), fields, title=title + SLICE * (truth.ndim == 4))


def _upright(field: np.ndarray) -> np.ndarray:
    """Files hold (x, y), images want rows of y; of (x, y, z) the middle slice."""
    field = np.asarray(field)
    return (field if field.ndim < 3 else field[..., field.shape[-1] // 2]).T


def _picks(count: int) -> list[str]:
    """What evaluation's evenly ranked examples are called."""
    places = np.linspace(0, 1, count) if count > 1 else [0.5]
    named = {0.0: "best", 0.5: "median", 1.0: "worst"}
    return [named.get(float(place), f"{100 * place:.0f} % from best") for place in places]


def latest(events: list[dict], kind: str) -> dict[int, dict]:
    """Events of a kind by step; a resumed run repeats steps after its checkpoint, and the repeat is what counts."""
    found: dict[int, dict] = {}
    for event in events:
        if event["kind"] == kind:
            if found and event["step"] <= next(reversed(found)):
                found = {number: one for number, one in found.items() if number < event["step"]}
            found[event["step"]] = event
    return found


def whose(step: dict) -> str:
    """The dataset of a step event, where it is of one alone."""
    return step["datasets"][0] if len(step["datasets"]) == 1 else "all"


def fall(losses: list[float | None]) -> dict[str, float | None]:
    """Median loss over the first and the last tenth of the steps; a single step is as noisy as its batch."""
    tenth = max(1, len(losses) // 10)
    parts = {"first": losses[:tenth], "last": losses[-tenth:]}
    return {key: float(np.median(floats(part))) if part else None for key, part in parts.items()}
