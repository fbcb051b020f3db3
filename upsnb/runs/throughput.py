"""How fast a run is while steady, and against another: the definitions that reports, tables and figures use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import starmap
from operator import truediv
from typing import NamedTuple

import numpy as np

WINDOW_S = 0.999  # of steady steps whose mean rate is one observation; ten of 0.1 s add up to less than 1
NUM_RESAMPLES = 2000
TURN_ENDS = ("turn", "measuring", "flip_effect", "segment", "end")  # kinds of events with which a turn is over


def block_length(values: np.ndarray) -> int:
    """How many successive values a bootstrap must draw together, because neighbours are alike.

    Steps of one run are: another program takes the cores for a while, a clock falls. The length is the best one for
    AR(1) data (Kuensch 1989) of the same correlation between neighbours, which is read off the sides of the median on
    which they lie, because outliers hide it. At most a quarter of the values: fewer blocks than four are no sample.
    """
    sides = np.sign(values - np.median(values))
    sides -= sides.mean()
    alike = sides[1:] @ sides[:-1] / (sides @ sides) if sides.any() else 0.0
    correlation = min(math.sin(math.pi / 2 * max(alike, 0.0)), 0.99)  # of normal values that lie so
    best = (math.sqrt(6) * correlation / (1 - correlation**2)) ** (2 / 3) * len(values) ** (1 / 3)
    return int(np.clip(round(best), 1, max(len(values) // 4, 1)))


def weighted_median(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Along the last axis: half of the weight lies on either side. Of equal weights it is `numpy.median`."""
    order = np.argsort(values, axis=-1)
    values, reached = (np.take_along_axis(array, order, -1) for array in (values, weights))
    reached = np.cumsum(reached, axis=-1)
    half = reached[..., -1:] / 2
    middle = np.stack([np.sum(reached < half, axis=-1), np.sum(reached <= half, axis=-1)], axis=-1)
    return np.take_along_axis(values, middle, -1).mean(axis=-1)  # of two where one ends just there


def median_with_interval(
    values: Sequence[float], over: Sequence[float] | None = None, weights: Sequence[float] | None = None
) -> dict:
    """Median of successive values, or that median over another's, with a 95 % interval.

    The interval is of a circular block bootstrap, by percentiles. Its draws have a seed: the same values give the same.

    Args:
        weights: of `values`, where they do not count alike.

    Returns:
        {"median", "ci95": [low, high]}; None where there is none: no median of nothing, no interval of a single value.
    """
    samples = [(np.asarray(values, float), np.ones(len(values)) if weights is None else np.asarray(weights, float))]
    samples += [] if over is None else [(np.asarray(over, float), np.ones(len(over)))]
    fewest, draws = min(len(sample) for sample, _ in samples), np.random.default_rng(0)

    def medians(sample: np.ndarray, weights: np.ndarray) -> np.ndarray:
        block, num = block_length(sample), len(sample)
        starts = draws.integers(num, size=(NUM_RESAMPLES, -(-num // block), 1))
        drawn = ((starts + np.arange(block)) % num).reshape(NUM_RESAMPLES, -1)[:, :num]
        return weighted_median(sample[drawn], weights[drawn])

    ratios = reduce(truediv, starmap(medians, samples)) if fewest > 1 else None
    interval = [None] * 2 if ratios is None else np.percentile(ratios, (2.5, 97.5)).tolist()
    return {"median": float(reduce(truediv, starmap(weighted_median, samples))) if fewest else None, "ci95": interval}


def throughput_ratio(rates: Sequence[float], reference: Sequence[float], paired: bool = False) -> dict:
    """Throughput over another, both in samples per second, as `median_with_interval` gives it.

    Args:
        paired: each rate has its partner, measured next to it: what slowed the machine down then slowed both.
    """
    return median_with_interval(np.divide(rates, reference)) if paired else median_with_interval(rates, reference)


def samples_seen(steps: Iterable[dict]) -> float:
    """Samples of step events, added up step by step, because flips change batches and ranks.

    A step that was repeated after a crash counts once.
    """
    return sum({step["step"]: step["samples_per_s"] * step["step_time_ms"] / 1e3 for step in steps}.values())


class Window(NamedTuple):
    """Successive steady steps, by training time [s]; between them others may lie, which `steady_s` leaves out."""

    begin_s: float
    end_s: float
    samples_per_s: float
    steady_s: float


def steady_windows(events: Iterable[dict]) -> list[Window]:
    """Windows of steady steps, each of about a second, or of one step where that takes longer.

    A window holds successive steady steps of one launch, and at least as many as there are datasets: single steps
    differ by dataset and by what the clock happened to catch. Steps that are not steady are passed over rather than
    ending a window: where an epoch, and with it a validation, takes less than a second, none would ever be full.
    """
    events = list(events)
    names = {name for event in events if event["kind"] == "step" for name in event.get("datasets", ())}
    windows: list[Window] = []
    begin, samples, seconds, count = 0.0, 0.0, 0.0, 0
    for event in events:
        if event["kind"] == "segment":  # a relaunch: another process, perhaps on another machine
            samples, seconds, count = 0.0, 0.0, 0
        if event["kind"] != "step" or not event["steady"]:
            continue
        step_s = event["step_time_ms"] / 1e3
        begin = begin if count else event["time_s"] - step_s
        samples, seconds, count = samples + event["samples_per_s"] * step_s, seconds + step_s, count + 1
        if seconds >= WINDOW_S and count >= len(names):
            windows.append(Window(begin, event["time_s"], samples / seconds, seconds))
            samples, seconds, count = 0.0, 0.0, 0
    return windows


def steady_throughput(events: Iterable[dict]) -> dict:
    """Median samples per second over `steady_windows`, with its 95 % interval: half of the steady time it was faster.

    A window counts by its length, or a run beside other programs would seem undisturbed: there most windows are
    short and fast, and a few steps of many seconds take the time.

    Returns:
        {"median", "ci95": [low, high], "num_windows"}; None where nothing can be said: no median without a window, no
        interval from a single one.
    """
    windows = steady_windows(events)
    rates, lengths = [window.samples_per_s for window in windows], [window.steady_s for window in windows]
    return {**median_with_interval(rates, weights=lengths), "num_windows": len(windows)}


def turns_with(events: Iterable[dict]) -> list[tuple[int, int | None]]:
    """From which step to which a measurement in turns had its change on; to None where it has it now."""
    found, since = [], None
    for event in events:
        if event["kind"] in TURN_ENDS:
            found += [(since, event["step"])] if since is not None else []
            since = event["step"] if event.get("arm") else None
    return found + ([(since, None)] if since is not None else [])
