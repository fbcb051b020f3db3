"""Every phase alone, every phase added in order, every phase left out: measured beside what was promised.

A phase alone is measured at the baseline's batch, accumulation and learning rate. The ladder begins with the published
recipe's batch and accumulation, which are a control of their own, and adds phases in order. Leaving one of all these
out of the full set shows what it adds to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from upsnb import hardware, overlays, phases
from upsnb.compare.search import error_after, recommend, told
from upsnb.compare.turns import ENDLESS, Turns, measure_beside, ratio_of_turns
from upsnb.config import RunConfig, setting
from upsnb.errors import ConfigError, RunError
from upsnb.hardware import Hardware
from upsnb.phases import PHASES
from upsnb.report.file import factor, finish, number
from upsnb.runs.events import latest_start, naming
from upsnb.training import preflight
from upsnb.widgets.progress import rewrite

FORMAT, KIND = 1, "phases"
BASELINE, FULL = "baseline", "full set"
NOTHING = {"changes": {}, "ratio": None, "basis": "nothing was searched", "refused": {}, "tried": []}
BATCH = "batch"  # the entry that is no phase: what the recipe changes along with phases, by itself
KINDS = ("alone", "ladder", "leave_one_out")  # of rows
TITLES = {"alone": "alone", "ladder": "added in order", "leave_one_out": "what it adds to the full set"}
PARAMETERS = (  # of the notebook, beside the sections
    *("chosen", "block_s", "rounds", "quality_epochs", "search_minutes", "recommended_file"),
)


@dataclass(frozen=True)
class Entry:
    """One config to measure, and the one it is measured against."""

    kind: str  # one of KINDS
    phase: str  # or BATCH
    config: RunConfig
    against: str  # BASELINE or FULL


def plan(
    base: RunConfig, machine: Hardware, chosen: Sequence[str] = ()
) -> tuple[list[Entry], RunConfig, dict[str, str]]:
    """What to measure: entries, the config with every phase off, and why phases are left out.

    Args:
        base: model, data and everything that is no phase; its phases are switched off.
        chosen: names of phases, measured in their own order; empty: all eight.
    Raises:
        ConfigError: an unknown phase, or a base that stays impossible here with all phases off.
    """
    unknown = sorted(set(chosen) - phases.BY_NAME.keys())
    if unknown:
        known = ", ".join(phases.BY_NAME)
        raise ConfigError([f"phases: {name!r} is none -> choose from {known}" for name in unknown], "the ladder")
    off = overlays.apply(base, phases.baseline_overlay(base))
    hardware.check_runnable(off, machine)
    skipped, used, verdicts = {}, [], preflight.foreseen(off, machine)
    for phase in [phase for name, phase in phases.BY_NAME.items() if name in chosen] or PHASES:
        problems = phases.unmet(phase, off, machine)
        if problems:
            skipped[phase.name] = "; ".join(map(str, problems))
        elif phase.name in verdicts and verdicts[phase.name].stands_against:
            skipped[phase.name] = str(verdicts[phase.name])
        else:
            used.append(phase)
    entries = [Entry("alone", phase.name, overlays.apply(off, phase.on), BASELINE) for phase in used]
    batch = {path: value for phase in used for path, value in phase.ladder.items() if setting(off, path) != value}
    rung, without = off, {}
    if batch:
        rung, without[BATCH] = overlays.apply(off, batch), {path: setting(off, path) for path in batch}
        entries.append(Entry("ladder", BATCH, rung, BASELINE))
    for phase in used:
        rung, without[phase.name] = overlays.apply(rung, phase.on), phases.off_overlay(phase, off)
        entries.append(Entry("ladder", phase.name, rung, BASELINE))
    if len(without) > 1:  # as the base is without it: all else stays, so that one thing differs
        entries += [Entry("leave_one_out", name, overlays.apply(rung, back), FULL) for name, back in without.items()]
    return entries, off, skipped


def measure(
    base: RunConfig,
    folder: Path | str,
    *,
    chosen: Sequence[str] = (),
    block_s: float = 10.0,
    rounds: int = 6,
    quality_epochs: int = 0,
    minutes: float = 0.0,
    log: Callable[[str], None] = rewrite,
) -> dict:
    """Measure all entries of `plan` and recommend a set; the report, also written to `report.json` after each of them.

    The search comes last, which takes longest and may be interrupted or fail.

    Args:
        block_s: length of a turn; every entry takes `rounds` of them against its reference, A B B A.
        quality_epochs: length of the trainings that accuracy is compared by; 0: only in the search, from 1 on.
        minutes: of the search for the set to recommend; 0: none is recommended.
    Raises:
        ConfigError: the base cannot run here.
    """
    folder, machine = Path(folder).absolute(), hardware.detect()
    entries, off, skipped = plan(base, machine, chosen)
    left_out = [entry for entry in entries if entry.kind == "leave_one_out"]
    measured = Measurements(folder, block_s, rounds, quality_epochs, log)
    report = {"format": FORMAT, "kind": KIND, **{kind: [] for kind in KINDS}, "skipped": skipped}
    report |= {"recommended": NOTHING, "settings": overlays.difference(RunConfig(), off)}
    report["num_ranks"] = off.training.num_gpus

    def add(some: Sequence[Entry]) -> None:
        for entry in some:
            report[entry.kind].append(measured.row(entry))
            finish(report, folder)

    try:
        measured.reference(BASELINE, off)
        report["metric"] = naming(latest_start(measured.references[BASELINE].events))["metric"]
        report["baseline"] = measured.results[BASELINE]
        add([entry for entry in entries if entry.kind != "leave_one_out"])
        if left_out and any("failed" not in row for row in report["ladder"]):
            full = next(entry.config for entry in reversed(entries) if entry.kind == "ladder")
            measured.reference(FULL, full)
            add(left_out)
    finally:
        measured.close()
    if minutes:
        try:
            report["recommended"] = recommend(off, folder / "search", minutes, max(quality_epochs, 1), log)
        except RunError as error:
            why = f"the search failed: {str(error).splitlines()[0]}"
            report["recommended"] = {**NOTHING, "basis": why, "failed": str(error)}
    return finish(report, folder)


class Measurements:
    """Runs that are measured against references, which wait paused as long as they are needed."""

    def __init__(self, folder: Path, block_s: float, rounds: int, quality_epochs: int, log: Callable[[str], None]):
        self.folder, self.block_s, self.rounds, self.log = folder, block_s, rounds, log
        self.quality_epochs = quality_epochs
        self.configs: dict[str, RunConfig] = {}  # of what others are measured against
        self.references: dict[str, Turns] = {}  # those that started
        self.missing: dict[str, str] = {}  # why another did not
        self.results: dict[str, dict] = {}
        self.quality_of: dict[str, float | None] = {}  # by config: the same one is trained once

    def reference(self, name: str, config: RunConfig) -> None:
        """Start what others are measured against; without the full set the rest stays what it is.

        Raises:
            RunError: the baseline does not start.
        """
        self.configs[name], self.results[name] = config, {"memory_gib": None, "val_nrmse": None}
        try:
            own = self.folder / "runs" / name.replace(" ", "-")
            self.references[name] = Turns.start(overlays.apply(config, ENDLESS), own)
            self.results[name]["val_nrmse"] = self._quality(config, name)
        except RunError as error:
            if name == BASELINE:
                raise
            self.missing[name] = f"the {name} did not start or train: {error}"

    def row(self, entry: Entry) -> dict:
        """Throughput, memory and accuracy of one entry beside its reference's; or why it failed."""
        name = f"{entry.kind}-{entry.phase}".replace(" ", "-")
        self.log(f"{entry.kind}: {entry.phase}")
        against = self.results[entry.against]
        promised = getattr(phases.BY_NAME.get(entry.phase), "expected", None)
        row = {
            "kind": entry.kind,
            "phase": entry.phase,
            "against": entry.against,
            "promised": promised and (promised.cumulative if entry.kind == "ladder" else promised.factor),
            "source": promised and promised.source,
            "changes": overlays.difference(self.configs[entry.against], entry.config),
        }
        if why := self.missing.get(entry.against):
            return row | {"ratio": ratio_of_turns([], "it", "reference"), "failed": why}
        reference = self.references[entry.against]
        folder, inverse = self.folder / "runs" / name, entry.against == FULL
        row |= measure_beside(reference, entry.config, folder, self.block_s, self.rounds, inverse)
        if "failed" in row:
            return row
        try:
            row["val_nrmse"], before = self._quality(entry.config, name), against["val_nrmse"]
        except RunError as error:  # of one entry; hours were spent on the others
            return row | {"val_nrmse": None, "nrmse_ratio": None, "failed": f"the training for accuracy: {error}"}
        row["nrmse_ratio"] = row["val_nrmse"] / before if before and row["val_nrmse"] else None
        against["memory_gib"] = row["reference_memory_gib"]
        return row

    def _quality(self, config: RunConfig, name: str) -> float | None:
        """Validation nRMSE after a training of its own, mean over datasets."""
        if not self.quality_epochs:
            return None
        key = str(overlays.difference(RunConfig(), config))
        if key not in self.quality_of:
            own = self.folder / "quality" / name.replace(" ", "-")
            self.quality_of[key] = error_after(self.quality_epochs, config, own)
        return self.quality_of[key]

    def close(self) -> None:
        """End what still waits: all are asked to first, for whoever interrupts this may not wait for the first one."""
        for turns in self.references.values():
            turns.run.stop()
        for turns in self.references.values():
            turns.end()


# -- in words -------------------------------------------------------------------------------------------------------


def recommended(report: dict) -> str:
    """The set to use on this machine, or why there is none, in a sentence; empty where none was searched for."""
    chosen = report["recommended"]
    if not chosen["changes"] and not chosen.get("tried", True):
        return "" if chosen["basis"] == NOTHING["basis"] else f"Nothing is recommended: {chosen['basis']}."
    if not chosen["changes"]:
        return f"Recommended: the baseline, because {chosen['basis']}."
    gain = factor(chosen["ratio"])
    return f"Recommended: {told(chosen['changes'])}, {gain} times the baseline; rests on {chosen['basis']}."


def finding(row: dict) -> str:
    """What was measured of an entry, or why nothing was."""
    if why := row.get("failed") or row["ratio"].get("why"):
        return f"failed: {why.splitlines()[0]}"
    return factor(row["ratio"]) if row["ratio"]["median"] else "no steady step in its turns -> raise block_s"


def summary(report: dict) -> str:
    """The report in a few lines."""
    lines = [line for line in [recommended(report)] if line]
    for kind in KINDS:
        for row in report[kind]:
            promised = f"promised {number(row['promised'], 3)}, " if row["promised"] and kind != "leave_one_out" else ""
            lines.append(f"{TITLES[kind]}: {row['phase']}: {promised}{finding(row)}")
    return "\n".join([*lines, *(f"{name} is left out: {reason}" for name, reason in report["skipped"].items())])


def write_params(report: dict, path: Path | str) -> Path:
    """The recommended set as a params file, to be put on top of any other."""
    chosen, machine = report["recommended"], report["hardware"]
    ratio = chosen["ratio"]
    where = f"{report['num_ranks']} x {machine['device_name']}, {report['date']}"
    nothing = recommended(report) or "Nothing was searched for, so nothing is changed."
    lines = [f"# The fastest set found on {where}." if chosen["changes"] else f"# {where}: {nothing}"]
    if ratio:
        lines.append(f"# {factor(ratio)} times the baseline; rests on {chosen['basis']}.")
    values: dict = {"preset": ""}
    for dotted, value in chosen["changes"].items():
        node = values
        *parents, leaf = dotted.split(".")
        for key in parents:
            node = node.setdefault(key, {})
        node[leaf] = value
    path = Path(path)
    path.write_text("\n".join(lines) + "\n" + yaml.safe_dump(values, sort_keys=False))
    return path
