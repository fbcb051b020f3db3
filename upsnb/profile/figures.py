"""A profile to look at: where a step goes, and what happened before the first one."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from upsnb.profile.report import COMPUTED, MEANINGS, SHARES
from upsnb.report.style import (
    BLACK,
    BLUE,
    GREY,
    VERMILLION,
    empty_figure,
    label,
    legend,
    name_rows,
    note,
    styled,
    writer,
)
from upsnb.spans import OTHER

LEAST_DRAWN = 0.005  # of a step; smaller parts would be labels without bars
ROLES = ((BLUE, "computes"), (VERMILLION, "waits"), (GREY, "between steps"))


@styled
def where_a_step_goes(report: Mapping) -> Figure:
    """Milliseconds of a mean step by part: blue computes, vermillion waits, grey is between steps.

    With several ranks a bar is their mean and the dots are the ranks.
    """
    names = [name for name in SHARES if report["shares"][name] >= LEAST_DRAWN]
    shares = {word: sum(report["shares"][name] for name in SHARES if _role(name)[1] == word) for _, word in ROLES}
    told = ", ".join(f"{share:.0%} {word}" for word, share in shares.items())
    figure = empty_figure(7.2, 1.0 + 0.3 * len(names), f"A mean step of {report['step_ms']:.4g} ms: {told}")
    ax = figure.subplots()
    for place, name in enumerate(names):
        share, time_ms = report["shares"][name], report["parts_ms"][name]
        colour, word = _role(name)
        ax.barh(place, time_ms, 0.62, color=colour, label=word if word not in ax.get_legend_handles_labels()[1] else "")
        reach = time_ms
        if report["num_ranks"] > 1:
            ranks_ms = [rank[name] * report["step_ms"] for rank in report["shares_by_rank"]]
            ax.plot(ranks_ms, [place] * len(ranks_ms), "o", ms=3, color=BLACK, label="" if place else "one rank")
            reach = max(reach, *ranks_ms)
        note(ax, reach, place, f"{share:.0%}")
    _finish(ax, names, label("time in a mean step", "ms"))
    legend(ax)
    return figure


@styled
def start_up(report: Mapping) -> Figure:
    """What happened between launch and first step, one after the other."""
    parts = {name: value for name, value in report["start_up_s"].items() if not name.startswith("compiling")}
    longest, total = max(parts, key=parts.get), sum(parts.values())
    title = f"The first step ends {total:.1f} s after launch, {parts[longest] / total:.0%} of it is {longest}"
    figure = empty_figure(7.2, 0.9 + 0.3 * len(parts), title)
    ax, begin = figure.subplots(), 0.0
    for place, value in enumerate(parts.values()):
        ax.barh(place, value, 0.62, left=begin, color=BLUE)
        begin += value
        note(ax, begin, place, f"{value:.1f} s")
    _finish(ax, list(parts), label("time since launch", "s"))
    return figure


def _role(name: str) -> tuple[str, str]:
    """Colour of a part of a step, and what it does."""
    return ROLES[2 if name == OTHER else 0 if name in COMPUTED else 1]


def _finish(ax: Axes, names: list[str], quantity: str) -> None:
    name_rows(ax, names, quantity)
    ax.margins(x=0.1)
    ax.set_xlim(left=0)


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


write_figures = writer(lambda report: {"where_a_step_goes": where_a_step_goes(report), "start_up": start_up(report)})
