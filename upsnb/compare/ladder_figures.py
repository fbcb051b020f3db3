"""The ladder to look at: one table, and one figure of promise beside measurement; and a pair of the search."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from upsnb.compare.ladder import BASELINE, BATCH, TITLES, finding, recommended
from upsnb.phases import BY_NAME
from upsnb.report.file import number
from upsnb.report.style import (
    BLUE,
    GAP,
    GREY,
    VERMILLION,
    empty_figure,
    name_rows,
    note,
    shared_legend,
    styled,
    writer,
)
from upsnb.runs.events import naming


@styled
def promise_and_measurement(report: Mapping) -> Figure:
    """Throughput over the reference's, a row a phase in their order: hollow grey is promised, filled is measured with
    its interval. Blue gains, vermillion loses, and a pale dot is one whose interval holds 1."""
    panels = [(kind, report[kind]) for kind in TITLES if report[kind]]
    shown = {row["phase"] for _, rows in panels for row in rows} | report["skipped"].keys()
    names = [name for name in (BATCH, *BY_NAME) if name in shown]
    gain = sum((row["ratio"]["ci95"][0] or 0) > 1 for row in report["alone"])
    title = f"{gain} of {len(names) - (BATCH in names)} phases {'is' if gain == 1 else 'are'} sure to gain alone."
    figure = empty_figure(7.2, 1.1 + 0.32 * max(len(names), 2), f"{title} {recommended(report)}".strip())
    axes = figure.subplots(1, max(len(panels), 1), sharey=True, squeeze=False)[0]
    for ax, (kind, rows) in zip(axes, panels):
        over = "with / without it" if kind == "leave_one_out" else "/ baseline's"
        numbers = [getattr(BY_NAME.get(name), "number", None) or "" for name in names]
        name_rows(ax, [f"{number} {name}" for number, name in zip(numbers, names)], f"throughput {over} [-]")
        ax.xaxis.label.set_size(8.5)
        ax.set_title(TITLES[kind])
        _rows(ax, rows, names)
    for name in report["skipped"]:
        note(axes[0], 1, names.index(name), "not possible here", color=GREY)
    shared_legend(figure, 3)
    return figure


@styled
def climb(report: Mapping) -> Figure:
    """What the search tried, from the top down: throughput over that of the best before, bold where it was kept, and
    grey where two equal arms come out as far apart. Below, what gained and the same without what may train worse: its
    error over the baseline's after as many epochs, on the grey bar of baselines of several seeds."""
    chosen = report["recommended"]
    tries, sets = chosen["tried"], chosen["accuracy"]
    kept = sum(row["kept"] for row in tries)
    title = f"{kept} of {len(tries)} changes {'is' if kept == 1 else 'are'} kept, in bold. {recommended(report)}"
    heights = [len(tries), len(sets) + 1] if sets else [1]
    figure = empty_figure(7.2, 1.4 + 0.22 * sum(heights), title)
    speed, *error = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    rows = [
        {**row, "phase": f"{number} {row['change']}", "promised": None, "kind": ""}
        for number, row in enumerate(tries, 1)
    ]
    names = [row["phase"] for row in rows]
    name_rows(speed, names, "throughput / that of the best before it [-]")
    for label, row in zip(speed.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row["kept"] else "normal")
    speed.axvspan(1 - chosen["noise_floor"], 1 + chosen["noise_floor"], color=GAP, lw=0, label="two equal arms")
    _rows(speed, rows, names)
    for ax in error:
        metric = naming(report)["metric"]
        name_rows(ax, [_trained(name, row) for name, row in sets.items()], f"{metric} / the baseline's [-]")
        ax.axvline(1, color=GREY, lw=1, ls="--")
        ax.margins(x=0.15)
        for place, row in enumerate(sets.values()):
            ax.plot([1 / row["tolerance"], row["tolerance"]], [place, place], color=GAP, lw=7, solid_capstyle="butt")
            ratio = row["nrmse_ratio"]
            if ratio is None or not math.isfinite(ratio):
                note(ax, 1, place, "failed", color=VERMILLION)
                continue
            ax.plot(ratio, place, "o", ms=6, color=BLUE if row["holds"] else VERMILLION)
            note(ax, ratio, place, f"{ratio:.3f}{'' if row['holds'] else ', refused'}")
    shared_legend(figure, 3)
    return figure


def _rows(ax: Axes, rows: Sequence[Mapping], names: Sequence[str]) -> None:
    ax.axvline(1, color=GREY, lw=1, ls="--")
    reach = [1.0]
    for row in rows:
        place, ratio = names.index(row["phase"]), row["ratio"]
        if row["promised"] and row["kind"] != "leave_one_out":
            ax.plot(row["promised"], place, "o", mfc="none", mec=GREY, ms=7, label="promised")
            reach.append(row["promised"])
        if ratio["median"] is None:
            note(ax, 1, place, "failed" if "failed" in row else "no steady step", color=VERMILLION)
            continue
        low, high = (end if end is not None else ratio["median"] for end in ratio["ci95"])
        colour, word = (BLUE, "faster") if ratio["median"] >= 1 else (VERMILLION, "slower")
        sure = not low <= 1 <= high
        look = {"color": colour, "alpha": 1 if sure else 0.4}
        ax.plot([low, high], [place, place], lw=3, solid_capstyle="butt", **look)
        name = f"measured, {word}" if sure else f"measured, {word}, but 1 is in its interval"
        ax.plot(ratio["median"], place, "o", ms=6, label=name, **look)
        ax.annotate(
            f"{ratio['median']:.2f}", (1, place), (-2, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="center", ha="right", color=colour, fontsize=8,
        )  # fmt: skip
        reach += [low, high]
    margin = 0.35 * max(max(reach) - min(reach), 0.2)
    ax.set_xlim(max(min(reach) - 0.4 * margin, 0), max(reach) + margin)


def table(report: Mapping) -> pd.DataFrame:
    """A row a phase: promised and measured each way, with memory [GiB] and the ratio of errors beside it.

    The last columns are of the full set without the phase.
    """
    known = {kind: {row["phase"]: row for row in report[kind]} for kind in TITLES}
    rows, metric = [], naming(report)["metric"]
    for name in (BATCH, *BY_NAME):
        measured, skipped = {kind: rows.get(name, {}) for kind, rows in known.items()}, report["skipped"].get(name)
        if not skipped and not any(measured.values()):
            continue
        expected = getattr(BY_NAME.get(name), "expected", None)
        promised = {"alone": expected and expected.factor, "ladder": expected and expected.cumulative}
        cells, nothing = {"phase": name}, "cannot run here" if skipped else "not measured" if expected else "-"
        for (kind, row), which in zip(measured.items(), ("alone", "so far", "without it"), strict=True):
            if kind in promised:
                cells[f"promised {which}"] = f"{promised[kind]:.2f}" if promised[kind] else "-"
            cells[TITLES[kind]] = finding(row) if row else nothing
            cells[f"GiB {which}"] = number(row.get("memory_gib"), 3)
            cells[f"{metric} ratio {which}"] = number(row.get("nrmse_ratio"), 3)
        if skipped:
            cells[TITLES["alone"]] += f": {skipped}"
        rows.append(cells)
    baseline = {"phase": BASELINE, "GiB alone": number(report["baseline"]["memory_gib"], 3)}
    return pd.DataFrame([*rows, baseline]).fillna("-")


def _trained(name: str, row: Mapping) -> str:
    return f"{name}, {row['epochs']} epoch{'s' * (row['epochs'] > 1)}"


def tried(report: Mapping) -> pd.DataFrame:
    """A row for each change that the search measured, on top of those kept before it, and for each set it trained."""
    chosen, error = report["recommended"], f"{naming(report)['metric']} / baseline's"
    changes = [
        {"tried": row["change"], "throughput": finding(row), "kept": "yes" if row["kept"] else "no"}
        for row in chosen["tried"]
    ]
    sets = [
        {
            "tried": _trained(name, row),
            error: number(row["nrmse_ratio"]),
            "equal arms": number(row["tolerance"]),
            "kept": "yes" if row["holds"] else "no",
        }
        for name, row in chosen.get("accuracy", {}).items()
    ]
    columns = ["tried", "throughput", error, "equal arms", "kept"]
    return pd.DataFrame([*changes, *sets], columns=columns, dtype=object).fillna("-")


def draw(report: Mapping) -> dict[str, Figure]:
    """All figures: the ladder, and the search where there was one."""
    searched = {"search": climb(report)} if report["recommended"].get("tried") else {}
    return {"ladder": promise_and_measurement(report), **searched}


write_figures = writer(draw)
