"""A sweep to look at: the table of its points, and its errors over each setting that was varied."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from upsnb.compare.search import told
from upsnb.report.file import number
from upsnb.report.style import BLUE, VERMILLION, empty_figure, label, shared_legend, styled, writer
from upsnb.runs.events import naming

MOST_COLUMNS = 3  # of panels in one row
MOST_TICKS = 5  # as few values of a setting are the ticks


def table(report: Mapping) -> pd.DataFrame:
    """Every point, the best by validation first: its settings, errors over its seeds, and what became of the others."""
    rows, metric = [], naming(report)["metric"]
    for point in report["points"]:
        low, high = point["nrmse"]["ci95"]
        rows.append(
            {
                **{path.rpartition(".")[2]: str(value) for path, value in point["settings"].items()},
                f"validation {metric}": number(point["nrmse"]["median"]),
                "95 %": "-" if low is None else f"{number(low)} to {number(high)}",
                **{name: number(value) for name, value in point["datasets"].items()},
                "seeds": point["seeds"],
                "failed": point["failed"],
                "missing": point["missing"],
                "train [s]": number(point["train_time_s"]),
            }
        )
    return pd.DataFrame(rows).fillna("-")


@styled
def slices(report: Mapping) -> Figure:
    """Validation error of every point over each setting, with its interval over seeds; the best is marked in all."""
    points = [point for point in report["points"] if point["seeds"]]
    paths, metric = [*report["points"][0]["settings"]], naming(report)["metric"]
    title = "Nothing has come to its end yet"
    if points:
        best = points[0]
        reached = f"{told(best['settings'])}, {metric} {number(best['nrmse']['median'])}"
        title = f"Best of {len(points)} points by validation: {reached}"
    columns = min(len(paths), MOST_COLUMNS)
    rows = -(-len(paths) // columns)
    figure = empty_figure(max(4.8, 2.4 * columns), 2.6 * rows + 0.3, title)
    axes = np.atleast_1d(figure.subplots(rows, columns, sharey=True, squeeze=False)).ravel()
    for ax, path in zip(axes, paths):
        _slice(ax, points, path)
    for ax in axes[len(paths) :]:
        ax.set_visible(False)
    for ax in axes[::columns]:
        ax.set_ylabel(label(f"validation {metric}"))
    if points:
        shared_legend(figure, 2)
    return figure


def _slice(ax: Axes, points: list[Mapping], path: str) -> None:
    values = [point["settings"][path] for point in points]
    is_number = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    if is_number:
        places = np.array(values, dtype=float)
        if len(values) and places.min() > 0 and places.max() > 5 * places.min():
            ax.set_xscale("log")
        elif len(ticks := sorted({*values})) <= MOST_TICKS:
            ax.set_xticks(ticks, [number(value, 3) for value in ticks])
    else:
        names = sorted({str(value) for value in values})
        places = np.array([names.index(str(value)) for value in values], dtype=float)
        ax.set_xticks(range(len(names)), names)
        ax.margins(x=0.2)
    medians = np.array([point["nrmse"]["median"] for point in points])
    ends = np.array([point["nrmse"]["ci95"] for point in points], dtype=float).reshape(-1, 2).T
    spread = np.nan_to_num(np.abs(ends - medians))  # of a single seed there is no interval
    ax.errorbar(places, medians, spread, ls="", marker="o", ms=4, color=BLUE, elinewidth=1, label="a point")
    ax.errorbar(places[:1], medians[:1], spread[:, :1], ls="", marker="D", ms=6, color=VERMILLION, label="the best")
    if len(medians) and medians.min() > 0 and medians.max() > 3 * medians.min():
        ax.set_yscale("log")
    ax.set_xlabel(path)


write_figures = writer(lambda report: {"sweep": slices(report)})
