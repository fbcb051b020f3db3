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
from upsnb.compare.turns import ENDLESS, Turns, measure_beside
from upsnb.compare.verdict import CRITERIA, score
from upsnb.config import RunConfig, setting
from upsnb.errors import ConfigError
from upsnb.hardware import Hardware
from upsnb.phases import PHASES
from upsnb.report.file import factor, finish, number
from upsnb.runs import handle
from upsnb.widgets.progress import rewrite

FORMAT, KIND = 1, "phases"
BASELINE, FULL = "baseline", "full set"
BATCH = "batch"  # the entry that is no phase: what the recipe changes along with phases, by itself
GAINING, LESS = "phases that gain alone", "full set without what costs"
KINDS = {"alone": "alone", "ladder": "ladder", "leave_one_out": "leave_one_out", "sets": "set"}  # key: kind of its rows
TITLES = {"alone": "alone", "ladder": "added in order", "leave_one_out": "what it adds to the full set"}
PARAMETERS = (  # of the notebook, beside the sections
    *("chosen", "block_s", "rounds", "quality_epochs", "criteria", "recommended_file"),
)


@dataclass(frozen=True)
class Entry:
    """One config to measure, and the one it is measured against."""

    kind: str  # alone, ladder, leave_one_out, or set
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
    skipped, used = {}, []
    for phase in [phase for name, phase in phases.BY_NAME.items() if name in chosen] or PHASES:
        problems = phases.unmet(phase, off, machine)
        if problems:
            skipped[phase.name] = "; ".join(map(str, problems))
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
    criteria: dict | None = None,
    log: Callable[[str], None] = rewrite,
) -> dict:
    """Measure all entries of `plan` and recommend a set; the report, also written to `report.json`.

    Args:
        block_s: length of a turn; every entry takes `rounds` of them against its reference, A B B A.
        quality_epochs: length of the trainings that accuracy is compared by; 0: accuracy is not measured.
    Raises:
        ConfigError: the base cannot run here.
    """
    folder, machine = Path(folder).absolute(), hardware.detect()
    entries, off, skipped = plan(base, machine, chosen)
    left_out = [entry for entry in entries if entry.kind == "leave_one_out"]
    measured = Measurements(folder, block_s, rounds, quality_epochs, log)
    try:
        measured.reference(BASELINE, off)
        rows = [measured.row(entry) for entry in entries if entry.kind != "leave_one_out"]
        if left_out and any(row["kind"] == "ladder" and "failed" not in row for row in rows):
            full = next(entry.config for entry in reversed(entries) if entry.kind == "ladder")
            measured.reference(FULL, full)
            rows += [measured.row(entry) for entry in left_out]
            for name in costly(rows):
                full = overlays.apply(full, phases.off_overlay(phases.BY_NAME[name], off))
            if costly(rows):
                rows.append(measured.row(Entry("set", LESS, full, BASELINE)))
        together = off
        for name in gaining(rows):
            together = overlays.apply(together, phases.BY_NAME[name].on)
        if together != off:
            rows.append(measured.row(Entry("set", GAINING, together, BASELINE)))
    finally:
        measured.close()
    report = {
        "format": FORMAT,
        "kind": KIND,
        "baseline": measured.results[BASELINE],
        **{key: [row for row in rows if row["kind"] == kind] for key, kind in KINDS.items()},
        "skipped": skipped,
        "recommended": recommend(rows, {**CRITERIA, **(criteria or {})}),
        "settings": overlays.difference(RunConfig(), off),
        "num_ranks": off.training.num_gpus,
    }
    return finish(report, folder)


class Measurements:
    """Runs that are measured against references, which wait paused as long as they are needed."""

    def __init__(self, folder: Path, block_s: float, rounds: int, quality_epochs: int, log: Callable[[str], None]):
        self.folder, self.block_s, self.rounds, self.log = folder, block_s, rounds, log
        self.quality_epochs = quality_epochs
        self.references: dict[str, tuple[Turns, RunConfig]] = {}
        self.results: dict[str, dict] = {}
        self.quality_of: dict[str, float | None] = {}  # by config: the same one is trained once

    def reference(self, name: str, config: RunConfig) -> None:
        """Start what others are measured against."""
        turns = Turns.start(overlays.apply(config, ENDLESS), self.folder / "runs" / name.replace(" ", "-"))
        self.references[name] = turns, config
        self.results[name] = {"memory_gib": None, "val_nrmse": self._quality(config, name)}

    def row(self, entry: Entry) -> dict:
        """Throughput, memory and accuracy of one entry beside its reference's; or why it failed."""
        name = f"{entry.kind}-{entry.phase}".replace(" ", "-")
        self.log(f"{entry.kind}: {entry.phase}")
        (reference, reference_config), against = self.references[entry.against], self.results[entry.against]
        promised = getattr(phases.BY_NAME.get(entry.phase), "expected", None)
        row = {
            "kind": entry.kind,
            "phase": entry.phase,
            "against": entry.against,
            "promised": promised and (promised.cumulative if entry.kind == "ladder" else promised.factor),
            "source": promised and promised.source,
            "changes": overlays.difference(reference_config, entry.config),
        }
        folder, inverse = self.folder / "runs" / name, entry.against == FULL
        row |= measure_beside(reference, entry.config, folder, self.block_s, self.rounds, inverse)
        if "failed" in row:
            return row
        row["val_nrmse"], before = self._quality(entry.config, name), against["val_nrmse"]
        row["nrmse_ratio"] = row["val_nrmse"] / before if before and row["val_nrmse"] else None
        against["memory_gib"] = row["reference_memory_gib"]
        return row

    def _quality(self, config: RunConfig, name: str) -> float | None:
        """Validation nRMSE after a training of its own, mean over datasets."""
        if not self.quality_epochs:
            return None
        key = str(overlays.difference(RunConfig(), config))
        if key not in self.quality_of:
            length = {"stages.operator.epochs": self.quality_epochs, "evaluation.every_epochs": self.quality_epochs}
            config = overlays.apply(config, {**length, "training.time_limit_s": None})
            run = handle.start(config, self.folder / "quality" / name.replace(" ", "-"))
            run.wait()
            self.quality_of[key] = score(run.events(("eval",))[-1])
        return self.quality_of[key]

    def close(self) -> None:
        """End what still waits."""
        for turns, _ in self.references.values():
            turns.end()


# -- recommendation --------------------------------------------------------------------------------------------------


def gaining(rows: list[dict]) -> list[str]:
    """Phases that are sure to gain alone, and not to cost the full set."""
    costs = costly(rows)
    return [
        row["phase"]
        for row in rows
        if row["kind"] == "alone" and row["phase"] not in costs and (row["ratio"]["ci95"][0] or 0) > 1
    ]


def costly(rows: list[dict]) -> dict[str, dict]:
    """Phases that are sure to make the full set slower, and the ratio with and without each."""
    without = [row for row in rows if row["kind"] == "leave_one_out" and row["phase"] != BATCH]
    left_out = {row["phase"]: row["ratio"] for row in without}
    return {name: ratio for name, ratio in left_out.items() if ratio["ci95"][1] is not None and ratio["ci95"][1] < 1}


def members(row: dict, rows: list[dict]) -> list[str]:
    """The phases that are on in a row of the baseline's."""
    rungs = [other["phase"] for other in rows if other["kind"] == "ladder"]
    if row["phase"] == LESS:
        return [name for name in rungs if name not in costly(rows)]
    if row["phase"] == GAINING:
        return gaining(rows)
    return rungs[: rungs.index(row["phase"]) + 1] if row["kind"] == "ladder" else [row["phase"]]


def recommend(rows: list[dict], criteria: dict) -> dict:
    """The fastest measured set whose accuracy and memory criteria hold on this machine, and what that rests on.

    None that keeps a phase without which the full set is faster: the set would be faster without it, too.
    """
    candidates = [row for row in rows if row["kind"] != "leave_one_out" and row["ratio"]["median"] is not None]
    refused, costs = {}, costly(rows)
    for row in sorted(candidates, key=lambda row: -row["ratio"]["median"]):
        name = f"{row['kind']}: {row['phase']}"
        kept = [f"{phase} ({factor(costs[phase])})" for phase in members(row, rows) if phase in costs]
        if (row["ratio"]["ci95"][0] or 0) <= 1:
            refused[name] = "no faster than the baseline within the interval"
        elif kept:
            refused[name] = f"keeps what costs the full set throughput: {', '.join(kept)}"
        elif row["memory_gib"] and criteria["memory_gib"] and row["memory_gib"] >= criteria["memory_gib"]:
            refused[name] = f"needs {row['memory_gib']:.1f} GiB"
        elif row["nrmse_ratio"] and criteria["nrmse_ratio"] and not row["nrmse_ratio"] <= criteria["nrmse_ratio"]:
            refused[name] = f"validation nRMSE is {row['nrmse_ratio']:.3f} times the baseline's"
        else:
            basis = "throughput and memory" + (", accuracy" if row["nrmse_ratio"] else "; accuracy was not measured")
            chosen = {key: row[key] for key in ("phase", "kind", "changes", "ratio", "nrmse_ratio", "memory_gib")}
            return {**chosen, "basis": basis, "refused": refused}
    return {"phase": None, "changes": {}, "ratio": None, "basis": "nothing beat the baseline", "refused": refused}


def recommended(report: dict) -> str:
    """The set to use on this machine, in a sentence."""
    chosen, rows = report["recommended"], [row for key in KINDS for row in report[key]]
    if chosen["phase"] is None:
        return f"Recommended: the baseline, because {chosen['basis']}."
    names = " + ".join(members(chosen, rows))
    return f"Recommended: {names}, {factor(chosen['ratio'])} times the baseline; rests on {chosen['basis']}."


def finding(row: dict) -> str:
    """What was measured of an entry, or why nothing was."""
    if "failed" in row:
        return f"failed: {row['failed'].splitlines()[0]}"
    return factor(row["ratio"]) if row["ratio"]["median"] else "no steady step in its turns -> raise block_s"


def summary(report: dict) -> str:
    """The report in a few lines."""
    lines = [recommended(report)]
    for key, kind in KINDS.items():
        for row in report[key]:
            promised = f"promised {number(row['promised'], 3)}, " if row["promised"] and kind != "leave_one_out" else ""
            lines.append(f"{TITLES.get(kind, kind)}: {row['phase']}: {promised}{finding(row)}")
    return "\n".join([*lines, *(f"{name} is left out: {reason}" for name, reason in report["skipped"].items())])


def write_params(report: dict, path: Path | str) -> Path:
    """The recommended set as a params file, to be put on top of any other."""
    chosen, machine = report["recommended"], report["hardware"]
    ratio = chosen["ratio"]
    lines = [f"# The fastest set measured on {report['num_ranks']} x {machine['device_name']}, {report['date']}."]
    if ratio:
        low, high = ratio["ci95"]
        lines.append(f"# {ratio['median']:.2f} [{low:.2f}, {high:.2f}] times the baseline; rests on {chosen['basis']}.")
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
