"""Models to look at: their errors over the time of training, and over what each one costs."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean

import pandas as pd
from matplotlib.figure import Figure

from upsnb.report.file import number
from upsnb.report.style import (
    BLACK,
    ROLES,
    empty_figure,
    label,
    looks,
    positive,
    shared_legend,
    styled,
    writer,
)

COSTS = {  # name of a figure: quantity, unit, and the value of a row for a dataset
    "parameters": ("parameters", "-", lambda row, dataset: row["parameters"]),
    "memory": ("peak memory of a process", "GiB", lambda row, dataset: row["peak_memory_gib"]),
    "frame": ("time for a frame", "ms", lambda row, dataset: row["frame_ms"][dataset]),
}


def best(report: Mapping) -> dict[str, tuple[str, float]]:
    """By dataset, the model with the lowest test nRMSE, mean over its seeds, and this nRMSE."""
    found = {}
    for dataset in report["families"]:
        errors: dict[str, list[float]] = {}
        for row in report["rows"]:
            error = row["nrmse"][dataset]
            errors.setdefault(row["model"], []).append(float("inf") if error is None else error)
        found[dataset] = min(((name, mean(those)) for name, those in errors.items()), key=lambda pair: pair[1])
    return found


def _lowest(report: Mapping) -> str:
    return ", ".join(f"{dataset} {name} {number(error, 2)}" for dataset, (name, error) in best(report).items())


@styled
def over_time(report: Mapping) -> Figure:
    """Validation nRMSE of each dataset over training time, a curve a run; grey and dotted what needs no model."""
    title = f"After {report['time_limit_s']:g} s of training each, the lowest test nRMSE: {_lowest(report)}"
    figure, look = empty_figure(7.2, 3.2, title), looks(dict.fromkeys(row["model"] for row in report["rows"]))
    for ax, dataset in zip(figure.subplots(1, len(report["families"]), squeeze=False)[0], report["families"]):
        for row in report["rows"]:
            times, errors = zip(*((time_s, found[dataset]) for time_s, found in row["validations"]))
            how = {"marker": "o", "ms": 3.5, "lw": 1.3, "clip_on": False, **look[row["model"]]}
            ax.plot(times, positive(errors), **how, label=row["model"])
        for name, error in report["rows"][0]["references"][dataset].items():
            role = {"lw": 1.2, "color": BLACK, "linestyle": ":"} | ROLES.get(name, {})
            ax.axhline(error, **role, label=f"{name}, test split")
        ax.set(yscale="log", xlim=(0, None), xlabel=label("training time, compilation included", "s"))
        ax.set_ylabel(label(f"{dataset}: validation nRMSE"))
    shared_legend(figure, 3)
    return figure


@styled
def over_cost(report: Mapping, cost: str) -> Figure:
    """Test nRMSE of each dataset over one of COSTS, a dot a run; down and to the left is better."""
    quantity, unit, value = COSTS[cost]
    first, look = next(iter(report["families"])), looks(dict.fromkeys(row["model"] for row in report["rows"]))
    costs = {row["model"]: number(value(row, first), 3) for row in report["rows"]}
    told = ", ".join(f"{name} {found}{f' {unit}' * (unit != '-')}" for name, found in costs.items())
    of = f" of {first}" if cost == "frame" else ""
    figure = empty_figure(7.2, 3.0, f"Lowest test nRMSE: {_lowest(report)}. {quantity.capitalize()}{of}: {told}")
    for ax, dataset in zip(figure.subplots(1, len(report["families"]), squeeze=False)[0], report["families"]):
        for row in report["rows"]:
            how = {"marker": "o", "ms": 6, "color": look[row["model"]]["color"], "linestyle": "none"}
            ax.plot([value(row, dataset)], positive([row["nrmse"][dataset]]), **how, label=row["model"])
        ax.set(yscale="log", xlabel=label(quantity, unit), ylabel=label(f"{dataset}: test nRMSE"))
        ax.margins(0.15)
        if cost == "memory":  # libraries and data are in it: how little of it is the model's shows from zero on only
            ax.set_xlim(left=0)
        else:
            ax.set(xscale="log")
    shared_legend(figure, 6)
    return figure


def table(report: Mapping) -> pd.DataFrame:
    """One row a run: errors on the test split, and costs; below them what needs no model."""
    rows = [
        {
            "model": row["model"],
            "seed": str(row["seed"]),
            "parameters": number(row["parameters"]),
            "steps": number(row["steps"]),
            "samples/s": number(row["samples_per_s"], 3),
            **{f"{name}: nRMSE": number(error, 3) for name, error in row["nrmse"].items()},
            "memory [GiB]": number(row["peak_memory_gib"], 3),
            **{f"{name}: ms a frame": number(time_ms, 3) for name, time_ms in row["frame_ms"].items()},
        }
        for row in report["rows"]
    ]
    without: dict[str, dict] = {}
    for dataset, references in report["rows"][0]["references"].items():
        for name, error in references.items():
            without.setdefault(name, {"model": name})[f"{dataset}: nRMSE"] = number(error, 3)
    return pd.DataFrame([*rows, *without.values()]).fillna("")


def draw(report: Mapping) -> dict[str, Figure]:
    """All figures of a report."""
    return {"over_time": over_time(report), **{f"over_{cost}": over_cost(report, cost) for cost in COSTS}}


write_figures = writer(draw)
