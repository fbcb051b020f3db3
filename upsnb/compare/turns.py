"""Runs that share a machine in turns, and the ratio of their throughputs with an interval."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.errors import RunError
from upsnb.runs import handle, runfolder
from upsnb.runs.handle import Run
from upsnb.runs.throughput import throughput_ratio

POLL_S = 0.05
LEAST_STEADY, PATIENCE = 4, 10  # steady steps that a turn waits for, and how many times its length it waits at most
ENDLESS = {  # a run that only gives throughput: nothing but steps, until it is stopped
    "stages.operator.epochs": 1_000_000,
    "training.time_limit_s": None,
    "training.patience": None,
    "evaluation.every_epochs": 1_000_000,
    "evaluation.rollout": False,
    "checkpoint.interval": 1_000_000,
}


@dataclass(frozen=True)
class Block:
    """One turn of one arm: its steady steps between two pauses."""

    arm: str
    seed: int
    round: int
    samples: float
    seconds: float


class Turns:
    """A run that waits while others have their turn; reads each of its events once."""

    def __init__(self, run: Run):
        self.run, self._tail = run, runfolder.Tail(run.folder)
        self.events: list[dict] = []

    @classmethod
    def start(cls, config: RunConfig, folder: Path) -> Turns:
        """Start a run and pause it after its first step, so that the next one starts on a quiet machine.

        It ends with this process: nobody else gives it a turn, and one that waits is never taken for dead.
        """
        turns = cls(handle.start(config, folder, attached=True))
        with turns.run.stopped_by_errors():  # or it trains on beside all that is measured later
            turns.wait("first_step")
            turns.wait("paused", turns.run.pause())
        return turns

    def read(self) -> None:
        """Take the events since the last call."""
        self.events += self._tail.read()

    def is_alive(self) -> bool:
        """Whether it has not finished yet.

        Raises:
            RunError: it never will.
        """
        status = self.run.status()
        if status in ("failed", "died"):
            raise RunError(f"{self.run.folder}: {status}: {self.run.cause()}")
        return status in runfolder.ALIVE

    def wait(self, kind: str, revision: int = 0) -> None:
        """Return once an event of the kind, of this revision or a later one, is there or the run has finished.

        Raises:
            RunError: it failed, or did not obey in time.
        """
        try:
            self.run.wait_for(kind, revision)
        except RunError:
            if self.is_alive():
                raise
        self.read()

    def take(self, seconds: float) -> tuple[float, float] | None:
        """Let it train for so long, and until some steps were steady; (samples, seconds) of these, None if it ended."""
        self.read()
        before, began, spent = len(self.events), time.monotonic(), 0.0
        self.run.resume()
        while self.is_alive() and spent < seconds * (1 if len(self._steady(before)) >= LEAST_STEADY else PATIENCE):
            time.sleep(POLL_S)
            self.read()
            spent = time.monotonic() - began
        if self.is_alive():
            self.wait("paused", self.run.pause())
        alive = self.is_alive()  # before its last events are read
        self.read()
        if not alive:
            return None
        steps = self._steady(before)
        times = [step["step_time_ms"] / 1e3 for step in steps]
        return sum(step["samples_per_s"] * time_s for step, time_s in zip(steps, times)), sum(times)

    def _steady(self, since: int) -> list[dict]:
        return [event for event in self.events[since:] if event["kind"] == "step" and event["steady"]]

    def end(self) -> None:
        """Stop it, and wait until it has ended."""
        self.run.stop()
        self.run.wait()
        self.read()

    @property
    def peak_memory_gib(self) -> float | None:
        """Largest memory of a rank so far."""
        peaks = [event["peak_memory_gib"] for event in self.events if event["kind"] in ("step", "end")]
        return max((max(peak) if isinstance(peak, list) else peak for peak in peaks), default=None)

    @property
    def last_step(self) -> int:
        return next((event["step"] for event in reversed(self.events) if event["kind"] == "step"), 0)


def interleave(
    arms: dict[str, Turns], seed: int, block_s: float, log: Callable[[str], None], rounds: int | None = None
) -> list[Block]:
    """Let paused runs take turns; the steady throughput of every turn.

    Args:
        block_s: length of a turn.
        rounds: turns of each; None: until all have ended.
    Raises:
        RunError: a run failed or did not obey.
    """
    blocks: list[Block] = []
    turn = 0
    while turn != rounds and any(arm.is_alive() for arm in arms.values()):
        for name in list(arms) if turn % 2 == 0 else list(arms)[::-1]:  # A B B A: a drift in time hits both alike
            if not arms[name].is_alive():
                continue
            found = arms[name].take(block_s)
            if found and found[1] > 0:
                blocks.append(Block(name, seed, turn, *found))
        turn += 1
        log(f"turn {turn}: " + ", ".join(f"{name} at step {arm.last_step}" for name, arm in arms.items()))
    return blocks


def measure_beside(
    reference: Turns,
    config: RunConfig,
    folder: Path,
    block_s: float,
    rounds: int,
    inverse: bool = False,
    then: Callable[[Turns], dict] = lambda turns: {},
) -> dict:
    """Throughput and memory of a config beside those of a run that waits, each for `rounds` turns of `block_s` seconds.

    Args:
        inverse: the ratio is that of the waiting run over the config.
        then: asks more of the run, paused after its last turn; what it returns is added.
    Returns:
        {"ratio", "memory_gib", "reference_memory_gib", ...}, or {"ratio", "failed": why}.
    Raises:
        RunError: the one that waits has failed.
    """
    ratio_of = ("reference", "it") if inverse else ("it", "reference")
    try:
        turns = Turns.start(overlays.apply(config, ENDLESS), folder)
        try:
            blocks = interleave({"it": turns, "reference": reference}, 0, block_s, lambda text: None, rounds)
            measured = {"ratio": ratio_of_turns(blocks, *ratio_of), "memory_gib": turns.peak_memory_gib}
            return {**measured, "reference_memory_gib": reference.peak_memory_gib, **then(turns)}
        finally:
            turns.end()
    except RunError as error:
        reference.is_alive()
        return {"ratio": ratio_of_turns([], *ratio_of), "failed": str(error)}


def ratio_of_turns(blocks: list[Block], arm: str, reference: str) -> dict:
    """Throughput of `arm` over that of `reference`: the median over rounds in which both had a turn.

    Returns:
        {"median", "ci95": [low, high], "num_rounds"}; None where there is none.
    """
    rates: dict[tuple[int, int], dict[str, float]] = {}
    for block in blocks:
        rates.setdefault((block.seed, block.round), {})[block.arm] = block.samples / block.seconds
    both = [(rate[arm], rate[reference]) for rate in rates.values() if {arm, reference} <= rate.keys()]
    return {**throughput_ratio(*np.reshape(both, (-1, 2)).T, paired=True), "num_rounds": len(both)}
