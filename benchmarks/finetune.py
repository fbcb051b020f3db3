"""Does training through several calls pay? The same time for it as for more training on one call.

    python benchmarks/finetune.py    # 20 quiet minutes; writes outputs/reference/finetune/

Kuramoto-Sivashinsky, which is chaotic, and linear advection, which is not: generated data, float32, nothing compiled.
One arm trains the operator for the whole time. The other one goes over to `stages.finetune` halfway, with a third of
the learning rates and a schedule of its own. Each arm reports on the weights that validated best.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import median

import numpy as np
from keep import ROOT, arguments, save

from upsnb import overlays
from upsnb.config import OPERATOR, RunConfig
from upsnb.data.datasets import open_all
from upsnb.report import plots, style
from upsnb.report.figures import read_evaluation
from upsnb.runs import handle, runfolder
from upsnb.runs.runfolder import REPORT
from upsnb.training import evaluation
from upsnb.training.parallel import Ranks

FAMILIES, SEEDS, TIME_S = ("kuramoto1d", "advection1d"), (42, 43, 44), 90.0
PLAIN = {"training.device": "cpu", "training.compile": False, "evaluation.checkpoint": "best"}
ONE, SEVERAL = "one call", "then several calls"


def arms(family: str, time_s: float) -> dict[str, RunConfig]:
    """Both trainings of a family, as long as each other."""
    base = overlays.load(ROOT / f"params/family/{family}.yaml", overrides=PLAIN)
    rates = {rate: getattr(base.optimizer, rate) / 3 for rate in ("lr", "muon_lr")}
    through = {"epochs": 100_000, "optimizer": {**dict(base.optimizer), **rates}}
    through |= {"scheduler": dict(base.stages.operator.scheduler)}
    return {
        ONE: overlays.apply(base, {"training.time_limit_s": time_s}),
        SEVERAL: overlays.apply(base, {"training.time_limit_s": time_s / 2, "stages.finetune": through}),
    }


def trained(config: RunConfig, folder: Path) -> dict:
    """What one training reached on the test split."""
    run = handle.start(config, folder)
    run.wait()
    ((name, splits),) = read_evaluation(folder, run.events())["datasets"].items()
    stage = config.stages.planned[-1]
    result = splits["test"] if stage == OPERATOR else judged(run, stage)[name]
    return {
        "nrmse": result["nrmse_mean"],
        "rollout_nrmse": result["rollout_nrmse_mean"],
        "correlation_time": result["rollout_correlation_time"],
        "over_time": result["per_time"]["rollout_nrmse"],
        "times": result["per_time"]["time"],
        "persistence": result["per_time"]["persistence_nrmse"],
        "steps": run.events(("step",))[-1]["step"],
        "validations": [[event["time_s"], event["val_nrmse"][name]] for event in run.events(("eval",))],
    }


def judged(run: handle.Run, stage: str) -> dict[str, dict]:
    """The test split by a stage's own model, whether or not it answers for its run."""
    datasets = open_all(run.config, ROOT, print)
    return evaluation.evaluate(run.load_model(stage=stage), datasets, "test", run.config.evaluation, Ranks())


def figure(family: str, rows: list[Mapping]):
    """Error as a forecast goes on: each arm's median over seeds, and their middle half."""
    curves, spread = {}, {}
    for arm in (ONE, SEVERAL):
        over = np.array([row["over_time"] for row in rows if row["arm"] == arm], dtype=float)
        curves[arm], spread[arm] = np.median(over, axis=0), np.quantile(over, (0.25, 0.75), axis=0)
    first, last = (curves[arm][-1] for arm in (ONE, SEVERAL))
    title = f"{family}: at the end of a rollout {first:.3g} after training on one call, {last:.3g} with several"
    shown = curves | {"persistence": rows[0]["persistence"]}
    return plots.rollout_error(rows[0]["times"], shown, quartiles=spread, title=title)


def main() -> None:
    parser = arguments(__doc__, "finetune")
    parser.add_argument("--time", type=float, default=TIME_S, help="training of each arm [s]")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=FAMILIES)
    args = parser.parse_args()
    work, found = runfolder.new_folder("finetune"), {}
    for family in args.only:
        rows = found[family] = []
        for seed in SEEDS:
            for arm, config in arms(family, args.time).items():
                own = work / f"{family}-{arm.replace(' ', '-')}-{seed}"
                rows.append({"arm": arm, "seed": seed, **trained(overlays.apply(config, {"training.seed": seed}), own)})
                print(f"{family}, {arm}, seed {seed}: rollout nRMSE {rows[-1]['rollout_nrmse']:.4g}", flush=True)
        style.save(figure(family, rows), args.output, family)
        for arm in (ONE, SEVERAL):
            middle = median(row["rollout_nrmse"] for row in rows if row["arm"] == arm)
            print(f"{family}, {arm}: median {middle:.4g}", flush=True)
    save({"format": 1, "kind": "finetune", "time_s": args.time, "families": found}, args.output / REPORT)


if __name__ == "__main__":
    main()
