"""Comparisons to look at: tables, and figures of speed, quality over time, and memory; any runs in one figure."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from upsnb.compare.verdict import NOISE, QUALITY_TOLERANCE, facts, judged, score, time_to_quality_told
from upsnb.errors import RunError
from upsnb.report import style
from upsnb.report.figures import floats, latest
from upsnb.report.file import factor, number
from upsnb.report.style import BLACK, BLUE, GREEN, GREY, PALETTE, VERMILLION, empty_figure, label, legend, styled
from upsnb.runs.events import NAMING, latest_start, naming
from upsnb.runs.handle import Run
from upsnb.runs.throughput import steady_windows

OVER = {"step": label("optimizer step"), "seconds": label("training time", "s")}  # of an overlay


def looks(names: Sequence[str]) -> dict[str, dict]:
    """Baseline blue, its rival vermillion; the baseline's double grey, dashed and hollow, so that it covers neither."""
    fixed = zip((name for name in names if name != NOISE), (BLUE, VERMILLION, *PALETTE[2:]))
    double = {"color": GREY, "linestyle": "--", "markerfacecolor": "none"}
    return {**{name: {"color": colour} for name, colour in fixed}, NOISE: double}


@styled
def speed(report: Mapping) -> Figure:
    """Left, throughput of every turn in its order and the median; right, ratios to the baseline with 95 % intervals."""
    blocks = report["turns"]
    baseline, ratios = report["baseline"], {report["optimized"]: report["speedup"], NOISE: report["aa_ratio"]}
    wanted = required(report).get("speedup", 1.0)
    names = list(dict.fromkeys(block["arm"] for block in blocks))
    look = looks([baseline, *ratios])
    title = f"Throughput of {report['optimized']} over {baseline}'s: {next(iter(facts(report).values()))}"
    figure = empty_figure(7.2, 2.9, title)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for name in names:
        turns = [number for number, block in enumerate(blocks, 1) if block["arm"] == name]
        rates = [block["samples"] / block["seconds"] for block in blocks if block["arm"] == name]
        left.plot(turns, rates, "o", ms=4, **(look[name] | {"linestyle": "none"}), label=name)
        left.axhline(np.median(rates), **look[name], lw=1.2)
    left.set(xlabel=label("turn, in the order of time"), ylabel=label("throughput", f"{naming(report)['unit']}/s"))
    left.set_ylim(0)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    shown = {name: ratio for name, ratio in ratios.items() if ratio and ratio["median"] is not None}
    reach = [1.0, wanted]
    for row, (name, ratio) in enumerate(shown.items()):
        median, colour, ends = ratio["median"], look[name]["color"], [ratio["median"]]
        if ratio["ci95"][0] is not None:
            ends += ratio["ci95"]
            right.plot(ratio["ci95"], [row, row], color=colour, lw=9, solid_capstyle="butt")
        right.plot(median, row, "|", color=BLACK, ms=14, mew=1)
        side, place = ("left", min(ends)) if median < 1.5 else ("right", max(ends))  # inwards, away from the frame
        how = {"ha": side, "fontsize": 8, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1}}
        right.annotate(factor(ratio), (place, row), (0, 10), textcoords="offset points", **how)
        reach += ends
    right.axvline(1, color=GREY, ls="--", lw=1, label="equal")
    if wanted != 1:
        right.axvline(wanted, color=GREEN, ls=":", lw=1.5, label=f"required {number(wanted)}")
    style.name_rows(right, list(shown), label(f"throughput / {baseline}'s"))
    margin = 0.15 * max(max(reach) - min(reach), 0.1)
    right.set_xlim(min(reach) - margin, max(reach) + margin)
    for ax in (left, right):
        legend(ax)
    return figure


@styled
def quality(report: Mapping) -> Figure:
    """Validation error over training time and over samples seen, one curve a run; dotted what time to quality is to.

    That is each seed's own, whose curves have the same marker.
    """
    unit, metric = naming(report).values()
    last = f"{report['baseline']}'s last + {QUALITY_TOLERANCE:.0%}"
    lasts = np.array([one["val_loss"] for one in report["arms"][report["baseline"]]], float)  # null becomes NaN
    markers = [marker for marker, _ in zip(itertools.cycle("os^Dv"), lasts)]
    title = f"Time to {last}{', dotted for each seed' * (len(lasts) > 1)}: {time_to_quality_told(report)}"
    look = looks(list(report["arms"]))
    figure = empty_figure(7.2, 3.1, title)
    axes = figure.subplots(1, 2, sharey=True)
    for name, runs in report["arms"].items():
        for run, marker, named in zip(runs, markers, (name, *[None] * len(runs))):
            *along, nrmse = (floats(run["validations"][what]) for what in ("time_s", "samples", "nrmse"))
            for ax, x in zip(axes, along):
                ax.plot(x, nrmse, marker=marker, ms=4, lw=1.2, **look[name], label=named)
    axes[0].set_ylabel(label(f"validation {metric}"))
    axes[0].set_xlabel(label("training time, compilation included", "s"))
    axes[1].set(xlabel=label(f"{unit} seen"))
    for ax in axes:
        ax.set(yscale="log", xlim=(0, None))
        ax.ticklabel_format(axis="x", style="plain")
        ax.locator_params(axis="x", nbins=5)
        for value, marker, named in zip((1 + QUALITY_TOLERANCE) * lasts, markers, (last, *[None] * len(lasts))):
            at_right = {"marker": marker, "ms": 4, "markevery": [1], "clip_on": False}
            across = {"transform": ax.get_yaxis_transform(), "color": GREEN, "ls": ":", "lw": 1.2}
            ax.plot((0, 1), (value, value), **across, **at_right, label=named)
    legend(axes[0], 2)
    return figure


@styled
def outcome(report: Mapping) -> Figure:
    """Error of each dataset and memory of a rank, by arm; a dot a seed, the bar their mean, dotted what is required."""
    arms, first, second, metric = report["arms"], report["baseline"], report["optimized"], naming(report)["metric"]
    values = {
        label(f"{name}: {metric}"): {arm: floats([run["nrmse"][name] for run in runs]) for arm, runs in arms.items()}
        for name in report["nrmse_ratio"]
    }
    memory = {arm: floats([run["peak_memory_gib"] for run in runs]) for arm, runs in arms.items()}
    ratios = ", ".join(f"{name} {number(ratio, 3)}" for name, ratio in report["nrmse_ratio"].items())
    more = memory[second].mean() / memory[first].mean()
    figure = empty_figure(7.2, 2.7, f"{second} over {first}: {metric} {ratios}; peak memory {more:.2f}")
    axes = figure.subplots(1, len(values) + 1, squeeze=False)[0]
    most, look = required(report), looks(list(arms))
    limits = [most.get("nrmse_ratio", np.inf) * those[first].mean() for those in values.values()]
    limits.append(most.get("memory_gib", np.inf))
    values[label("peak memory of a rank", "GiB")] = memory
    for ax, limit, (quantity, those) in zip(axes, limits, values.items()):
        for place, (arm, found) in enumerate(those.items()):
            beside = place + 0.12 * (np.arange(len(found)) - (len(found) - 1) / 2)  # equal ones are seen, too
            ax.bar(place, found.mean(), width=0.6, color=look[arm]["color"], alpha=0.35)
            ax.plot(beside, found, "o", ms=4, **(look[arm] | {"linestyle": "none"}))
        if limit < 1.5 * ax.get_ylim()[1]:  # farther away it would flatten the bars, and holds without being drawn
            ax.axhline(limit, color=GREEN, ls=":", lw=1.5, label=f"at most {number(limit, 3)}")
            legend(ax)
        ax.set(xticks=range(len(arms)), xticklabels=list(arms), ylabel=quantity)
        ax.grid(axis="x", visible=False)
    return figure


@styled
def overlay(runs: Sequence[Run | Path | str], over: str = "step") -> Figure:
    """Training loss, validation error and throughput of any runs, a colour each, whatever state they are in.

    Losses are running medians, validations means over the datasets, throughputs those of windows of steady steps.

    Args:
        runs: or their folders.
        over: "step", or "seconds" of training.
    Raises:
        RunError: nothing to draw, or an unknown `over`.
    """
    runs = [run if isinstance(run, Run) else Run.attach(run) for run in runs]
    if not runs or over not in OVER:
        raise RunError(f"an overlay of {len(runs)} runs over {over!r} -> give one or more, over {' or '.join(OVER)}")
    above = os.path.commonpath([run.folder.parent for run in runs])  # runs of two comparisons have the same names
    curves, starts = {}, []
    for run in runs:
        events = run.events()
        curves[str(run.folder.relative_to(above))] = _curves(events, over == "step")
        starts.append(latest_start(events))
    said = [naming(start) for start in starts if start] or [NAMING]  # one that has not started says nothing
    unit, metric = (" or ".join(dict.fromkeys(one[what] for one in said)) for what in NAMING)
    last = {name: [values[-1] if len(values) else np.nan for _, values in three] for name, three in curves.items()}
    told = "; ".join(f"{name} {loss:.2g} and {nrmse:.2g}" for name, (loss, nrmse, _) in last.items())
    figure = empty_figure(7.2, 5.6, f"Training loss and validation {metric} at last: {told}")
    panels = figure.subplots(3, 1, sharex=True)
    for name, look in style.looks(curves).items():
        for ax, (x, values) in zip(panels, curves[name]):
            ax.plot(x, values, **look, marker="o", ms=style.point_size(len(x)), lw=1.2, label=name if len(x) else "")
    panels[0].set(yscale="log", ylabel=label("training loss"))
    panels[1].set(yscale="log", ylabel=label(f"validation {metric}"))
    panels[2].set(ylabel=label("throughput", f"{unit}/s"), xlabel=OVER[over], ylim=(0, None))
    legend(panels[0])
    return figure


def _curves(events: list[dict], by_step: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """(x, loss), (x, validation error) and (x, throughput) of one run."""
    key = "step" if by_step else "time_s"
    steps = [step for step in latest(events, "step").values() if step["loss"] is not None]
    checks, windows = list(latest(events, "eval").values()), np.reshape(steady_windows(events), (-1, 4))
    x, time_s = (np.array([step[name] for step in steps]) for name in (key, "time_s"))
    middles_s = windows[:, :2].mean(axis=1)
    return [
        (x, style.running_median(style.positive([step["loss"] for step in steps]))),
        (np.array([check[key] for check in checks]), style.positive([score(check) for check in checks])),
        (np.interp(middles_s, time_s, x) if len(steps) else middles_s, windows[:, 2]),
    ]


# -- tables and figures ----------------------------------------------------------------------------------------------


def draw(report: Mapping) -> dict[str, Figure]:
    """All figures of a comparison: speed (where arms took turns), quality, outcome."""
    drawn = {"speed": speed(report)} if report["turns"] else {}
    return {**drawn, "quality": quality(report), "outcome": outcome(report)}


write_figures = style.writer(draw)


def required(report: Mapping) -> dict[str, float]:
    """What each criterion asks for."""
    return {item["name"]: item["required"] for item in report["criteria"]}


def arms_table(report: dict) -> pd.DataFrame:
    """One row a run: what it reached and what it cost."""
    unit, metric = naming(report).values()
    rows = [
        {
            "arm": name,
            "seed": run["seed"],
            unit: run["samples"],
            f"{unit}/s": number(run["samples_per_s"]),
            "trained [s]": number(run["train_time_s"]),
            "compiled [s]": number(run["compile_s"]),
            "memory [GiB]": number(run["peak_memory_gib"], 3),
            "cost [$]": number(run["cost_dollars"], 3),
            **{f"{dataset} {metric}": number(value) for dataset, value in run["nrmse"].items()},
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
