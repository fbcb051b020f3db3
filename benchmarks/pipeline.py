"""What do the stages after the operator add, and is it worth their time? Chaos, and a problem with one answer.

    python benchmarks/pipeline.py --only pipeline_ks    # 45 quiet minutes, three seeds
    python benchmarks/pipeline.py --only pipeline_ks+pipeline_diffusion --output outputs/reference/pipeline_diffusion
    # an hour, three seeds; likewise the others, 10 to 30 minutes, a folder outputs/reference/pipeline_NAME/ for each
    # machine and time

Kuramoto-Sivashinsky and Kolmogorov flow, which are chaotic, and Darcy flow, where there ought to be nothing to gain:
the runs of params/pipeline_*.yaml, whose later stages begin at the operator's weights and have the same time. Gates
look at the validation split. The numbers here are of the test split, by the weights that each stage ended with;
beside them the cheapest ensemble there is, fine-tuning's forecasts of given frames that noise was added to.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from keep import ROOT, arguments, save

from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.data.datasets import open_all
from upsnb.models.perturbed import Perturbed
from upsnb.models.surrogate import Surrogate
from upsnb.report import plots, style
from upsnb.report.file import number
from upsnb.runs import handle, runfolder
from upsnb.runs.runfolder import REPORT
from upsnb.training import evaluation
from upsnb.training.parallel import Ranks

PRESETS = {  # params files, on top of each other, and seeds
    "pipeline_ks": (42, 43, 44),
    "pipeline_kolmogorov": (42, 43, 44),
    "pipeline_darcy": (42, 43, 44),
    "pipeline_ks+pipeline_diffusion": (42, 43, 44),
    "pipeline_darcy+pipeline_diffusion": (42, 43, 44),
}
PERTURBED, SIZES = "finetune, perturbed", (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # noise that validation chooses [std]
KEPT = (  # of what is found of a stage
    *("members", "crps", "mean_nrmse", "spread_skill", "coverage", "rank_histogram", "forecast_s"),
    *("times", "correlation_time", "correlation_lost"),
)


def perturbed(model: Surrogate, size: float) -> Perturbed:
    """Of its one dataset, with noise of a size [standard deviations of the training data]."""
    return Perturbed(model, dict.fromkeys(model.specs, size))


def judged(model: Surrogate, datasets: dict, split: str, config: RunConfig) -> dict:
    """What the ensembles of the one dataset are worth."""
    with torch.no_grad():
        ((_, found),) = evaluation.evaluate_ensembles(model, datasets, split, config.evaluation, Ranks()).items()
    return found


def one_call(model: Surrogate, datasets: dict, config: RunConfig) -> dict[str, float]:
    """Errors of one call on the test split, and those of PDEBench's three bands of waves: up to 4, up to 12, above."""
    alone = config.evaluation.model_copy(update={"rollout": False})
    ((_, found),) = evaluation.evaluate(model, datasets, "test", alone, Ranks()).items()
    return {key: found[key] for key in ("nrmse_mean", "frmse_low", "frmse_mid", "frmse_high")}


def best_size(model: Surrogate, datasets: dict, config: RunConfig) -> float:
    """The noise whose ensemble is best on the validation split [standard deviations of the training data]."""
    found = {size: judged(perturbed(model, size), datasets, "validation", config)["crps"] for size in SIZES}
    print(f"perturbed frames, CRPS by size of the noise, validation split: {found}", flush=True)
    return min(found, key=found.get)


def trained(preset: str, seed: int, folder: Path, size: float | None) -> list[dict]:
    """One run, taken as it is where it is there: a row for each stage, and where there is a time one for PERTURBED.

    Args:
        size: of that one's noise, as the first seed has found it.
    """
    files = [ROOT / f"params/{name}.yaml" for name in preset.split("+")]
    config = overlays.load(*files, overrides={"training.seed": seed})
    run = handle.Run.attach(folder) if folder.exists() else handle.start(config, folder)
    run.wait()
    events = run.events(("gate", "step", "end"))
    gates = {event["stage"]: event for event in events if event["kind"] == "gate"}
    steps = {event["stage"]: event["step"] for event in events if event["kind"] == "step"}
    known = {"seed": seed, "run_s": round(events[-1]["time"] - run.manifest["created"], 1)}
    datasets, rows = open_all(config, ROOT, print), []
    asked = {stage: (run.load_model(stage=stage), {}) for stage in config.stages.planned}
    if next(iter(datasets.values())).spec.time_dependent:
        model = asked["finetune"][0]
        size = size or best_size(model, datasets, config)
        asked[PERTURBED] = perturbed(model, size), {"size": size}
    for stage, (model, more) in asked.items():
        found = judged(model, datasets, "test", config)
        gate = {key: gates[stage][key] for key in ("against", "verdict", "ratio", "ci95")} if stage in gates else None
        row = {"stage": stage, **known, "steps": steps.get(stage), "gate": gate, **more}
        row |= {key: found[key] for key in KEPT if key in found}
        row |= {"one_call": one_call(model, datasets, config)} if stage != PERTURBED else {}
        rows.append(row | {"samples": len(found["samples"]), "over_time": found["per_time"]})
        said = f"{preset}, seed {seed}, {stage}: CRPS {row['crps']:.4g}, {row.get('correlation_time')}, {gate}"
        print(said, flush=True)
    return rows


def medians(rows: Sequence[dict], *keys: str) -> dict[str, np.ndarray]:
    """By stage, the median over seeds of a number or a curve."""
    stages = dict.fromkeys(row["stage"] for row in rows)
    values = [functools.reduce(dict.__getitem__, keys, row) for row in rows]
    return {s: np.median([v for v, row in zip(values, rows) if row["stage"] == s], axis=0) for s in stages}


def figures(preset: str, rows: Sequence[dict], folder: Path) -> None:
    """CRPS and correlation as the forecast goes on, and whether the ensembles are as wide as they err."""
    preset = preset.replace("+pipeline", "")  # a file's name
    times, count = rows[0]["times"], len({row["seed"] for row in rows})
    of = f"{rows[0]['samples']} trajectories of the test split, " + (
        f"median of {count} seeds" if count > 1 else "one seed"
    )

    def told(key: str) -> str:
        return ", ".join(f"{stage} {number(float(value), 3)}" for stage, value in medians(rows, key).items())

    curves, quantity = medians(rows, "over_time", "crps"), "CRPS [standard deviations]"
    crps = plots.rollout_error(times, curves, quantity=quantity, title=f"CRPS: {told('crps')}; {of}")
    curves, title = (
        medians(rows, "over_time", "correlation"),
        f"Correlated with the truth for: {told('correlation_time')}",
    )
    style.save(crps, folder, f"{preset}_crps")
    style.save(plots.correlations(times, curves, title=f"{title}; {of}"), folder, f"{preset}_correlation")
    for stage in dict.fromkeys(row["stage"] for row in rows if row["members"] > 1 and row["stage"] != PERTURBED):
        drawn = [row for row in rows if row["stage"] == stage]
        (ranks,) = medians(drawn, "rank_histogram").values()
        spread, error = (next(iter(medians(drawn, "over_time", key).values())) for key in ("spread", "mean_rmse"))
        wide = number(float(np.median([row["spread_skill"] for row in drawn])), 2)
        title = f"{stage}, {drawn[0]['members']} members: spread over skill {wide}; {of}"
        style.save(plots.calibration(times, spread, error, ranks, title=title), folder, f"{preset}_{stage}_calibration")


def main() -> None:
    parser = arguments(__doc__, "pipeline")
    parser.add_argument("--only", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--seeds", nargs="+", type=int, help="instead of those that each preset has")
    parser.add_argument("--work", type=Path, help="folder of the runs; those that are there are not trained again")
    args = parser.parse_args()
    work, found = args.work or runfolder.new_folder("pipelines"), {}
    for preset in args.only:
        found[preset] = []
        for seed in args.seeds or PRESETS[preset]:
            size = found[preset][-1].get("size") if found[preset] else None
            found[preset] += trained(preset, seed, work / f"{preset}-{seed}", size)
            if "times" in found[preset][0]:
                figures(preset, found[preset], args.output)
            save({"format": 1, "kind": "pipeline", "presets": found}, args.output / REPORT)


if __name__ == "__main__":
    main()
