"""Does it pay to begin with another run's weights? Few samples of a new problem, the same time with and without them.

    python benchmarks/pretrained.py    # 20 quiet minutes; writes outputs/reference/pretrained/

One operator learns advection and Burgers' equation, from data of which there are plenty. Then each problem of PROBLEMS,
of which there are sixteen trajectories, is trained twice for the same time: from random weights and from those. Where
the other run knows the equation, its forecasts without any training are judged too.
"""

import json
from statistics import median

from keep import ROOT, arguments, save

from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.report import transfer
from upsnb.report.figures import read_evaluation
from upsnb.runs import handle, runfolder
from upsnb.runs.runfolder import REPORT

SEEDS, BEFORE_S, TIME_S = (42, 43, 44), 180.0, 45.0
GRID = {"resolution": 128, "num_times": 21}
FRAMES = {"input_frames": 4, "output_frames": 4, "augment": True}
KNOWN = {"advection": {"family": "advection1d", **FRAMES, "generate": {**GRID, "num_samples": 160, "parameter": 0.4}}}
KNOWN["burgers"] = {"family": "burgers1d", **FRAMES, "generate": {**GRID, "num_samples": 160, "parameter": 0.01}}
FEW = {**GRID, "num_samples": 100, "seed": 1}  # of which 16 train and 80 judge
PROBLEMS = {
    "advection, another speed": {"advection": KNOWN["advection"] | {"generate": {**FEW, "parameter": 1.0}}},
    "Burgers, less viscous": {"burgers": KNOWN["burgers"] | {"generate": {**FEW, "parameter": 0.002}}},
    "reaction-diffusion": {"reaction": {"family": "reacdiff1d", **FRAMES, "generate": FEW}},
}
RANDOM, WEIGHTS, UNTRAINED = "random weights", "another run's weights", "another run, untrained"


def config(datasets: dict, time_s: float, seed: int, test: float, **changes) -> RunConfig:
    split = {"validation_fraction": 0.04, "test_fraction": test}
    given = {"data.datasets": datasets, "data.split": split, "training.time_limit_s": time_s, "training.seed": seed}
    return overlays.load(ROOT / "params/minute.yaml", overrides={**given, "training.device": "cpu", **changes})


def trained(settings: RunConfig, folder) -> dict:
    """What a training reached on the test split of its one dataset."""
    run = handle.start(settings, folder)
    run.wait()
    ((_, splits),) = read_evaluation(folder, run.events())["datasets"].items()
    return numbers(splits["test"]) | {"steps": run.events(("step",))[-1]["step"]}


def numbers(found: dict) -> dict:
    return {key: found[key] for key in ("nrmse_mean", "rollout_nrmse_mean", "rollout_persistence_nrmse_mean")}


def main() -> None:
    parser = arguments(__doc__, "pretrained")
    parser.add_argument("--time", type=float, default=TIME_S, help="training of each arm [s]")
    parser.add_argument("--before", type=float, default=BEFORE_S, help="of the run whose weights are taken [s]")
    args = parser.parse_args()
    work, rows = runfolder.new_folder("pretrained"), []
    before = handle.start(config(KNOWN, args.before, 42, 0.1), work / "before")
    before.wait()
    for problem, datasets in PROBLEMS.items():
        (name,) = datasets
        if name in KNOWN:
            asked = {f"data.datasets.{name}.generate": datasets[name]["generate"]}
            folder = transfer.transfer(before, asked, work / f"{name}-untrained")
            found = json.loads((folder / REPORT).read_text())["datasets"][name][transfer.SPLIT]
            rows.append({"problem": problem, "arm": UNTRAINED, "seed": 42, **numbers(found), "steps": 0})
        for seed in SEEDS:
            for arm, weights in {RANDOM: None, WEIGHTS: str(before.folder)}.items():
                own = config(datasets, args.time, seed, 0.8, **{"model.pretrained": weights})
                rows.append({"problem": problem, "arm": arm, "seed": seed})
                rows[-1] |= trained(own, work / f"{name}-{arm.split()[0]}-{seed}")
                print(f"{problem}, {arm}, seed {seed}: {rows[-1]['rollout_nrmse_mean']:.4g}", flush=True)
        for arm in (RANDOM, WEIGHTS):
            middle = median(row["rollout_nrmse_mean"] for row in rows if (row["problem"], row["arm"]) == (problem, arm))
            print(f"{problem}, {arm}: median {middle:.4g}", flush=True)
    report = {"format": 1, "kind": "pretrained", "time_s": args.time, "before_s": args.before, "rows": rows}
    save(report, args.output / REPORT)


if __name__ == "__main__":
    main()
