"""The fastest settings for a model on this machine that train as well as the baseline, found within some minutes.

First throughput: one run of the baseline goes on, and every candidate is measured in turns with what is best so far
(`Run.measure`), no longer than it takes to tell. What gains more than two equal arms differ is kept, and the next
candidates are measured on top of it, until none gains. Then accuracy, because settings that change a step's numbers or
its pairs may train worse: sets with and without them are trained on equal samples, all of them for a short time, and
then the faster half of those that hold for longer. Equal arms of other seeds say what counts as worse.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from upsnb import hardware, overlays, phases
from upsnb.compare.turns import ENDLESS, Turns
from upsnb.compare.verdict import last_score
from upsnb.config import RunConfig
from upsnb.errors import ConfigError, RunError, RunFailed
from upsnb.hardware import Hardware
from upsnb.memory.plan import usable_bytes
from upsnb.memory.predict import Predictor
from upsnb.phases import BY_NAME
from upsnb.report.file import factor
from upsnb.runs import handle, runfolder
from upsnb.runs.events import latest_start, naming
from upsnb.runs.handle import NOTHING
from upsnb.training import preflight
from upsnb.widgets.progress import rewrite

WITHIN, LEAST_STEPS, MOST_STEPS = 0.03, 60, 400  # of each measurement in turns
MEASUREMENTS = 16  # that the time for throughput is for, where steps are slow
CLEAR, LEAST_ROUNDS = 0.1, 3  # a gain whose interval is so far above 1 after so many rounds needs no more of them
QUIET = 2 * WITHIN  # two equal arms on a machine that does nothing else
LOSING = 0.9  # what is sure to reach no more than that is not tried again
SHARE = 0.6  # of the minutes, for throughput; the rest is for accuracy
SEEDS = (42, 43, 44)  # of the trainings; the baseline's come out as far apart as equal arms do
ROUNDS = 3  # of trainings, each twice as long as the one before
KERNELS = {"cpu": ("sdpa", "math"), "cuda": ("sdpa", "flash", "efficient", "math")}  # on a CPU, sdpa is flash
SAVERS = ("activation_checkpointing", "optimizer_offload")  # memory for time: tried last
QUERIES = (None, 2048, 1024, 512)
BASELINE = "baseline"
BATCH, ACCUM = "training.batch_size", "training.accum_steps"
KERNEL, NUM_QUERIES = "operator.pdet.attention", "training.query_sampling.num_queries"


def candidates(config: RunConfig, base: RunConfig, machine: Hardware, idle: Collection[str] = ()) -> dict[str, dict]:
    """Changes to try on top of a config, by name: what this machine can run and what can take turns in one run.

    Args:
        base: what the run was started with; its phases may turn out to cost.
        idle: phases that do not apply to the model.
    """
    wanted, last = {}, {}
    for name, phase in BY_NAME.items():
        if name in idle:
            continue
        if phases.is_on(phase, base):
            wanted[f"{phases.label(name)} off"] = phases.off_overlay(phase, base)
        else:
            (last if name in SAVERS else wanted)[phases.label(name)] = phase.on
    wanted |= {f"attention {kernel}": {KERNEL: kernel} for kernel in KERNELS[machine.device]}
    # Together: a kernel may pay in 16 bits alone, and 16 bits with that kernel alone.
    half = phases.label("bf16")
    if half in wanted:
        wanted |= {
            f"{half}, attention {kernel}": {**wanted[half], KERNEL: kernel} for kernel in KERNELS[machine.device]
        }
    wanted |= larger_batch(config, machine)  # after what shortens a step, and with it all that is measured later
    wanted |= {f"{count or 'all'} query points": {NUM_QUERIES: count} for count in QUERIES}
    wanted |= last
    found, before = {}, hardware.problems(config, machine)
    for name, overlay in wanted.items():
        try:
            new = overlays.apply(config, overlay)
        except ConfigError:
            continue
        runs = all(problem in before for problem in hardware.problems(new, machine))
        if new != config and runs and not phases.no_turns(config, new):
            found[name] = overlays.difference(config, new)
    return found


def larger_batch(config: RunConfig, machine: Hardware) -> dict[str, dict]:
    """Twice the microbatch, with half of the accumulation where there is any; nothing where it is predicted not to fit.

    On a CPU all ranks share the memory.
    """
    size, accum = 2 * config.training.batch_size, config.training.accum_steps
    changes = {BATCH: size, ACCUM: accum // 2 if accum % 2 == 0 else accum}
    ranks = 1 if machine.device == "cuda" else config.training.num_gpus
    fits = Predictor(overlays.apply(config, changes)).at().nbytes <= usable_bytes(machine.device_memory_gib / ranks)
    return {f"batch {size} x {changes[ACCUM]}": changes} if fits else {}


def error_after(epochs: int, config: RunConfig, folder: Path) -> float:
    """Validation error, mean over datasets, of a training of its own; equal epochs are equal samples.

    Raises:
        RunError: it failed, or has no validation.
    """
    length = {"stages.operator.epochs": epochs, "evaluation.every_epochs": epochs, "training.time_limit_s": None}
    run = handle.start(overlays.apply(config, length), folder)
    with run.stopped_by_errors():
        run.wait()
    return last_score(run)


def is_risky(changes: Mapping, base: RunConfig) -> bool:
    """Whether settings may change what is learned, beyond rounding: so do the pairs of a step, and their datasets.

    A microbatch is of one dataset, so a step of fewer microbatches than datasets follows the gradient of some of them.
    """
    different = {path for phase in BY_NAME.values() if phase.numerics == "different" for path in phase.on}
    different.add(NUM_QUERIES)
    steps = []
    for config in (base, overlays.apply(base, dict(changes))):
        size, accum = config.training.batch_size, config.training.accum_steps
        steps.append((size * accum, min(accum, len(config.data.datasets))))
    return bool(different & changes.keys()) or steps[0] != steps[1]


class Search:
    """One search; what it has tried is in `tried`."""

    def __init__(self, base: RunConfig, folder: Path, minutes: float, epochs: int, log: Callable[[str], None]):
        self.base, self.folder, self.log, self.epochs = base, folder, log, epochs
        self.machine, self.began, self.seconds = hardware.detect(), time.monotonic(), 60 * minutes
        self.tried: list[dict] = []
        self.adopted: list[tuple[str, dict, float]] = []  # in order: name, changes, gain on top of those before
        self.errors: dict[tuple[str, int, int], float] = {}  # set, epochs, seed: validation nRMSE
        self.judged: dict[str, dict] = {}  # set: what its longest trainings came to
        self.metric = naming({})["metric"]  # what its errors are called, until the run says so
        self.idle: list[str] = []  # phases that do not apply to the model
        self.floor = 0.0  # of throughput ratios
        self.step_s = math.inf  # of the measurement before
        self.stopped = ""

    def is_late(self, share: float = 1.0) -> bool:
        """Whether that share of the time is spent."""
        return time.monotonic() - self.began > share * self.seconds

    # -- throughput ---------------------------------------------------------------------------------------------------

    def measure(self, turns: Turns, what: str | dict) -> dict:
        """Throughput with a change over that without, and why it is None where it is."""
        tail = runfolder.Tail(turns.run.folder, ("measuring", "turn", "flip_effect"))
        steps = int(np.clip(SHARE * self.seconds / MEASUREMENTS / self.step_s, LEAST_STEPS, MOST_STEPS))
        revision, first, cut = turns.run.measure(what, WITHIN, steps), None, False
        while True:
            alive = turns.is_alive()  # before the events, so that none of a run's last ones is missed
            for event in [event for event in tail.read() if event["revision"] == revision]:
                if event["kind"] == "flip_effect":
                    self.step_s = (event["time"] - first["time"]) / (event["step"] - first["step"])
                    return {"median": event["ratio"], "ci95": event["ci95"]}
                if event["kind"] == "turn":
                    known = what != NOTHING and event["num_rounds"] >= LEAST_ROUNDS
                    if known and not cut and self.is_settled(*event["ci95"]):
                        cut = bool(turns.run.update({}))  # any other request ends it
                elif not event["applied"]:
                    return {"median": None, "ci95": [None, None], "why": event["reason"]}
                else:
                    first = event
            if not alive:
                raise RunError(f"{turns.run.folder}: ended while {what} was measured -> look at its log")
            time.sleep(handle.POLL_S)

    def equal_arms(self, turns: Turns) -> float:
        """How far from 1 the throughput of two equal arms may come out."""
        ends = self.measure(turns, NOTHING)["ci95"]
        return max((abs(end - 1) for end in ends if end is not None), default=0.0)

    def is_settled(self, low: float, high: float) -> bool:
        """Whether an interval leaves no doubt about a change: that it gains, or no more than two equal arms differ."""
        return low > 1 + max(CLEAR, 2 * self.floor) or high < 1 + self.floor

    def climb(self, turns: Turns) -> None:
        """Keep every change that is sure to gain more than two equal arms differ, until none does."""
        self.measure(turns, NOTHING)  # how long a step takes, and so how many there is time for
        floors = [self.equal_arms(turns)]
        if floors[0] > QUIET:  # something else worked meanwhile, and would hide most gains from all that follows
            floors += [self.equal_arms(turns) for _ in range(2)]
        self.floor = float(np.median(floors))
        best, losing, gained = self.base, set(), True
        before: dict[str, float] = {}  # what each came to when it was measured last
        while gained:
            gained, queue = False, [*candidates(best, self.base, self.machine, self.idle).items()]
            queue.sort(key=lambda item: -before.get(item[0], math.inf))  # the most promising first: time may run out
            while queue:
                name, changes = queue.pop(0)
                if self.is_late(SHARE):
                    self.stopped = "the time for throughput was spent"
                    return
                try:
                    new = overlays.apply(best, changes)
                except ConfigError:  # it excludes what was kept meanwhile
                    continue
                if name in losing or new == best:
                    continue
                ratio = self.measure(turns, overlays.difference(best, new))
                low, high = ratio["ci95"]
                before[name] = ratio["median"] or 0.0
                keep = low is not None and low > 1 and ratio["median"] > 1 + self.floor
                self.tried.append({"change": name, "changes": changes, "ratio": ratio, "kept": keep})
                self.log(f"{name}: {ratio.get('why') or factor(ratio)}{', kept' * keep}")
                if high is None or high < LOSING:
                    losing.add(name)
                if keep:
                    best, gained = new, True
                    self.adopted.append((name, changes, ratio["median"]))
                    turns.run.wait_for("flip", turns.run.update(overlays.difference(self.base, best)))
                    if BATCH in changes:
                        queue[:0] = larger_batch(best, self.machine).items()
        self.stopped = "no candidate gains any more"

    def sets(self) -> dict[str, dict]:
        """What to compare the accuracy of, the fastest first: all that was kept, and the same without what is risky.

        What was kept later for the same settings goes with it: without a batch, the larger ones are out as well.
        """
        without = {}
        for number, (name, changes, _) in enumerate(self.adopted):
            if is_risky(changes, self.base):
                later = self.adopted[number:]
                without[f"without {name}"] = {other for other, more, _ in later if changes.keys() & more.keys()}
        left_out = {"all that gains": set(), **without, "without any of these": set().union(*without.values())}
        found: dict[str, tuple[float, dict]] = {}
        for title, names in left_out.items():
            config, gain = self.base, 1.0
            for name, changes, factor_of_it in self.adopted:
                if name not in names:
                    config, gain = overlays.apply(config, changes), gain * factor_of_it
            changes = overlays.difference(self.base, config)
            if changes and changes not in [known for _, known in found.values()]:
                found[title] = gain, changes
        return {title: changes for title, (_, changes) in sorted(found.items(), key=lambda item: -item[1][0])}

    # -- accuracy -----------------------------------------------------------------------------------------------------

    def error(self, name: str, changes: dict, epochs: int, seed: int) -> float:
        """Validation error of a set after so many epochs; infinite where its training failed."""
        key = name, epochs, seed
        if key not in self.errors:
            config = overlays.apply(self.base, {**changes, "training.seed": seed})
            self.log(f"{name}: {epochs} epoch{'s' * (epochs > 1)}, seed {seed}")
            # beside the run of the measurements: what that has compiled is found again
            own = self.folder / "runs" / f"{name}-{epochs}-{seed}".replace(" ", "-")
            try:
                self.errors[key] = error_after(epochs, config, own)
            except RunFailed:
                if name == BASELINE:
                    raise
                self.errors[key] = math.inf
        return self.errors[key]

    def holding(self, names: list[str], sets: dict[str, dict], epochs: int, num_seeds: int) -> list[str]:
        """Those that are no worse than the baseline after so many epochs, as far as equal arms can tell."""
        found = []
        for name in names:
            if self.is_late():
                break
            equal = [self.error(BASELINE, {}, epochs, seed) for seed in SEEDS]
            tolerance = max(equal) / min(equal)
            errors = [self.error(name, sets[name], epochs, seed) for seed in SEEDS[:num_seeds]]
            ratio = float(np.mean(errors) / np.mean(equal[:num_seeds]))
            found += [name] * bool(ratio <= tolerance)
            self.judged[name] = {"nrmse_ratio": ratio, "tolerance": tolerance, "epochs": epochs, "holds": name in found}
            self.log(f"{name}: {self.metric} {ratio:.3f} times the baseline's, equal arms up to {tolerance:.3f}")
        return found

    def halve(self, sets: dict[str, dict]) -> str:
        """The fastest set that is no worse than the baseline, trained for longer and longer; empty if none is."""
        alive, began = list(sets), time.monotonic()
        for number in range(ROUNDS):
            ahead = 2 * (time.monotonic() - began)  # all rounds so far, and as much again: the next is twice as long
            if number and time.monotonic() - self.began + ahead > self.seconds:
                self.stopped += "; longer trainings would have taken more than the time for accuracy"
                break
            half = math.ceil(len(alive) / 2) if number else len(alive)  # few seeds for many, more for the few left
            judge = partial(self.holding, sets=sets, epochs=self.epochs * 2**number, num_seeds=number + 1)
            held = judge(alive[:half]) or judge(alive[half:])
            if self.is_late():  # what was not trained for so long may have held for shorter
                self.stopped += "; the time for accuracy was spent"
                return next((name for name in alive if self.judged.get(name, {}).get("holds")), "")
            alive = held
        return alive[0] if alive else ""


def recommend(
    base: RunConfig, folder: Path | str, minutes: float, epochs: int = 1, log: Callable[[str], None] = rewrite
) -> dict:
    """Search on top of `base`; what to change, what that rests on, all that was tried and why it ended.

    Args:
        minutes: the search begins nothing new after so many.
        epochs: length of the shortest trainings.
    Returns:
        {"changes", "ratio", "nrmse_ratio", "basis", "refused", "tried", "accuracy", "noise_floor"}
    Raises:
        RunError: the run that candidates are measured on, or a training, has failed.
    """
    search = Search(base, Path(folder).absolute(), minutes, epochs, log)
    verdicts = preflight.foreseen(base, search.machine)
    search.idle = [name for name, verdict in verdicts.items() if verdict.stands_against]
    turns = Turns.start(overlays.apply(base, ENDLESS), search.folder / "runs" / "search")
    search.metric = naming(latest_start(turns.events))["metric"]
    ratio, chosen, changes = None, "", {}
    try:
        turns.run.wait_for("resumed", turns.run.resume())
        search.climb(turns)
        turns.run.pause()  # trainings are alone on the machine
        sets = search.sets()
        chosen = search.halve(sets)
        if changes := sets.get(chosen, {}):  # what was kept one by one, now together against the baseline
            turns.run.wait_for("flip", turns.run.back_to_start())
            turns.run.wait_for("resumed", turns.run.resume())
            ratio = search.measure(turns, changes)
    finally:
        turns.end()
    basis = f"throughput in turns and accuracy on equal samples; the search ended because {search.stopped}"
    refused = {
        name: f"validation {search.metric} is {row['nrmse_ratio']:.3f} times the baseline's, "
        f"equal arms: {row['tolerance']:.3f}"
        for name, row in search.judged.items()
        if not row["holds"]
    }
    return {
        "changes": changes,
        "ratio": ratio,
        "nrmse_ratio": search.judged[chosen]["nrmse_ratio"] if chosen else None,
        "basis": basis if changes else f"nothing beat it and trained as well; {basis}",
        "refused": refused,
        "tried": search.tried,
        "accuracy": search.judged,
        "noise_floor": search.floor,
    }


def told(changes: Mapping) -> str:
    """Settings as phases and values: `compile + bf16 + batch size 16`."""
    left, names = dict(changes), []
    for phase in BY_NAME.values():
        if all(left.get(path, object()) == value for path, value in phase.on.items()):
            names.append(phases.label(phase.name))
            left = {path: value for path, value in left.items() if path not in phase.on}
    return " + ".join([*names, *(f"{phases.label(path.rpartition('.')[2])} {value}" for path, value in left.items())])
