"""What a closed panel leaves: its curves, flips and effects as one figure that every reader of a notebook can show."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure

from upsnb.report.style import BLACK, GREY, empty_figure, styled
from upsnb.widgets.charts import strips
from upsnb.widgets.history import History, letter
from upsnb.widgets.progress import duration

MOST_NAMED = 12  # flips with a line of text below the curves; the panel's table has them all


@styled
def figure(history: History, title: str = "", axis: str = "step") -> Figure:
    """Throughput, loss, memory, data waiting and what the GPU told, over one axis, with every flip marked.

    Args:
        axis: "step", or "time" for seconds of training.
    """
    drawn = strips(history, axis)
    share, _ = history.progress()
    rate = history.rate()
    facts = [title, f"step {history.step:,}", f"{duration(history.time_s)} of training"]
    facts += [f"{rate:,.3g} {history.unit}/s"] if math.isfinite(rate) else []
    facts += [f"ended by {history.end['reason']}"] if history.end else [f"{100 * share:.0f} % done"]
    named = history.flips[-MOST_NAMED:]
    heights = [strip.height / 60 for strip in drawn] or [1.0]
    result = empty_figure(7.6, sum(heights) + 0.75 + 0.17 * len(named), " \u00b7 ".join(filter(None, facts)))
    if not drawn:
        result.text(0.5, 0.5, history.message or "no step yet", ha="center", va="center", parse_math=False)
        return result
    all_axes = result.subplots(len(drawn), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for ax, strip in zip(all_axes, drawn):
        for curve, colour in ((curve, GREY if curve.pale else curve.colour) for curve in strip.curves):
            if curve.low is not None:
                ax.fill_between(strip.x, curve.low, curve.high, color=colour, alpha=0.22, linewidth=0)
            marker = {"marker": ".", "markersize": 3} if curve.pale else {}
            known = np.isfinite(curve.y) | (not curve.joined)
            style = {"color": colour, "linewidth": 1.2, "alpha": 0.4 if curve.pale else 1.0, **marker}
            ax.plot(strip.x[known], curve.y[known], label=curve.name, **style)
        if any(curve.name for curve in strip.curves):
            ax.legend(loc="upper right", ncols=4, fontsize=7, borderpad=0, handlelength=1.2)
        low, high = strip.span()
        if strip.log:
            ax.set_yscale("log")
            low, high = 10**low, 10**high
        ax.set_ylim(low, high)
        ax.set_ylabel(f"{strip.title.replace(', ', chr(10))}\n[{strip.unit}]", fontsize=7.5)
        for span in history.turns(axis):
            ax.axvspan(*span, color=GREY, alpha=0.2, linewidth=0)
        for flip in history.flips:
            style = {"linestyle": "--" if flip.applied else ":", "color": BLACK, "linewidth": 0.8}
            ax.axvline(history.position(flip.step, axis), **style)
    end = max(strip.x[-1] for strip in drawn) or 1.0
    before = np.inf
    for number, flip in reversed(list(enumerate(history.flips))):
        place = history.position(flip.step, axis)
        if before - place > 0.02 * end:  # of several at one place the last is named
            all_axes[0].annotate(
                letter(number), (place, 1.0), (0, 2), xycoords=("data", "axes fraction"), textcoords="offset points",
                ha="center",
            )  # fmt: skip
            before = place
    all_axes[0].set_xlim(0, 1.01 * end)
    lines = []
    for number, flip in list(enumerate(history.flips))[-MOST_NAMED:]:
        came = (flip.measured or "not measured") if flip.applied else f"refused: {flip.why}"
        lines.append(f"{letter(number)}  step {flip.step:,}: {flip.what}  {came}"[:110])
    bottom = "\n".join(["step" if axis == "step" else "training time [s]", *lines])
    all_axes[-1].set_xlabel(bottom, ha="left", x=0.0, parse_math=False)
    result.align_ylabels()
    return result
