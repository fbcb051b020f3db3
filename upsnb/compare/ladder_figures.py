"""The ladder to look at: one table, and one figure of promise beside measurement."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from upsnb.compare.ladder import BASELINE, TITLES, finding
from upsnb.phases import BY_NAME
from upsnb.report.file import number
from upsnb.report.style import BLUE, GREY, VERMILLION, empty_figure, save, styled
from upsnb.runs.runfolder import FIGURES, REPORT


@styled
def promise_and_measurement(report: Mapping) -> Figure:
    """Throughput over the reference's, a row a phase: hollow grey is promised, filled is measured with its interval.

    Blue gains, vermillion loses, and a pale dot is one whose interval holds 1.
    """
    panels = [(kind, report[kind]) for kind in TITLES if report[kind]]
    names = list(dict.fromkeys(row["phase"] for _, rows in panels for row in rows)) + list(report["skipped"])
    figure = empty_figure(7.2, 1.1 + 0.32 * max(len(names), 2))
    axes = figure.subplots(1, max(len(panels), 1), sharey=True, squeeze=False)[0]
    for ax, (kind, rows) in zip(axes, panels):
        _rows(ax, rows, names)
        ax.set_title(TITLES[kind])
        over = "with / without it" if kind == "leave_one_out" else "/ baseline's"
        ax.set_xlabel(f"throughput {over} [-]", fontsize=8.5)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    axes[0].plot([], [], "o", mfc="none", mec=GREY, ms=7, label="promised")
    axes[0].plot([], [], "o", color=BLUE, ms=6, label="measured, faster")
    axes[0].plot([], [], "o", color=VERMILLION, ms=6, label="measured, slower")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    for row, name in enumerate(names):
        if name in report["skipped"]:
            axes[0].annotate("not possible here", (1, row), (6, 0), textcoords="offset points", va="center", color=GREY)
    return figure


def _rows(ax: Axes, rows: Sequence[Mapping], names: Sequence[str]) -> None:
    ax.axvline(1, color=GREY, lw=1, ls="--")
    ax.grid(axis="y", visible=False)
    reach = [1.0]
    for row in rows:
        place, ratio = names.index(row["phase"]), row["ratio"]
        if row["promised"] and row["kind"] != "leave_one_out":
            ax.plot(row["promised"], place, "o", mfc="none", mec=GREY, ms=7)
            reach.append(row["promised"])
        if ratio["median"] is None:
            why = "failed" if "failed" in row else "no steady step"
            ax.annotate(why, (1, place), (6, 0), textcoords="offset points", va="center", color=VERMILLION)
            continue
        low, high = (end if end is not None else ratio["median"] for end in ratio["ci95"])
        colour, sure = (BLUE if ratio["median"] >= 1 else VERMILLION), not low <= 1 <= high
        ax.plot([low, high], [place, place], color=colour, lw=3, alpha=1 if sure else 0.4, solid_capstyle="butt")
        ax.plot(ratio["median"], place, "o", color=colour, ms=6, alpha=1 if sure else 0.4)
        ax.annotate(
            f"{ratio['median']:.2f}", (1, place), (-2, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="center", ha="right", color=colour, fontsize=8,
        )  # fmt: skip
        reach += [low, high]
    margin = 0.35 * max(max(reach) - min(reach), 0.2)
    ax.set_xlim(max(min(reach) - 0.4 * margin, 0), max(reach) + margin)


def table(report: Mapping) -> pd.DataFrame:
    """A row a phase, and one a set of them: promised and measured each way, with memory [GiB] and nRMSE beside it.

    The last columns are of the full set without the phase.
    """
    known = {kind: {row["phase"]: row for row in report[kind]} for kind in TITLES}
    known["alone"] |= {row["phase"]: row for row in report["sets"]}
    rows = []
    for name in (*BY_NAME, *(row["phase"] for row in report["sets"])):
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
            cells[f"nRMSE ratio {which}"] = number(row.get("nrmse_ratio"), 3)
        if skipped:
            cells[TITLES["alone"]] += f": {skipped}"
        rows.append(cells)
    baseline = {"phase": BASELINE, "GiB alone": number(report["baseline"]["memory_gib"], 3)}
    return pd.DataFrame([*rows, baseline]).fillna("-")


def write_figures(folder: Path | str) -> dict[str, Path]:
    """Draw a ladder from its folder into `figures/`; figure name -> PNG."""
    report = json.loads((Path(folder) / REPORT).read_text())
    return {"ladder": save(promise_and_measurement(report), Path(folder) / FIGURES, "ladder")}
