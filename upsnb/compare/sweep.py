"""One training for every point of a grid, of a random draw or of a search, and every seed; the best by validation.

A sweep is a folder of ordinary runs. Each training has the GPUs to itself that it needs; on a CPU there is one at a
time. Whatever ends it, the same call goes on: what is finished stays, what was interrupted is continued. No run of a
sweep opens the test split, because the best of many would then be the luckiest on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import yaml

from upsnb import hardware, overlays, phases
from upsnb.compare.search import told
from upsnb.compare.suggest import INSTALL, SAMPLER, rounded, suggest
from upsnb.config import RunConfig
from upsnb.errors import ConfigError, RunError, shown
from upsnb.hardware import Hardware
from upsnb.models.chosen import with_source
from upsnb.overlays import as_typed
from upsnb.report.file import finish, number
from upsnb.report.results import train_report
from upsnb.rules import did_you_mean
from upsnb.runs import handle, runfolder
from upsnb.runs.events import naming
from upsnb.runs.files import Shape, read_json
from upsnb.runs.handle import POLL_S, Run
from upsnb.runs.runfolder import ALIVE
from upsnb.runs.supervisor import ORPHANED
from upsnb.runs.table import row
from upsnb.runs.throughput import median_with_interval
from upsnb.widgets.progress import rewrite

FORMAT, KIND = 1, "sweep"
PARAMETERS = ("grid", "random", "draws", "sampler", "seeds", "share")  # of the notebook, beside the sections
KEYS = ("base", "settings", *PARAMETERS)  # of a sweep's file
RANGE = ("from", "to", "log")  # of what is drawn from an interval
SWEEP, RUNS, BEST = "sweep.json", "runs", "best.yaml"
MOST_RUNS = 1000
# Where a training lies and what it may cost: of no result, and of each machine that shares in it another.
ELSEWHERE = ("cost.", "checkpoint.", "logging.")
BY_CHANCE = 5  # points of a search that are drawn before there is anything to go by
OWN = {  # settings that a sweep has for itself, and what says them instead
    "training.seed": "seeds",
    "evaluation.split": "nothing: a sweep selects on validation",
    "checkpoint.resume": "nothing: the same call goes on",
}


@dataclass(frozen=True)
class Sweep:
    """What is to be trained."""

    name: str
    base: RunConfig
    points: tuple[dict, ...]  # settings by dotted path
    seeds: tuple[int, ...]
    axes: Mapping = field(default_factory=dict)  # of a search: what further points are drawn from
    draws: int = 0  # and how many there are in all
    share: tuple[int, int] = (1, 1)  # which one is trained here, of how many

    def config(self, point: Mapping, seed: int) -> RunConfig:
        """Of one training."""
        own = {"training.seed": seed, "evaluation.split": "validation", "logging.name": self.name}
        return overlays.apply(self.base, {**point, **own}, told(point))


# -- what to train -------------------------------------------------------------------------------------------------


def read(path: Path, share: str = "") -> Sweep:
    """A sweep's file, or a share of it.

    Raises:
        ConfigError: every problem of it, a sentence each.
    """
    values, layers = overlays.read(path), overlays.Layers(as_typed(path))
    layers.problems += [f"{key}: unknown -> {did_you_mean(key, KEYS)}" for key in values if key not in KEYS]
    bases = values.get("base") or []
    bases = [bases] if isinstance(bases, str) else bases
    if not (isinstance(bases, list) and all(isinstance(base, str) for base in bases)):
        layers.problems.append(f"base: got {shown(bases)} -> name a params file, or a list of them")
        bases = []
    for base in map(overlays.params_path, bases):
        layers.put(layers.read(base)[0], base)
    more = values.get("settings") or {}
    if not isinstance(more, dict):
        layers.problems.append(f"settings: got {shown(more)} -> write settings below it")
        more = {}
    layers.put(more, "settings")
    given = {key: values[key] for key in PARAMETERS if values.get(key) is not None}
    given |= {"share": share} if share else {}
    return plan(layers.config(), Path(path).stem, where=as_typed(path), **given)


def plan(
    base: RunConfig,
    name: str = KIND,
    grid: Mapping | None = None,
    random: Mapping | None = None,
    draws: int = 0,
    sampler: str = "",
    seeds: Sequence[int] = (42,),
    share: str = "",
    where: str = "the sweep",
) -> Sweep:
    """What a grid or a random draw asks for.

    Args:
        grid: values by setting, in any written form; all combinations are trained.
        random: values by setting, or {"from", "to", "log"}: an interval, even on a logarithmic scale with `log`.
        draws: how many random points; more of them begin with the same.
        sampler: "optuna" draws all but the first few by what those before came to; empty: chance draws them.
        share: "2/3": the second of three machines' trainings, every third one; see `gather`. Empty: all of them.
    Raises:
        ConfigError: every problem, a sentence each.
    """
    problems: list[str] = []
    if bool(grid) == bool(random):
        problems.append(f"grid, random: {'both' if grid else 'neither'} -> write one of them, with settings below it")
    if bool(random) != bool(draws) or not _is_count(draws):
        problems.append(f"draws: got {shown(draws)} -> how many points `random` draws, and nothing for a grid")
    if not (isinstance(seeds, (list, tuple)) and seeds and all(_is_count(seed) for seed in seeds)):
        problems.append(f"seeds: got {shown(seeds)} -> write a list of whole numbers")
    elif len(set(seeds)) < len(seeds):
        problems.append(f"seeds: {shown(seeds)} has one twice -> each once")
    if sampler and (sampler != SAMPLER or not random):
        problems.append(f"sampler: got {shown(sampler)} -> write {SAMPLER}, beside random, or nothing")
    elif sampler and find_spec(SAMPLER) is None:
        problems.append(f"sampler: {SAMPLER} is not installed -> {INSTALL}, or let chance draw")
    part = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", share or "1/1") if isinstance(share, str) else None
    mine = tuple(map(int, part.groups())) if part else (1, 0)
    if mine[0] > mine[1]:
        problems.append(f"share: got {shown(share)} -> write 2/3 for the second of three, or nothing for all")
    elif sampler and mine[1] > 1:
        problems.append(f"share: {sampler} draws by all that came before -> let one machine train them all")
    if base.data.split.validation_fraction == 0:
        problems.append("data.split.validation_fraction: is 0, and trainings are ranked by it -> 0.1, for instance")
    axes = {}
    for said, chosen in (("grid", grid), ("random", random)):
        if chosen and not isinstance(chosen, Mapping):
            problems.append(f"{said}: got {shown(chosen)} -> write settings below it, each with its values")
            continue
        for key, values in (chosen or {}).items():
            try:
                is_range = said == "random" and isinstance(values, Mapping)
                axes[_path(key)] = _range(key, values) if is_range else _list(key, values)
            except ConfigError as error:
                problems += [f"{said}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems, where)
    first = min(draws, BY_CHANCE) if sampler else draws
    points = _drawn(axes, first) if random else [dict(zip(axes, those)) for those in itertools.product(*axes.values())]
    if max(len(points), draws) * len(seeds) > MOST_RUNS:
        asked = f"{max(len(points), draws)} points x {len(seeds)} seeds"
        raise ConfigError([f"{asked} -> at most {MOST_RUNS} trainings; draw at random instead of a grid"], where)
    further = {"axes": axes, "draws": draws} if sampler else {}
    sweep = Sweep(name, base, tuple(points), tuple(seeds), share=mine, **further)
    machine = hardware.detect()
    for point in points:
        try:
            config = sweep.config(point, seeds[0])
            if config.training.on_missing == "error":
                hardware.check_runnable(config, machine)
        except ConfigError as error:
            problems += [f"{told(point)}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems, where)
    return sweep


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _path(key: str) -> str:
    """The one setting that a key means."""
    flat = [*overlays.flatten({key: None})]
    if flat[0] in OWN:
        raise ConfigError([f"{key}: cannot be varied -> {OWN[flat[0]]}"])
    return flat[0]


def _list(key: str, values) -> list:
    if not isinstance(values, (list, tuple)) or not values:
        raise ConfigError([f"{key}: got {shown(values)} -> write a list of values"])
    if len({json.dumps(value, sort_keys=True) for value in values}) < len(values):
        raise ConfigError([f"{key}: {shown(values)} has a value twice -> each once"])
    return list(values)


def _range(key: str, values: Mapping) -> dict:
    low, high, log = values.get("from"), values.get("to"), values.get("log", False)
    numbers = all(isinstance(end, (int, float)) and not isinstance(end, bool) for end in (low, high))
    if values.keys() - {*RANGE} or not numbers or not isinstance(log, bool):
        remedy = "write from and to, as numbers, and log: true or false"
        raise ConfigError([f"{key}: got {shown(dict(values))} -> {remedy}"])
    if not low < high or (log and low <= 0):
        remedy = "the second must be above the first, and with log both above 0"
        raise ConfigError([f"{key}: from {low} to {high} -> {remedy}"])
    return dict(values)


def _drawn(axes: Mapping, draws: int) -> list[dict]:
    """Random points, each once; the same for the same axes."""
    random, points = np.random.default_rng(0), []
    for _ in range(20 * draws):
        point = {path: _draw(random, values) for path, values in axes.items()}
        points += [point] if point not in points else []
        if len(points) == draws:
            break
    return points


def _draw(random: np.random.Generator, values: list | Mapping):
    if isinstance(values, list):
        return values[random.integers(len(values))]
    low, high = values["from"], values["to"]
    drawn = math.exp(random.uniform(math.log(low), math.log(high))) if values.get("log") else random.uniform(low, high)
    is_whole = isinstance(low, int) and isinstance(high, int)
    return rounded(min(max(round(drawn), low), high) if is_whole else drawn, values)


# -- training ------------------------------------------------------------------------------------------------------


def run_name(point: Mapping, seed: int) -> str:
    """The folder of a training, which depends on nothing but its settings: a longer list of values finds it again."""
    text = "_".join(f"{path.rpartition('.')[2]}-{value}" for path, value in point.items())
    known = hashlib.sha256(json.dumps(point, sort_keys=True).encode()).hexdigest()[:6]
    return f"{re.sub(r'[^A-Za-z0-9.+_-]+', '-', text)[:80]}-{known}-seed{seed}"


def run(sweep: Sweep, folder: Path | str, log: Callable[[str], None] = rewrite) -> dict:
    """Train what is missing; the report, also written to `report.json`, with `best.yaml` beside it.

    A run that somebody stops ends the sweep, and so does Ctrl-C; the same call then goes on.

    Raises:
        RunError: the folder holds trainings with other settings, or another process works on this sweep.
    """
    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if sweep.draws and (folder / SWEEP).exists():  # a search goes on from all that it knows
            earlier = [one["settings"] for one in read_json(folder / SWEEP, FORMAT, _Record)["points"]]
            further = (point for point in earlier if point not in sweep.points)
            sweep = replace(sweep, points=(*sweep.points, *further))
        found = _train(sweep, folder, log)
        while len(found["points"]) < sweep.draws and not any(point["missing"] for point in found["points"]):
            known = [(point["settings"], point["nrmse"]["median"]) for point in found["points"]]
            if (point := suggest(sweep.axes, known)) is None:
                break
            sweep = replace(sweep, points=(*sweep.points, point))
            found = _train(sweep, folder, log)
    return found


def _train(sweep: Sweep, folder: Path, log: Callable[[str], None]) -> dict:
    """Train those of this share's points that are missing; the report."""
    first, every = sweep.share
    trainings = {run_name(point, seed): (point, seed) for point in sweep.points for seed in sweep.seeds}
    for name, (point, seed) in trainings.items():
        if (folder / RUNS / name / runfolder.MANIFEST).exists():
            check_same(folder / RUNS / name, sweep.config(point, seed))
    points = [{"settings": one, "runs": [run_name(one, seed) for seed in sweep.seeds]} for one in sweep.points]
    different = overlays.difference(RunConfig(), sweep.base)
    base = {path: value for path, value in different.items() if not path.startswith(ELSEWHERE)}
    runfolder.write_json(folder / SWEEP, {"format": FORMAT, "name": sweep.name, "base": base, "points": points})
    own = dict(itertools.islice(trainings.items(), first - 1, None, every))
    try:
        _work(sweep, folder, own, log)
    finally:
        found = report(folder)
    return found


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time works on a sweep; the lock ends with it, however it ends."""
    with open(folder / ".working", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{as_typed(folder)}: another process works on this sweep -> wait for it") from None
        yield


def check_same(folder: Path, config: RunConfig) -> None:
    """
    Raises:
        RunError: the run in a folder has other settings than a config, in what matters to its result.
    """
    if config.training.on_missing == "skip":
        config, _ = phases.skip_missing(config, hardware.detect())
    different = overlays.difference(Run(folder).config, with_source(config))
    if other := [path for path in different if not path.startswith(ELSEWHERE)]:
        found = f"was trained with another {', '.join(sorted(other))}"
        raise RunError(f"{as_typed(folder)}: {found} -> choose another folder")


def _work(sweep: Sweep, folder: Path, trainings: Mapping[str, tuple[dict, int]], log: Callable[[str], None]) -> None:
    for name in trainings:  # of a sweep that was killed; on which GPU they are nobody knows
        if _is_alive(folder / RUNS / name):
            log(f"{name}: still trains, and is waited for")
        while _is_alive(folder / RUNS / name):
            time.sleep(POLL_S)
    queue = [name for name in trainings if not is_done(folder / RUNS / name)]
    places = devices(sweep.base, hardware.detect())
    free, running = places, {}
    total, ended = len(trainings), len(trainings) - len(queue)
    with contextlib.ExitStack() as stack:
        while queue or running:
            for name, (live, its_own) in [*running.items()]:
                if (status := live.status()) in ALIVE:
                    continue
                del running[name]
                free, ended = free + its_own, ended + 1
                train_report(live)
                log(f"{ended} of {total}, {name}: {live.cause() or status}")
                if live.manifest["end_reason"] == "stopped":
                    log(f"{name} was stopped, so the sweep ends here; the same call goes on")
                    queue.clear()
            while queue:
                config = sweep.config(*trainings[queue[0]])
                needed = min(config.training.num_gpus, len(places))  # of processes on one CPU as many as it asks for
                if len(free) < needed:
                    break
                its_own, free, name = free[:needed], free[needed:], queue.pop(0)
                live = _start(config, folder / RUNS / name, its_own)
                stack.enter_context(live.stopped_by_interrupts())
                running[name] = live, its_own
                log(f"{ended} of {total}, {name}: training")
            time.sleep(POLL_S)


def _start(config: RunConfig, folder: Path, its_own: list[str]) -> Run:
    if (folder / runfolder.MANIFEST).exists():
        config = overlays.apply(config, {"checkpoint.resume": True})
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(its_own)} if its_own != [""] else {}
    return handle.start(config, folder, environment=seen)


def _is_alive(folder: Path) -> bool:
    return (folder / runfolder.MANIFEST).exists() and runfolder.state(folder)[0] in ALIVE


def devices(config: RunConfig, machine: Hardware) -> list[str]:
    """The GPUs to share out, as CUDA_VISIBLE_DEVICES names them; of a CPU one nameless place."""
    if hardware.resolve_device(config, machine) != "cuda":
        return [""]
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return named if named != [""] else [str(number) for number in range(machine.num_devices)]


def is_done(folder: Path) -> bool:
    """Whether a training needs nothing more: it came to its end, or failed by itself and would again."""
    if not (folder / runfolder.MANIFEST).exists():
        return False
    (status, cause), reason = runfolder.state(folder), runfolder.read_manifest(folder)["end_reason"]
    return (status == "finished" and reason != "stopped") or (status == "failed" and cause != ORPHANED)


# -- what came of it -----------------------------------------------------------------------------------------------


class _Point(Shape):
    settings: dict
    runs: list[str]


class _Record(Shape):
    name: str
    base: dict
    points: list[_Point]


def gather(folder: Path | str, shares: Sequence[Path]) -> dict:
    """Put together what shares of a sweep trained, each in a folder of its own; the report.

    What has ended is copied; what is there already stays, so that a share can be gathered again when it has more.

    Raises:
        RunError: a folder that holds no sweep, or another one.
    """
    folder = Path(folder).absolute()
    known = [folder] * (folder / SWEEP).exists() + [*map(Path, shares)]
    if strange := [place for place in known if not (place / SWEEP).exists()]:
        raise RunError(f"{as_typed(strange[0])}: holds no sweep -> name folders that a sweep was trained in")
    records = [read_json(place / SWEEP, FORMAT, _Record) for place in known]
    for place, record in zip(known, records):
        if any(record[key] != records[0][key] for key in ("base", "points")):
            raise RunError(f"{as_typed(place)}: is of another sweep than {as_typed(known[0])} -> gather them apart")
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        for place, name in itertools.product(known, (name for point in records[0]["points"] for name in point["runs"])):
            target = folder / RUNS / name
            if is_done(place / RUNS / name) and not target.exists():
                unfinished = target.with_name(f".{name}")
                shutil.rmtree(unfinished, ignore_errors=True)
                shutil.copytree(place / RUNS / name, unfinished)
                unfinished.replace(target)
        runfolder.write_json(folder / SWEEP, {"format": FORMAT, **records[0]})
        return report(folder)


def report(folder: Path | str) -> dict:
    """The report of a sweep as far as it has come, from its folder alone; also written to `report.json`.

    Points are sorted by the validation error, mean over datasets, median over seeds. Those that lost a seed, or miss
    one still, come after those that have all, and those that have none come last.
    """
    folder = Path(folder)
    record = read_json(folder / SWEEP, FORMAT, _Record)
    names = [name for point in record["points"] for name in point["runs"] if is_done(folder / RUNS / name)]
    ended = {name: row(folder / RUNS / name, name) for name in names}
    points = [_came_to(point, ended) for point in record["points"]]
    points.sort(key=lambda one: (not one["seeds"], one["failed"] + one["missing"] > 0, one["nrmse"]["median"] or 0.0))
    if points[0]["seeds"]:
        best = overlays.apply(overlays.resolve(record["base"]), points[0]["settings"])
        text = yaml.safe_dump({"preset": "", **overlays.difference(RunConfig(), best)}, sort_keys=False)
        title = f"# The best of {len(points)} points by validation: {told(points[0]['settings'])}."
        (folder / BEST).write_text(f"{title}\n{text}")
    said = next((one for one in ended.values() if "metric" in one), {})  # what cannot be read says nothing
    named = {"name": record["name"], "metric": naming(said)["metric"]}
    return finish({"format": FORMAT, "kind": KIND, **named, "points": points}, folder)


def _came_to(point: Mapping, ended: Mapping[str, dict]) -> dict:
    runs = [ended[name] for name in point["runs"] if name in ended]
    done = [one for one in runs if one["status"] == "finished" and one["nrmse"] and None not in one["nrmse"].values()]
    datasets = done[0]["nrmse"] if done else ()
    return {
        **point,
        "seeds": len(done),
        "failed": len(runs) - len(done),  # or diverged
        "missing": len(point["runs"]) - len(runs),
        "nrmse": median_with_interval([float(np.mean([*one["nrmse"].values()])) for one in done]),
        "datasets": {name: float(np.median([one["nrmse"][name] for one in done])) for name in datasets},
        "train_time_s": float(np.median([one["train_time_s"] for one in done])) if done else None,
        "cause": next((one["cause"] for one in runs if one["cause"]), None),
    }


def _told_point(point: Mapping) -> str:
    """What a point came to, in one line."""
    low, high = point["nrmse"]["ci95"]
    said = [f"{point['seeds']} seed{'s' * (point['seeds'] != 1)}"] if point["seeds"] else []
    said += [f"{point['failed']} failed: {point['cause'] or 'an error that is no number'}"] if point["failed"] else []
    said += [f"{point['missing']} missing"] if point["missing"] else []
    interval = "" if low is None else f" [{number(low)}, {number(high)}]"
    return f"{told(point['settings'])}: {number(point['nrmse']['median'])}{interval} ({', '.join(said)})"


def summary(report: Mapping) -> str:
    """The report in a few lines, the best points first."""
    points = report["points"]
    title = f"{len(points)} points by validation {naming(report)['metric']}; the test split stays closed"
    missing = sum(point["missing"] for point in points)
    left = [f"{missing} trainings are left: the same call goes on"] if missing else []
    return "\n".join([title, *(f"  {_told_point(point)}" for point in points), *left])
