"""Still figures: NumPy arrays in, a matplotlib Figure out, nothing shown; the look they share is style's."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from upsnb.data.layouts import Family
from upsnb.report.style import (
    BLACK,
    BLUE,
    ERROR_COLOURS,
    FIELD_COLOURS,
    GAP,
    GREEN,
    GREY,
    INPUT_COLOURS,
    PURPLE,
    VERMILLION,
    draw_image,
    edges,
    empty_figure,
    label,
    legend,
    looks,
    point_size,
    positive,
    running_median,
    styled,
    symmetric_range,
    value_range,
)

SPECTRUM_DEPTH = 1e-8  # of the largest energy: amplitudes down to a ten-thousandth
DASHES = ("-", "--", ":", "-.")  # of loss terms


class FieldSample(NamedTuple):
    """One sample of a 2-D problem, arrays (ny, nx) in physical units."""

    label: str
    inputs: np.ndarray
    truth: np.ndarray
    prediction: np.ndarray
    nrmse: float


def predicted(family: Family) -> str:
    """The first of the quantities that are forecast, with its unit."""
    return family.quantity(family.output_channels[0])


@styled
def prediction_truth_error_1d(
    family: Family, x: ArrayLike, truth: ArrayLike, prediction: ArrayLike, times: ArrayLike, *, title: str = ""
) -> Figure:
    """Space-time images of truth, prediction and error, and cuts at three times.

    Truth and prediction share the truth's colour range; a forecast that leaves it shows as arrows on the colour bar.

    Args:
        x, times: (N,) and (T,) coordinates, evenly spaced and increasing.
        truth, prediction: (T, N).
    """
    x, times, truth, prediction = (np.asarray(a, dtype=float) for a in (x, times, truth, prediction))
    quantity, extent = predicted(family), edges(x) + edges(times)
    figure = empty_figure(7.2, 5.2, title)
    upper, lower = figure.subfigures(2, 1, height_ratios=[1, 1.05])  # one grid for both would part the images
    images = _truth_prediction_error(truth, prediction, quantity)
    _draw_row(upper.subplots(1, 3, sharey=True), extent, images, ylabel=label("time t"))

    cuts = lower.subplots()
    mark = {"marker": "o", "markersize": 3} if len(x) == 1 else {}
    frames = sorted({0, len(times) // 2, len(times) - 1})
    for i, colour in zip(frames, (BLUE, GREEN, VERMILLION)):
        when = f"t = {times[i]:.3g}"
        cuts.plot(x, truth[i], color=colour, linewidth=5, alpha=0.3, **mark, label=f"truth, {when}")
        cuts.plot(x, prediction[i], color=colour, linewidth=1.2, **mark, label=f"prediction, {when}")
    cuts.set(xlabel=label("x"), ylabel=quantity, xlim=extent[:2])
    _keep_in_view(cuts, truth)
    legend(cuts, len(frames))
    return figure


@styled
def prediction_truth_error_2d(family: Family, samples: Sequence[FieldSample], *, title: str = "") -> Figure:
    """One row a sample: input, truth, prediction, error. Truth and prediction of a row share the truth's colour range.

    Args:
        samples: e.g. best, median and worst of the test split.
    """
    given = family.quantity(family.input_channels[0])
    input_norm = value_range(np.concatenate([np.ravel(sample.inputs) for sample in samples]))
    figure = empty_figure(8.2, 1.5 * len(samples) + 0.7, title)
    figure.get_layout_engine().set(w_pad=0.07, wspace=0.05)
    grid = figure.subplots(len(samples), 4, squeeze=False, sharex=True, sharey=True)
    for sample, row in zip(samples, grid, strict=True):
        images = {"input": (sample.inputs, INPUT_COLOURS, input_norm, given)}
        images |= _truth_prediction_error(sample.truth, sample.prediction, predicted(family))
        _draw_row(row, _plane(family), images, ylabel=label("y"), aspect="equal")
        for ax in row:
            ax.locator_params(nbins=3)
        beside = {"xycoords": row[0].yaxis.label, "textcoords": "offset points", "rotation": 90}
        text = f"{sample.label}\nnRMSE {sample.nrmse:.2g}"
        row[0].annotate(text, (0, 0.5), (-5, 0), **beside, ha="right", va="center", multialignment="center")
    return figure


@styled
def rollout_error(
    times: ArrayLike,
    curves: Mapping[str, ArrayLike],
    *,
    quartiles: Mapping[str, ArrayLike] | None = None,
    given_until: float | None = None,
    lost_at: float | None = None,
    quantity: str = "nRMSE [-]",
    title: str = "",
) -> Figure:
    """An error as the forecast goes on, model beside persistence, or models beside each other.

    Args:
        times: (T,) forecast times.
        curves: name -> (T,) nRMSE, or what `quantity` says.
        quartiles: name -> (2, T) errors between which the middle half of the samples lies; shaded behind the curve.
        given_until: time of the last given frame; everything up to it is marked as input.
        lost_at: time from which on the model's forecast is correlated with the truth by less than 0.8.
    """
    figure = empty_figure(4.8, 3.1, title)
    ax = figure.subplots()
    times = np.asarray(times, dtype=float)
    for name, look in looks(curves).items():
        if name in (quartiles or {}):
            low, high = positive(quartiles[name])
            text = f"{name}, middle half"
            ax.fill_between(times, low, high, color=look["color"], alpha=0.18, linewidth=0, label=text)
        ax.plot(times, positive(curves[name]), **look, marker="o", markersize=point_size(len(times)), label=name)
    if given_until is not None:
        start = min(ax.get_xlim()[0], given_until - 0.08 * float(np.ptp(times) or 1.0))
        ax.axvspan(start, given_until, color=GAP, alpha=0.6, linewidth=0, label="given frames")
        ax.set_xlim(left=start)
    if lost_at is not None:
        ax.axvline(lost_at, color=PURPLE, linestyle=":", linewidth=1.2, label="correlation lost")
    ax.set(xlabel=label("time t"), ylabel=quantity, yscale="log")
    legend(ax)
    return figure


@styled
def correlations(times: ArrayLike, curves: Mapping[str, ArrayLike], *, title: str = "") -> Figure:
    """Correlation with the truth as forecasts of chaos go on, and the 0.8 below which they count as lost.

    Args:
        times: (T,) forecast times.
        curves: name -> (T,) correlation.
    """
    figure = empty_figure(4.8, 3.1, title)
    ax = figure.subplots()
    for name, look in looks(curves).items():
        ax.plot(times, curves[name], **look, label=name)
    ax.axhline(0.8, color=GREY, linestyle=":", linewidth=1.2, label="lost below")
    ax.set(xlabel=label("time t"), ylabel=label("correlation with the truth"), ylim=(min(0.0, ax.get_ylim()[0]), 1.03))
    legend(ax)
    return figure


@styled
def calibration(times: ArrayLike, spread: ArrayLike, error: ArrayLike, ranks: ArrayLike, *, title: str = "") -> Figure:
    """Whether an ensemble differs as much as it errs: both over time, and how often the truth has which rank.

    Args:
        times: (T,) forecast times.
        spread, error: (T,) of the members, and of their mean.
        ranks: (M + 1,) shares of points by how many members lie below the truth.
    """
    figure = empty_figure(7.2, 2.7, title)
    over_time, places = figure.subplots(1, 2)
    mark = {"marker": "o", "markersize": point_size(len(times))}
    over_time.plot(times, positive(error), color=BLACK, **mark, label="error of the mean")
    over_time.plot(times, positive(spread), color=BLUE, **mark, label="spread of the members")
    over_time.set(xlabel=label("time t"), ylabel=label("root mean square", "standard deviations"), yscale="log")
    legend(over_time)
    even = 1 / len(ranks)
    places.bar(range(len(ranks)), ranks, width=0.9, color=BLUE, label="found")
    places.axhline(even, color=BLACK, linestyle="--", linewidth=1.2, label=f"calibrated, {even:.3g} each")
    places.set(xlabel=label("members below the truth"), ylabel=label("share of points"))
    legend(places)
    return figure


@styled
def cost(time_ms: Mapping[str, float], error: Mapping[str, float], quantity: str, *, title: str = "") -> Figure:
    """An error over the time that a forecast takes, a named dot each; down and to the left is better."""
    figure = empty_figure(4.8, 2.8, title)
    ax = figure.subplots()
    for name, look in looks(error).items():
        ax.plot([time_ms[name]], positive([error[name]]), "o", markersize=8, alpha=0.8, color=look["color"], label=name)
    highest = max((value for value in error.values() if np.isfinite(value)), default=0.0) or 1.0
    ax.set(xscale="log", xlabel=label("forecast of a sample", "ms"), ylabel=quantity, ylim=(0, 1.15 * highest))
    ax.margins(x=0.2)
    legend(ax)
    return figure


@styled
def members_1d(
    family: Family, x: ArrayLike, times: ArrayLike, truth: ArrayLike, members: ArrayLike, *, title: str = ""
) -> Figure:
    """Space-time images of the truth, two members and their spread; below, all of them at the middle of the domain.

    Args:
        x, times: (N,) and (T,) coordinates, evenly spaced and increasing.
        truth: (T, N).
        members: (M, T, N), two at least.
    """
    x, times, truth, members = (np.asarray(a, dtype=float) for a in (x, times, truth, members))
    shades, extent = (FIELD_COLOURS, value_range(truth)), edges(x) + edges(times)
    quantity, spread = predicted(family), members.std(axis=0, ddof=1)
    figure = empty_figure(7.2, 4.6, title)
    upper, lower = figure.subfigures(2, 1, height_ratios=[1.1, 1])
    images = {
        "truth": (truth, *shades),
        "one member": (members[0], *shades),
        "another": (members[1], *shades, quantity),
        "spread": (spread, INPUT_COLOURS, value_range(spread), label("spread")),
    }
    _draw_row(upper.subplots(1, 4, sharey=True), extent, images, ylabel=label("time t"))
    ax, middle = lower.subplots(), len(x) // 2
    low, high = np.quantile(members[:, :, middle], (0.05, 0.95), axis=0)
    ax.fill_between(times, low, high, color=BLUE, alpha=0.22, linewidth=0, label="nine tenths of the members")
    for number, member in enumerate(members[:5, :, middle]):
        ax.plot(times, member, color=BLUE, linewidth=0.7, alpha=0.7, label="_" * (number > 0) + "five of them")
    ax.plot(times, truth[:, middle], color=BLACK, linewidth=1.8, label="truth")
    name, _, unit = quantity.partition(" [")
    ax.set(xlabel=label("time t"), ylabel=f"{name} at x = {x[middle]:.3g} [{unit}")
    legend(ax, 3)
    return figure


@styled
def members_2d(family: Family, truth: ArrayLike, members: ArrayLike, *, title: str = "") -> Figure:
    """One field of the truth, two members, their mean and their spread.

    Args:
        truth: (ny, nx).
        members: (M, ny, nx), two at least.
    """
    truth, members = np.asarray(truth, float), np.asarray(members, float)
    shades, spread = (FIELD_COLOURS, value_range(truth)), members.std(axis=0, ddof=1)
    figure = empty_figure(8.2, 2.0, title)
    images = {
        "truth": (truth, *shades),
        "one member": (members[0], *shades),
        "another": (members[1], *shades),
        "mean": (members.mean(0), *shades, predicted(family)),
        "spread": (spread, INPUT_COLOURS, value_range(spread), label("spread")),
    }
    axes = figure.subplots(1, 5, sharex=True, sharey=True)
    _draw_row(axes, _plane(family), images, ylabel=label("y"), aspect="equal")
    return figure


@styled
def spectra(
    wavenumber: ArrayLike, curves: Mapping[str, ArrayLike], *, quantity: str = "u [-]", title: str = ""
) -> Figure:
    """Energy per wavenumber, log-log; the mean (wavenumber 0) has no place on it and is left out.

    What has less than SPECTRUM_DEPTH of the largest energy lies below the axis: a truth that is smooth ends in rounding
    errors, and would leave to what a forecast can get right a tenth of the figure.

    Args:
        wavenumber: (K,) cycles per domain length.
        curves: name -> (K,) energy, e.g. truth, prediction, error; see `metrics.energy_spectrum`.
    """
    figure = empty_figure(4.8, 3.3, title)
    ax = figure.subplots()
    wavenumber = np.asarray(wavenumber, dtype=float)
    drawn = {name: positive(values)[wavenumber > 0] for name, values in curves.items()}
    for name, look in looks(curves).items():
        ax.plot(wavenumber[wavenumber > 0], drawn[name], **look, label=name)
    known = np.concatenate(list(drawn.values()))
    known = known[known > SPECTRUM_DEPTH * np.max(known[np.isfinite(known)], initial=0.0)]
    if known.size:
        ax.set(xscale="log", yscale="log", ylim=(known.min() / 2, known.max() * 2))
    ax.set(xlabel=label("wavenumber k", "cycles per domain"), ylabel=f"energy of {quantity}")
    legend(ax)
    return figure


@styled
def loss_terms(
    progress: ArrayLike,
    terms: Mapping[tuple[str, str], ArrayLike],
    validation: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    metric: str = "nRMSE",
    title: str = "",
) -> Figure:
    """Loss terms, raw values pale under their running median; below them what validations measured, if there are any.

    A data set has one colour in both, a term its dashes; every validation is a point.

    Args:
        progress: (n,) steps.
        terms: (data set, term) -> (n,) values; NaN where a term was not computed at that step.
        validation: data set -> (progress, metric).
    """
    figure = empty_figure(7.2, 4.6 if validation else 2.9, title)
    panels = figure.subplots(2 if validation else 1, 1, sharex=True, squeeze=False)[:, 0]
    progress = np.asarray(progress, dtype=float)
    look = looks(dict.fromkeys([*(name for name, _ in terms), *validation]))
    kinds = list(dict.fromkeys(kind for _, kind in terms))
    for name, kind in terms:
        values, dash = positive(terms[name, kind]), DASHES[kinds.index(kind) % len(DASHES)]
        known = np.isfinite(values)
        mark = {"marker": "o", "markersize": 3.5} if known.sum() == 1 else {}
        how = look[name] | ({"linestyle": dash} if len(kinds) > 1 else {})
        panels[0].plot(progress[known], values[known], color=how["color"], linewidth=0.7, alpha=0.3)
        panels[0].plot(progress[known], running_median(values[known]), **how, **mark, label=f"{name}, {kind}")
    panels[0].set(yscale="log", ylabel=label("training loss"))
    for name in (name for name in look if name in validation):
        where, values = validation[name]
        size = point_size(len(where))
        panels[1].plot(where, positive(values), **look[name], marker="o", markersize=size, label=f"{name}, validation")
        panels[1].set(yscale="log", ylabel=label(f"validation {metric}"))
    panels[-1].set_xlabel(label("optimizer step"))
    for ax in panels:
        legend(ax)
    return figure


@styled
def throughput(
    time_s: ArrayLike,
    samples_per_s: ArrayLike,
    steady: ArrayLike,
    names: Sequence[str],
    windows: ArrayLike,
    median: float,
    ci95: tuple[float, float],
    *,
    turns: Sequence[tuple[float, float]] = (),
    unit: str = "samples",
    title: str = "",
) -> Figure:
    """Samples per second of every step by data set, and the windows that the median is of; the rest is hollow.

    Args:
        time_s, samples_per_s: (n,) one entry an optimizer step.
        steady: (n,) bool, the steps that count; the others warm up or compile.
        names: (n,) the data sets of each step.
        windows: (m, 3) begin and end [s] and samples per second of each window of steady steps.
        median, ci95: over the windows' time, samples per second, and its bootstrap 95 % interval.
        turns: begin and end [s] of those that had on what was measured in turns.
    """
    figure = empty_figure(7.2, 3.3, title)
    ax = figure.subplots()
    time_s, rate, steady = np.asarray(time_s, float), np.asarray(samples_per_s, float), np.asarray(steady, bool)
    names, windows = np.asarray(names), np.reshape(windows, (-1, 3)).astype(float)
    for name, look in looks(dict.fromkeys(names)).items():  # in the order of the loss figure, and so in its colours
        chosen = steady & (names == name)
        if not chosen.any():
            continue
        ax.plot(time_s[chosen], rate[chosen], "o", markersize=2.5, color=look["color"], label=f"steps of {name}")
    if not steady.all():
        hollow = {"markerfacecolor": "none", "markeredgecolor": GREY, "markeredgewidth": 0.7}
        ax.plot(time_s[~steady], rate[~steady], "o", markersize=4, **hollow, label="warm-up and compile steps")
    for number, turn in enumerate(turns):
        ax.axvspan(
            *turn, color=BLACK, alpha=0.1, linewidth=0, label="_" * (number > 0) + "with what was measured in turns"
        )
    if np.isfinite(ci95).all():  # one window has a median and no interval
        text = f"95 % interval {ci95[0]:.4g} to {ci95[1]:.4g}"
        ax.axhspan(*ci95, color=GREY, alpha=0.35, linewidth=0, label=text, zorder=1)
    if np.isfinite(median):  # no steady step yet: nothing to claim
        ax.axhline(median, color=GREY, linewidth=1.0, label=f"median {median:.4g} {unit}/s", zorder=1)
        begin, end, rates = windows.T
        ax.plot(
            np.stack((begin, end, np.full_like(end, np.nan)), axis=1).ravel(), np.repeat(rates, 3), color=BLACK,
            linewidth=2, solid_capstyle="butt", label=f"windows of about {np.median(end - begin):.1g} s", zorder=3,
        )  # fmt: skip
    ax.set(xlabel=label("training time", "s"), ylabel=label("throughput", f"{unit}/s"))
    ax.set_ylim(0, 1.08 * np.max(rate[np.isfinite(rate)], initial=0.0) or 1.0)
    legend(ax)
    return figure


@styled
def error_distribution(
    nrmse: Mapping[str, ArrayLike], *, baselines: Mapping[str, tuple[str, float]] | None = None, title: str = ""
) -> Figure:
    """Share of test samples at or below an nRMSE, one curve a data set; its baseline's mean as a dashed line.

    Samples whose nRMSE is not finite stay in the count, so their curve ends below 1, and the legend says how many.

    Args:
        nrmse: data set -> (B,) nRMSE of each sample.
        baselines: data set -> name and mean nRMSE of the forecast without a model.
    """
    figure = empty_figure(4.8, 3.3, title)
    ax = figure.subplots()
    for name, look in looks(nrmse).items():
        values = np.ravel(np.asarray(nrmse[name], dtype=float))
        finite = np.sort(values[np.isfinite(values)])
        share = np.arange(1, len(finite) + 1) / max(len(values), 1)
        missing = f", {len(values) - len(finite)} not finite" if len(finite) < len(values) else ""
        text = f"{name} (n = {len(values)}{missing})"
        # Each curve starts on the floor: a single sample is a step, not an invisible point.
        ax.step(np.append(finite[:1], finite), np.append(share[:1] * 0, share), where="post", **look, label=text)
        baseline, mean = (baselines or {}).get(name, ("", np.nan))
        if np.isfinite(mean):
            text = f"{baseline} {mean:.3g}, its mean"
            ax.axvline(mean, color=look["color"], linestyle="--", linewidth=1.2, label=text)
    ax.set(xscale="log", xlabel=label("nRMSE of a sample"), ylabel=label("share of samples"), ylim=(0, 1.02))
    legend(ax)
    return figure


def _plane(family: Family) -> tuple[float, ...]:
    """Ends of x and of y."""
    return family.domain[0] + family.domain[1]


def _truth_prediction_error(truth: np.ndarray, prediction: np.ndarray, quantity: str) -> dict[str, tuple]:
    """Images of a forecast for `_draw_row`, in the truth's colours, and of its error."""
    shades, error = (FIELD_COLOURS, value_range(truth)), np.asarray(prediction, dtype=float) - truth
    return {
        "truth": (truth, *shades),
        "prediction": (prediction, *shades, quantity),
        "error": (error, ERROR_COLOURS, symmetric_range(error), label("error")),
    }


def _draw_row(axes: Sequence[Axes], extent: Sequence[float], images: Mapping[str, tuple], **of_axes) -> None:
    """Images of one domain beside each other.

    Args:
        images: title -> values, colours, norm, and the label of a colour bar where there is one.
        of_axes: of all axes; labels stand at the left and at the bottom of the figure alone.
    """
    for ax, (title, (values, *look)) in zip(axes, images.items(), strict=True):
        draw_image(ax, values, extent, *look)
        ax.set(title=title if ax.get_subplotspec().is_first_row() else "", xlabel=label("x"), **of_axes)
        ax.label_outer()


def _keep_in_view(ax: Axes, truth: np.ndarray) -> None:
    """Keep a diverging forecast from flattening the truth: no more than the truth's own span beyond it."""
    norm, (bottom, top) = value_range(truth), ax.get_ylim()
    span = norm.vmax - norm.vmin
    ax.set_ylim(max(bottom, norm.vmin - span), min(top, norm.vmax + span))
