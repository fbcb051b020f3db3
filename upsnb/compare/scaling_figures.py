"""Scaling to look at: throughput beside the ideal and the promised one, and what of a step communicates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from upsnb.compare.scaling import AGAIN, PROMISED, REHEARSAL, Entry, finding
from upsnb.report.file import factor, number
from upsnb.report.style import (
    BLUE,
    GREY,
    VERMILLION,
    empty_figure,
    label,
    name_rows,
    note,
    shared_legend,
    styled,
    writer,
)
from upsnb.runs.events import naming

COLOURS, DASHES = {"ddp": BLUE, "fsdp2": VERMILLION}, {"weak": "-", "strong": ":", AGAIN: "-"}
MARKERS = {"weak": "o", "strong": "s", AGAIN: "o"}


@styled
def throughput(report: Mapping) -> Figure:
    """Left, throughput over one rank's, with the ideal dashed and the promised range in grey; right, the share
    of a step that waits for communication."""
    rows = [row for row in report["rows"] if row["ratio"]["median"] is not None]
    title = f"{len(rows)} of {len(report['rows'])} were measured"
    if rows:
        best = max(rows, key=lambda row: (row["ranks"], row["ratio"]["median"]))
        many = f"{best['ranks']} ranks ({best['wrapper']}, {best['mode']})"
        title = f"Throughput of {many} over one rank's: {factor(best['ratio'])}"
    figure = empty_figure(7.2, 3.3, f"{title}. {REHEARSAL if report['rehearsal'] else ''}".strip())
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    counts = sorted({1, *(row["ranks"] for row in report["rows"])})
    left.plot(counts, counts, color=GREY, ls="--", lw=1, label="ideal")
    for count, (low, high) in PROMISED.items():
        if count in counts:
            left.fill_between([count * 0.95, count * 1.05], low, high, color=GREY, alpha=0.35, lw=0, label="promised")
    for wrapper, mode in sorted({(row["wrapper"], row["mode"]) for row in rows if row["mode"] != AGAIN}):
        chosen = [row for row in rows if row["wrapper"] == wrapper and row["mode"] in (mode, AGAIN)]
        if wrapper == "fsdp2" and mode != "weak":  # a single rank's batch is not shared: one row for both
            chosen += [row for row in rows if row["wrapper"] == wrapper and row["ranks"] == 1]
        chosen = sorted(chosen, key=lambda row: row["ranks"])
        _series(left, chosen, wrapper, mode)
    left.set_xscale("log", base=2)
    left.set_yscale("log", base=2)
    ends = np.log2(
        [1, *counts, *(end for row in rows for end in (*row["ratio"]["ci95"], row["ratio"]["median"]) if end)]
    )
    ticks = 2.0 ** np.arange(np.floor(ends.min()), np.ceil(ends.max()) + 1)
    left.set_xlabel(label("ranks"))
    left.set_ylabel(label("throughput over one rank's"))
    shared_legend(figure, 6)
    _communication(
        right, [row for row in report["rows"] if row["ranks"] > 1 and row["communication_share"] is not None]
    )
    left.xaxis.set_major_locator(FixedLocator(counts))
    left.yaxis.set_major_locator(FixedLocator(ticks))
    for axis in (left.xaxis, left.yaxis):
        axis.set_minor_locator(NullLocator())
    return figure


def _series(ax: Axes, rows: list[Mapping], wrapper: str, mode: str) -> None:
    style = {"color": COLOURS[wrapper], "ls": DASHES[mode]}
    places = [row["ranks"] * (1.03 if wrapper == "fsdp2" else 0.97) for row in rows]  # beside each other
    medians = np.array([row["ratio"]["median"] for row in rows])
    ends = [[x if x is not None else row["ratio"]["median"] for x in row["ratio"]["ci95"]] for row in rows]
    spread = np.abs(np.array(ends).T - medians)
    ax.errorbar(places, medians, spread, marker=MARKERS[mode], ms=4, lw=1.5, label=f"{wrapper}, {mode}", **style)


def _communication(ax: Axes, rows: list[Mapping]) -> None:
    names = [f"{row['ranks']} {row['wrapper']} {row['mode']}" for row in rows]
    shares = [100 * row["communication_share"] for row in rows]
    ax.barh(range(len(rows)), shares, 0.62, color=[COLOURS[row["wrapper"]] for row in rows])
    for place, share in enumerate(shares):
        note(ax, share, place, f"{share:.0f} %")
    name_rows(ax, names, label("step waiting for communication", "%"))
    ax.set_ylim(max(len(rows), 4) - 0.5, -0.5)  # no broad bars where there are few
    ax.margins(x=0.2)
    ax.set_xlim(left=0)


def plan_table(entries: Sequence[Entry]) -> pd.DataFrame:
    """What will be measured, and the batch of each rank."""
    return pd.DataFrame(
        {
            "ranks": entry.ranks,
            "wrapper": entry.wrapper,
            "mode": entry.mode,
            "batch a rank": entry.config.training.batch_size,
            "accumulated": entry.config.training.accum_steps,
        }
        for entry in entries
    )


def table(report: Mapping) -> pd.DataFrame:
    """Every entry: promised and measured throughput, efficiency, communication; what is left out says why."""
    unit = naming(report)["unit"]
    rows = [
        {
            "ranks": row["ranks"],
            "wrapper": row["wrapper"],
            "mode": row["mode"],
            "pairs a step": row["effective_batch"],
            f"{unit}/s": number((row["samples_per_s"] or {}).get("median")),
            "promised": " to ".join(map(str, row["promised"] or ())),
            "over one rank": finding(row),
            "efficiency": number(row["efficiency"], 3),
            "communication": "-" if row["communication_share"] is None else f"{row['communication_share']:.1%}",
            "MB sent (computed)": number(row["bytes_per_step"] and row["bytes_per_step"] / 1e6, 3),
        }
        for row in report["rows"]
    ]
    for name, reason in report["skipped"].items():
        entry = dict(zip(("ranks", "wrapper", "mode"), name.split("-")))
        rows.append({**dict.fromkeys(rows[0] if rows else (), "-"), **entry, "over one rank": f"left out: {reason}"})
    return pd.DataFrame(rows)


write_figures = writer(lambda report: {"scaling": throughput(report)})
