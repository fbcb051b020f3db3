"""Changes asked of a live run: applied at one step boundary on every rank, acknowledged, and measured.

A hot flip changes the setup between two steps. A cold one makes all ranks save and end; the supervisor launches them
again with the new settings, and they acknowledge the flip once they have done a step. Each revision of the settings is
answered by one `flip` event, its own or that of a later revision asked for before the run came to read it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from upsnb import hardware, overlays
from upsnb.config import RunConfig
from upsnb.data.batches import Schedule
from upsnb.errors import ConfigError, Problem
from upsnb.phases import names_on, skip_missing
from upsnb.runs import runfolder
from upsnb.runs.events import EventWriter
from upsnb.runs.runfolder import Launch
from upsnb.runs.throughput import throughput_ratio
from upsnb.training import parallel
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup, cold_changes
from upsnb.training.timing import peak_memory_gib

WINDOW_STEPS = 40  # steady steps on either side of a flip that its effect is measured from
NOTHING, CHANGED, RELAUNCH = "nothing", "changed", "relaunch"  # what `Flips.apply` found to do


class Flips:
    """What was asked so far, and what the last change did."""

    def __init__(self, base: RunConfig, setup: Setup, ranks: Ranks, events: EventWriter, folder: Path, launch: Launch):
        """`base` is config.yaml, which all overlays are differences from; `setup` has the launch's on top."""
        self.base, self.setup, self.ranks, self.events, self.folder = base, setup, ranks, events, folder
        self.revision = launch.revision  # of the settings in control.json, last obeyed or refused
        self.trial = launch.cold_flip  # the `relaunch` event of a flip to acknowledge once these ranks have done a step
        self.made = bool(launch.overlay)  # settings were changed since the run was started
        self.request: dict = {}  # the `relaunch` event that these ranks end with
        self.before: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS)  # (samples, seconds) of steady steps
        self.after: list[tuple[float, float]] | None = None  # None: nothing to measure
        self.memory_before = 0.0
        self._highest = 0.0  # peaks that were reset at a flip
        if self.trial and ranks.rank == 0:
            steps = steady_steps_before(runfolder.read_events(folder, ("segment", "flip", "step")))
            self.before.extend(_samples_and_seconds(step["samples_per_s"], step["step_time_ms"]) for step in steps)
            self.memory_before = max((step["peak_memory_gib"] for step in steps), default=0.0)

    def apply(self, revision: int, overlay: dict | None, step: int) -> str:
        """Update the setup to `base` + overlay, or find that it takes a relaunch; all ranks enter.

        What one rank cannot do none does: the others go back, the run goes on, and the event says why. What would fail
        after a relaunch is refused before anything is stopped, as far as it can be foreseen.

        Args:
            overlay: dotted settings on rank 0; ignored elsewhere.
        Returns:
            NOTHING, CHANGED or RELAUNCH.
        """
        self.revision, self.made = revision, True
        overlay = parallel.all_gather_objects(self.ranks, overlay)[0]
        old, since, started = self.setup.config, time.time(), time.perf_counter()
        new, skipped, cold = old, {}, []
        memory_before = peak_memory_gib(self.ranks.device)  # without what the flip itself takes, such as compiling

        def change() -> None:
            nonlocal new, skipped, cold
            new = overlays.apply(self.base, overlays.flatten(overlay, "control.json"), "control.json")
            if self.setup.stage not in new.stages.planned:
                remedy = "no fewer than 1, or leave it to `patience` and `time_limit_s`"
                problem = Problem(f"stages.{self.setup.stage}.epochs", "0, and the stage is being trained", remedy)
                raise ConfigError([problem], "control.json")
            if new.training.on_missing == "skip":
                new, skipped = skip_missing(new, hardware.detect(), self.base)
            cold = cold_changes(old, new)
            if cold:
                hardware.check_runnable(new, hardware.detect())
                ranks = 0, new.training.num_gpus
                Schedule(self.setup.datasets, new, *ranks, self.setup.stage)  # refuses ranks without enough pairs
            else:
                self.setup.update(new)

        failed = self.tried(change)
        if not failed and not cold:  # on all ranks or none: compile now, while it can be undone
            failed = self.tried(self.setup.try_compile)
        if failed and self.setup.config is not old:
            self.setup.update(old)
        if failed:
            new, skipped = old, {}
        elif cold:
            described = {**changes_between(old, new), "skipped": skipped, "overlay": self._overlay(new)}
            self.request = {"revision": revision, "since": since, **described, "phases_on": names_on(old)}
            return RELAUNCH
        if self.ranks.rank == 0:
            outcome = {"applied": not failed, "reason": "; ".join(failed) or None, "skipped": skipped, "cold": False}
            self._answer(step, old, new, time.perf_counter() - started, outcome, memory_before)
        return CHANGED if new != old else NOTHING

    def tried(self, change: Callable[[], object]) -> list[str]:
        """Change something on this rank; which ranks could not, and why, the same on all ranks."""
        problem = ""
        try:
            change()
        except Exception as error:  # whatever it was, the run must go on as it did before
            problem = f"{type(error).__name__}: {error}"
        return self.failures(problem)

    def failures(self, problem: str) -> list[str]:
        """Which ranks have a problem, and what; the same on all ranks."""
        problems = parallel.all_gather_objects(self.ranks, problem)
        return [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]

    def leave(self, step: int) -> None:
        """Hand a cold flip over to the supervisor: rank 0's last event, once the state is saved."""
        self.events.write("relaunch", step, **self.request)

    def acknowledge(self, step: int) -> None:
        """Say that a cold flip has worked; rank 0 only."""
        trial, self.trial = self.trial, None
        old = overlays.apply(self.base, runfolder.read_manifest(self.folder)["applied"]["overlay"])
        outcome = {"applied": True, "reason": None, "skipped": trial["skipped"], "cold": True}
        self._answer(step, old, self.setup.config, time.time() - trial["since"], outcome, None)

    def _answer(
        self,
        step: int,
        old: RunConfig,
        new: RunConfig,
        duration_s: float,
        outcome: dict,
        memory_before: float | None,
    ) -> None:
        # The manifest first: who sees the event may ask for more on top of what is in force.
        runfolder.update_manifest(self.folder, applied={"revision": self.revision, "overlay": self._overlay(new)})
        described = changes_between(old, new)
        self.events.write(
            "flip",
            step,
            revision=self.revision,
            **outcome,
            **described,
            phases_on=names_on(new),
            overlay=self._overlay(new),
            duration_ms=round(1e3 * duration_s, 3),
        )
        if described["changes"]:
            if self.after is not None:  # the last flip is not measured yet: steps before it would tell of both
                self.before = deque(self.after, maxlen=WINDOW_STEPS)
            self.after, self.flipped = [], {"revision": self.revision, "cold": outcome["cold"], **described}
            if memory_before is not None:  # a cold flip knows it from the launch before
                self.memory_before = memory_before
                self.forget_peak()

    def _overlay(self, config: RunConfig) -> dict:
        return overlays.difference(self.base, config)

    def forget_peak(self) -> None:
        """Count peaks from here on where the device can; a process's resident peak never falls."""
        if self.ranks.device.type == "cuda":
            self._highest = self.peak_memory_gib()
            torch.cuda.reset_peak_memory_stats(self.ranks.device)

    def peak_memory_gib(self) -> float:
        """Largest memory of this rank over the whole launch, flips or not."""
        return max(self._highest, peak_memory_gib(self.ranks.device))

    def observe(self, step: int, samples_per_s: float, step_time_ms: float, steady: bool) -> None:
        """Take the next step's throughput; rank 0 only. Writes `flip_effect` once there is enough to say."""
        if not steady:
            return
        pair = _samples_and_seconds(samples_per_s, step_time_ms)
        if self.after is None:
            self.before.append(pair)
            return
        self.after.append(pair)
        if len(self.after) < WINDOW_STEPS:
            return
        cycle = len(self.setup.datasets)
        if len(self.before) >= max(WINDOW_STEPS // 2, 2 * cycle):  # of one turn there is no interval
            effect = throughput_ratio(rates(self.after, cycle), rates(list(self.before), cycle))
            self.events.write(
                "flip_effect",
                step,
                **self.flipped,
                of="samples_per_s",
                ratio=round(effect["median"], 4),
                ci95=[round(end, 4) for end in effect["ci95"]],
                num_steps=[len(self.before), len(self.after)],
                memory_gib=[round(self.memory_before, 4), round(peak_memory_gib(self.ranks.device), 4)],
            )
        self.before = deque(self.after, maxlen=WINDOW_STEPS)
        self.after = None


def changes_between(old: RunConfig, new: RunConfig) -> dict:
    """Settings that differ, and the phases of the recipe that are switched by them, as events tell it."""
    before, after = names_on(old), names_on(new)
    switched = {name: name in after for name in (*before, *after) if (name in after) != (name in before)}
    return {"changes": overlays.difference(old, new), "phases": switched}


def _samples_and_seconds(samples_per_s: float, step_time_ms: float) -> tuple[float, float]:
    return samples_per_s * step_time_ms / 1e3, step_time_ms / 1e3


def steady_steps_before(events: list[dict]) -> list[dict]:
    """Steady steps of the launch before the latest, since its last change: what a cold flip is compared with.

    Args:
        events: `segment`, `flip` and `step` events of the run, in order.
    """
    launches: list[list[dict]] = [[]]
    for event in events:
        if event["kind"] == "segment":
            launches.append([])
        elif event["kind"] == "flip" and event["changes"]:
            launches[-1].clear()
        elif event["kind"] == "step" and event["steady"]:
            launches[-1].append(event)
    return launches[-2] if len(launches) > 1 else []


def rates(steps: list[tuple], cycle: int) -> np.ndarray:
    """Samples per second of whole turns of all datasets, because datasets cost differently.

    Args:
        steps: (samples, seconds) of each.
        cycle: steps in a turn.
    """
    whole = np.array(steps[: len(steps) // cycle * cycle]).reshape(-1, cycle, 2).sum(axis=1)
    return whole[:, 0] / whole[:, 1]
