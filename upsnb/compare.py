"""A against B on one machine: interleaved runs, paired seeds and data order, and a noise floor beside every ratio.

Every arm is a run of its own, in its own processes and folder. All are started and paused; then they take turns in
blocks of some seconds (A B B A, and so on) until each has trained to its end. A machine that slows down or speeds up
meanwhile does so for all arms; a third arm, equal to A, shows how far apart two equal ones come out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from upsnb import hardware, overlays, phases, runfolder
from upsnb.config import RunConfig
from upsnb.errors import ConfigError, RunError
from upsnb.interleave import NOISE, Block, Turns, interleave, throughput_ratio
from upsnb.report import SPLIT_KEYS, steady_throughput, train_report
from upsnb.reportfile import finish, number
from upsnb.runs import Run

FORMAT, KIND = 1, "compare"
ARMS = "arms.json"  # which runs were compared, and the blocks in which they took turns

QUALITY_TOLERANCE = 0.03  # of the baseline's final validation nRMSE, for the time to quality
CRITERIA = {  # what an optimization must keep, unless a params file says otherwise
    "speedup": 3.0,  # at least
    "loss_delta": 0.001,  # validation nRMSE, mean over datasets and seeds: at most so much more than the baseline's
    "nrmse_ratio": 1.03,  # of each dataset: at most
    "memory_gib": 50.0,  # of each rank: at most
}
SIGNS = {"speedup": ">=", "loss_delta": "<", "nrmse_ratio": "<=", "memory_gib": "<"}  # measured, sign, required
SIGNS |= {"nonfinite_steps": "=", "out_of_memory": "="}
PARAMETERS = (  # of the notebook, beside the sections
    *("baseline", "optimized", "isolate", "seeds", "block_s", "noise_floor"),
    *("price_per_hour", "criteria", "fail_on_verdict"),
)


# -- arms ----------------------------------------------------------------------------------------------------------


def arms_from_notebook(variables: dict) -> tuple[RunConfig, RunConfig]:
    """Both arms from a notebook's parameters: each one's own file, the notebook's sections on top of both.

    Raises:
        ConfigError: unknown names, wrong types, contradictions; all of them at once for each arm.
    """
    first = overlays.from_notebook({**variables, "preset": variables["baseline"]}, PARAMETERS)
    if variables["isolate"]:
        return first, isolated(first, variables["isolate"])
    return first, overlays.from_notebook({**variables, "preset": variables["optimized"]}, PARAMETERS)


def technique_paths() -> set[str]:
    """Settings that phases, and the published recipe along with them, change: what two arms may differ in."""
    every = (*phases.PHASES, *phases.EXTRAS)
    paths = {path for phase in every for path in (*phase.on, *phase.ladder)}
    return paths | {"training.compile_mode", "training.on_missing", "logging.name"}


def check_arms(baseline: RunConfig, other: RunConfig, asked: set[str] | None = None) -> dict:
    """What the arms differ in.

    Args:
        asked: settings that may differ; empty: those of `technique_paths`.
    Raises:
        ConfigError: the arms differ in anything else, each named, or in nothing.
    """
    changes = overlays.difference(baseline, other)
    allowed = technique_paths() if asked is None else asked | {"logging.name"}
    stray = sorted(changes.keys() - allowed)
    if stray:
        raise ConfigError(
            [f"{path}: differs between the arms and was not asked for -> make it equal" for path in stray]
        )
    if not changes.keys() - {"logging.name"}:
        raise ConfigError(["the arms are equal -> give the second one another setting; A/A is measured anyway"])
    return changes


def isolated(baseline: RunConfig, name: str) -> RunConfig:
    """The baseline with one phase on and nothing else changed: batch, accumulation and learning rate are its own."""
    if name not in phases.BY_NAME:
        raise ConfigError([f"isolate: {name!r} is no phase -> choose one of {', '.join(phases.BY_NAME)}"])
    phase = phases.BY_NAME[name]
    return overlays.apply(overlays.apply(baseline, phase.off), phase.on, f"the baseline with {name}")


# -- quality -------------------------------------------------------------------------------------------------------


def time_to_quality(events: list[dict], target: float) -> float | None:
    """Training time, compilation included, until the first validation whose nRMSE is no higher than `target` [s]."""
    for event in events:
        if event["kind"] == "eval" and score(event) <= target:
            return event["time_s"]
    return None


def score(event: dict) -> float:
    """Validation nRMSE of an eval event, mean over datasets."""
    return float(np.mean(list(event["val_nrmse"].values())))


# -- the comparison ------------------------------------------------------------------------------------------------


def compare(
    baseline: RunConfig,
    other: RunConfig,
    folder: Path | str,
    *,
    names: tuple[str, str] = ("baseline", "optimized"),
    asked: set[str] | None = None,
    seeds: tuple[int, ...] = (42,),
    block_s: float = 10.0,
    noise_floor: bool = True,
    say: Callable[[str], None] = print,
) -> dict[str, list[Run]]:
    """Train both arms to their ends, taking turns, once per seed; the runs of each arm.

    Leaves `arms.json` in `folder`, from which `compare_report` can be made again at any time.

    Raises:
        ConfigError: the arms differ in what was not asked for, or cannot run here.
    """
    check_arms(baseline, other, asked)
    if baseline.training.time_limit_s is not None:
        said = "ends the arms by the clock and not after equal samples -> set it to null, and stages.operator.epochs"
        raise ConfigError([f"training.time_limit_s: {said}"], "the arms")
    found, folder = hardware.detect(), Path(folder).absolute()
    arms = {names[0]: baseline, names[1]: other} | ({NOISE: baseline} if noise_floor else {})
    for config in arms.values():
        if config.training.on_missing == "error":
            hardware.check_runnable(config, found)
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    blocks: list[Block] = []
    for seed in seeds:
        started: dict[str, Turns] = {}
        for name, config in arms.items():
            say(f"seed {seed}: starting {name}")
            own = folder / "runs" / f"{name.replace('/', '')}-seed{seed}"
            started[name] = Turns.start(overlays.apply(config, {"training.seed": seed}), own)
        blocks += interleave(started, seed, block_s, say)
        for name, turns in started.items():
            train_report(turns.run)
            runs[name].append(turns.run)
        record = {
            "format": FORMAT,
            "names": list(names),
            "runs": {name: [str(run.folder.relative_to(folder)) for run in those] for name, those in runs.items()},
            "blocks": [asdict(block) for block in blocks],
        }
        runfolder.write_json(folder / ARMS, record)
    return runs


def compare_report(folder: Path | str, criteria: dict | None = None, price_per_hour: float = 0.0) -> dict:
    """The report of a comparison, from its folder alone; also written to `report.json`.

    Args:
        criteria: over CRITERIA; a criterion of null is left out.
        price_per_hour: of the machine, for the cost [$].
    """
    folder = Path(folder)
    record = json.loads((folder / ARMS).read_text())
    runs = {name: [Run.attach(folder / path) for path in paths] for name, paths in record["runs"].items()}
    blocks = [Block(**block) for block in record["blocks"]]
    return _report(folder, tuple(record["names"]), runs, blocks, {**CRITERIA, **(criteria or {})}, price_per_hour)


def compare_runs(run_a: Run, run_b: Run, folder: Path | str, criteria: dict | None = None) -> dict:
    """The same report of two runs that ended earlier, whenever and wherever: no turns, and so no intervals."""
    names = (run_a.folder.name, run_b.folder.name)
    runs = {names[0]: [run_a], names[1]: [run_b]}
    return _report(Path(folder), names, runs, [], {**CRITERIA, **(criteria or {})}, 0.0)


def _report(folder: Path, names, runs: dict[str, list[Run]], blocks: list[Block], criteria: dict, price: float) -> dict:
    arms = {name: [_reached(run, price) for run in those] for name, those in runs.items()}
    first, second = names
    ratio = throughput_ratio(blocks, second, first)
    if not blocks:
        rates = [np.median([one["samples_per_s"] for one in arms[name]]) for name in names]
        ratio = {"median": float(rates[1] / rates[0]), "ci95": [None, None], "num_rounds": 0}
    targets = [(1 + QUALITY_TOLERANCE) * score(run.events(("eval",))[-1]) for run in runs[first]]
    times = {
        name: [time_to_quality(run.events(("eval",)), target) for run, target in zip(runs[name], targets, strict=True)]
        for name in names
    }
    reached = all(t is not None for t in times[second])
    datasets = sorted(arms[first][0]["nrmse"])
    nrmse_ratio = {
        dataset: float(np.mean([b["nrmse"][dataset] / a["nrmse"][dataset] for a, b in zip(arms[first], arms[second])]))
        for dataset in datasets
    }
    report = {
        "format": FORMAT,
        "kind": KIND,
        "arms": arms,
        "baseline": first,
        "optimized": second,
        "differences": overlays.difference(runs[first][0].config, runs[second][0].config),
        "interleaved": bool(blocks),
        "aa_ratio": throughput_ratio(blocks, NOISE, first) if NOISE in runs else None,
        "speedup": ratio,
        "time_to_quality_s": times,
        "time_to_quality_speedup": float(np.sum(times[first]) / np.sum(times[second])) if reached else None,
        "nrmse_ratio": nrmse_ratio,
        "loss_delta": float(np.mean([b["val_loss"] - a["val_loss"] for a, b in zip(arms[first], arms[second])])),
    }
    report["criteria"] = _judge(report, criteria)
    report["verdict"] = "passed" if all(item["passed"] for item in report["criteria"]) else "failed"
    return finish(report, folder, runs[first][0].manifest)


def _reached(run: Run, price_per_hour: float) -> dict:
    """What one run of an arm came to."""
    report, events = train_report(run), run.events()
    if report["status"] != "finished":
        raise RunError(f"{run.folder}: {report['status']}: {report['cause']} -> only finished runs can be compared")
    steps = [event for event in events if event["kind"] == "step"]
    evals = [event for event in events if event["kind"] == "eval"]
    metrics = {name: next(iter(splits.values())) for name, splits in report["datasets"].items()}
    assert all(next(iter(splits)) in SPLIT_KEYS.values() for splits in report["datasets"].values())
    start = next(event for event in events if event["kind"] == "start")
    return {
        "seed": run.config.training.seed,
        "folder": run.folder.name,
        "phases_on": report["phases_on"],
        "phases_skipped": report["phases_skipped"],
        "num_ranks": report["num_ranks"],
        "samples": len(steps) * start["samples_per_step"],
        "samples_per_s": steady_throughput(events)["median"],
        "train_time_s": report["train_time_s"],
        "compile_s": report["compile_s"],
        "time_to_first_step_s": report["time_to_first_step_s"],
        "cost_dollars": report["train_time_s"] / 3600 * price_per_hour,
        "peak_memory_gib": report["peak_memory_gib"],
        "memory_kind": report["memory_kind"],
        "val_loss": score(evals[-1]),
        "nrmse": {name: values.get("rollout_nrmse_mean", values["nrmse_mean"]) for name, values in metrics.items()},
        "nonfinite_steps": sum(step["loss"] is None for step in steps),
        "out_of_memory": sum(e["kind"] == "guard" and e["guard"] == "out_of_memory" for e in events),
    }


def _judge(report: dict, criteria: dict) -> list[dict]:
    """Each criterion beside what was measured."""
    optimized = report["arms"][report["optimized"]]
    worst = max(report["nrmse_ratio"].values())
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


def summary(report: dict) -> str:
    """The report in a few lines."""
    first, second = report["baseline"], report["optimized"]
    equal, quality = report["aa_ratio"], report["time_to_quality_speedup"]
    errors = ", ".join(f"{dataset} {number(ratio)}" for dataset, ratio in report["nrmse_ratio"].items())
    return "\n".join(
        [
            f"{second} against {first}, {len(report['arms'][first])} seed(s), "
            + ("taking turns" if report["interleaved"] else "which ended earlier: no turns, and so no interval"),
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
