"""What a change does to the throughput, measured on the live run: without and with it in turns, A B B A, between steps.

A machine that slows down does so for both. Four turns make a round, in which a steady drift cancels, and the ratio is
the median over rounds. Weights, moments, schedule and place in the data stay the run's own; it goes on, and ends with
the settings that it had. All ranks enter every method but `observe` and `due`, which are rank 0's.
"""

from __future__ import annotations

import numpy as np

from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.errors import ConfigError
from upsnb.phases import no_turns
from upsnb.runs import recovery
from upsnb.runs.throughput import throughput_ratio
from upsnb.training import parallel
from upsnb.training.timing import WARMUP_STEPS, peak_memory_gib
from upsnb.worker.flips import CHANGED, NOTHING, Flips, changes_between

TURN_STEPS, TURN_S = 6, 2.0  # steady steps of a turn, or fewer where they are slow; each dataset has had as many
TURN_WARMUP_STEPS = 2  # of each turn, never counted: both arms have been compiled and tried before
LEAST_ROUNDS = 5  # before an interval is believed
WITHOUT, WITH, OVER = 0, 1, 2  # what the next step is taken with; or no turn is left
ORDER = (WITHOUT, WITH, WITH, WITHOUT)


class Measuring:
    """One measurement at a time."""

    def __init__(self, flips: Flips):
        self.flips, self.setup, self.ranks, self.events = flips, flips.setup, flips.ranks, flips.events
        self.configs: tuple[RunConfig, RunConfig] | None = None  # without and with; None: nothing is measured
        self.arm, self.problem = WITHOUT, ""

    def begin(self, revision: int, asked: dict, step: int) -> str:
        """Try the change out, compiling what it needs, and start with the first turn; or say why not.

        Args:
            asked: `overlay`, `within` and `steps` of control.json, on rank 0; ignored elsewhere.
        Returns:
            CHANGED or NOTHING.
        """
        asked = parallel.all_gather_objects(self.ranks, asked)[0]
        old, memory_gib = self.setup.config, peak_memory_gib(self.ranks.device)
        new = old

        def change() -> None:
            nonlocal new
            new = overlays.apply(old, overlays.flatten(asked["overlay"], "the measurement"), "the measurement")
            if problems := no_turns(old, new):
                raise ConfigError(problems, "the measurement")
            self.setup.update(new)

        failed = self.flips.tried(change)
        for config in (new, old):
            if not failed:
                self.setup.update(config)
                failed = self.flips.tried(self.setup.try_compile)
        self.setup.update(old)
        self.revision, self.asked, self.from_step = revision, asked, step
        self.change = changes_between(old, new if not failed else old)
        self._tell("measuring", step, applied=not failed, reason="; ".join(failed) or None)
        if failed:
            return NOTHING
        self.configs, self.flips.made = (old, new), True
        self.arm, self.problem, self.effect = WITHOUT, "", None
        self.memory_gib, self.scalers = {WITHOUT: memory_gib}, {}
        self.turns: list[np.ndarray] = []  # (samples, seconds, steps) of each that is over, their arms as in ORDER
        self.current: list[tuple[float, float, int]] = []  # the same of the steps of the one that is not
        return CHANGED

    def _tell(self, kind: str, step: int, **fields) -> None:
        if self.ranks.rank == 0:
            self.events.write(kind, step, revision=self.revision, **self.change, **fields)

    def observe(self, step: int, samples_per_s: float, step_time_ms: float, steady: bool) -> None:
        """Take a step's throughput for the turn it was taken in, or for the effect of the last flip."""
        if self.configs is None:
            return self.flips.observe(step, samples_per_s, step_time_ms, steady)
        if not steady:
            return
        self.current.append((samples_per_s * step_time_ms / 1e3, step_time_ms / 1e3, 1))
        turn = np.sum(self.current, axis=0)
        if len(self.current) % len(self.setup.datasets) or (len(self.current) < TURN_STEPS and turn[1] < TURN_S):
            return
        self.turns.append(turn)
        self.current = []
        if len(self.turns) % len(ORDER) == 0:
            rates = self._arms()
            rates = rates[..., 0] / rates[..., 1]
            self.effect = throughput_ratio(rates[:, WITH], rates[:, WITHOUT], paired=True)

    def _arms(self) -> np.ndarray:
        """(rounds, 2, 3): samples, seconds and steps of each arm in each round that is over."""
        turns = np.reshape(self.turns[: self.num_rounds * len(ORDER)], (-1, len(ORDER), 3))
        return turns[:, np.argsort(ORDER, kind="stable")].reshape(len(turns), 2, -1, 3).sum(axis=2)

    @property
    def warmup_steps(self) -> int:
        """Steps after a change that tell nothing of it."""
        return WARMUP_STEPS if self.configs is None else TURN_WARMUP_STEPS

    @property
    def num_rounds(self) -> int:
        """Rounds that are over."""
        return len(self.turns) // len(ORDER)

    def due(self, step: int) -> int:
        """What the next step is to be taken with."""
        if self.configs is None:
            return WITHOUT
        return OVER if self._why_over(step) else ORDER[len(self.turns) % len(ORDER)]

    def _why_over(self, step: int) -> str:
        """Why no turn is left, or nothing."""
        if self.problem or step - self.from_step >= self.asked["steps"]:
            return self.problem or "budget"
        if self.num_rounds < LEAST_ROUNDS:
            return ""
        ratio, (low, high) = self.effect["median"], self.effect["ci95"]
        return "within" if max(high - ratio, ratio - low) <= self.asked["within"] * ratio else ""

    def take_turn(self, arm: int, step: int) -> str:
        """Bring the run to what the next step is to be taken with; CHANGED or NOTHING."""
        if arm == OVER:
            return self.end(self._why_over(step) if self.ranks.rank == 0 else "", step)
        failed = self._go_to(arm)
        if failed:
            return self.end("; ".join(failed), step)
        self._tell("turn", step, arm=arm, num_rounds=self.num_rounds, **(self.effect or {}))
        return CHANGED

    def _go_to(self, arm: int) -> list[str]:
        """Change the setup to an arm's on all ranks or none; why not."""
        setup = self.setup
        self.scalers[self.arm], self.current = setup.scaler, []  # steps of a turn that was over already, read late
        self.memory_gib.setdefault(self.arm, peak_memory_gib(self.ranks.device))
        failed = self.flips.tried(lambda: setup.update(self.configs[arm]))
        if failed:
            setup.update(self.configs[self.arm])
        elif setup.scaler is not self.scalers[self.arm]:  # another precision: its scale was found in its last turn
            setup.scaler = self.scalers.get(arm, setup.scaler)
        self.arm = self.arm if failed else arm
        self.flips.forget_peak()
        return failed

    def blame(self, error: Exception) -> bool:
        """Whether a step failed because of what is tried out: then it is taken again without that, and the run goes on.

        Several ranks wait in collectives for the one that failed, so there a relaunch has to help.
        """
        known = recovery.is_out_of_memory(error) or recovery.is_compile_failure(error)
        if not known or self.configs is None or self.arm != WITH or self.ranks.world_size > 1 or self.setup.updating:
            return False
        self.problem = recovery.in_one_line(error)
        return True

    def end(self, why: str, step: int) -> str:
        """Go back to the run's own settings and say what was measured, if anything is; CHANGED or NOTHING."""
        if self.configs is None:
            return NOTHING
        found = CHANGED if self.arm == WITH else NOTHING
        if self.arm == WITH:
            self._go_to(WITHOUT)
        self.configs = None
        effect = self.effect
        if self.num_rounds < 2:
            self._tell("measuring", step, applied=False, reason=f"{why}, before two rounds of turns were over")
            return found
        self._tell(
            "flip_effect",
            step,
            method="interleaved",
            cold=False,
            of="samples_per_s",
            ratio=round(effect["median"], 4),
            ci95=[round(end, 4) for end in effect["ci95"]],
            num_rounds=self.num_rounds,
            num_steps=[int(count) for count in self._arms()[..., 2].sum(axis=0)],
            memory_gib=[round(self.memory_gib[arm], 4) for arm in (WITHOUT, WITH)],
            ended=why,
        )
        return found
