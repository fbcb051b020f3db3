"""A profile to look at: where a step goes, and what happened before the first one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from upsnb.profile.report import COMPUTED, MEANINGS, SHARES
from upsnb.report.style import BLACK, BLUE, GREY, VERMILLION, empty_figure, label, save, styled
from upsnb.runs.runfolder import FIGURES, REPORT
from upsnb.spans import OTHER

LEAST_DRAWN = 0.005  # of a step; smaller parts would be labels without bars


@styled
def where_a_step_goes(report: Mapping) -> Figure:
    """Milliseconds of a mean step by part: blue computes, vermillion waits, grey is between steps.

    With several ranks a bar is their mean and the dots are the ranks.
    """
    names = [name for name in SHARES if report["shares"][name] >= LEAST_DRAWN]
    figure = empty_figure(7.2, 1.0 + 0.3 * len(names))
    ax = figure.subplots()
    for place, name in enumerate(names):
        share, time_ms = report["shares"][name], report["parts_ms"][name]
        ax.barh(place, time_ms, 0.62, color=_colour(name))
        reach = time_ms
        if report["num_ranks"] > 1:
            ranks_ms = [rank[name] * report["step_ms"] for rank in report["shares_by_rank"]]
            ax.plot(ranks_ms, [place] * len(ranks_ms), "o", ms=3, color=BLACK)
            reach = max(reach, *ranks_ms)
        _note(ax, reach, place, f"{share:.0%}")
    for name, text in ((COMPUTED[0], "computes"), ("data wait", "waits"), (OTHER, "between steps")):
        ax.barh(0, 0, color=_colour(name), label=text)
    if report["num_ranks"] > 1:
        ax.plot([], [], "o", ms=3, color=BLACK, label="one rank")
    _finish(ax, names, label("time in a mean step", "ms"))
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
    return figure


@styled
def start_up(report: Mapping) -> Figure:
    """What happened between launch and first step, one after the other."""
    parts = {name: value for name, value in report["start_up_s"].items() if not name.startswith("compiling")}
    figure = empty_figure(7.2, 0.9 + 0.3 * len(parts))
    ax, begin = figure.subplots(), 0.0
    for place, value in enumerate(parts.values()):
        ax.barh(place, value, 0.62, left=begin, color=BLUE)
        begin += value
        _note(ax, begin, place, f"{value:.1f} s")
    _finish(ax, list(parts), label("time since launch", "s"))
    return figure


def _colour(name: str) -> str:
    return GREY if name == OTHER else BLUE if name in COMPUTED else VERMILLION


def _note(ax: Axes, x: float, y: float, text: str) -> None:
    ax.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center", fontsize=8)


def _finish(ax: Axes, names: list[str], quantity: str) -> None:
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.margins(x=0.1)
    ax.set_xlim(left=0)
    ax.set_xlabel(quantity)


def table(report: Mapping) -> pd.DataFrame:
    """Every part of a step with what it means."""
    rows = {
        name: {"share": f"{report['shares'][name]:.1%}", "ms": round(report["parts_ms"][name], 3), "what": what}
        for name, what in MEANINGS.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def answers_table(report: Mapping) -> pd.DataFrame:
    """Five questions and their answers."""
    return pd.Series({f"{question}?": found["answer"] for question, found in report["questions"].items()}).to_frame("")


def write_figures(folder: Path | str) -> dict[str, Path]:
    """Draw a profile from its report into `figures/`; figure name -> PNG."""
    report = json.loads((Path(folder) / REPORT).read_text())
    drawn = {"where_a_step_goes": where_a_step_goes(report), "start_up": start_up(report)}
    return {name: save(figure, Path(folder) / FIGURES, name) for name, figure in drawn.items()}
