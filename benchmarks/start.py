"""What starting costs: time to the first optimized step, compiled anew and found on disk, and a notebook's overhead.

    python benchmarks/start.py     # about 10 minutes on a quiet machine; writes outputs/reference/start/start.json

A run of the optimized params file is stopped once every kind of microbatch (each dataset, with and without inverse
losses) was taken twice: first with an empty compile cache, then several times with what that left. After that the
training notebook runs headless, and what its wall time holds beside training is told apart by what papermill, the run
and this process noted. Data is generated before anything is timed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from keep import ROOT, arguments, save

from upsnb import overlays
from upsnb.compare.turns import Turns
from upsnb.config import RunConfig
from upsnb.data import datasets
from upsnb.runs import handle, runfolder
from upsnb.runs.runfolder import REPORT

NOTEBOOK = ROOT / "notebooks/01_train.ipynb"
TARGETS = {"cold_first_step_s": 30.0, "warm_first_step_s": 10.0, "overhead_s": 20.0}
TURNS = 2  # of every kind of microbatch


def num_steps(config: RunConfig) -> int:
    """Optimizer steps in which every kind of microbatch is taken TURNS times."""
    training = config.training
    every = max(training.inverse_loss_frequency, *training.loss_frequency.values(), 1)
    return -(-TURNS * every * len(config.data.datasets) // training.accum_steps)


def first_steps(config: RunConfig, folder: Path) -> dict:
    """How long a new run takes to its first step, and how much of its first steps is compiling."""
    began, last = time.time(), num_steps(config)
    turns = Turns(handle.start(config, folder, attached=True))
    while turns.is_alive() and turns.last_step < last:
        time.sleep(0.05)
        turns.read()
    turns.end()
    first, compiled = ([e for e in turns.events if e["kind"] == kind] for kind in ("first_step", "compile"))
    totals = {name: sum(e[name] for e in compiled) for name in ("graphs", "graph_breaks", "cache_hits")}
    return {
        "first_step_s": first[0]["time"] - began,
        "since_launch_s": first[0]["since_launch_s"],  # as reports have it: without starting the processes
        "compile_s": round(sum(e["duration_s"] for e in compiled), 3),
        "compiling_ended_s": max((e["time"] - began for e in compiled), default=None),
        "compiling_steps": [e["step"] for e in compiled],
        **totals,
    }


def notebook(params: Path, seconds: float, folder: Path) -> dict:
    """Wall time of the training notebook, headless, in parts.

    Raises:
        CalledProcessError: it failed.
    """
    command = [sys.executable, "-m", "upsnb", "run", str(NOTEBOOK), "-f", str(params), "-o", str(folder)]
    began = time.time()
    with open(folder.with_suffix(".log"), "w") as log:
        subprocess.run([*command, "-p", f"training.time_limit_s={seconds}"], stdout=log, stderr=log, check=True)
    ended = time.time()
    executed = json.loads((folder / "notebook.ipynb").read_text())
    trained_s = json.loads((folder / REPORT).read_text())["train_time_s"]
    parts = split(executed, runfolder.read_events(folder), trained_s, began, ended)
    return {"wall_s": ended - began, "train_time_s": trained_s, "overhead_s": sum(parts.values()), "parts_s": parts}


def split(executed: Mapping, events: list[dict], trained_s: float, began: float, ended: float) -> dict[str, float]:
    """Seconds between a command's beginning and its end that are not training, by what took them.

    Args:
        executed: the notebook as papermill left it.
        events: of its run.
        began, ended: Unix seconds at the command's beginning and end.
    """

    def seconds(record: Mapping, which: str) -> float:
        return datetime.fromisoformat(record["metadata"]["papermill"][which]).timestamp()

    def cell(text: str) -> Mapping:
        return next(cell for cell in code if text in "".join(cell["source"]))

    code = [cell for cell in executed["cells"] if cell["cell_type"] == "code"]
    started, over = (next(e["time"] for e in events if e["kind"] == kind) for kind in ("start", "end"))
    marks = {
        "command": seconds(executed, "start_time"),
        "kernel": seconds(code[0], "start_time"),
        "imports": seconds(cell("from upsnb import"), "end_time"),
        "data and its pictures": seconds(cell("handle.start_or_attach("), "start_time"),
        "launch to training": started,
        "training": started + trained_s,
        "last save and evaluation": over,
        "end of the processes": seconds(cell("run.wait()"), "end_time"),
        "tables and figures": seconds(executed, "end_time"),
        "end of the command": ended,
    }
    times = [began, *marks.values()]  # each ends what its name says
    parts = {name: later - before for name, before, later in zip(marks, times, times[1:])}
    del parts["training"]
    return parts


def main() -> None:
    parser = arguments(__doc__, "start/start.json")
    parser.add_argument("--params", type=Path, default=ROOT / "params/cpu_optimized.yaml", help="that compiles")
    parser.add_argument("--notebook-params", type=Path, default=ROOT / "params/quick.yaml")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the notebook trains")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    config = overlays.load(args.params)
    for each in (config, overlays.load(args.notebook_params)):
        for dataset in each.data.datasets.values():
            datasets.ensure_generated(dataset, ROOT / each.data.root, print)
    with tempfile.TemporaryDirectory() as temporary:
        folder, numbers = Path(temporary), range(args.repeats)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")  # the run's processes inherit it
        cold = first_steps(config, folder / "cold")
        warm = [first_steps(config, folder / f"warm-{number}") for number in numbers]
        notebooks = [notebook(args.notebook_params, args.seconds, folder / f"notebook-{number}") for number in numbers]
    made = {
        "format": 1,
        "kind": "start",
        "params": args.params.stem,
        "notebook_params": args.notebook_params.stem,
        "targets": TARGETS,
        "num_steps": num_steps(config),
        "cold": cold,
        "warm": warm,
        "warm_first_step_s": statistics.median(one["first_step_s"] for one in warm),
        "notebooks": notebooks,
        "overhead_s": statistics.median(one["overhead_s"] for one in notebooks),
        "load": os.getloadavg()[0],  # of a machine that does nothing else this stays near its number of cores
    }
    save(made, args.output)


if __name__ == "__main__":
    main()
