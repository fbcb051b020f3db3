"""From run folders and datasets to figures: which arrays a figure shows, and what it is called. Needs no model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from upsnb.config import RunConfig
from upsnb.data.datasets import Dataset
from upsnb.data.families import FAMILIES
from upsnb.report import plots
from upsnb.report.style import edges, label
from upsnb.runs import runfolder
from upsnb.runs.handle import Run
from upsnb.runs.throughput import steady_throughput


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
    def rolled_out(self) -> list[str]:
        """Datasets that have a time to roll out over."""
        return [name for name, result in self.results.items() if result["per_time"]]

    @once
    def prediction(self, name: str) -> Figure:
        """Truth, prediction and error: in 1-D of the median sample over space and time, in 2-D of each kept sample."""
        kept, family = self._examples(name), FAMILIES[self.config.data.datasets[name].family]
        truth, forecast, inputs = kept["truth"][:, :, 0], kept["forecast"][:, :, 0], kept["inputs"][:, -1, 0]
        picks = _picks(len(truth))
        what, quantity = f"{name}, {self.split} split", family.output_channels[0]
        if truth.ndim == 3:
            i = len(picks) // 2
            title = (
                f"{what}: {picks[i]} sample, number {kept['samples'][i]}, nRMSE {kept['nrmse'][i]:.2g} over all frames"
            )
            times = kept["times"][-truth.shape[1] :]
            return plots.prediction_truth_error_1d(
                kept["x"], truth[i], forecast[i], times, quantity=quantity, title=title
            )
        samples = [
            plots.FieldSample(
                pick, _upright(inputs[i]), _upright(truth[i, -1]), _upright(forecast[i, -1]), float(kept["nrmse"][i])
            )
            for i, pick in enumerate(picks)
        ]
        return plots.prediction_truth_error_2d(
            samples, quantity=quantity, input_quantity=family.input_channels[0], title=f"{what}: by nRMSE"
        )

    @once
    def rollout(self, name: str) -> Figure:
        """nRMSE as the self-fed forecast goes on, beside persistence."""
        per_time = self.results[name]["per_time"]
        return plots.rollout_error(
            per_time["time"],
            {"model": _floats(per_time["rollout_nrmse"]), "persistence": _floats(per_time["persistence_nrmse"])},
            samples={"model": _floats(per_time["rollout_nrmse_quartiles"])},  # two rows: their own middle half
            given_until=per_time["given_until"],
            title=f"{name}: {self.results[name]['num_samples']} trajectories of the {self.split} split",
        )

    @once
    def spectrum(self, name: str) -> Figure:
        """Energy by wavenumber of truth, prediction and error at the last frame, mean over the kept samples."""
        import torch  # here, as nothing else about a report needs it

        from upsnb.training import metrics

        kept = self._examples(name)
        last = {"truth": kept["truth"][:, -1:], "prediction": kept["forecast"][:, -1:]}
        last["error"] = last["prediction"] - last["truth"]
        curves = {}
        for curve, values in last.items():
            wavenumber, energy = metrics.energy_spectrum(torch.from_numpy(values))
            curves[curve] = energy[:, 0, 0].mean(0).numpy()
        family = FAMILIES[self.config.data.datasets[name].family]
        when = f" at t = {kept['times'][-1]:.3g}" if family.time_dependent else ""
        title = f"{name}{when}: mean of {len(kept['truth'])} samples of the {self.split} split"
        return plots.spectra(wavenumber.numpy(), curves, quantity=family.output_channels[0], title=title)

    @once
    def losses(self) -> Figure:
        """Every loss term by step and dataset, and the validation error."""
        steps = _latest(self.events)
        terms: dict[str, dict[int, float]] = {}
        for number, step in steps.items():
            for term, value in step["losses"].items():
                whose = step["datasets"][0] if len(step["datasets"]) == 1 else "all"
                terms.setdefault(f"{term}, {whose}", {})[number] = value
        curves = {term: _floats([values.get(number) for number in steps]) for term, values in terms.items()}
        checks = [event for event in self.events if event["kind"] == "eval"]
        names = list(dict.fromkeys(name for event in checks for name in event["val_nrmse"]))
        validation = {
            name: ([event["step"] for event in checks], _floats([event["val_nrmse"].get(name) for event in checks]))
            for name in names
        }
        return plots.loss_terms(list(steps), curves, validation=validation)

    @once
    def throughput(self) -> Figure:
        """Samples per second of every step, and the median with its interval."""
        speed = steady_throughput(self.events)
        steps = list(_latest(self.events).values())
        columns = ([step[key] for step in steps] for key in ("time_s", "samples_per_s", "steady"))
        return plots.throughput(*columns, *_floats([speed["median"]]), tuple(_floats(speed["ci95"])))

    @once
    def distribution(self) -> Figure:
        """Which share of the samples has which error: over the whole rollout where there is one."""
        scores, baselines = {}, {}
        for name, result in self.results.items():
            rollout = "rollout_" if "rollout_nrmse" in result["per_sample"] else ""
            curve = f"{name}{', rollout' * bool(rollout)}"
            scores[curve] = _floats(result["per_sample"][f"{rollout}nrmse"])
            found = [result.get(f"{rollout}{key}_nrmse_mean") for key in ("persistence", "baseline")]
            baselines[curve] = next((value for value in found if value is not None), np.nan)
        return plots.error_distribution(scores, baselines=baselines, baseline_name="without a model")

    def all(self) -> dict[str, Callable[[], Figure]]:
        """Every figure this run can show, by file name."""
        drawings: dict[str, Callable[[], Figure]] = {}
        if any(event["kind"] == "step" for event in self.events):
            drawings |= {"loss": self.losses, "throughput": self.throughput}
        for name in self.results:
            drawings[f"prediction_{name}"] = partial(self.prediction, name)
            drawings[f"spectrum_{name}"] = partial(self.spectrum, name)
            if name in self.rolled_out:
                drawings[f"rollout_{name}"] = partial(self.rollout, name)
        if self.results:
            drawings["error_distribution"] = self.distribution
        return drawings

    def _examples(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.folder / runfolder.EXAMPLES) as file:
            return {key.removeprefix(f"{name}/"): file[key] for key in file.files if key.startswith(f"{name}/")}


def data_samples(dataset: Dataset) -> Figure:
    """The first four training samples: space-time images in 1-D, input over output in 2-D."""
    chosen, family = dataset.splits["train"][:4], dataset.family
    inputs, targets = dataset.source.read(chosen, dataset.frames if dataset.spec.time_dependent else slice(None))
    quantity, title = label(family.output_channels[0]), f"{dataset.name}: the first {len(chosen)} training samples"
    if dataset.spec.num_dims == 1:
        extent = edges(dataset.source.coordinates[0]) + edges(dataset.source.times[dataset.frames])
        rows, y_label = {quantity: targets[:, :, 0]}, label("time t")
        return plots.dataset_samples(rows, extent=extent, x_label=label("x"), y_label=y_label, title=title)
    rows = {} if family.time_dependent else {label(family.input_channels[0]): [_upright(x[-1, 0]) for x in inputs]}
    rows[quantity] = [_upright(x[-1, 0]) for x in targets]
    extent = edges(dataset.source.coordinates[0]) + edges(dataset.source.coordinates[1])
    return plots.dataset_samples(rows, extent=extent, x_label=label("x"), y_label=label("y"), square=True, title=title)


def _upright(field: np.ndarray) -> np.ndarray:
    """Files hold (x, y), images want rows of y."""
    return np.asarray(field).T


def _picks(count: int) -> list[str]:
    """What evaluation's evenly ranked examples are called."""
    places = np.linspace(0, 1, count) if count > 1 else [0.5]
    named = {0.0: "best", 0.5: "median", 1.0: "worst"}
    return [named.get(float(place), f"{100 * place:.0f} % from best") for place in places]


def _latest(events: list[dict]) -> dict[int, dict]:
    """Step events by step; a resumed run repeats steps after its checkpoint, and the repeat is what counts."""
    steps: dict[int, dict] = {}
    for event in events:
        if event["kind"] == "step":
            if steps and event["step"] <= next(reversed(steps)):
                steps = {number: step for number, step in steps.items() if number < event["step"]}
            steps[event["step"]] = event
    return steps


def _floats(values: list) -> np.ndarray:
    """null, which JSON has for NaN and infinity, as NaN."""
    if values and isinstance(values[0], list):
        return np.stack([_floats(row) for row in values])
    return np.array([np.nan if value is None else value for value in values], dtype=float)
