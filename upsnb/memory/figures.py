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

from upsnb.memory.ledger import KINDS, Account
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
    name_rows,
    note,
    styled,
)

COLOURS = dict(zip(KINDS, (BLUE, SKY, GREY, GREEN, ORANGE, VERMILLION, PURPLE), strict=True))
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
MOST_MODULES = 12  # that have a bar of their own
LEAST_DRAWN = 0.005  # of all bytes that a module of its own holds; smaller ones would be labels without bars
MEASURED = 0.45  # opacity of what was measured
FULLEST = "memory at the step's fullest moment"
VISIBLE = 0.004  # share of the largest bar below which a kind is not drawn nor named


@styled
def predicted_beside_measured(rows: Sequence[Mapping]) -> Figure:
    """Two bars a config, stacked by kind: full colours predicted, pale ones measured.

    Args:
        rows: from `bars`; "measured_bytes" is the allocator's own total.
    """
    names, totals = [_spoken(row["config"]) for row in rows], [sum(row["predicted"].values()) for row in rows]
    largest, least = max(totals), int(np.argmin(totals))
    unit, scale = _unit(largest)
    measured = {place: row["measured_bytes"] for place, row in enumerate(rows) if row["measured"] is not None}
    off = {place: 100 * (totals[place] / nbytes - 1) for place, nbytes in measured.items()}
    title = f"{names[0].capitalize()} a step takes {totals[0] / scale:.3g} {unit}, "
    title += f"with {names[least]} {totals[least] / scale:.3g}, the least"
    title += f"; predictions are off by at most {max(map(abs, off.values())):.1f} %" if off else ""
    figure = empty_figure(7.2, 0.9 + 0.52 * len(rows), title)
    ax = figure.subplots()
    for place, row in enumerate(rows):
        _stack(ax, place - (0.19 if place in measured else 0), row["predicted"], scale)
        text = f"{totals[place] / scale:.3g} predicted, not measured"
        if place in measured:
            _stack(ax, place + 0.19, row["measured"], scale, MEASURED)
            error = round(off[place], 1) + 0.0  # no -0.0
            text = f"{totals[place] / scale:.3g} predicted, {measured[place] / scale:.3g} measured ({error:+.1f} %)"
        note(ax, max(totals[place], measured.get(place, 0)) / scale, place, text)
    name_rows(ax, names, label(FULLEST, unit))
    ax.set_xlim(0, 1.75 * largest / scale)
    _name_kinds(ax, [row["predicted"] for row in rows], largest, bool(measured))
    return figure


def bars(rows: Sequence[Mapping]) -> list[dict]:
    """What `predicted_beside_measured` draws, from the rows of `plan.compare`."""
    return [
        {
            "config": row["config"],
            "predicted": row["predicted"].account.by_kind(),
            "measured": row["measured"].account.by_kind() if row["measured"] else None,
            "measured_bytes": row["measured"].nbytes if row["measured"] else None,
        }
        for row in rows
    ]


def _stack(
    ax: Axes, place: float, kinds: Mapping[str, int], scale: float, alpha: float = 1.0, height: float = 0.36
) -> None:
    left = 0.0
    for kind, nbytes in kinds.items():
        ax.barh(place, nbytes / scale, height, left=left, color=COLOURS[kind], alpha=alpha, linewidth=0)
        left += nbytes / scale


def _name_kinds(ax: Axes, stacks: Sequence[Mapping[str, int]], largest: float, pale: bool = False) -> None:
    """Colours of the kinds that can be seen."""
    seen = [kind for kind in KINDS if any(stack[kind] > VISIBLE * largest for stack in stacks)]
    handles = [Patch(color=COLOURS[kind], label=kind) for kind in seen]
    handles += [Patch(color=COLOURS[seen[0]], alpha=MEASURED, lw=0, label="measured: pale")] * pale
    columns = {"ncols": 4 if pale else 6, "columnspacing": 1.1, "handlelength": 1}
    ax.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), **columns)


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
    peak = int(total.argmax())
    during = next((what for start, what in reversed(marks) if start <= times[peak]), "step")
    most = int(levels[peak].argmax())
    share = levels[peak, most] / total[peak]
    title = f"Fullest with {total[peak] / scale:.3g} {unit}, in the {during}: {share:.0%} {KINDS[most]}"
    figure = empty_figure(7.2, 3.2, title)
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
        if stop - start > 0.055 * (ends[-1] - begin):
            ax.text(
                (start + stop) / 2,
                1.19 * total.max() / scale,
                what.partition(" ")[0],
                ha="center",
                va="top",
                fontsize=7.5,
                color=GREY,
            )
    ax.set(xlim=(begin, ends[-1]), ylim=(0, 1.21 * total.max() / scale))
    ax.set(xlabel=label("operations and frees since the step began", "thousands"), ylabel=label("memory", unit))
    legend(ax, len(seen))
    return figure


@styled
def by_module(table: Mapping[str, Mapping[str, int]]) -> Figure:
    """Where the fullest moment's bytes belong: a bar a module, stacked by kind, the largest first; what is less than
    half a percent is one bar together."""
    whole = sum(sum(row.values()) for row in table.values())
    shown = [name for name, row in table.items() if sum(row.values()) >= LEAST_DRAWN * whole][:MOST_MODULES]
    modules = {name: table[name] for name in shown}
    rest = [row for name, row in table.items() if name not in modules]
    if rest:
        modules[f"{len(rest)} others"] = {kind: sum(row[kind] for row in rest) for kind in KINDS}
    sizes = [sum(row.values()) for row in modules.values()]
    unit, scale = _unit(max(sizes))
    title = f"{shown[0]} holds {sizes[0] / whole:.0%} of the {whole / scale:.3g} {unit} at the step's fullest moment"
    figure = empty_figure(7.2, 1.0 + 0.24 * len(modules), title)
    ax = figure.subplots()
    for place, (row, size) in enumerate(zip(modules.values(), sizes)):
        _stack(ax, place, row, scale, height=0.7)
        note(ax, size / scale, place, f"{size / whole:.0%}" if size >= LEAST_DRAWN * whole else "less than 0.5%")
    name_rows(ax, list(modules), label(FULLEST, unit))
    ax.set_xlim(0, 1.1 * max(sizes) / scale)
    _name_kinds(ax, list(modules.values()), max(sizes))
    return figure


@styled
def largest_batch(table: pd.DataFrame) -> Figure:
    """Largest batch by phase set (rows) and device (columns): numbers on a logarithmic colour.

    Args:
        table: from `plan.fits_table`.
    """
    values = np.maximum(table.to_numpy(dtype=float), 0)
    positive = values[values > 0]
    best, device = table.max(axis=1).idxmax(), table.max().idxmax()
    title = f"{device} takes a batch of {table.iloc[0][device]:,} pairs {_spoken(table.index[0])}"
    title += f", of {table.loc[best, device]:,} with {_spoken(best)}" if best != table.index[0] else ""
    figure = empty_figure(7.2, 1.3 + 0.34 * len(table), title)
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
    ax.set(yticks=range(len(table)), yticklabels=[_spoken(name) for name in table.index], ylabel="phases [-]")
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
    title += f"{': ' * bool(title)}at most {levels.max(initial=0.0) / scale:.3g} {unit} were allocated"
    title += f", {pieces[0]['nbytes'] / scale:.2g} of it in {pieces[0]['where']}" if pieces else ""
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
    name_rows(
        lower,
        [piece["where"] for piece in pieces],
        label(f"largest pieces {'then' if failure else 'at the peak'}", unit),
    )
    return figure


def _spoken(name: str) -> str:
    return name.replace("_", " ")


def _unit(nbytes: float) -> tuple[str, int]:
    """The largest unit in which a size is at least 2."""
    return next(((unit, scale) for unit, scale in reversed(UNITS.items()) if nbytes >= 2 * scale), ("KiB", 2**10))
