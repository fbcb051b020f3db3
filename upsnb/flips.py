"""Changes asked of a live run: applied at one step boundary on every rank, acknowledged, and measured."""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import torch

from upsnb import overlays, parallel
from upsnb.config import RunConfig
from upsnb.events import EventWriter
from upsnb.parallel import Ranks
from upsnb.phases import PHASES, is_on
from upsnb.setup import Setup
from upsnb.timing import peak_memory_gib

WINDOW_STEPS = 40  # steady steps on either side of a flip that its effect is measured from
NUM_RESAMPLES = 2000


class Flips:
    """What was asked so far, and what the last change did."""

    def __init__(self, base: RunConfig, setup: Setup, ranks: Ranks, events: EventWriter):
        self.base, self.setup, self.ranks, self.events = base, setup, ranks, events
        self.revision = 0  # of control.json, last obeyed or refused
        self.before: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS)  # (samples, seconds) of steady steps
        self.after: list[tuple[float, float]] | None = None  # None: nothing to measure
        self.memory_before = 0.0
        self._highest = 0.0  # peaks that were reset at a flip

    def apply(self, revision: int, overlay: dict | None, step: int) -> bool:
        """Update the setup to `base` + overlay; all ranks enter. Returns whether anything changed.

        What one rank cannot do none does: the others go back, the run goes on, and the event says why.

        Args:
            overlay: dotted settings on rank 0; ignored elsewhere.
        """
        self.revision = revision
        overlay = parallel.all_gather_objects(self.ranks, overlay)[0]
        old, started, problem = self.setup.config, time.perf_counter(), ""
        try:
            self.setup.update(overlays.apply(self.base, overlay, "control.json"))
        except Exception as error:  # whatever it was, the run must go on as it did before
            problem = f"{type(error).__name__}: {error}"
        problems = parallel.all_gather_objects(self.ranks, problem)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
        new = self.setup.config
        if failed and new is not old:
            self.setup.update(old)
        changes = {} if failed else overlays.difference(old, new)
        if self.ranks.rank == 0:
            self._announce(revision, old, changes, failed, step, time.perf_counter() - started)
        return bool(changes)

    def _announce(self, revision, old: RunConfig, changes: dict, failed: list[str], step, duration_s) -> None:
        now = self.setup.config
        switched = {phase.name: is_on(phase, now) for phase in PHASES if is_on(phase, now) != is_on(phase, old)}
        self.events.write(
            "flip",
            step,
            revision=revision,
            applied=not failed,
            reason="; ".join(failed) or None,
            changes=changes,
            phases=switched,
            phases_on=[phase.name for phase in PHASES if is_on(phase, now)],
            duration_ms=round(1e3 * duration_s, 3),
        )
        if changes:
            self.after, self.flipped = [], {"revision": revision, "changes": changes, "phases": switched}
            self.memory_before = self._memory()

    def _memory(self) -> float:
        """Peak since the last flip where the device can tell, else of the process so far."""
        peak = peak_memory_gib(self.ranks.device)
        if self.ranks.device.type == "cuda":
            self._highest = max(self._highest, peak)
            torch.cuda.reset_peak_memory_stats(self.ranks.device)
        return peak

    def peak_memory_gib(self) -> float:
        """Largest memory of this rank over the whole launch, flips or not."""
        return max(self._highest, peak_memory_gib(self.ranks.device))

    def observe(self, step: int, samples_per_s: float, step_time_ms: float, steady: bool) -> None:
        """Take the next step's throughput; rank 0 only. Writes `flip_effect` once there is enough to say."""
        if not steady:
            return
        seconds = step_time_ms / 1e3
        pair = (samples_per_s * seconds, seconds)
        if self.after is None:
            self.before.append(pair)
            return
        self.after.append(pair)
        if len(self.after) < WINDOW_STEPS:
            return
        if len(self.before) >= WINDOW_STEPS // 2:
            ratio, interval = throughput_ratio(list(self.before), self.after, len(self.setup.datasets))
            self.events.write(
                "flip_effect",
                step,
                **self.flipped,
                of="samples_per_s",
                ratio=ratio,
                ci95=interval,
                num_steps=[len(self.before), len(self.after)],
                memory_gib=[round(self.memory_before, 4), round(peak_memory_gib(self.ranks.device), 4)],
            )
        self.before = deque(self.after, maxlen=WINDOW_STEPS)
        self.after = None


def throughput_ratio(before: list[tuple], after: list[tuple], cycle: int) -> tuple[float, list[float]]:
    """Median rate after over median rate before, with a bootstrap 95 % interval.

    Args:
        before, after: (samples, seconds) of steps.
        cycle: steps in a turn of all datasets; rates are of whole turns, because datasets cost differently.
    """

    def rates(steps: list[tuple]) -> np.ndarray:
        whole = np.array(steps[: len(steps) // cycle * cycle]).reshape(-1, cycle, 2).sum(axis=1)
        return whole[:, 0] / whole[:, 1]

    draw, sides = np.random.default_rng(0), [rates(before), rates(after)]
    medians = [np.median(draw.choice(side, (NUM_RESAMPLES, len(side))), axis=1) for side in sides]
    interval = np.quantile(medians[1] / medians[0], [0.025, 0.975])
    return round(float(np.median(sides[1]) / np.median(sides[0])), 4), [round(float(x), 4) for x in interval]
