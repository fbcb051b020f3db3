"""Run folders and events as a trainer leaves them, made up."""

import json

import numpy as np

from upsnb.config import RunConfig
from upsnb.runs import handle, runfolder

CONFIG = RunConfig.model_validate_json(
    json.dumps({"data": {"datasets": {"waves": {"family": "advection1d"}, "darcy": {"family": "darcy2d"}}}})
)
START = {
    "num_ranks": 1, "device": "cpu", "parameters": 1234, "total_steps": 100, "time_limit_s": None,
    "samples_per_step": 16, "datasets": {"waves": {"pairs": 9}},
}  # fmt: skip
TOKENS = {"unit": "tokens", "metric": "perplexity"}  # what a start event of a language model says beside it
END = {
    "reason": "time", "train_time_s": 9.5, "epochs": 2, "peak_memory_gib": [0.25, 0.5],
    "memory_kind": "resident set, peak",
}  # fmt: skip
WHOLE = {  # kind: fields that every event of it has, beside kind, time and step
    "segment": {"number": 0, "num_ranks": 1},
    "start": START,
    "step": {
        "epoch": 0, "time_s": 1.0, "step_time_ms": 100.0, "samples_per_s": 160.0, "data_wait_ms": 1.0,
        "peak_memory_gib": 0.5, "loss": 1.0, "losses": {}, "datasets": ["darcy"], "steady": True,
    },
    "eval": {"epoch": 0, "time_s": 1.0, "val_nrmse": {"waves": 0.3}, "best": True},
    "flip": {"revision": 1, "applied": True},
    "flip_effect": {"revision": 1, "ratio": 1.31, "ci95": [1.27, 1.35], "memory_gib": [2.0, 1.58]},
    "relaunch": {"revision": 1, "since": 0.0, "changes": {}, "overlay": {}, "phases_on": []},
    "end": END,
}  # fmt: skip


def fields(kind, **own):
    """All fields of an event, some of them its own."""
    return {**WHOLE[kind], **own}


def make_event(kind, step, **own):
    return {"kind": kind, "step": step, **fields(kind, **own)}


def step(number, ms=100.0, rate=None, steady=True, names=("waves",), **fields):
    """A step event of 16 samples; `time_s` grows with the number."""
    rate = 16e3 / ms if rate is None else rate
    common = {"epoch": 0, "time_s": number * ms / 1e3, "data_wait_ms": ms / 10, "peak_memory_gib": 0.125}
    made = {"kind": "step", "step": number, "step_time_ms": ms, "samples_per_s": rate, "steady": steady, **common}
    return made | {"datasets": list(names), "loss": 1 / number, "losses": {"relative": 1 / number}} | fields


def write_run(folder, events, status="finished", cause=None, evaluation=None, examples=None, config=CONFIG):
    runfolder.create(config, folder)
    runfolder.update_manifest(folder, status=status, cause=cause)
    writer = runfolder.EventWriter(folder)
    for said in events:
        writer.write(**said)
    writer.close()
    if evaluation:
        (folder / runfolder.EVALUATION).write_text(json.dumps(evaluation))
    if examples:
        np.savez(folder / runfolder.EXAMPLES, **examples)
    return handle.Run.attach(folder)


def finished(folder, split="test", ms=100.0, validated=(0.3, None), darcy=0.05):
    """A whole run: two datasets that take turns, one validation, evaluation and examples.

    `ms`: of a step; `validated`: nRMSE of the validation; `darcy`: nRMSE in the end.
    """
    random = np.random.default_rng(0)
    events = [{"kind": "segment", "step": 0, "number": 0}, {"kind": "start", "step": 0, **START}]
    events += [step(n, ms, steady=n > 5, names=[("waves", "darcy")[n % 2]]) for n in range(1, 60)]
    events.insert(3, {"kind": "first_step", "step": 1, "since_launch_s": 2.5})
    events.insert(3, {"kind": "compile", "step": 1, "graphs": 3, "duration_s": 1.5})
    errors = dict(zip(("waves", "darcy"), validated))
    events += [make_event("eval", 40, time_s=40 * ms / 1e3, val_nrmse=errors)]
    events += [{"kind": "end", "step": 59, **END}]
    waves = {
        "num_samples": 3, "baseline": "persistence", "nrmse_mean": 0.02, "nrmse_median": 0.01, "max_error": None,
        "persistence_nrmse_mean": 0.8, "rollout_nrmse_mean": 0.1, "rollout_persistence_nrmse_mean": 1.0,
        "per_sample": {"samples": [7, 8, 9], "nrmse": [0.1, 0.2, 0.3], "rollout_nrmse": [0.1, None, 0.3]},
        "per_time": {
            "time": [0.5, 1.0], "given_until": 0.25, "rollout_nrmse": [0.1, None], "persistence_nrmse": [1.0, 1.1],
            "rollout_nrmse_quartiles": [[0.05, 0.1], [0.2, None]],
        },
    }  # fmt: skip
    darcy = {
        "num_samples": 3, "baseline": "training mean", "nrmse_mean": darcy, "nrmse_median": 0.04,
        "baseline_nrmse_mean": 0.7, "per_sample": {"samples": [1, 2, 3], "nrmse": [0.1, 0.2, 0.3]}, "per_time": {},
    }  # fmt: skip
    falling = {"wavenumber": [0, 1, 2], "truth": [1.0, 0.1, 0.01], "prediction": [0.9, 0.1, 0.02]}
    for result in (waves, darcy):
        result["spectrum"] = {**falling, "error": [0.01, 0.02, 0.03]}
    evaluation = {
        "format": 1, "split": split, "weights": "last",
        "datasets": {"waves": {split: waves}, "darcy": {split: darcy}},
    }  # fmt: skip
    arrays = {"x": np.linspace(0, 1, 8), "nrmse": np.array([0.1, 0.2, 0.3]), "samples": np.array([7, 8, 9])}
    examples = {f"{name}/{key}": value for name in ("waves", "darcy") for key, value in arrays.items()}
    examples |= {"waves/times": np.linspace(0, 1, 6), "darcy/times": np.zeros(1)}
    for key, frames in (("inputs", 4), ("truth", 2), ("forecast", 2)):
        examples[f"waves/{key}"] = random.random((3, frames, 1, 8), dtype=np.float32)
        examples[f"darcy/{key}"] = random.random((3, 1, 1, 8, 8), dtype=np.float32)
    return write_run(folder, events, evaluation=evaluation, examples=examples)


def of(events, kind, **fields):
    """Events of one kind, with these fields."""
    return [e for e in events if e["kind"] == kind and all(e[key] == value for key, value in fields.items())]
