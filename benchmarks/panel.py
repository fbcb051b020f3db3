"""What the live panel costs: opening a run, a redraw in kernel CPU and bytes, and the training it slows.

    python benchmarks/panel.py            # about 3 minutes; writes outputs/reference/panel/panel.json

A synthetic run of 100,000 steps is opened, and one with 600 points a curve is redrawn. Then a real run trains while a
panel in this process follows it half of the time, in turns of 5 s, and its throughput with and without is compared.
"""

import contextlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from keep import ROOT, arguments, save

from upsnb import overlays
from upsnb.runs import events, handle, runfolder
from upsnb.runs.throughput import throughput_ratio
from upsnb.widgets import charts
from upsnb.widgets.panel import Panel

NUM_STEPS, NUM_REDRAWS, TURN_S = 100_000, 200, 5.0
FULLEST = 76_800  # steps that make 300 buckets of 256: the most a curve ever has


def synthetic(folder: Path, num_steps: int) -> handle.Run:
    """A run folder as a trainer leaves it, every curve noisy, a flip now and then."""
    config = overlays.load(ROOT / "params/smoke.yaml")
    runfolder.create(config, folder)
    runfolder.update_manifest(folder, status="running")
    now, noise = time.time(), np.random.default_rng(0).lognormal(0, 0.3, (num_steps, 4)).round(4).tolist()
    datasets = {"advection": {"pairs": 100}, "darcy": {"pairs": 100}}
    lines = [{"kind": "start", "time": now, "step": 0, "num_ranks": 1, "device": "cpu", "total_steps": 2 * num_steps}]
    lines[0] |= {"parameters": 1, "samples_per_step": 16, "datasets": datasets}
    for k, (a, b, c, d) in enumerate(noise, 1):
        lines.append(
            {"kind": "step", "time": now + 0.01 * k, "step": k, "time_s": 0.01 * k, "step_time_ms": 10 * a}
            | {"samples_per_s": 1600 / a, "loss": b, "losses": {"relative": b, "spectral": c}, "gradient_norm": c}
            | {"epoch": k // 100, "data_wait_ms": d, "datasets": ["advection" if k % 2 else "darcy"]}
            | {"learning_rate": 1e-3, "peak_memory_gib": 1 + k / num_steps, "steady": k > 5}
        )
        if k % (num_steps // 12) == 0:
            flip = {"time": now + 0.01 * k, "step": k, "revision": k, "changes": {"training.amp": True}}
            flip |= {"phases": {"bf16": True}, "applied": True, "reason": None, "duration_ms": 2.0}
            lines += [{"kind": "flip", **flip}, {"kind": "flip_effect", **flip, **EFFECT}]
    events.events_path(folder).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return handle.Run.attach(folder)


EFFECT = {"ratio": 1.31, "ci95": [1.27, 1.35], "memory_gib": [1.0, 0.79]}


def opening_and_redrawing(folder: Path) -> dict:
    run = synthetic(folder, NUM_STEPS)
    started, cpu = time.perf_counter(), time.process_time()
    panel = Panel(run)
    panel.refresh()
    opened = {"open_s": time.perf_counter() - started, "open_cpu_s": time.process_time() - cpu}
    run = synthetic(folder.with_name("fullest"), FULLEST)
    panel = Panel(run)
    panel.refresh()
    folder, costs, sizes = run.folder, [], []
    line = events.events_path(folder).read_text().splitlines()[-1].replace("flip_effect", "memory")
    for _ in range(NUM_REDRAWS):
        with open(events.events_path(folder), "a") as file:
            file.write(line + "\n")
        before = {widget: widget.value for widget in panel._widgets() if hasattr(widget, "value")}
        cpu = time.process_time()
        panel.refresh()
        costs.append(1e3 * (time.process_time() - cpu))
        changed = [str(widget.value) for widget, old in before.items() if widget.value != old]
        sizes.append(sum(len(text.encode()) for text in [*changed, panel._plots.value]))  # as if the curves had moved
    points = 2 * len(charts.strips(panel.history)[0].curves[1].y)
    median, worst = statistics.median(costs), float(np.quantile(costs, 0.95))
    redrawn = {"redraw_cpu_ms": median, "redraw_cpu_ms_95": worst, "redraw_kilobytes": max(sizes) / 1e3}
    return {"num_steps": NUM_STEPS, **opened, "points_per_curve": points, **redrawn}


def slowing(folder: Path, seconds: float) -> dict:
    """Throughput with a panel at work over throughput without, from turns that interleave."""
    settings = {"training.time_limit_s": seconds, "evaluation.every_epochs": 1000}
    settings |= {"stages.operator.epochs": 100_000, "data.datasets.darcy": None}
    config = overlays.load(ROOT / "params/smoke.yaml", overrides=settings)
    run = handle.start(config, folder, attached=True)
    panel, turns = Panel(run), []
    while panel.status in runfolder.ALIVE:
        for followed in (True, False):
            turns.append((time.time(), followed))
            until = time.time() + TURN_S
            while time.time() < until and run.status() in runfolder.ALIVE:
                if followed:
                    panel.refresh()
                time.sleep(0.5)
        panel.refresh()
    run.wait()
    sides: dict[bool, list] = {True: [], False: []}
    for step in run.events(("step",)):
        since, followed = max(turn for turn in turns if turn[0] <= step["time"])
        if step["steady"] and since + 0.5 < step["time"]:
            sides[followed].append(step["samples_per_s"])
    found = throughput_ratio(sides[True], sides[False])
    return {
        "throughput_with_over_without": found["median"],
        "ci95": found["ci95"],
        "num_steps": [len(sides[k]) for k in (False, True)],
        "threads_per_rank": config.training.threads_per_rank,  # None: all cores, so that a panel takes some from it
    }


def main() -> None:
    parser = arguments(__doc__, "panel/panel.json")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long the real run trains")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        costs = opening_and_redrawing(Path(temporary) / "synthetic")
        costs["training"] = slowing(Path(temporary) / "real", args.seconds) if args.seconds else None
    with contextlib.suppress(OSError):
        costs["load"] = os.getloadavg()[0]  # of a machine that does nothing else this is below 2
    save(costs, args.output)


if __name__ == "__main__":
    main()
