"""What a run costs: the price of its machine for all the time that it held it, energy, and how busy its GPUs were."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from statistics import fmean, quantiles

from upsnb.values import CostConfig

PRICE, BUDGET = "cost.price_per_hour", "cost.budget"


def held_s(manifest: Mapping, now: float | None = None) -> float:
    """Seconds that the run has held its machine for, all launches; what lies between an end and going on is free.

    Args:
        now: Unix time that a launch counts up to which has not ended; empty: this moment.
    """
    now = time.time() if now is None else now
    launches = [launch for launch in manifest["segments"] if "started" in launch]
    ends = [launch.get("ended", launch["started"]) for launch in launches[:-1]]
    ends += [launch.get("ended", now) for launch in launches[-1:]]
    return sum(max(end - launch["started"], 0.0) for launch, end in zip(launches, ends, strict=True))


def dollars(price_per_hour: float, seconds: float) -> float:
    """What so much time costs [$]."""
    return price_per_hour * seconds / 3600


def is_spent(settings: CostConfig, seconds: float) -> bool:
    """Whether a run that has held its machine for so long may cost no more."""
    return settings.budget is not None and dollars(settings.price_per_hour, seconds) >= settings.budget


def of(manifest: Mapping, now: float | None = None) -> dict:
    """Price [$/h], time held [s], cost and budget [$], None where nobody said one.

    A price that was corrected while the run trained counts from its start.
    """
    said = {**manifest.get("cost", {}), **manifest["applied"]["overlay"]}  # older runs have none
    price, seconds = said.get(PRICE) or None, held_s(manifest, now)
    return {
        "price_per_hour": price,
        "held_s": round(seconds, 3),
        "dollars": round(dollars(price, seconds), 4) if price else None,
        "budget": said.get(BUDGET),
    }


def energy_wh(events: Iterable[dict]) -> float | None:
    """What the GPUs drew, by their own word once a second [Wh]; None where they say nothing."""
    readings = [event for event in events if event["kind"] == "telemetry" and None not in event.get("power_w", [None])]
    pairs = zip(readings, readings[1:])
    total = sum(sum(one["power_w"]) * min(after["time"] - one["time"], 10.0) for one, after in pairs)  # a pause is none
    return total / 3600 if len(readings) > 1 else None


def utilisation(events: Iterable[dict]) -> dict[str, float | None]:
    """How busy the GPUs were, by their own word once a second: mean and lowest tenth [%]; None if they say nothing."""
    readings = (event["utilisation_percent"] for event in events if event["kind"] == "telemetry")
    told = [value for reading in readings for value in reading if value is not None]
    lowest = quantiles(told * 2 if len(told) == 1 else told, n=10, method="inclusive") if told else [None]
    return {"mean": fmean(told) if told else None, "p10": lowest[0]}
