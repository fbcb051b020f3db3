"""Finished runs of two arms beside each other: ratios, time to quality, criteria and a verdict."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from upsnb import overlays
from upsnb.errors import ConfigError, RunError
from upsnb.reportfile import number
from upsnb.runs import Run

FORMAT, KIND = 1, "compare"
NOISE = "A/A"  # the arm that is the baseline once more
QUALITY_TOLERANCE = 0.03  # of the baseline's final validation nRMSE, for the time to quality
CRITERIA = {  # what an optimization must keep, unless a params file says otherwise
    "speedup": 3.0,  # at least
    "loss_delta": 0.001,  # validation nRMSE, mean over datasets and seeds: at most so much more than the baseline's
    "nrmse_ratio": 1.03,  # of each dataset: at most
    "memory_gib": 50.0,  # of each rank: at most
}
SIGNS = {"speedup": ">=", "loss_delta": "<", "nrmse_ratio": "<=", "memory_gib": "<"}  # measured, sign, required
SIGNS |= {"nonfinite_steps": "=", "out_of_memory": "="}


# -- one run -------------------------------------------------------------------------------------------------------


def score(event: dict) -> float:
    """Validation nRMSE of an eval event, mean over datasets; NaN where one was not finite."""
    return float(np.mean([np.nan if value is None else value for value in event["val_nrmse"].values()]))


def time_to_quality(events: list[dict], target: float) -> float | None:
    """Training time, compilation included, until the first validation whose nRMSE is no higher than `target` [s]."""
    for event in events:
        if event["kind"] == "eval" and score(event) <= target:
            return event["time_s"]
    return None


def reached(run: Run, numbers: Mapping, price_per_hour: float) -> dict:
    """What one run of an arm came to.

    Args:
        numbers: of the run's own report.
        price_per_hour: of the machine, for the cost [$].
    Raises:
        RunError: it did not finish, or its errors were not measured.
    """
    if numbers["status"] != "finished":
        raise RunError(f"{run.folder}: {numbers['status']}: {numbers['cause']} -> only finished runs can be compared")
    evals = run.events(("eval",))
    if not evals or not numbers["datasets"]:
        raise RunError(
            f"{run.folder}: has no validation or no final errors, because it ended early ({numbers['end_reason']}) -> "
            "compare runs that trained to their ends"
        )
    metrics = {name: next(iter(splits.values())) for name, splits in numbers["datasets"].items()}
    return {
        "seed": run.config.training.seed,
        "folder": run.folder.name,
        "device_name": run.manifest["hardware"]["device_name"],
        "phases_on": numbers["phases_on"],
        "phases_skipped": numbers["phases_skipped"],
        "num_ranks": numbers["num_ranks"],
        "samples": numbers["samples"],
        "samples_per_s": numbers["samples_per_s"]["median"],
        "train_time_s": numbers["train_time_s"],
        "compile_s": numbers["compile_s"],
        "time_to_first_step_s": numbers["time_to_first_step_s"],
        "cost_dollars": numbers["train_time_s"] / 3600 * price_per_hour,
        "peak_memory_gib": numbers["peak_memory_gib"],
        "memory_kind": numbers["memory_kind"],
        "val_loss": score(evals[-1]),
        "split": numbers["split"],
        "nrmse": {name: values.get("rollout_nrmse_mean", values["nrmse_mean"]) for name, values in metrics.items()},
        "nonfinite_steps": sum(step["loss"] is None for step in run.events(("step",))),
        "out_of_memory": sum(event["guard"] == "out_of_memory" for event in run.events(("guard",))),
    }


# -- two arms ------------------------------------------------------------------------------------------------------


def compared(
    runs: Mapping[str, list[Run]],
    arms: Mapping[str, list[dict]],
    ratios: Mapping[str, dict] | None,
    criteria: Mapping | None,
) -> dict:
    """The report of a comparison, as far as it does not say where and when.

    Args:
        runs: of the baseline, of its rival and, where there is one, of NOISE, in this order; one run a seed.
        arms: what each run `reached`.
        ratios: of throughputs over the baseline's, by arm, of arms that took turns; None: they did not.
        criteria: over CRITERIA; a criterion of null is left out.
    Raises:
        RunError: the runs were not judged by the same datasets and split.
        ConfigError: an unknown criterion.
    """
    _check_judged_alike(runs, arms)
    first, second = (name for name in runs if name != NOISE)
    evals = {name: [run.events(("eval",)) for run in those] for name, those in runs.items()}
    targets = [(1 + QUALITY_TOLERANCE) * score(events[-1]) for events in evals[first]]
    times = {
        name: [time_to_quality(*pair) for pair in zip(those, targets, strict=True)] for name, those in evals.items()
    }
    known = None not in (*times[first], *times[second])
    report = {
        "format": FORMAT,
        "kind": KIND,
        "arms": arms,
        "baseline": first,
        "optimized": second,
        "differences": overlays.difference(runs[first][0].config, runs[second][0].config),
        "interleaved": ratios is not None,
        "aa_ratio": ratios.get(NOISE) if ratios else None,
        "speedup": ratios[second] if ratios else _ratio_of_medians(arms[second], arms[first]),
        "time_to_quality_s": times,
        "time_to_quality_speedup": sum(times[first]) / sum(times[second]) if known else None,
        "nrmse_ratio": nrmse_ratio(arms[second], arms[first]),
        "loss_delta": float(np.mean([b["val_loss"] - a["val_loss"] for a, b in zip(arms[first], arms[second])])),
    }
    report["criteria"] = _judge(report, {**CRITERIA, **(criteria or {})})
    report["verdict"] = "passed" if all(item["passed"] for item in report["criteria"]) else "failed"
    return report


def _check_judged_alike(runs: Mapping[str, list[Run]], arms: Mapping[str, list[dict]]) -> None:
    judged = {
        str(run.folder): f"{', '.join(sorted(one['nrmse']))} ({one['split']} split)"
        for name, those in runs.items()
        for run, one in zip(those, arms[name])
    }
    if len(set(judged.values())) > 1:
        found = "; ".join(f"{folder}: {what}" for folder, what in judged.items())
        raise RunError(f"judged by different data: {found} -> compare runs of the same datasets and evaluation.split")


def _ratio_of_medians(arm: list[dict], reference: list[dict]) -> dict:
    """Of arms that took no turns: no interval, and no median where a run was too short for one."""
    rates = [[one["samples_per_s"] for one in runs] for runs in (arm, reference)]
    known = None not in (*rates[0], *rates[1])
    median = float(np.median(rates[0]) / np.median(rates[1])) if known else None
    return {"median": median, "ci95": [None, None], "num_rounds": 0}


def nrmse_ratio(arm: list[dict], reference: list[dict]) -> dict[str, float]:
    """nRMSE over the reference's by dataset, mean over seeds; NaN where one was not finite."""
    return {
        name: float(np.mean([_over(b["nrmse"][name], a["nrmse"][name]) for a, b in zip(reference, arm)]))
        for name in reference[0]["nrmse"]
    }


def _over(above: float | None, below: float | None) -> float:
    return np.nan if above is None or not below else above / below


def _judge(report: dict, criteria: dict) -> list[dict]:
    """Each criterion beside what was measured."""
    optimized = report["arms"][report["optimized"]]
    worst = float(np.max(list(report["nrmse_ratio"].values())))  # NaN if one is, which holds no criterion
    memory = max(one["peak_memory_gib"] for one in optimized)
    measured = {
        "speedup": (report["speedup"]["median"], lambda value, limit: value >= limit),
        "loss_delta": (report["loss_delta"], lambda value, limit: value < limit),
        "nrmse_ratio": (worst, lambda value, limit: value <= limit),
        "memory_gib": (memory, lambda value, limit: value < limit),
    }
    unknown = criteria.keys() - measured.keys()
    if unknown:
        raise ConfigError([f"criteria.{name}: unknown -> known are {', '.join(measured)}" for name in sorted(unknown)])
    rows = [
        {"name": name, "required": limit, "measured": value, "passed": value is not None and bool(holds(value, limit))}
        for name, (value, holds) in measured.items()
        if (limit := criteria.get(name)) is not None
    ]
    for name in ("nonfinite_steps", "out_of_memory"):
        count = sum(one[name] for one in optimized)
        rows.append({"name": name, "required": 0, "measured": count, "passed": count == 0})
    return rows


# -- in words ------------------------------------------------------------------------------------------------------


def summary(report: dict) -> str:
    """The report in a few lines."""
    first, second = report["baseline"], report["optimized"]
    equal, quality = report["aa_ratio"], report["time_to_quality_speedup"]
    machines = sorted({run["device_name"] for arm in report["arms"].values() for run in arm})
    errors = ", ".join(f"{dataset} {number(ratio)}" for dataset, ratio in report["nrmse_ratio"].items())
    return "\n".join(
        [
            f"{second} against {first}, {len(report['arms'][first])} seed(s), "
            + ("taking turns" if report["interleaved"] else "no turns, and so no interval"),
            *([f"on different machines, which differ in speed as well: {', '.join(machines)}"] if machines[1:] else []),
            f"throughput: {_ratio(report['speedup'])} times the baseline's"
            + (f"; of two equal arms (A/A): {_ratio(equal)}" if equal else ""),
            f"time to quality: {f'{number(quality)} times as fast' if quality else 'not reached'}",
            f"nRMSE over the baseline's: {errors}",
            *(
                f"{item['name']}: required {SIGNS[item['name']]} {number(item['required'])}, "
                f"measured {number(item['measured'])}, {'passed' if item['passed'] else 'failed'}"
                for item in report["criteria"]
            ),
            f"verdict: {report['verdict']}",
        ]
    )


def _ratio(found: dict) -> str:
    """A median with its interval, where it has one."""
    low, high = found["ci95"]
    return number(found["median"]) + ("" if low is None else f" [{number(low)}, {number(high)}]")
