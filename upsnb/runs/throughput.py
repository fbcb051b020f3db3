"""How fast a run is while steady: the one definition that reports, tables and figures use."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

WINDOW_S = 0.999  # of steady steps whose mean rate is one observation; ten of 0.1 s add up to less than 1
NUM_RESAMPLES = 2000


def samples_seen(steps: Iterable[dict]) -> float:
    """Samples of step events, added up step by step, because flips change batches and ranks.

    A step that was repeated after a crash counts once.
    """
    return sum({step["step"]: step["samples_per_s"] * step["step_time_ms"] / 1e3 for step in steps}.values())


def steady_throughput(events: Iterable[dict]) -> dict:
    """Median samples per second over windows of about a second of steady steps, with a bootstrap 95 % interval.

    A window holds successive steady steps of one launch, and at least as many as there are datasets: single steps
    differ by dataset and by what the clock happened to catch. Steps that are not steady are passed over rather than
    ending a window: where an epoch, and with it a validation, takes less than a second, none would ever be full.

    Returns:
        {"median", "ci95": [low, high], "num_windows"}; None where nothing can be said: no median without a window, no
        interval from a single one.
    """
    events = list(events)
    names = {name for event in events if event["kind"] == "step" for name in event.get("datasets", ())}
    rates: list[float] = []
    samples, seconds, count = 0.0, 0.0, 0
    for event in events:
        if event["kind"] == "segment":  # a relaunch: another process, perhaps on another machine
            samples, seconds, count = 0.0, 0.0, 0
        if event["kind"] != "step" or not event["steady"]:
            continue
        step_s = event["step_time_ms"] / 1e3
        samples, seconds, count = samples + event["samples_per_s"] * step_s, seconds + step_s, count + 1
        if seconds >= WINDOW_S and count >= len(names):
            rates.append(samples / seconds)
            samples, seconds, count = 0.0, 0.0, 0
    if not rates:
        return {"median": None, "ci95": [None, None], "num_windows": 0}
    interval = [None, None]
    if len(rates) > 1:
        draws = np.random.default_rng(0).choice(rates, (NUM_RESAMPLES, len(rates)))
        interval = np.quantile(np.median(draws, axis=1), [0.025, 0.975]).tolist()
    return {"median": float(np.median(rates)), "ci95": interval, "num_windows": len(rates)}
