"""Throughput on 1, 2, 4 ranks beside one rank's: DDP and FSDP2, with a constant batch per rank or in all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from upsnb import hardware, overlays
from upsnb.compare.turns import ENDLESS, Turns, measure_beside
from upsnb.config import RunConfig
from upsnb.errors import ConfigError
from upsnb.hardware import Hardware
from upsnb.profile import report as profiling
from upsnb.profile.recorder import profile_name
from upsnb.report.file import factor, finish
from upsnb.runs.events import latest_start, naming
from upsnb.runs.throughput import steady_throughput
from upsnb.widgets.progress import rewrite

FORMAT, KIND = 1, "scaling"
PARAMETERS = ("ranks", "wrappers", "modes", "block_s", "rounds")  # of the notebook, beside the sections
WRAPPERS = {"ddp": {"training.use_fsdp2": False}, "fsdp2": {"training.use_fsdp2": True}}
WEAK, STRONG, AGAIN = "weak", "strong", "again"  # again: one rank beside one rank, the noise of this machine
MODES = {WEAK: "every rank has the batch of one", STRONG: "all ranks share the batch of one"}
PROMISED = {2: [1.7, 1.9], 4: [3.2, 3.8]}  # published: throughput over one GPU's
REHEARSAL = "More ranks than devices: the numbers below rehearse that ranks work together, and say nothing of speed."


@dataclass(frozen=True)
class Entry:
    """One config to measure beside one rank's."""

    ranks: int
    wrapper: str
    mode: str
    config: RunConfig

    @property
    def name(self) -> str:
        return f"{self.ranks}-{self.wrapper}-{self.mode}"


def plan(
    base: RunConfig,
    machine: Hardware,
    ranks: Sequence[int] = (1, 2, 4),
    wrappers: Sequence[str] = tuple(WRAPPERS),
    modes: Sequence[str] = tuple(MODES),
) -> tuple[list[Entry], RunConfig, dict[str, str], bool]:
    """What to measure: entries, the config of one rank, what is left out and why, and whether it is a rehearsal.

    Where no two devices are there, or the base asks for the CPU, all ranks are processes on the CPU, one thread each: a
    rehearsal. Elsewhere numbers of ranks that have no devices are left out.

    Raises:
        ConfigError: an unknown wrapper or mode, or a base that one rank cannot run here.
    """
    known = {"wrappers": (wrappers, WRAPPERS), "modes": (modes, MODES)}
    problems = [
        f"{what}: {name!r} is none -> choose from {', '.join(allowed)}"
        for what, (names, allowed) in known.items()
        for name in names
        if name not in allowed
    ]
    problems += [f"ranks: {count!r} -> give whole numbers from 1 up" for count in ranks if count < 1]
    if problems:
        raise ConfigError(problems, "the scaling")
    devices = machine.num_devices if machine.device == "cuda" else 0
    rehearsal = base.training.device == "cpu" or devices < 2
    one = {
        "training.num_gpus": 1,
        "training.use_fsdp2": False,
        "training.nccl_tuning": False,
        "training.bf16_gradients": False,
    }
    if rehearsal:
        one |= {"training.device": "cpu", "training.threads_per_rank": base.training.threads_per_rank or 1}
    reference = overlays.apply(base, one)
    hardware.check_runnable(reference, machine)
    entries, skipped = [], {}
    for count in sorted(set(ranks)):
        for wrapper in wrappers:
            for mode in modes if count > 1 else (AGAIN if wrapper == "ddp" else WEAK,):
                entry = Entry(count, wrapper, mode, reference)
                try:
                    config = overlays.apply(reference, {**WRAPPERS[wrapper], **split_batch(reference, count, mode)})
                    hardware.check_runnable(config, machine)
                except ConfigError as error:
                    skipped[entry.name] = "; ".join(map(str, error.problems))
                else:
                    entries.append(Entry(count, wrapper, mode, config))
    return entries, reference, skipped, rehearsal


def split_batch(config: RunConfig, ranks: int, mode: str) -> dict:
    """The overlay that puts one rank's config on several.

    Strong: fewer microbatches as far as possible, then smaller ones, because a full device is what scaling is about.

    Raises:
        ConfigError: the batch cannot be shared.
    """
    training = config.training
    overlay = {"training.num_gpus": ranks}
    if mode != STRONG:
        return overlay
    fewer = math.gcd(training.accum_steps, ranks)
    if training.batch_size % (ranks // fewer):
        raise ConfigError(
            [
                f"training.batch_size: {training.batch_size} x accum_steps {training.accum_steps} pairs cannot be "
                f"shared by {ranks} ranks -> choose multiples"
            ],
            "strong scaling",
        )
    return {
        **overlay,
        "training.accum_steps": training.accum_steps // fewer,
        "training.batch_size": training.batch_size // (ranks // fewer),
    }


def measure(
    base: RunConfig,
    folder: Path | str,
    *,
    ranks: Sequence[int] = (1, 2, 4),
    wrappers: Sequence[str] = tuple(WRAPPERS),
    modes: Sequence[str] = tuple(MODES),
    block_s: float = 10.0,
    rounds: int = 6,
    log: Callable[[str], None] = rewrite,
) -> dict:
    """Measure all entries of `plan`; the report, also written to `report.json` after each of them.

    Each entry takes turns with one rank, which waits meanwhile, and is profiled at the end.

    Args:
        block_s: length of a turn [s]; every entry takes `rounds` of them.
    """
    folder, machine = Path(folder).absolute(), hardware.detect()
    entries, reference, skipped, rehearsal = plan(base, machine, ranks, wrappers, modes)
    report = {"format": FORMAT, "kind": KIND, "rehearsal": rehearsal, "rows": [], "skipped": skipped}
    report["settings"] = overlays.difference(RunConfig(), reference)
    one = Turns.start(overlays.apply(reference, ENDLESS), folder / "runs" / "one-rank")
    try:
        report["unit"] = naming(latest_start(one.events))["unit"]
        for entry in entries:
            report["rows"].append(_row(entry, one, folder, block_s, rounds))
            report["reference_samples_per_s"] = steady_throughput(one.events)
            finish(report, folder)
            log(_line(report["rows"][-1]))
    finally:
        one.end()
    report["reference_samples_per_s"] = steady_throughput(one.events)
    return finish(report, folder)


def _row(entry: Entry, one: Turns, folder: Path, block_s: float, rounds: int) -> dict:
    """Throughput of an entry beside one rank's, and what its step spends on communication; or why it failed."""
    training, own = entry.config.training, folder / "runs" / entry.name

    def profiled(turns: Turns) -> dict:
        turns.run.resume()
        stage = profiling.take(turns.run)["stage"]
        ranks = profiling.read(own, entry.ranks)
        parts = profiling.mean_parts(ranks)
        return {
            "samples_per_s": steady_throughput(turns.events),
            "communication_share": parts[profiling.COMMUNICATION] / sum(parts.values()),
            "bytes_per_step": profiling.bytes_per_step(ranks[0]["parameters"], entry.config, entry.ranks, stage),
            "collectives": ranks[0]["trace"]["collectives"],
            "step_ms": sum(parts.values()),
            "profiles": [f"runs/{entry.name}/{profile_name(rank)}" for rank in range(entry.ranks)],
        }

    row = {
        "ranks": entry.ranks,
        "wrapper": entry.wrapper,
        "mode": entry.mode,
        "batch_size": training.batch_size,
        "accum_steps": training.accum_steps,
        "effective_batch": training.batch_size * training.accum_steps * entry.ranks,
        **dict.fromkeys(("samples_per_s", "communication_share", "bytes_per_step")),
        "promised": PROMISED.get(entry.ranks),
        **measure_beside(one, entry.config, own, block_s, rounds, then=profiled),
    }
    median = row["ratio"]["median"]
    note = "" if median or "failed" in row else f"no steady step in a turn of {block_s:g} s -> raise block_s"
    return {**row, "efficiency": median and median / entry.ranks, "note": note}


def finding(row: dict) -> str:
    """What was measured of an entry, or why nothing was."""
    if "failed" in row:
        return f"failed: {row['failed'].splitlines()[0]}"
    return row["note"] or factor(row["ratio"])


def _line(row: dict) -> str:
    name = f"{row['ranks']} {'ranks' if row['ranks'] > 1 else 'rank'}, {row['wrapper']}, {row['mode']}"
    share = row["communication_share"]
    communicates = "" if share is None else f"; {share:.0%} of a step communicates"
    return f"{name}: throughput over one rank's: {finding(row)}{communicates}"


def summary(report: dict) -> str:
    """The report in a few lines."""
    lines = [REHEARSAL] if report["rehearsal"] else []
    lines += [_line(row) for row in report["rows"]]
    return "\n".join([*lines, *(f"{name} is left out: {reason}" for name, reason in report["skipped"].items())])
