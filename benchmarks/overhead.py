"""What following a run costs it: writing a step event and a heartbeat, as a share of a finished run's steps.

python benchmarks/overhead.py RUN_FOLDER
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from upsnb.runs.events import EventWriter, Heartbeat
from upsnb.runs.handle import Run
from upsnb.runs.runfolder import read_control

REPEATS = 20_000


def microseconds(call) -> float:
    """Median over 20 blocks, so that a pause of the machine does not count."""
    blocks = []
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(REPEATS // 20):
            call()
        blocks.append((time.perf_counter() - started) / (REPEATS // 20) * 1e6)
    return statistics.median(blocks)


def main() -> None:
    run = Run.attach(Path(sys.argv[1]))
    steps = [event for event in run.events(("step",)) if event["steady"]]
    fields = {key: value for key, value in steps[-1].items() if key not in ("kind", "time", "step")}
    with tempfile.TemporaryDirectory() as folder:
        events, heartbeat = EventWriter(Path(folder)), Heartbeat(Path(folder), 0)
        costs = {
            "event_us": microseconds(lambda: events.write("step", 1, **fields)),
            "two_heartbeats_us": 2 * microseconds(lambda: heartbeat.beat(1)),
            "read_control_us": microseconds(lambda: read_control(folder)),
        }
    step_us = 1e3 * statistics.median(event["step_time_ms"] for event in steps)
    waited = sum(event["data_wait_ms"] for event in steps) / sum(event["step_time_ms"] for event in steps)
    costs = {name: round(value, 2) for name, value in costs.items()}
    print(
        json.dumps(
            {
                **costs,
                "step_us": round(step_us),
                "following_share": round(sum(costs.values()) / step_us, 6),
                "data_wait_share": round(waited, 5),
            }
        )
    )


if __name__ == "__main__":
    main()
