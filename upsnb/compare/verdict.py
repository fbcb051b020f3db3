"""Finished runs of two arms beside each other: ratios, time to quality, criteria and a verdict."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.data.audit import headline
from upsnb.errors import ConfigError, RunError, shown
from upsnb.report.figures import read_evaluation
from upsnb.report.file import factor, finish, number
from upsnb.report.results import run_numbers
from upsnb.runs import runfolder
from upsnb.runs.events import NAMING, naming
from upsnb.runs.handle import Run

FORMAT, KIND = 1, "compare"
JUDGED = ("samples", "data", "frames given", "frames forecast")  # of what an evaluation says that it was of
NOISE = "A/A"  # the arm that is the baseline once more
QUALITY_TOLERANCE = 0.03  # of the baseline's final validation nRMSE, for the time to quality
CRITERIA = {  # what an optimization must keep, unless a params file says otherwise; cost_ratio is there to be asked for
    "speedup": 3.0,  # at least
    "loss_delta": 0.001,  # validation nRMSE, mean over datasets and seeds: at most so much more than the baseline's
    "nrmse_ratio": 1.03,  # of each dataset: at most
    "memory_gib": 50.0,  # of each rank: at most
}
NEVER = ("nonfinite_steps", "out_of_memory")  # what no criteria can allow
SIGNS = {"speedup": ">=", "loss_delta": "<", "nrmse_ratio": "<=", "memory_gib": "<"}  # measured, sign, required
SIGNS |= {"cost_ratio": "<=", **dict.fromkeys(NEVER, "=")}
HOLDS = {">=": operator.ge, "<": operator.lt, "<=": operator.le, "=": operator.eq}


# -- one run -------------------------------------------------------------------------------------------------------


def score(event: dict) -> float:
    """Validation nRMSE of an eval event, mean over datasets; NaN where one was not finite."""
    return float(np.mean([np.nan if value is None else value for value in event["val_nrmse"].values()]))


def last_score(run: Run) -> float:
    """`score` of a run's last validation.

    Raises:
        RunError: it has none.
    """
    evals = run.events(("eval",))
    if not evals:
        raise RunError(f"{run.folder}: has no validation -> look at {run.folder / runfolder.LOG}")
    return score(evals[-1])


def time_to_quality(evals: list[dict], target: float) -> float | None:
    """Training time, compilation included, until the first validation whose nRMSE is no higher than `target` [s]."""
    return next((event["time_s"] for event in evals if score(event) <= target), None)


def run_summary(run: Run, numbers: Mapping, price_per_hour: float) -> dict:
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
            f"{run.folder}: has no validation or no final errors (it ended by {numbers['end_reason']}) -> "
            "compare runs that have a validation split and trained to their ends"
        )
    metrics = {name: next(iter(splits.values())) for name, splits in numbers["datasets"].items()}
    per_step = next((event["samples_per_step"] for event in run.events(("start",))), np.nan)
    return {
        "seed": run.config.training.seed,
        "folder": run.folder.name,
        "device_name": run.manifest["hardware"]["device_name"],
        "phases_on": numbers["phases_on"],
        "phases_skipped": numbers["phases_skipped"],
        "num_ranks": numbers["num_ranks"],
        **naming(numbers),
        "samples": numbers["samples"],
        "samples_per_s": numbers["samples_per_s"]["median"],
        "train_time_s": numbers["train_time_s"],
        "compile_s": numbers["compile_s"],
        "time_to_first_step_s": numbers["time_to_first_step_s"],
        "cost_dollars": numbers["train_time_s"] / 3600 * price_per_hour,
        "peak_memory_gib": numbers["peak_memory_gib"],
        "memory_kind": numbers["memory_kind"],
        "val_loss": score(evals[-1]),
        "validations": {
            "time_s": [event["time_s"] for event in evals],  # of training, compilation included
            "samples": [event["step"] * per_step for event in evals],
            "nrmse": [score(event) for event in evals],
        },
        "split": numbers["split"],
        "nrmse": {name: headline(values) for name, values in metrics.items()},
        "nonfinite_steps": sum(step["loss"] is None for step in run.events(("step",))),
        "out_of_memory": sum(event["guard"] == "out_of_memory" for event in run.events(("guard",))),
    }


# -- two arms ------------------------------------------------------------------------------------------------------


def compare_arms(
    runs: Mapping[str, list[Run]],
    ratios: Mapping[str, dict] | None,
    folder: Path | str | None,
    criteria: Mapping | None = None,
    price_per_hour: float = 0.0,
    turns: Sequence[Mapping] = (),
) -> dict:
    """The report of several runs of two arms, and of a noise floor.

    Args:
        runs: of the baseline, of its rival and, where there is one, of NOISE, in this order; one run a seed.
        ratios: of throughputs over the baseline's, by arm, of arms that took turns; None: they did not.
        folder: where `report.json` is written; None: nowhere.
        criteria: over CRITERIA; a criterion of null is left out.
        price_per_hour: of the machine, for the cost [$].
        turns: in the order of time, each with its `arm`, `samples` and `seconds`.
    Raises:
        RunError: a run did not finish, or the runs were not judged by the same datasets and split.
        ConfigError: an unknown criterion.
    """
    arms = {name: [run_summary(run, run_numbers(run), price_per_hour) for run in those] for name, those in runs.items()}
    _check_judged_alike(runs, arms)
    first, second = (name for name in runs if name != NOISE)
    baseline = runs[first][0]
    evals = {name: [run.events(("eval",)) for run in those] for name, those in runs.items()}
    targets = [(1 + QUALITY_TOLERANCE) * score(events[-1]) for events in evals[first]]
    times = {
        name: [time_to_quality(*pair) for pair in zip(those, targets, strict=True)] for name, those in evals.items()
    }
    known = None not in (*times[first], *times[second])
    errors_over = nrmse_ratios(arms[second], arms[first])
    report = {
        "format": FORMAT,
        "kind": KIND,
        "arms": arms,
        "baseline": first,
        "optimized": second,
        **naming(arms[first][0]),
        "files": {name: list(data.files) for name, data in baseline.config.data.datasets.items()},  # or generated
        "differences": overlays.difference(baseline.config, runs[second][0].config),
        "interleaved": ratios is not None,
        "turns": list(turns),
        "aa_ratio": ratios.get(NOISE) if ratios else None,
        "speedup": ratios[second] if ratios else _ratio_of_medians(arms[second], arms[first]),
        "time_to_quality_s": times,
        "time_to_quality_speedup": sum(times[first]) / sum(times[second]) if known else None,
        "nrmse_ratio": _means(errors_over),
        "nrmse_ratio_range": {
            name: [float(end(those)) for end in (np.min, np.max)] for name, those in errors_over.items()
        },
        "aa_nrmse_ratio": _means(nrmse_ratios(arms[NOISE], arms[first])) if NOISE in arms else None,
        # of one machine, whose price falls out: what training cost, compilation and validation included
        "cost_ratio": _over(*(sum(one["train_time_s"] for one in arms[name]) for name in (second, first))),
        "loss_delta": loss_delta(arms[second], arms[first]),
        "aa_loss_delta": loss_delta(arms[NOISE], arms[first]) if NOISE in arms else None,
    }
    report["criteria"] = _judge(report, {**CRITERIA, **(criteria or {})})
    report["verdict"] = "passed" if all(item["passed"] for item in report["criteria"]) else "failed"
    return finish(report, folder, baseline.manifest)


def _check_judged_alike(runs: Mapping[str, list[Run]], arms: Mapping[str, list[dict]]) -> None:
    judged = {
        str(run.folder): f"{', '.join(sorted(one['nrmse']))} ({one['split']} split)"
        for name, those in runs.items()
        for run, one in zip(those, arms[name])
    }
    if len(set(judged.values())) > 1:
        found = "; ".join(f"{folder}: {what}" for folder, what in judged.items())
        raise RunError(f"judged by different data: {found} -> compare runs of the same datasets and evaluation.split")
    of_name: dict[str, dict[str, str]] = {}  # dataset: what its errors are of, by that the runs that say so
    for run in (run for those in runs.values() for run in those):
        for name, splits in read_evaluation(run.folder, run.events()).get("datasets", {}).items():
            for terms in (result["protocol"] for result in splits.values() if "protocol" in result):
                told = ", ".join(f"{what}: {terms[what]}" for what in JUDGED if what in terms)
                of_name.setdefault(name, {}).setdefault(told, run.folder.name)
    for name, told in of_name.items():
        if len(told) > 1:
            found = "; ".join(f"{folder}: {what}" for what, folder in told.items())
            raise RunError(f"{name}: judged by different data: {found} -> compare runs of the same data and its splits")
    metrics = sorted({naming(one)["metric"] for those in arms.values() for one in those})
    if len(metrics) > 1:
        raise RunError(f"judged by different errors: {', '.join(metrics)} -> compare runs of one workload")


def _ratio_of_medians(arm: list[dict], reference: list[dict]) -> dict:
    """Of arms that took no turns: no interval, and no median where a run was too short for one."""
    rates = [[one["samples_per_s"] for one in runs] for runs in (arm, reference)]
    known = None not in (*rates[0], *rates[1])
    median = float(np.median(rates[0]) / np.median(rates[1])) if known else None
    return {"median": median, "ci95": [None, None], "num_rounds": 0}


def nrmse_ratios(arm: list[dict], reference: list[dict]) -> dict[str, list[float]]:
    """nRMSE over the reference's by dataset, one a seed; NaN where one was not finite."""
    pairs = list(zip(arm, reference, strict=True))
    return {name: [_over(a["nrmse"][name], b["nrmse"][name]) for a, b in pairs] for name in reference[0]["nrmse"]}


def _over(above: float | None, below: float | None) -> float:
    return np.nan if above is None or not below else above / below


def _means(ratios: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: float(np.mean(those)) for name, those in ratios.items()}


def loss_delta(arm: list[dict], reference: list[dict]) -> float:
    """Validation nRMSE, mean over datasets, above the reference's; mean over seeds."""
    return float(np.mean([a["val_loss"] - b["val_loss"] for a, b in zip(arm, reference, strict=True)]))


def check_criteria(criteria: Mapping) -> None:
    """
    Raises:
        ConfigError: a criterion that nobody knows, or a limit that is no number.
    """
    problems = []
    for name, limit in criteria.items():
        if name not in (known := (*CRITERIA, "cost_ratio")):
            problems.append(f"criteria.{name}: unknown -> known are {', '.join(known)}")
        elif limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float)):
            problems.append(f"criteria.{name}: got {shown(limit)} -> write a number, or null to leave it out")
    if problems:
        raise ConfigError(problems, "the criteria")


def check_judged(*configs: RunConfig) -> None:
    """
    Raises:
        ConfigError: a config without a validation split, whose error nobody would know after all training.
    """
    if any(config.data.split.validation_fraction == 0 for config in configs):
        remedy = "say which share of the samples runs are compared by, 0.1 for instance"
        raise ConfigError([f"data.split.validation_fraction: is 0 -> {remedy}"])


def _judge(report: dict, criteria: dict) -> list[dict]:
    """Each criterion beside what was measured."""
    check_criteria(criteria)
    optimized, limits = report["arms"][report["optimized"]], {**criteria, **dict.fromkeys(NEVER, 0)}
    measured = {
        "speedup": report["speedup"]["median"],
        "loss_delta": report["loss_delta"],
        "nrmse_ratio": float(np.max(list(report["nrmse_ratio"].values()))),  # NaN if one is, which holds no criterion
        "memory_gib": max(one["peak_memory_gib"] for one in optimized),
        "cost_ratio": report["cost_ratio"],
        **{name: sum(one[name] for one in optimized) for name in NEVER},
    }
    rows = []
    for name, value in measured.items():
        if (limit := limits.get(name)) is not None:
            holds = value is not None and bool(HOLDS[SIGNS[name]](value, limit))
            rows.append({"name": name, "required": limit, "measured": value, "passed": holds})
    return rows


# -- finished runs -------------------------------------------------------------------------------------------------


def compare(run_a: Run, run_b: Run, folder: Path | str | None = None, criteria: dict | None = None) -> dict:
    """Two saved runs beside each other: what the second differs in, what it gains and what it loses.

    They may have ended whenever and wherever: no turns, and so neither intervals nor a noise floor. Nothing is trained,
    compiled or written into their folders.

    Args:
        folder: where `report.json` is written; None: nowhere.
        criteria: over CRITERIA without the speed-up, which nobody asks of any two runs; one of null is left out.
    Raises:
        RunError: a run has not finished or its errors were not measured, or the two were judged by different data.
        ConfigError: an unknown criterion.
    """
    if run_a.folder == run_b.folder:
        raise RunError(f"{run_a.folder}: is compared with itself -> name two runs")
    if folder is not None and (Path(folder) / runfolder.MANIFEST).exists():
        raise RunError(f"{folder}: holds a run, whose report would be lost -> choose another folder")
    above = os.path.commonpath((run_a.folder, run_b.folder))  # runs of two comparisons have the same names
    asked = {"speedup": None, **(criteria or {})}
    return compare_arms({str(run.folder.relative_to(above)): [run] for run in (run_a, run_b)}, None, folder, asked)


# -- in words ------------------------------------------------------------------------------------------------------


def of_equal_arms(report: Mapping) -> dict[str, float]:
    """By criterion, what two equal arms come out at: closer to it than that, a measurement decides nothing.

    Of the datasets the one whose ratio is farthest from 1. Empty where no arm was trained twice.
    """
    ratios = [ratio for ratio in (report["aa_nrmse_ratio"] or {}).values() if ratio]
    found = {
        "speedup": report["aa_ratio"] and report["aa_ratio"]["median"],
        "nrmse_ratio": max(ratios, key=lambda ratio: abs(np.log(ratio)), default=None),
        "loss_delta": report["aa_loss_delta"],
    }
    return {name: value for name, value in found.items() if value is not None}


def summary(report: Mapping) -> str:
    """The report in a few lines."""
    first, second = report["baseline"], report["optimized"]
    turns = "taking turns" if report["interleaved"] else "no turns, and so no interval"
    lines = [f"{second} against {first}, {len(report['arms'][first])} seed(s), {turns}"]
    machines = sorted({run["device_name"] for arm in report["arms"].values() for run in arm})
    if len(machines) > 1:
        lines.append(f"on different machines, which differ in speed as well: {', '.join(machines)}")
    lines += [f"{what}: {text}" for what, text in facts(report).items()]
    lines += [f"{_told(row)}: {'passed' if row['holds'] == 'yes' else 'failed'}" for row in judged(report)]
    return "\n".join([*lines, f"verdict: {report['verdict']}"])


def failed(report: Mapping) -> str:
    """The criteria that do not hold, in one line; empty where all do."""
    return "; ".join(_told(row) for row in judged(report) if row["holds"] == "no")


def judged(report: Mapping) -> list[dict[str, str]]:
    """Each criterion, what it asks for, what was measured, what two equal arms come out at, and whether it holds."""
    equal, metric = of_equal_arms(report), naming(report)["metric"]
    # a params file says nrmse_ratio whatever the error is, so the key stays to be seen
    told = {} if metric == NAMING["metric"] else {"nrmse_ratio": f"nrmse_ratio (of {metric})"}
    return [
        {
            "criterion": told.get(item["name"], item["name"]),
            "required": f"{SIGNS[item['name']]} {number(item['required'])}",
            "measured": number(item["measured"]),
            "two equal arms": number(equal.get(item["name"])),
            "holds": "yes" if item["passed"] else "no",
        }
        for item in report["criteria"]
    ]


def _told(row: Mapping) -> str:
    beside = "" if row["two equal arms"] == "-" else f", A/A {row['two equal arms']}"
    return f"{row['criterion']}: required {row['required']}, measured {row['measured']}{beside}"


def facts(report: Mapping) -> dict[str, str]:
    """What the criteria rest on: throughput and errors over the baseline's, and the time to its quality."""
    speedup, equal, metric = report["speedup"], report["aa_ratio"], naming(report)["metric"]
    return {
        "throughput over the baseline's": factor(speedup) + (f" (A/A {factor(equal)})" if equal else ""),
        "time to the baseline's quality": time_to_quality_told(report),
        **{f"{metric} over the baseline's, {name}": text for name, text in errors(report).items()},
    }


def time_to_quality_told(report: Mapping) -> str:
    """How much sooner the baseline's quality is reached; where some seeds do not reach it, what the others took."""
    if quality := report["time_to_quality_speedup"]:
        return f"{quality:.2f} times as fast"
    of_seeds = [*zip(*(report["time_to_quality_s"][report[arm]] for arm in ("baseline", "optimized")))]
    reached = [times for times in of_seeds if None not in times]
    if not reached:
        return "not reached"
    before, after = map(sum, zip(*reached))
    return f"reached in {len(reached)} of {len(of_seeds)} seeds, there {before / after:.2f} times as fast"


def errors(report: Mapping) -> dict[str, str]:
    """By dataset, the ratio of the arms' nRMSE, its range over seeds and the ratio of two equal arms."""
    texts = {}
    for dataset, ratio in report["nrmse_ratio"].items():
        beside = []
        if len(report["arms"][report["baseline"]]) > 1:
            beside.append(" to ".join(map(number, report["nrmse_ratio_range"][dataset])) + " over seeds")
        if report["aa_nrmse_ratio"]:
            beside.append(f"A/A {number(report['aa_nrmse_ratio'][dataset])}")
        texts[dataset] = number(ratio) + (f" ({'; '.join(beside)})" if beside else "")
    return texts
