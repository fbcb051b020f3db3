"""Between two steps: rank 0 reads what is asked of the run, all ranks learn the same, and wait where it is to pause."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import torch

from upsnb.errors import RunError
from upsnb.runs import cost, runfolder
from upsnb.runs.events import EventWriter
from upsnb.spans import outside_step
from upsnb.training import checkpoint, parallel
from upsnb.training.parallel import Ranks
from upsnb.worker.flips import Flips
from upsnb.worker.position import Position

POLL_S = 0.1  # between two looks at control.json while all ranks wait
REVISIONS = (
    *(runfolder.CHECKPOINT, runfolder.PROFILE, runfolder.RESTORE, runfolder.MEASURE, runfolder.SETTINGS),
    runfolder.PAUSE,
)


class Requested(NamedTuple):
    """What all ranks are to do; of each from `checkpoint` on the revision that asks for it, 0: nothing."""

    progress: float  # of the stage, 0 to 1; schedules follow it
    time_is_up: bool
    turn: int  # of a measurement: what the next step is to be taken with
    stop: bool
    spent: bool  # the budget
    checkpoint: int
    profile: int
    restore: int
    measure: int
    settings: int
    pause: int


class Requests:
    """Requests to one launch of a run, and its pauses."""

    def __init__(self, folder: Path, ranks: Ranks, events: EventWriter, flips: Flips):
        self.folder, self.ranks, self.events, self.flips = folder, ranks, events, flips
        self.last: runfolder.Control | None = None  # the last good request, on rank 0
        self.warned = False  # of what now stands in its place
        self.paused_since: float | None = None
        self._is_first = True  # no step was begun in this launch
        self.held_s = cost.held_s(runfolder.read_manifest(folder))  # before this moment
        self.began = time.monotonic()  # a clock that is set right meanwhile spends nothing
        self._obeyed = {  # by earlier launches
            what: max((event.get("revision") or 0 for event in runfolder.read_events(folder, (kind,))), default=0)
            for what, kind in zip(REVISIONS, ("checkpoint", "profile", "restored", "measuring"))
        }

    def _read(self, step: int) -> runfolder.Control:
        """What is asked now. What is no request leaves the last one standing, whoever wrote it.

        A request that is numbered no higher than what was read or answered before was written by hand, or after the
        file was deleted: it is asked anew, under a number of its own.
        """
        found, last = runfolder.read_control(self.folder), self.last
        if last is None:
            last = runfolder.Control(max(self.flips.revision, runfolder.last_answered(self.folder)))
            is_old = found.revision < last.revision
        else:
            is_old = found.revision <= last.revision and found != last
        lost = found.problem or ("" if found.revision or not last.revision else f"{runfolder.CONTROL}: was deleted")
        if lost and not self.warned:
            message = f"{lost} -> what was asked before still holds; the next request replaces the file"
            print(f"warning: {message}", flush=True)
            self.events.write("warning", step, message=message)
        self.warned = bool(lost)
        if lost:
            found = last
        elif is_old:
            found = runfolder.write_control(
                self.folder, found.overlay, found.command, after=last, measure=found.measure
            )
        self.last = found
        return found

    def ask(self, step: int, progress: float, time_is_up: bool, turn: int) -> Requested:
        """What is to be done now; all ranks enter. Acknowledges a cold flip whose ranks have come so far.

        Args:
            progress, time_is_up, turn: rank 0's count.
        """
        message = torch.zeros(len(Requested._fields), dtype=torch.float64)
        if self.ranks.rank == 0:
            control, flips = self._read(step), self.flips
            # After the first step, or where none is to follow: that the ranks are there has to do then.
            if flips.trial and (not self._is_first or control.stop or control.paused or progress >= 1):
                flips.acknowledge(step)
            asked = {what: control.asked.get(what, 0) for what in REVISIONS}
            for what, revision in self._obeyed.items():
                asked[what] *= revision < asked[what]
                self._obeyed[what] = max(revision, asked[what])
            asked[runfolder.SETTINGS] *= asked[runfolder.SETTINGS] > flips.revision and not flips.trial  # one by one
            asked[runfolder.PAUSE] *= control.paused
            held_s = self.held_s + time.monotonic() - self.began
            spent = cost.is_spent(flips.setup.config.cost, held_s)
            message[:] = torch.tensor([progress, time_is_up, turn, control.stop, spent, *asked.values()])
        progress, time_is_up, turn, stop, spent, *asked = parallel.broadcast_control(self.ranks, message).tolist()
        return Requested(progress, bool(time_is_up), int(turn), bool(stop), bool(spent), *map(int, asked))

    def load_best(self) -> dict | None:
        """The best checkpoint's state, None where there is none; all ranks enter."""
        room = checkpoint.room_for(self.flips.setup.model)
        return checkpoint.load(self.folder, "best", ranks=self.ranks, allocate=room)

    def take_best(self, step: int) -> str:
        """Take the best checkpoint's weights where it can be read; which weights these are now. All ranks enter."""
        try:
            state = self.load_best()
        except RunError as error:  # there was no room for it beside the last one, or it was damaged
            self.events.write("warning", step, message=f"{error}; the last weights are reported instead")
            return "last"
        self.flips.setup.load_state_dict(state["setup"])
        return f"best, step {state['step']}"

    @outside_step
    def restore(self, step: int, revision: int) -> None:
        """Go on from the best checkpoint's weights and optimizer state, if there is one; all ranks enter."""
        setup, state, reason = self.flips.setup, None, None
        try:
            state = self.load_best()
            if state is None:
                reason = "there is none: no validation has been saved"
            elif (stage := Position.of(state["position"]).stage) != setup.stage:  # older ones name none
                state, reason = None, f"it is of the stage {stage}"
        except RunError as error:
            reason = str(error)
        if state:
            setup.load_state_dict(state["setup"])
        if self.ranks.rank == 0:
            told = {"applied": state is not None, "reason": reason, "from_step": state and state["step"]}
            self.events.write("restored", step, revision=revision, **told)

    @outside_step
    def hold(self, step: int, revision: int) -> None:
        """Wait for a moment."""
        if self.paused_since is None:
            self.paused_since = time.perf_counter()
            if self.ranks.rank == 0:
                self.events.write("paused", step, revision=revision)
        time.sleep(POLL_S)

    def leave(self, step: int, resumed: bool) -> float:
        """End the boundary; the seconds of pause in it.

        Args:
            resumed: training goes on, and does not end.
        """
        self._is_first = False
        if self.paused_since is None:
            return 0.0
        paused_s, self.paused_since = time.perf_counter() - self.paused_since, None
        if resumed and self.ranks.rank == 0:
            revision = self.last.asked.get(runfolder.RESUME)
            self.events.write("resumed", step, revision=revision, paused_s=round(paused_s, 3))
        return paused_s

    def now(self) -> float:
        """The clock of training [s], which stands still in a pause."""
        return time.perf_counter() if self.paused_since is None else self.paused_since
