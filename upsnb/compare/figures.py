"""Comparisons to look at: tables, and figures of speed, quality over time, and memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from upsnb.compare.arms import ARMS
from upsnb.compare.verdict import NOISE, QUALITY_TOLERANCE, facts, judged, score
from upsnb.report.file import number
from upsnb.report.style import BLUE, GREY, PALETTE, VERMILLION, empty_figure, label, legend, save, styled
from upsnb.runs.handle import Run
from upsnb.runs.runfolder import FIGURES, REPORT


def colours(names: Sequence[str]) -> dict[str, str]:
    """Baseline blue, its rival vermillion, the baseline's double grey; the same in every figure."""
    fixed = dict(zip([name for name in names if name != NOISE], (BLUE, VERMILLION, *PALETTE[2:])))
    return fixed | {NOISE: GREY}


@styled
def speed(blocks: Sequence[dict], ratios: Mapping[str, Mapping], *, baseline: str) -> Figure:
    """Left, throughput of every turn in its order; right, ratios to the baseline with 95 % intervals.

    Args:
        blocks: {"arm", "samples", "seconds"} in the order of time.
        ratios: name -> {"median", "ci95"}, of throughputs over the baseline's.
    """
    names = list(dict.fromkeys(block["arm"] for block in blocks))
    colour = colours(names)
    figure = empty_figure(7.2, 2.9)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for name in names:
        turns = [number for number, block in enumerate(blocks, 1) if block["arm"] == name]
        rates = [block["samples"] / block["seconds"] for block in blocks if block["arm"] == name]
        left.plot(turns, rates, "o", ms=4, color=colour[name], label=name)
        left.axhline(np.median(rates), color=colour[name], lw=0.9, alpha=0.6)
    left.set(xlabel=label("turn, in the order of time"), ylabel=label("throughput", "samples/s"))
    left.set_ylim(0)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(left)
    shown = [(name, ratio) for name, ratio in ratios.items() if ratio and ratio["median"] is not None]
    for row, (name, ratio) in enumerate(shown):
        median, (low, high) = ratio["median"], ratio["ci95"]
        if low is not None:
            right.plot([low, high], [row, row], color=colour.get(name, VERMILLION), lw=3, solid_capstyle="butt")
        right.plot(median, row, "o", color=colour.get(name, VERMILLION), ms=6)
        interval = f" [{low:.2f}, {high:.2f}]" if low is not None else ""
        ends = [end for end in (low, median, high) if end is not None]
        side, place = ("left", min(ends)) if median < 1.5 else ("right", max(ends))  # inwards, away from the frame
        right.annotate(f"{median:.2f}{interval}", (place, row), (0, 8), textcoords="offset points", ha=side, fontsize=8)
    right.axvline(1, color=GREY, ls="--", lw=1)
    right.set_yticks(range(len(shown)), [name for name, _ in shown])
    right.set_ylim(-0.6, len(shown) - 0.4)
    highest = max((max(ratio["median"], ratio["ci95"][1] or 0) for _, ratio in shown), default=1)
    lowest = min((min(ratio["median"], ratio["ci95"][0] or np.inf) for _, ratio in shown), default=1)
    margin = 0.15 * max(highest - min(lowest, 1), 0.1)
    right.set_xlim(min(lowest, 1) - margin, max(highest, 1) + margin)
    right.set(xlabel=label(f"throughput / {baseline}'s"))
    right.grid(axis="y", visible=False)
    return figure


@styled
def quality(curves: Mapping[str, Sequence[tuple]], *, target: float | None = None) -> Figure:
    """Validation nRMSE over training time and over samples seen, one curve a run; the dashed line is the target.

    Args:
        curves: arm -> [(time [s], samples, nRMSE [-]) of every validation, as arrays], one entry a seed.
    """
    colour = colours(list(curves))
    figure = empty_figure(7.2, 2.9)
    axes = figure.subplots(1, 2, sharey=True)
    for name, runs in curves.items():
        for seed, (times, samples, nrmse) in enumerate(runs):
            for ax, x in zip(axes, (times, samples)):
                ax.plot(x, nrmse, "-o", ms=3, lw=1.2, color=colour[name], label=name if seed == 0 else None)
    for ax in axes:
        ax.set_yscale("log")
        if target is not None:
            ax.axhline(target, color=GREY, ls="--", lw=1)
            ax.annotate(
                "baseline's last + 3 %", (0.01, target), (0, -10), xycoords=("axes fraction", "data"),
                textcoords="offset points", fontsize=7.5, color=GREY,
            )  # fmt: skip
    axes[0].set(xlabel=label("training time, compilation included", "s"), ylabel=label("validation nRMSE"))
    axes[1].set(xlabel=label("samples seen"))
    axes[0].set_xlim(0)
    axes[1].set_xlim(0)
    legend(axes[0])
    return figure


@styled
def outcome(arms: Mapping[str, Sequence[dict]]) -> Figure:
    """Error of each dataset and memory of a rank, by arm; a dot a seed, the bar their mean.

    Args:
        arms: arm -> runs with `nrmse` by dataset and `peak_memory_gib`.
    """
    colour = colours(list(arms))
    datasets = list(next(iter(arms.values()))[0]["nrmse"])
    figure = empty_figure(7.2, 2.7)
    axes = figure.subplots(1, len(datasets) + 1, squeeze=False)[0]
    panels = [(f"{name}: nRMSE", "-", lambda run, name=name: run["nrmse"][name]) for name in datasets]
    panels.append(("peak memory of a rank", "GiB", lambda run: run["peak_memory_gib"]))
    for ax, (quantity, unit, value) in zip(axes, panels):
        for place, (name, runs) in enumerate(arms.items()):
            values = [value(run) for run in runs]
            ax.bar(place, np.mean(values), width=0.6, color=colour[name], alpha=0.35)
            ax.plot([place] * len(values), values, "o", ms=4, color=colour[name])
        ax.set_xticks(range(len(arms)), list(arms))
        ax.set(ylabel=label(quantity, unit))
        ax.grid(axis="x", visible=False)
    return figure


# -- tables and figures ----------------------------------------------------------------------------------------------


def curves(runs: dict[str, list[Run]]) -> dict[str, list[tuple]]:
    """For each arm and run: training time [s], samples seen, and validation nRMSE of every validation."""
    found: dict[str, list[tuple]] = {}
    for name, those in runs.items():
        for run in those:
            evals = run.events(("eval",))
            (first, *_) = run.events(("start",))
            times = [event["time_s"] for event in evals]
            samples = [event["step"] * first["samples_per_step"] for event in evals]
            found.setdefault(name, []).append((times, samples, [score(event) for event in evals]))
    return found


def write_figures(folder: Path | str) -> dict[str, Path]:
    """Draw a comparison from its folder into `figures/`; figure name -> PNG."""
    return {name: save(figure, Path(folder) / FIGURES, name) for name, figure in draw(folder).items()}


def draw(folder: Path | str) -> dict[str, Figure]:
    """All figures of a comparison: speed (where arms took turns), quality, outcome."""
    folder = Path(folder)
    report = json.loads((folder / REPORT).read_text())
    record = json.loads((folder / ARMS).read_text())
    first, second = record["names"]
    runs = {name: [Run.attach(folder / path) for path in paths] for name, paths in record["runs"].items()}
    target = (1 + QUALITY_TOLERANCE) * np.mean([one["val_loss"] for one in report["arms"][first]])
    ratios = {NOISE: report["aa_ratio"], second: report["speedup"]}
    return {
        "speed": speed(record["blocks"], ratios, baseline=first),
        "quality": quality(curves(runs), target=target),
        "outcome": outcome(report["arms"]),
    }


def arms_table(report: dict) -> pd.DataFrame:
    """One row a run: what it reached and what it cost."""
    rows = [
        {
            "arm": name,
            "seed": run["seed"],
            "samples": run["samples"],
            "samples/s": number(run["samples_per_s"]),
            "trained [s]": number(run["train_time_s"]),
            "compiled [s]": number(run["compile_s"]),
            "memory [GiB]": number(run["peak_memory_gib"], 3),
            "cost [$]": number(run["cost_dollars"], 3),
            **{f"{dataset} nRMSE": number(value) for dataset, value in run["nrmse"].items()},
        }
        for name, runs in report["arms"].items()
        for run in runs
    ]
    return pd.DataFrame(rows)


def table(report: dict) -> pd.DataFrame:
    """Each criterion and whether it holds; below them, what they rest on, and the verdict."""
    others = {**facts(report), "verdict": report["verdict"]}
    rows = [*judged(report), *({"criterion": name, "measured": text} for name, text in others.items())]
    return pd.DataFrame(rows).fillna("-")
