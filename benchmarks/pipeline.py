"""What do the stages after the operator add, and is it worth their time? Chaos, and a problem with one answer.

    python benchmarks/pipeline.py    # 40 quiet minutes; writes outputs/reference/pipeline/

Kuramoto-Sivashinsky flow, which is chaotic, and Darcy flow, where there ought to be nothing to gain: the runs of
params/pipeline_*.yaml, whose `finetune` and `crps` begin at the operator's weights and have the same time. Gates look
at the validation split. The numbers here are of the test split, by the weights that each stage ended with.
"""

import argparse
import functools
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from keep import save

from upsnb import overlays
from upsnb.data.datasets import open_all
from upsnb.report import plots, style
from upsnb.report.file import number
from upsnb.runs import handle, runfolder
from upsnb.runs.runfolder import REPORT
from upsnb.training import evaluation
from upsnb.training.parallel import Ranks

ROOT = Path(__file__).resolve().parents[1]
PRESETS = {"pipeline_ks": (42, 43, 44), "pipeline_darcy": (42,)}  # and seeds
KEPT = (  # of what is found of a stage
    *("members", "crps", "mean_nrmse", "spread_skill", "coverage", "rank_histogram", "forecast_s"),
    *("times", "correlation_time", "correlation_lost"),
)


def trained(preset: str, seed: int, folder: Path) -> list[dict]:
    """One run: a row for each stage."""
    config, began = (
        overlays.load(ROOT / f"params/{preset}.yaml", overrides={"training.seed": seed}),
        time.perf_counter(),
    )
    run = handle.start(config, folder)
    run.wait()
    whole_s, rows = time.perf_counter() - began, []
    gates = {event["stage"]: event for event in run.events(("gate",))}
    steps = {event["stage"]: event["step"] for event in run.events(("step",))}
    datasets = open_all(config, runfolder.project_root(), print)
    for stage in config.stages.planned:
        model = run.load_model(stage=stage)
        ((_, found),) = evaluation.evaluate_ensembles(model, datasets, "test", config.evaluation, Ranks()).items()
        gate = {key: gates[stage][key] for key in ("against", "verdict", "ratio", "ci95")} if stage in gates else None
        row = {"stage": stage, "seed": seed, "steps": steps[stage], "run_s": round(whole_s, 1), "gate": gate}
        row |= {key: found[key] for key in KEPT if key in found}
        rows.append(row | {"samples": len(found["samples"]), "over_time": found["per_time"]})
        print(
            f"{preset}, seed {seed}, {stage}: CRPS {row['crps']:.4g}, {row.get('correlation_time')}, {gate}", flush=True
        )
    return rows


def medians(rows: Sequence[dict], *keys: str) -> dict[str, np.ndarray]:
    """By stage, the median over seeds of a number or a curve."""
    stages = dict.fromkeys(row["stage"] for row in rows)
    values = [functools.reduce(dict.__getitem__, keys, row) for row in rows]
    return {s: np.median([v for v, row in zip(values, rows) if row["stage"] == s], axis=0) for s in stages}


def figures(preset: str, rows: Sequence[dict], folder: Path) -> None:
    """CRPS and correlation as the forecast goes on, and whether the ensembles are as wide as they err."""
    times, count = rows[0]["times"], len({row["seed"] for row in rows})
    of = f"{rows[0]['samples']} trajectories of the test split, median of {count} seeds"

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
    drawn = [row for row in rows if row["members"] > 1]
    (ranks,) = medians(drawn, "rank_histogram").values()
    spread, error = (next(iter(medians(drawn, "over_time", key).values())) for key in ("spread", "mean_rmse"))
    wide = number(float(np.median([row["spread_skill"] for row in drawn])), 2)
    title = f"{drawn[0]['stage']}, {drawn[0]['members']} members: spread over skill {wide}; {of}"
    style.save(plots.calibration(times, spread, error, ranks, title=title), folder, f"{preset}_calibration")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--output", type=Path, default=ROOT / "outputs/reference/pipeline")
    args = parser.parse_args()
    work, found = runfolder.new_folder("pipelines"), {}
    for preset in args.only:
        found[preset] = []
        for seed in PRESETS[preset]:
            found[preset] += trained(preset, seed, work / f"{preset}-{seed}")
        if "times" in found[preset][0]:
            figures(preset, found[preset], args.output)
        save({"format": 1, "kind": "pipeline", "presets": found}, args.output / REPORT)


if __name__ == "__main__":
    main()
