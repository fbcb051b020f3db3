"""Do models pay beside solvers? One of each family, trained as its file says, against the solver that made its data.

    python benchmarks/worth.py    # 45 quiet minutes, on Linux; writes outputs/reference/worth/

Two train at a time, one core each; nothing trains while times are measured.
"""

import os
from pathlib import Path

import torch
from eleven import start_on
from keep import ROOT, arguments, save

from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.data.families import FAMILIES
from upsnb.report import style, worth
from upsnb.runs import runfolder
from upsnb.runs.handle import Run
from upsnb.runs.runfolder import REPORT

AT_ONCE = 2


def settings(family: str, time_s: float | None) -> RunConfig:
    changes = {} if time_s is None else {"training.time_limit_s": time_s}
    return overlays.load(ROOT / f"params/family/{family}.yaml", overrides=changes)


def train(families: list[str], time_s: float | None, work: Path) -> dict[str, Run]:
    """A finished run of each."""
    cores, runs = sorted(os.sched_getaffinity(0))[:AT_ONCE], {}
    for first in range(0, len(families), len(cores)):
        chosen = families[first : first + len(cores)]
        started = {
            name: start_on(core, settings(name, time_s), work / name) for name, core in zip(chosen, cores, strict=False)
        }
        for name, run in started.items():
            run.wait()
            print(f"{name}: trained", flush=True)
        runs |= started
    return runs


def main() -> None:
    parser = arguments(__doc__, "worth")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--time", type=float, help="training of each [s]; else as its file says")
    args = parser.parse_args()
    torch.set_num_threads(1)  # of this process, which starts runs from one core: two threads there wait for each other
    work, rows = runfolder.new_folder("worth"), {}
    for name, run in train(args.only, args.time, work).items():
        report = worth.measure(run, work / f"{name}-worth")
        rows |= report["datasets"]
        print(worth.finding(name, report["datasets"][name]), flush=True)
    report |= {"run": f"{len(rows)} trainings", "datasets": rows}
    style.save(worth.draw(report), args.output, "worth")
    save(report, args.output / REPORT)


if __name__ == "__main__":
    main()
