"""What a run reached: report.json, its table and its figures, from its folder alone."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd

from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.data import audit
from upsnb.data.datasets import Dataset
from upsnb.phases import names_on
from upsnb.report.figures import RunFigures, end_of_last_launch, fall, read_evaluation
from upsnb.report.file import finish, number, verdict
from upsnb.report.style import save_all
from upsnb.runs import runfolder
from upsnb.runs.events import naming
from upsnb.runs.handle import Run
from upsnb.runs.throughput import samples_seen, steady_throughput

FORMAT = 1
GATE = (  # of a gate's event
    *("against", "verdict", "ratio", "ci95", "mean_ratio", "samples"),
    *("perturbed_ratio", "perturbed_ci95"),
)
FEWEST_STEPS = 200  # what is `unmet` after fewer means nothing; the first look at params/quick.yaml takes 1,200
SPLIT_KEYS = {"validation": "val", "test": "test"}
COLUMNS = (
    *("dataset", "split", "nRMSE", "median", "worst tenth", "without a model", "gain"),
    *("rollout", "rollout without", "rollout gain", "look-up"),
)

# -- numbers -------------------------------------------------------------------------------------------------------


def train_report(run: Run) -> dict:
    """The report of a run that has ended, however it ended; also written to `report.json`.

    What a run did not get to is null; accuracy is reported only if the latest launch evaluated to its end.
    """
    return finish(run_numbers(run), run.folder, run.manifest)


def run_numbers(run: Run) -> dict:
    """The report, as far as it does not say where and when."""
    events, manifest, config = run.events(), run.manifest, run.config
    last = {event["kind"]: event for event in events}
    start, steps = last.get("start", {}), [event for event in events if event["kind"] == "step"]
    end = end_of_last_launch(events)
    evaluation = read_evaluation(run.folder, events)
    datasets = scalar_metrics(evaluation)
    samples, train_time_s = samples_seen(steps), end.get("train_time_s")
    steady = [step for step in steps if step["steady"]]
    waited_ms, took_ms = (sum(step[key] for step in steady) for key in ("data_wait_ms", "step_time_ms"))
    memory = end.get("peak_memory_gib") or [step["peak_memory_gib"] for step in steps[-1:]]
    return {
        "format": FORMAT,
        "kind": "train",
        "status": run.status(),
        "leaks": _leaks(datasets),
        "device": start.get("device"),
        "num_ranks": start.get("num_ranks"),
        "parameters": start.get("parameters"),
        **naming(start),
        "samples_per_s": steady_throughput(events),
        "time_to_first_step_s": next((e["since_launch_s"] for e in events if e["kind"] == "first_step"), None),
        "train_time_s": train_time_s,
        "peak_memory_gib": max(memory, default=None),
        "phases_on": _phases_on(events, config),
        "phases_skipped": manifest["phases_skipped"],
        "datasets": datasets,
        # what the numbers above rest on
        "cause": run.cause(),
        "end_reason": end.get("reason"),
        "steps": steps[-1]["step"] if steps else 0,
        "samples": round(samples),
        # over all of training's time, compilation, validations and disturbances included
        "overall_samples_per_s": samples / train_time_s if steps and train_time_s else None,
        "epochs": end.get("epochs"),
        "epoch_s": _epoch_s(steps),
        "split": evaluation.get("split"),
        "weights": evaluation.get("weights"),
        "stages": stages(events),
        "loss": fall([step["loss"] for step in steps if step["stage"] == steps[0]["stage"]]),  # others have their own
        "compile_s": round(sum(event["duration_s"] for event in events if event["kind"] == "compile"), 3),
        "data_wait_share": waited_ms / took_ms if steady else None,
        "memory_kind": end.get("memory_kind"),
        "seeds": manifest["seeds"],
        "verdicts": manifest.get("verdicts", {}),  # phase: what it is to this model, and which parts or why not
        "num_launches": max(len(manifest["segments"]), 1),
        "cost": runfolder.costs(run.folder),
        "energy_wh": _energy_wh(events),
        "gpu_utilisation_percent": _utilisation(events),
        "settings": overlays.difference(RunConfig(), config),  # all that differs from the defaults
    }


def _phases_on(events: list[dict], config: RunConfig) -> list[str]:
    """Phases that were on at the end: as the last launch or obeyed flip says, else as the run was started."""
    said = [event for event in events if event["kind"] == "start" or (event["kind"] == "flip" and event["applied"])]
    started = names_on(config)
    return said[-1].get("phases_on", started) if said else started


def stages(events: list[dict], least: int = 2) -> list[dict]:
    """How long each stage trained, how fast, and how its last validation found it; nothing of fewer than `least`."""
    found, before = [], {"step": 0, "time_s": 0.0}
    names = dict.fromkeys(event["stage"] for event in events if event["kind"] == "step")
    for stage in names if len(names) >= least else ():
        of_stage = [event for event in events if event["stage"] == stage]
        last = [event for event in of_stage if event["kind"] == "step"][-1]
        validated = [event["val_nrmse"] for event in of_stage if event["kind"] == "eval"]
        gates = [event for event in of_stage if event["kind"] == "gate"]
        caches = [event["cache"] for event in of_stage if event["kind"] == "start" and event.get("cache")]
        known = {"stage": stage, "steps": last["step"] - before["step"], "cache": caches[-1] if caches else {}}
        known |= {
            "train_time_s": round(last["time_s"] - before["time_s"], 3),
            "samples_per_s": steady_throughput(of_stage),
        }
        known["gate"] = {key: gates[-1][key] for key in GATE} if gates else None
        found.append(known | {"val_nrmse": validated[-1] if validated else {}})
        before = last
    return found


def scalar_metrics(evaluation: dict) -> dict:
    """{dataset: {split, short: metrics}}: what is one number or one name, what channels reached, and leaks."""
    return {
        name: {
            SPLIT_KEYS.get(split, split): {
                key: value
                for key, value in result.items()
                if key in ("per_channel", "leak") or not isinstance(value, (dict, list))
            }
            for split, result in splits.items()
        }
        for name, splits in evaluation.get("datasets", {}).items()
    }


def _leaks(datasets: dict) -> list[str]:
    """What is to be known before any error is read: splits that test what was trained on, a sentence each."""
    said = []
    for name, split, values in _results({"datasets": datasets}):
        if leak := values.get("leak"):
            distinct, count = leak["distinct"], values["num_samples"]
            left = f"read the error of the other {distinct['num_samples']}" if distinct else "none is left to judge by"
            left += ", or train with data.split.convention: distinct" if leak["seen"] else ""
            alike = f"{leak['near']} of {count} samples begin within {audit.NEAR:.0%} of a training sample"
            said.append(f"{name}: the {split} split leaks, {alike}, {leak['seen']} exactly so -> {left}")
    return said


def _epoch_s(steps: list[dict]) -> float | None:
    """Wall time from the end of an epoch to that of the next, validation included, median [s]."""
    ends = {(step["stage"], step["epoch"]): step["time_s"] for step in steps}
    lengths = [
        after - ends[stage, epoch - 1] for (stage, epoch), after in [*ends.items()][:-1] if (stage, epoch - 1) in ends
    ]
    return median(lengths) if lengths else None


def _energy_wh(events: list[dict]) -> float | None:
    """What the GPUs drew, by their own word once a second [Wh]; None where they say nothing."""
    readings = [event for event in events if event["kind"] == "telemetry" and None not in event["power_w"]]
    pairs = zip(readings, readings[1:])
    total = sum(sum(one["power_w"]) * min(after["time"] - one["time"], 10.0) for one, after in pairs)  # a pause is none
    return total / 3600 if len(readings) > 1 else None


def _utilisation(events: list[dict]) -> dict[str, float | None]:
    """How busy the GPUs were, by their own word once a second: mean and lowest tenth [%]; None if they say nothing."""
    readings = (event["utilisation_percent"] for event in events if event["kind"] == "telemetry")
    told = [value for reading in readings for value in reading if value is not None]
    if not told:
        return {"mean": None, "p10": None}
    return {"mean": float(np.mean(told)), "p10": float(np.percentile(told, 10))}


# -- tables --------------------------------------------------------------------------------------------------------


def table(report: dict) -> pd.DataFrame:
    """nRMSE [-] per dataset and split, beside what a forecast without a model reaches; gain is the second by the first.

    "nRMSE", "median" and "worst tenth" (what a tenth of the samples exceeds) are of one call, "rollout" of self-fed
    forecasts to the end of the trajectory, "look-up" of the training sample that begins most alike. Where there are
    several channels, each has a row of its own below; where the split leaks, the samples that it does not leak have one
    above.
    """
    rows, metric = [], naming(report)["metric"]
    if any("error" in values for _, _, values in _results(report)):  # of another workload, whose columns are its own
        for name, split, values in _results(report):
            known = {key: number(value) for key, value in values.items() if isinstance(value, int | float)}
            rows.append({"dataset": name, "split": split, metric: known.pop("error", ""), **known})
        return pd.DataFrame(rows, dtype=object).fillna("")
    for name, split, values in _results(report):
        if distinct := (values.get("leak") or {}).get("distinct"):
            rows.append(_row(f"{name}: {distinct['num_samples']} distinct samples", split, distinct))
        rows.append(_row(name, split, values))
        channels = values.get("per_channel", {})
        for channel, nrmse in channels.get("nrmse", {}).items() if len(channels.get("nrmse", {})) > 1 else ():
            row = {"dataset": f"{name}: {channel}", "split": split, "nRMSE": number(nrmse)}
            if rolled := channels.get("rollout_nrmse"):
                row["rollout"] = number(rolled[channel])
            rows.append(row)
    return pd.DataFrame(rows, columns=COLUMNS, dtype=object).fillna("")


def _row(name: str, split: str, values: dict) -> dict[str, str]:
    called, key = _baseline(values)
    nrmse, without = values.get("nrmse_mean"), values.get(key)
    rollout, rollout_without = values.get("rollout_nrmse_mean"), values.get(f"rollout_{key}")
    return {
        "dataset": name,
        "split": split,
        "nRMSE": number(nrmse),
        "median": number(values.get("nrmse_median")),
        "worst tenth": number(values.get("nrmse_p90")),
        "without a model": f"{called} {number(without)}".strip(),
        "gain": number(_ratio(without, nrmse), 3),
        "rollout": number(rollout),
        "rollout without": number(rollout_without),
        "rollout gain": number(_ratio(rollout_without, rollout), 3),
        "look-up": number(values.get("rollout_lookup_nrmse_mean", values.get("lookup_nrmse_mean"))),
    }


def gains(report: dict) -> dict[str, float]:
    """How many times larger the metric of a forecast without a model is, by dataset; NaN if unknown."""
    ratios = {
        name: _ratio(values.get(_baseline(values)[1]), values.get(_own(values)))
        for name, _, values in _headlines(report)
    }
    return {name: float("nan") if ratio is None else ratio for name, ratio in ratios.items()}


def unmet(report: dict) -> list[str]:
    """What a run has not shown that a good one shows, a sentence each."""
    said = []
    for name, _, values in _headlines(report):
        for key, what in (("", "a forecast"), ("rollout_", "a rollout")):
            without, own = values.get(f"{key}{_baseline(values)[1]}"), values.get(f"{key}{_own(values)}")
            if without is not None and not (own is not None and own < without):
                said.append(f"{name}: {what} without a model is as good")
    loss = report["loss"]
    if loss["first"] is None or not loss["last"] < loss["first"]:
        said.append("the loss did not fall")
    if not report["samples_per_s"]["num_windows"]:
        said.append("it was too short for one steady second, so its speed was not measured")
    return said


def is_short(report: dict) -> bool:
    """Whether a run took too few steps for anything to be expected of it."""
    return report["steps"] < FEWEST_STEPS


def _results(report: dict) -> list[tuple[str, str, dict]]:
    datasets = report.get("datasets") or {}
    return [(name, split, values) for name, splits in datasets.items() for split, values in splits.items()]


def _headlines(report: dict) -> list[tuple[str, str, dict]]:
    """The same, but of distinct samples alone where the split leaks and has some."""
    return [(name, split, audit.judging(values)) for name, split, values in _results(report)]


def _own(values: dict) -> str:
    """The key of the model's metric."""
    return "error" if "error" in values else "nrmse_mean"


def _baseline(values: dict) -> tuple[str, str]:
    """What the forecast without a model is called, and the key of its metric."""
    if "error" in values:
        return values.get("baseline", ""), "baseline_error"
    keys = (key for key in values if key.endswith("_nrmse_mean") and not key.startswith("rollout_"))
    key = next(keys, "")
    return values.get("baseline") or key.removesuffix("_nrmse_mean").replace("_", " "), key


def references(values: dict) -> dict[str, float]:
    """nRMSE of forecasts without a model as far as it is known, of the rollout where there is one."""
    values = audit.judging(values)
    rolled, (called, key) = "rollout_" * ("rollout_nrmse_mean" in values), _baseline(values)
    keys = {called: key, "training mean": key if called == "training mean" else "training_mean_nrmse_mean"}
    found = {name: values.get(rolled + key) for name, key in {**keys, "look-up": "lookup_nrmse_mean"}.items()}
    return {name: value for name, value in found.items() if value is not None}


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def costs(report: dict) -> str:
    """What the run cost, in a few lines."""
    speed, skipped = report.get("samples_per_s") or {}, report.get("phases_skipped") or {}
    low, high = speed.get("ci95") or (None, None)
    memory = f" ({report['memory_kind']})" if report.get("memory_kind") else ""
    overall, said = report.get("overall_samples_per_s"), naming(report)
    lines = [
        f"{report.get('status')} on {report.get('num_ranks')} x {report.get('device')}, "
        f"{number(report.get('parameters'))} parameters, trained {number(report.get('train_time_s'))} s"
        + (f" for {number(report['steps'])} steps" if report.get("steps") else ""),
        f"{number(speed.get('median'))} {said['unit']}/s while steady (95 % interval {number(low)} to {number(high)})"
        + (f", {number(overall)} overall" if overall else ""),
        f"first step after {number(report.get('time_to_first_step_s'))} s, "
        f"peak memory {number(report.get('peak_memory_gib'))} GiB{memory}",
        *_of_machine(report),
        *(_of_stage(known, **said) for known in report.get("stages") or []),
        f"phases on: {', '.join(map(str, report.get('phases_on') or [])) or 'none'}",
        *(f"skipped {phase}: {reason}" for phase, reason in skipped.items()),
    ]
    return "\n".join(lines)


def _of_machine(report: dict) -> list[str]:
    """How busy GPUs were, where they told, and what the machine cost, where somebody said its price."""
    lines, busy, known = [], report.get("gpu_utilisation_percent") or {}, report.get("cost") or {}
    if busy.get("mean") is not None:
        energy = f", {number(report['energy_wh'])} Wh" if report.get("energy_wh") else ""
        lines.append(f"GPUs busy {busy['mean']:.0f} % of the time, {busy['p10']:.0f} % in its laziest tenth{energy}")
    if not known.get("dollars"):
        return lines
    budget = f" of a budget of ${known['budget']:,.2f}" if known["budget"] else ""
    price = f"at ${known['price_per_hour']:,.2f} an hour, start-up and pauses included"
    return [*lines, f"held the machine for {number(known['held_s'])} s: ${known['dollars']:,.2f}{budget}, {price}"]


def _of_stage(known: dict, unit: str, metric: str) -> str:
    errors = ", ".join(f"{name} {number(error)}" for name, error in known["val_nrmse"].items()) or "not measured"
    return (
        f"stage {known['stage']}: {known['steps']} steps in {number(known['train_time_s'])} s, "
        f"{number(known['samples_per_s']['median'])} {unit}/s; its last validation {metric}: {errors}"
        + (f"; {verdict(known['gate'])}" if known.get("gate") else "")
        + "".join(f"; {_of_cache(name, cache)}" for name, cache in known.get("cache", {}).items())
    )


def _of_cache(name: str, cache: dict) -> str:
    """Whether a stage reads what a frozen model says of a dataset, and what that takes and saves."""
    if not cache["on"]:
        return f"frozen forecasts of {name} computed in each step: {cache['why']}"
    return (
        f"frozen forecasts of {name} read from {number(cache['gib'], 3)} GiB: {number(cache['read_ms'], 3)} ms a row, "
        f"{number(cache['compute_ms'], 3)} to compute; made in {number(cache['build_s'], 3)} s at the stage's start"
    )


def data_table(datasets: dict[str, Dataset]) -> pd.DataFrame:
    """What there is to train on: grid, frames, samples by split, and the training split's statistics."""
    rows = []
    for name, dataset in datasets.items():
        spec = dataset.spec
        row = {"dataset": name, "equation": dataset.family.title, "grid": " x ".join(map(str, spec.grid_shape))}
        row |= {"frames": len(dataset.frames), "in -> out": f"{spec.input_frames} -> {spec.output_frames}"}
        row |= {split: len(samples) for split, samples in dataset.splits.items()}
        row |= {"mean [-]": number(spec.output_mean[0]), "std [-]": number(spec.output_std[0])}
        row |= {"size [MiB]": number(dataset.num_bytes / 2**20)}
        rows.append(row)
    return pd.DataFrame(rows)


# -- figures ---------------------------------------------------------------------------------------------------------


def write_figures(drawn: RunFigures) -> dict[str, Path]:
    """Write all that a run can show into its folder's `figures/`; figure name -> PNG."""
    return save_all({name: draw() for name, draw in drawn.all().items()}, drawn.folder)
