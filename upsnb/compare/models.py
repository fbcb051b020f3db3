"""Models beside each other: each trained on the same data for the same time; what it reached, and what it costs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch

from upsnb import hardware, overlays
from upsnb.compare.sweep import check_same
from upsnb.compare.verdict import check_judged, run_summary
from upsnb.config import RunConfig
from upsnb.data import datasets
from upsnb.data.datasets import Dataset
from upsnb.errors import ConfigError, RunError, RunFailed
from upsnb.models import chosen
from upsnb.models.surrogate import Surrogate
from upsnb.report.file import finish, number
from upsnb.report.results import references, train_report
from upsnb.runs import handle, runfolder
from upsnb.runs.handle import Run
from upsnb.training import evaluation
from upsnb.training.timing import elapsed_ms, mark
from upsnb.widgets.progress import Progress, rewrite

FORMAT, KIND = 1, "models"
PARAMETERS = ("others", "seeds")  # of the notebook, beside the sections
YOURS = "yours"
BY_THE_CLOCK = {  # nothing else ends training, and the weights that it ends with are validated too
    "stages.operator.epochs": 1_000_000,
    "training.patience": None,
    "evaluation.checkpoint": "best",
}
SHARED = ("data.", "evaluation.", "training.time_limit_s", "training.seed")  # with these, models could not be compared
TIMED_S = 0.5  # calls of one dataset are timed for so long


def plan(base: RunConfig, others: Sequence[str], yours: Mapping | None = None) -> dict[str, RunConfig]:
    """A config for each model: yours first, then others by their files in params/models/, each on top of `base`.

    Args:
        yours: settings in any written form, `model.build` among them; None: there is none.
    Raises:
        ConfigError: no such model, a model that cannot be imported, no time to train for, or a model that changes what
            all of them share.
    """
    files = {path.stem: path for path in sorted((runfolder.project_root() / "params/models").glob("*.yaml"))}
    unknown = [name for name in others if name not in files]
    problems = [f"others: {name!r} is no model -> choose from {', '.join(files)}" for name in unknown]
    if base.training.time_limit_s is None:
        problems.append("training.time_limit_s: is empty -> say for how long each model may train [s]")
    if problems:
        raise ConfigError(problems, "the models")
    check_judged(base)
    configs, theirs = {}, {name: overlays.read(files[name]) for name in others}
    for name, overlay in (({YOURS: yours} if yours else {}) | theirs).items():
        flat = overlays.flatten(dict(overlay), name)
        if stray := [path for path in flat if f"{path}.".startswith(SHARED)]:
            raise ConfigError([f"{path}: all models share it -> set it for all of them" for path in stray], name)
        configs[name] = overlays.apply(base, {**flat, **BY_THE_CLOCK}, name)
        if later := configs[name].stages.planned[1:]:
            found = f"stages.{later[0]}: would train for longer than the others -> leave it out"
            raise ConfigError([found], name)
        chosen.find(configs[name])
    return configs


def train(
    configs: Mapping[str, RunConfig],
    folder: Path | str,
    seeds: Sequence[int] = (42,),
    log: Callable[[str], None] = rewrite,
) -> dict:
    """Train every model once a seed, one after the other; the report, also written to `report.json` after each of them.

    Those that have finished in this folder are not trained again, so that what was interrupted can be gone on with.
    One that fails is told of in `failed`, and costs no other.

    Raises:
        RunError: the folder holds trainings with other settings, or all of them failed.
    """
    folder, base = Path(folder).absolute(), next(iter(configs.values()))
    trainings = {
        f"{name}-seed{seed}": (name, overlays.apply(config, {"training.seed": seed, "logging.name": name}))
        for seed in seeds
        for name, config in configs.items()
    }
    for its_own, (_, config) in trainings.items():
        if (folder / "runs" / its_own / runfolder.MANIFEST).exists():
            check_same(folder / "runs" / its_own, config)
    datasets.generate_missing(base, runfolder.project_root(), log)
    opened = datasets.open_all(base, runfolder.project_root())
    report = {
        "format": FORMAT,
        "kind": KIND,
        "time_limit_s": base.training.time_limit_s,
        "families": {name: dataset.spec.family for name, dataset in opened.items()},
        "test_samples": {name: len(dataset.splits["test"]) for name, dataset in opened.items()},
        "models": {name: overlays.difference(base, config) for name, config in configs.items()},
        "rows": [],
        "failed": {},
        "settings": overlays.difference(RunConfig(), base),
    }
    for its_own, (name, config) in trainings.items():
        try:
            run = _started(config, folder / "runs" / its_own)
            with run.stopped_by_errors():
                run.wait(on_event=Progress(lambda text, name=name: log(f"{name}: {text}")))
            report["rows"].append(_row(name, run, opened))
            log(_line(report["rows"][-1]))
        except RunError as error:
            report["failed"][its_own] = str(error)
            log(f"{its_own}: failed: {str(error).splitlines()[0]}")
        made = finish(report, folder)
    if not report["rows"]:
        raise RunError("\n".join(["no model was trained to its end", *report["failed"].values()]))
    return made


def _started(config: RunConfig, folder: Path) -> Run:
    """A training in a folder: what is there of it is gone on with, and what has finished is not trained again."""
    if not (folder / runfolder.MANIFEST).exists():
        return handle.start(config, folder)
    run = Run.attach(folder)
    if runfolder.read_control(folder).stop:  # an interrupt asked it to end, which takes a step
        with contextlib.suppress(RunFailed):
            run.wait()
    status = run.status()
    if status in runfolder.ALIVE or (status == "finished" and run.manifest["end_reason"] != "stopped"):
        return run
    return handle.start(overlays.apply(config, {"checkpoint.resume": True}), folder)


def _row(name: str, run: Run, opened: Mapping[str, Dataset]) -> dict:
    """What one run reached and cost; `references` are nRMSEs of forecasts without a model, of the same samples."""
    device = hardware.resolve_device(run.config, hardware.detect())
    numbers, model = train_report(run), run.load_model(device=device)
    reached = run_summary(run, numbers, 0.0)
    del reached["cost_dollars"]  # nobody said what an hour costs
    return {
        "model": name,
        **reached,
        "parameters": numbers["parameters"],
        "steps": numbers["steps"],
        "validations": [[event["time_s"], event["val_nrmse"]] for event in run.events(("eval",))],
        "references": {
            key: references(values) for key, splits in numbers["datasets"].items() for values in splits.values()
        },
        "frame_ms": {key: frame_ms(model, dataset, device) for key, dataset in opened.items()},
    }


@torch.no_grad()
def frame_ms(model: Surrogate, dataset: Dataset, device: str) -> float:
    """Time for one frame of one sample: the median of calls, not compiled, over the frames of a call [ms]."""
    spec, place = dataset.spec, torch.device(device)
    fields, _, parameters = evaluation.read_samples(dataset, dataset.splits["test"][:1], place)
    found, until = [], time.monotonic() + TIMED_S
    while len(found) < 3 or time.monotonic() < until:
        start = mark(place)
        model(dataset.name, fields[:, : spec.input_frames], parameters, dataset.dt)
        end = mark(place)
        if place.type == "cuda":
            end.synchronize()
        found.append(elapsed_ms(start, end))
    return median(found[1:]) / spec.output_frames  # the first one warms up


def _line(row: Mapping) -> str:
    errors = ", ".join(f"{name} {number(value, 3)}" for name, value in row["nrmse"].items())
    times = ", ".join(f"{name} {number(value, 3)}" for name, value in row["frame_ms"].items())
    cost = f"{number(row['parameters'])} parameters, {number(row['peak_memory_gib'], 3)} GiB, ms a frame: {times}"
    return f"{row['model']}, seed {row['seed']}: nRMSE {errors}; {cost}"


def summary(report: Mapping) -> str:
    """The report in a few lines."""
    failed = [f"{name}: failed: {why.splitlines()[0]}" for name, why in report.get("failed", {}).items()]
    return "\n".join([f"{report['time_limit_s']:g} s for each model", *map(_line, report["rows"]), *failed])
