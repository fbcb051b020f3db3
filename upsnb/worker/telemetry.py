"""What the GPUs say of themselves while a run trains, as one event a second; nothing on machines without any."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

import torch

from upsnb.runs.events import EventWriter
from upsnb.training.parallel import Ranks

EVERY_S = 1.0
READINGS = {  # event field: how torch asks the driver for it (through nvidia-ml-py), and what of the answer is kept
    "utilisation_percent": (torch.cuda.utilization, 1.0),
    "power_w": (torch.cuda.power_draw, 1e-3),  # it answers in mW
    "clock_mhz": (torch.cuda.clock_rate, 1.0),  # of the SMs
}


@contextlib.contextmanager
def telemetry(ranks: Ranks, events: EventWriter, step: Callable[[], int | None], every_s: float = EVERY_S) -> Iterator:
    """Sample this machine's GPUs in a thread of rank 0 until the block ends.

    Events `telemetry` carry one list per reading, an entry per local rank; None where the driver has no answer (a slice
    of a GPU tells no utilisation). One answer takes tens of microseconds and no kernel waits for it.

    Args:
        step: the step that events are written under.
    """
    if ranks.rank != 0 or ranks.device.type != "cuda":
        yield
        return
    devices = range(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    first, missing = sample(devices)
    if missing:
        events.write("warning", step() or 0, message=f"GPU telemetry is incomplete: {'; '.join(missing)}")
    if all(value is None for values in first.values() for value in values):
        yield
        return
    done = threading.Event()

    def watch() -> None:
        while not done.wait(every_s):
            events.write("telemetry", step() or 0, **sample(devices)[0])

    thread = threading.Thread(target=watch, name="telemetry", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def sample(devices) -> tuple[dict[str, list[float | None]], list[str]]:
    """Every reading of every device now, and why some are missing, in words."""
    readings, missing = {}, {}
    for name, (ask, scale) in READINGS.items():
        readings[name] = []
        for device in devices:
            try:
                readings[name].append(round(scale * ask(device), 3))
            except Exception as error:  # the driver's own errors have no common base with torch's
                readings[name].append(None)
                missing[name] = f"{name}: {error}"
    return readings, list(missing.values())
