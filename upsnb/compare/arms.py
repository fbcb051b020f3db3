"""A against B on one machine: interleaved runs, paired seeds and data order, and a noise floor beside every ratio.

Every arm is a run of its own, in its own processes and folder. All are started and paused; then they take turns in
blocks of some seconds (A B B A, and so on) until each has trained to its end. A machine that slows down or speeds up
meanwhile does so for all arms; a third arm, equal to A, shows how far apart two equal ones come out.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from upsnb import hardware, overlays, phases
from upsnb.compare.turns import Block, Turns, interleave, ratio_of_turns
from upsnb.compare.verdict import NOISE, check_criteria, check_judged, compare_arms
from upsnb.config import RunConfig
from upsnb.errors import ConfigError
from upsnb.report.results import train_report
from upsnb.runs import runfolder
from upsnb.runs.handle import Run
from upsnb.widgets.progress import rewrite

FORMAT = 1
ARMS = "arms.json"  # which runs were compared, and the blocks in which they took turns

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
    check_criteria(variables["criteria"])
    if variables["isolate"]:
        return first, isolated(first, variables["isolate"])
    return first, overlays.from_notebook({**variables, "preset": variables["optimized"]}, PARAMETERS)


def check_arms(baseline: RunConfig, other: RunConfig) -> dict:
    """What the arms differ in: settings that phases, and the published recipe along with them, change.

    Raises:
        ConfigError: the arms differ in anything else, each named, or in nothing.
    """
    changes = overlays.difference(baseline, other)
    techniques = {path for phase in phases.BY_NAME.values() for path in (*phase.on, *phase.ladder)}
    stray = sorted(changes.keys() - techniques - {*phases.COMPANIONS, "logging.name"})
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
    return overlays.apply(baseline, phases.BY_NAME[name].on, f"the baseline with {name}")


# -- the comparison ------------------------------------------------------------------------------------------------


def compare(
    baseline: RunConfig,
    other: RunConfig,
    folder: Path | str,
    *,
    names: tuple[str, str] = ("baseline", "optimized"),
    seeds: tuple[int, ...] = (42,),
    block_s: float = 10.0,
    noise_floor: bool = True,
    log: Callable[[str], None] = rewrite,
) -> dict[str, list[Run]]:
    """Train both arms to their ends, taking turns, once per seed; the runs of each arm.

    Leaves `arms.json` in `folder`, from which `compare_report` can be made again at any time.

    Raises:
        ConfigError: the arms differ in what was not asked for, or cannot run here.
    """
    check_arms(baseline, other)
    check_judged(baseline, other)
    if baseline.training.time_limit_s is not None:
        said = "ends the arms by the clock and not after equal samples -> set it to null, and stages.operator.epochs"
        raise ConfigError([f"training.time_limit_s: {said}"], "the arms")
    machine, folder = hardware.detect(), Path(folder).absolute()
    arms = {names[0]: baseline, names[1]: other} | ({NOISE: baseline} if noise_floor else {})
    for config in arms.values():
        if config.training.on_missing == "error":
            hardware.check_runnable(config, machine)
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    blocks: list[Block] = []
    for seed in seeds:
        started: dict[str, Turns] = {}
        with contextlib.ExitStack() as stack:  # a paused run holds its memory until it is stopped
            for name, config in arms.items():
                log(f"seed {seed}: starting {name}")
                own = folder / "runs" / f"{name.replace('/', '')}-seed{seed}"
                started[name] = Turns.start(overlays.apply(config, {"training.seed": seed}), own)
                stack.enter_context(started[name].run.stopped_by_errors())
            blocks += interleave(started, seed, block_s, log)
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
        criteria: over `verdict.CRITERIA`; a criterion of null is left out.
        price_per_hour: of the machine, for the cost [$].
    """
    folder = Path(folder)
    record = json.loads((folder / ARMS).read_text())
    runs = {name: [Run.attach(folder / path) for path in paths] for name, paths in record["runs"].items()}
    blocks, (first, *_) = [Block(**block) for block in record["blocks"]], record["names"]
    ratios = {name: ratio_of_turns(blocks, name, first) for name in runs} if blocks else None
    return compare_arms(runs, ratios, folder, criteria, price_per_hour, record["blocks"])
