"""What a run costs: the price of its machine for all the time that it held it, start-up and pauses too."""

from __future__ import annotations

import time
from collections.abc import Mapping

from upsnb.values import CostConfig


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


def of(settings: CostConfig, seconds: float) -> dict:
    """Price [$/h], time held [s], cost and budget [$], None where nobody said one.

    A price that was corrected while the run trained counts from its start.
    """
    price = settings.price_per_hour or None
    return {
        "price_per_hour": price,
        "held_s": round(seconds, 3),
        "dollars": round(dollars(price, seconds), 4) if price else None,
        "budget": settings.budget,
    }
