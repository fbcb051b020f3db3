"""Figures of memory: predicted beside measured, through a step, by module, the largest batch, CUDA's history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from upsnb.memory.ledger import BACKWARD, KINDS, Account
from upsnb.report.style import (
    BLACK,
    BLUE,
    GAP,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    empty_figure,
    label,
    legend,
    styled,
)

COLOURS = dict(zip(KINDS, (BLUE, SKY, GREY, GREEN, ORANGE, VERMILLION, PURPLE), strict=True))
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
MOST_MODULES = 12  # that have a bar of their own
VISIBLE = 0.004  # share of the largest bar below which a kind is not drawn nor named


@styled
def predicted_beside_measured(rows: Sequence[Mapping]) -> Figure:
    """Two bars a config, stacked by kind: full colours predicted, pale ones measured.

    Args:
        rows: from `bars`; "measured_bytes" is the allocator's own total.
    """
    figure = empty_figure(7.2, 0.9 + 0.52 * len(rows))
    ax = figure.subplots()
    largest = max(sum(row["predicted"].values()) for row in rows)
    unit, scale = _unit(largest)
    for place, row in enumerate(rows):
        total = sum(row["predicted"].values())
        _stack(ax, place - (0.19 if row["measured"] is not None else 0), row["predicted"], scale, 1.0)
        text = f"{total / scale:.3g} predicted, not measured"
        if row["measured"] is not None:
            _stack(ax, place + 0.19, row["measured"], scale, 0.45)
            error = round(100 * (total / row["measured_bytes"] - 1), 1) + 0.0  # no -0.0
            text = f"{total / scale:.3g} predicted, {row['measured_bytes'] / scale:.3g} measured ({error:+.1f} %)"
        longest = max(total, row["measured_bytes"] or 0) / scale
        ax.text(longest + 0.012 * largest / scale, place, text, va="center", fontsize=7.5)
    ax.set(yticks=range(len(rows)), yticklabels=[row["config"].replace("_", " ") for row in rows])
    ax.set(xlabel=label("memory at the step's fullest moment", unit), xlim=(0, 1.6 * largest / scale))
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    _name_kinds(ax, [row["predicted"] for row in rows], largest, " (pale: measured)")
    return figure


def bars(rows: Sequence[Mapping]) -> list[dict]:
    """What `predicted_beside_measured` draws, from the rows of `planning.compare`."""
    return [
        {
            "config": row["config"],
            "predicted": row["predicted"].account.by_kind(),
            "measured": row["measured"].account.by_kind() if row["measured"] else None,
            "measured_bytes": row["measured"].nbytes if row["measured"] else None,
        }
        for row in rows
    ]


def _stack(ax: Axes, place: float, kinds: Mapping[str, int], scale: float, alpha: float, height: float = 0.36) -> None:
    left = 0.0
    for kind, nbytes in kinds.items():
        ax.barh(place, nbytes / scale, height, left=left, color=COLOURS[kind], alpha=alpha, linewidth=0)
        left += nbytes / scale


def _name_kinds(ax: Axes, stacks: Sequence[Mapping[str, int]], largest: float, more: str = "") -> None:
    """Colours of the kinds that can be seen."""
    seen = [kind for kind in KINDS if any(stack[kind] > VISIBLE * largest for stack in stacks)]
    patches = [Patch(color=COLOURS[kind], label=kind + (more if kind == seen[-1] else "")) for kind in seen]
    ax.legend(
        handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(patches), columnspacing=1.1, handlelength=1
    )


@styled
def through_a_step(account: Account) -> Figure:
    """Memory by kind while the step goes on, stacked; its fullest moment marked."""
    times, levels = account.timeline()
    begin = account.marks[0][0] if account.marks else 0
    times = np.maximum(times, begin) / 1e3
    begin, end = begin / 1e3, account.end / 1e3
    marks = [(start / 1e3, what) for start, what in account.marks]
    total = levels.sum(axis=1)
    unit, scale = _unit(total.max())
    figure = empty_figure(7.2, 3.2)
    ax = figure.subplots()
    seen = [i for i in range(len(KINDS)) if levels[:, i].max() > VISIBLE * total.max()]
    ends = np.append(times, end)
    stacked = np.vstack((levels, levels[-1:]))[:, seen].T / scale
    ax.stackplot(
        ends,
        stacked,
        step="post",
        colors=[COLOURS[KINDS[i]] for i in seen],
        labels=[KINDS[i] for i in seen],
        linewidth=0,
    )
    peak = int(total.argmax())
    ax.plot(times[peak], total[peak] / scale, "o", color=BLACK, markersize=4)
    right = times[peak] > 0.6 * ends[-1]
    ax.annotate(
        f"{total[peak] / scale:.3g} {unit}",
        (times[peak], total[peak] / scale),
        xytext=(-7 if right else 7, 2),
        textcoords="offset points",
        ha="right" if right else "left",
        fontweight="bold",
    )
    for number, (start, what) in enumerate(marks):
        stop = marks[number + 1][0] if number + 1 < len(marks) else ends[-1]
        if number:
            ax.axvline(start, color=GREY, linewidth=0.6, linestyle=":")
        short = {"forward pass": "forward", BACKWARD: "backward"}.get(what, "optimizer")
        if stop - start > 0.055 * (ends[-1] - begin):
            ax.text(
                (start + stop) / 2, 1.19 * total.max() / scale, short, ha="center", va="top", fontsize=7.5, color=GREY
            )
    ax.set(xlim=(begin, ends[-1]), ylim=(0, 1.21 * total.max() / scale))
    ax.set(xlabel=label("operations and frees since the step began", "thousands"), ylabel=label("memory", unit))
    legend(ax, len(seen))
    return figure


@styled
def by_module(table: Mapping[str, Mapping[str, int]]) -> Figure:
    """Where the fullest moment's bytes belong: a bar a module, stacked by kind, the largest first."""
    modules = dict(list(table.items())[:MOST_MODULES])
    rest = list(table.values())[MOST_MODULES:]
    if rest:
        modules["all others"] = {kind: sum(row[kind] for row in rest) for kind in KINDS}
    figure = empty_figure(7.2, 1.0 + 0.24 * len(modules))
    ax = figure.subplots()
    whole = sum(sum(row.values()) for row in modules.values())
    largest = max(sum(row.values()) for row in modules.values())
    unit, scale = _unit(largest)
    for place, row in enumerate(modules.values()):
        _stack(ax, place, row, scale, 1.0, 0.7)
        size = sum(row.values())
        ax.text(size / scale + 0.01 * largest / scale, place, f"{100 * size / whole:.0f} %", va="center", fontsize=7.5)
    ax.set(yticks=range(len(modules)), yticklabels=list(modules))
    ax.set(xlabel=label("memory at the step's fullest moment", unit), xlim=(0, 1.1 * largest / scale))
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    _name_kinds(ax, list(modules.values()), largest)
    return figure


@styled
def largest_batch(table: pd.DataFrame) -> Figure:
    """Largest batch by phase set (rows) and device (columns): numbers on a logarithmic colour."""
    values = np.maximum(table.to_numpy(dtype=float), 0)
    positive = values[values > 0]
    figure = empty_figure(7.2, 1.3 + 0.34 * len(table))
    ax = figure.subplots()
    ax.grid(False)
    low, high = (positive.min(), positive.max()) if positive.size else (1, 10)
    colours = matplotlib.colormaps["YlGnBu"].with_extremes(bad=GAP)
    norm = LogNorm(low, max(high, 1.01 * low))
    image = ax.imshow(np.where(values > 0, values, np.nan), aspect="auto", cmap=colours, norm=norm)
    for (row, column), value in np.ndenumerate(values):
        dark = value > 0 and norm(value) > 0.55
        text = f"{value:,.0f}" if value else "none"
        ax.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else BLACK)
    ax.set(xticks=range(table.shape[1]), xticklabels=list(table.columns), xlabel="device [-]")
    ax.set(yticks=range(len(table)), yticklabels=[name.replace("_", " ") for name in table.index], ylabel="phases [-]")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=ax, pad=0.02)
    bar.set_label(label("largest batch_size", "pairs"))
    return figure


@styled
def cuda_history(history: Mapping, *, title: str = "") -> Figure:
    """What CUDA's allocator held over time and, at the end of its memory, the largest pieces and who asked for them.

    Args:
        history: from `measure.history`.
    """
    levels = np.asarray(history["allocated_bytes"], dtype=float)
    unit, scale = _unit(levels.max(initial=1.0))
    pieces, failure = history["largest"], history["out_of_memory"]
    figure = empty_figure(7.2, 3.0 + (0.22 * len(pieces) + 0.6 if pieces else 0), title)
    upper, lower = figure.subplots(2, 1, height_ratios=[3, max(0.24 * len(pieces), 0.5)])
    upper.step(history["time_ms"], levels / scale, where="post", color=BLUE, linewidth=1.0)
    upper.fill_between(history["time_ms"], levels / scale, step="post", color=BLUE, alpha=0.2, linewidth=0)
    upper.set(xlabel=label("time since recording began", "ms"), ylabel=label("allocated", unit), ylim=(0, None))
    if failure is not None:
        when = history["time_ms"][failure["index"]]
        upper.axvline(when, color=VERMILLION)
        asked_unit, asked_scale = _unit(failure["requested_bytes"])
        text = f"out of memory: {failure['requested_bytes'] / asked_scale:.3g} {asked_unit} more were asked for"
        upper.text(when, 1.02, text, transform=upper.get_xaxis_transform(), color=VERMILLION, ha="right", fontsize=8)
    sizes = [piece["nbytes"] / scale for piece in pieces]
    lower.barh(range(len(pieces)), sizes, 0.7, color=BLUE)
    lower.set(yticks=range(len(pieces)), yticklabels=[piece["where"] for piece in pieces])
    lower.set(xlabel=label("largest pieces " + ("then" if failure else "at the peak"), unit))
    lower.invert_yaxis()
    lower.grid(axis="y", visible=False)
    return figure


def _unit(nbytes: float) -> tuple[str, int]:
    """The largest unit in which a size is at least 2."""
    return next(((unit, scale) for unit, scale in reversed(UNITS.items()) if nbytes >= 2 * scale), ("KiB", 2**10))
