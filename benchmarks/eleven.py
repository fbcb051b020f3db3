"""PDEBench's eleven families, five minutes each: UPS by its file beside neuraloperator's FNO, on small real files.

One core each, at the same time, so that whatever else the machine does happens to both.

    make .extras/.installed
    PYTHONPATH=. .extras/bin/python benchmarks/eleven.py ../shared/data/pdebench-small     # three quiet hours, on Linux
    ... --only cfd1d cfd2d --seeds 42                                               # what is known of others stays
    PYTHONPATH=. .extras/bin/python benchmarks/eleven.py --only cfd2d incompressible2d cfd3d      # of generated data

UPS trains as `params/family/<name>.yaml` says, compile time within its five minutes; the FNO as
`params/models/neuralop.yaml` on top of that, in float32 and not compiled. A tenth of each file is the test split, first
or last as PDEBench's own loader takes it, of files with few samples more (FEW) and of generated data a fifth; where
that leaks, errors are those of the samples that training has not seen. Ends with the weights that validated best, where
anything is left to validate on. Writes outputs/reference/eleven/report.json.
"""

import json
import os
from pathlib import Path

import torch
from keep import ROOT, arguments, save

from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.data import audit
from upsnb.report.figures import read_evaluation
from upsnb.report.file import finish
from upsnb.report.results import references
from upsnb.runs import handle, runfolder
from upsnb.runs.handle import Run

FILES = {
    "advection1d": "1D_Advection_Sols_beta0.4.hdf5",
    "burgers1d": "1D_Burgers_Sols_Nu0.01.hdf5",
    "reacdiff1d": "ReacDiff_Nu0.5_Rho1.0.hdf5",
    "diffsorp1d": "1D_diff-sorp_NA_NA.h5",
    "cfd1d": "1D_CFD_Rand_Eta0.01_Zeta0.01_periodic_Train.hdf5",
    "darcy2d": "2D_DarcyFlow_beta1.0_Train.hdf5",
    "shallowwater2d": "2D_rdb_NA_NA.h5",
    "diffreact2d": "2D_diff-react_NA_NA.h5",
    "cfd2d": "2D_CFD_Rand_M0.1_Eta0.01_Zeta0.01_periodic_48_Train.hdf5",
    "incompressible2d": "ns_incom_inhom_2d_48-3.h5",
    "cfd3d": "3D_CFD_Rand_M1.0_Eta1e-08_Zeta1e-08_periodic_Train.hdf5",
}
FEW = {  # shares for validation and test; of the last four a file has two to six samples
    "diffsorp1d": (0.125, 0.25),
    "cfd1d": (0.15, 0.25),
    "diffreact2d": (0.0, 0.5),
    "cfd2d": (0.0, 0.5),
    "incompressible2d": (0.0, 0.5),
    "cfd3d": (0.0, 0.5),
}
GENERATED = (0.0, 0.2)  # the same of generated data: nothing to validate on, so the last weights are judged
MODELS, SEEDS, TIME_S = ("ups", "neuralop"), (42, 43, 44), 300.0
PLAIN = {"training.compile": False, "training.amp": False}  # complex weights have no halves, and kernels do not pay
SCORES = ("nrmse_mean", "nrmse_median", "nrmse_p90", "rollout_nrmse_mean", "rollout_nrmse_median", "rollout_nrmse_p90")


def settings(family: str, model: str, data: Path | None, time_s: float, seed: int) -> RunConfig:
    """A family's file with its real data, or generated ones, and another model on top of it."""
    validation, test = FEW.get(family, (0.05, 0.1)) if data else GENERATED
    read = {"data.root": str(data.absolute()), f"data.datasets.{family}.files": [FILES[family]]} if data else {}
    own = read | {
        "data.split.validation_fraction": validation,
        "data.split.test_fraction": test,
        "training.time_limit_s": time_s,
        "training.seed": seed,
        "evaluation.checkpoint": "best" if validation else "last",
        "logging.name": f"{family}-{model}-{seed}",
    }
    files = [ROOT / f"params/family/{family}.yaml"]
    if model != "ups":
        files, own = [*files, ROOT / f"params/models/{model}.yaml"], own | PLAIN
    return overlays.load(*files, overrides=own)


def start_on(core: int, config: RunConfig, folder: Path) -> Run:
    """A run whose processes have one core and take no other."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        return handle.start(config, folder)
    finally:
        os.sched_setaffinity(0, cores)


def reached(run: Run) -> dict:
    """What one training came to on the test split, when it is over."""
    run.wait()
    ((_, splits),) = read_evaluation(run.folder, run.events())["datasets"].items()
    result, steps, (start, *_) = splits["test"], run.events(("step",)), run.events(("start",))
    judged = audit.judging(result)
    return {
        **{score: judged[score] for score in SCORES if score in judged},
        "num_samples": judged["num_samples"],
        "num_trained": next(iter(start["datasets"].values()))["samples"]["train"],
        "per_channel": result["per_channel"],
        "references": references(result),
        "steps": steps[-1]["step"],
        "parameters": start["parameters"],
        "leaks": "leak" in result,
    }


def main() -> None:
    parser = arguments(__doc__, "eleven/report.json")
    parser.add_argument("data", type=Path, nargs="?", help="where PDEBench's small files are; none: data are generated")
    parser.add_argument("--only", nargs="+", choices=FILES, default=list(FILES), metavar="FAMILY")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), metavar="SEED")
    parser.add_argument("--time", type=float, default=TIME_S, help="training of each model [s]")
    args = parser.parse_args()
    torch.set_num_threads(1)  # of this process, which starts runs from one core: two threads there wait for each other
    report = json.loads(args.output.read_text()) if args.output.exists() else {}
    known = report.setdefault("families" if args.data else "generated", {})
    work = runfolder.new_folder("eleven")
    for seed in args.seeds:
        for family in args.only:
            found = {"seed": seed, "time_s": args.time, "cores": 1}
            runs = {}
            for core, model in zip(sorted(os.sched_getaffinity(0)), MODELS):
                config = settings(family, model, args.data, args.time, seed)
                runs[model] = start_on(core, config, work / config.logging.name)
            for model, run in runs.items():
                found[model] = row = reached(run)
                error = row.get("rollout_nrmse_mean", row["nrmse_mean"])
                print(f"{family}, {model}, seed {seed}: nRMSE {error:.4g}, beside {row['references']}", flush=True)
            others = [one for one in known.get(family, []) if one["seed"] != seed]
            known[family] = sorted([*others, finish(found, None)], key=lambda one: one["seed"])
            save(report | {"format": 1, "kind": "eleven"}, args.output)


if __name__ == "__main__":
    main()
