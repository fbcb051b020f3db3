"""What a run has said so far: read once, then only what is new, and thinned out to what a screen can show."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from upsnb.phases import label
from upsnb.runs.events import FIELDS, Tail, naming
from upsnb.runs.throughput import TURN_ENDS, turns_with
from upsnb.widgets.progress import progress

MOST_BUCKETS = 300  # of a curve; each has a least and a greatest value, so a curve has at most 600 points
STEP_FIELDS = ("step", "time", "time_s", "loss", "peak_memory_gib", "learning_rate")
TELEMETRY_FIELDS = tuple(FIELDS["telemetry"])


class Table:
    """Columns of numbers that grow, and the buckets that are drawn of them. A gap is NaN."""

    def __init__(self, names):
        self.num_rows, self._columns = 0, {name: np.empty(1024) for name in names}
        self._bucket_size, self._buckets = 0, {}  # name: least, greatest and mean of the buckets that are complete

    def __getitem__(self, name: str) -> np.ndarray:
        return self._columns[name][: self.num_rows]

    def append(self, columns: dict[str, np.ndarray]) -> None:
        """Add rows; a column that is new, or missing this time, is NaN where nothing was given."""
        num_new = len(next(iter(columns.values())))
        rows = slice(self.num_rows, self.num_rows + num_new)
        for name in columns.keys() - self._columns.keys():
            self._columns[name] = np.full(self.num_rows, np.nan)
        for name, column in self._columns.items():
            if len(column) < rows.stop:
                column = np.concatenate([column, np.empty(max(rows.stop - len(column), len(column)))])
                self._columns[name] = column
            column[rows] = columns.get(name, np.nan)
        self.num_rows = rows.stop

    def cut(self, num_rows: int) -> None:
        """Forget the rows from `num_rows` on."""
        if num_rows < self.num_rows:
            self.num_rows, self._bucket_size = num_rows, 0

    def thinned(self, name: str, cycle: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(least, greatest, mean) of each bucket of consecutive rows, at most MOST_BUCKETS of them.

        Args:
            cycle: rows that belong together: datasets take turns, and a turn is what costs the same each time.
        """
        size = cycle
        while self.num_rows > size * MOST_BUCKETS:
            size *= 2
        if size != self._bucket_size:
            self._bucket_size, self._buckets = size, {}
        least, greatest, mean = self._buckets.get(name, (np.empty(0),) * 3)
        rest = self[name][len(mean) * size :]
        if len(rest):
            starts = np.arange(0, len(rest), size)
            present = np.isfinite(rest)
            counts = np.add.reduceat(present.astype(float), starts)
            sums = np.add.reduceat(np.where(present, rest, 0.0), starts)
            new = (
                np.fmin.reduceat(rest, starts),
                np.fmax.reduceat(rest, starts),
                np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0),
            )
            least, greatest, mean = (np.concatenate(pair) for pair in zip((least, greatest, mean), new))
            complete = self.num_rows // size
            self._buckets[name] = least[:complete], greatest[:complete], mean[:complete]
        return least, greatest, mean


@dataclass
class Flip:
    """One change that was asked of the run, what came of it, and what it did."""

    revision: int
    step: int
    applied: bool
    changes: dict
    phases: dict  # phase: whether it was switched on
    reason: str | None = None  # why it was refused
    cold: bool = False  # by a relaunch
    skipped: dict = field(default_factory=dict)  # phases that were asked for and left out, and why
    duration_ms: float | None = None
    effect: dict | None = None  # the `flip_effect` event
    in_turns: bool = False  # it is only measured, and the run goes on as before
    turn: dict = field(default_factory=dict)  # the latest `turn` event

    @property
    def what(self) -> str:
        """`bf16`, `compile off`, `batch size 32`; with `, in turns` where it is only measured."""
        parts = [label(name) if on else f"{label(name)} off" for name, on in self.phases.items()]
        parts = parts or [f"{label(path.rpartition('.')[2])} {plain(value)}" for path, value in self.changes.items()]
        if self.in_turns and not self.changes:
            parts = ["two equal arms"]
        elif not parts:
            parts = ["request"]  # a refused one; the event does not say what was asked
        said = ", ".join(parts) if len(parts) <= 3 else f"{parts[0]} and {len(parts) - 1} more"
        return said + ", in turns" * self.in_turns

    @property
    def why(self) -> str:
        """Why it was refused, without the heading of a list of problems; empty if it was not."""
        lines = (self.reason or "").splitlines()
        return " ".join(line.strip() for line in (lines[1:] or lines))

    @property
    def measured(self) -> str:
        """`x1.31 [1.27, 1.35], memory -21 %`; empty until it is measured."""
        if self.effect is None:
            return ""
        before, after = self.effect["memory_gib"]
        low, high = self.effect["ci95"]
        memory = f", memory {100 * (after / before - 1):+.0f} %".replace("-", "\N{MINUS SIGN}") if before else ""
        return f"\N{MULTIPLICATION SIGN}{self.effect['ratio']:.2f} [{low:.2f}, {high:.2f}]{memory}"

    @property
    def measuring(self) -> str:
        """`measuring`, and how far that is."""
        if self.turn.get("median") is None:
            return "measuring"
        said = f"measuring, round {self.turn['num_rounds'] + 1}: \N{MULTIPLICATION SIGN}{self.turn['median']:.2f}"
        low, high = self.turn["ci95"]
        return said if None in (low, high) else f"{said} [{low:.2f}, {high:.2f}] so far"


@dataclass
class History:
    """A run's past and present. `read` brings it up to date; nothing is read twice."""

    folder: Path
    start: dict = field(default_factory=dict)  # the latest `start` event
    end: dict | None = None
    last: float = 0.0  # of the latest one
    num_launches: int = 0
    epoch: int = 0
    flips: list[Flip] = field(default_factory=list)
    paused: bool = False
    relaunching: bool = False  # for a cold flip, until that is answered
    evaluations: list[dict] = field(default_factory=list)  # `eval` events
    best_step: int | None = None  # of the best of them
    gates: dict[str, dict] = field(default_factory=dict)  # by stage, its `gate` event
    message: str = ""  # what the run said last, in words
    warning: dict | None = None  # the latest `warning` or `guard` event

    def __post_init__(self):
        self.folder = Path(self.folder)
        self.steps, self.telemetry = Table(STEP_FIELDS), Table(("time", *TELEMETRY_FIELDS))
        self.terms: list[str] = []  # names of loss terms seen so far
        self._tail = Tail(self.folder)
        self._turn_ends: list[dict] = []
        self._by_revision: dict[int, Flip] = {}  # in order; those that changed nothing too
        self._restored: dict[int, dict] = {}  # revision: `restored` event

    def read(self) -> list[dict]:
        """Take in what is new since the last call; returns it."""
        events = self._tail.read()
        steps, telemetry = [], []
        for event in events:
            kind = event["kind"]
            if kind == "step":
                if steps and event["step"] <= steps[-1]["step"]:  # another launch, from a checkpoint before
                    self._take_steps(steps)
                    steps = []
                steps.append(event)
            elif kind == "telemetry":
                telemetry.append(event)
            else:
                self._take(kind, event)
        self._take_steps(steps)
        if telemetry:
            columns = {name: np.array([_mean(e[name]) for e in telemetry]) for name in TELEMETRY_FIELDS}
            self.telemetry.append({"time": np.array([e["time"] for e in telemetry]), **columns})
        if events:
            self.last = max(self.last, events[-1]["time"])
        return events

    def _take_steps(self, steps: list[dict]) -> None:
        if not steps:
            return
        # A relaunch repeats the steps after its checkpoint: what it says of them replaces what was said before.
        self.steps.cut(int(np.searchsorted(self.steps["step"], steps[0]["step"])))

        def column(name: str) -> np.ndarray:
            return np.array([event[name] for event in steps], float)  # None becomes NaN

        columns = {name: column(name) for name in STEP_FIELDS}
        duration_ms, steady = column("step_time_ms"), column("steady") > 0
        rate = column("samples_per_s")
        columns["seconds"] = np.where(steady, duration_ms / 1e3, np.nan)
        columns["samples"] = rate * columns["seconds"]
        columns["rate"] = np.where(steady, rate, np.nan)
        columns["rate unsteady"] = np.where(steady, np.nan, rate)
        with np.errstate(invalid="ignore", divide="ignore"):
            columns["wait"] = 100 * column("data_wait_ms") / duration_ms
        for term in {term for event in steps for term in event["losses"]}:
            columns[f"term {term}"] = np.array([event["losses"].get(term) for event in steps], float)
            if term not in self.terms:
                self.terms = sorted([*self.terms, term])
        self.steps.append(columns)
        self.epoch = steps[-1]["epoch"]

    def _take(self, kind: str, event: dict) -> None:
        if kind in TURN_ENDS:
            self._turn_ends.append(event)
        if kind == "start":
            self.start, self.end, self.paused = event, None, False
        elif kind == "segment":
            self.num_launches += 1
        elif kind in ("flip", "measuring"):
            self._take_flip(event)
        elif kind in ("flip_effect", "turn"):
            if event["revision"] in self._by_revision:
                setattr(self._by_revision[event["revision"]], kind.removeprefix("flip_"), event)
        elif kind in ("paused", "resumed"):
            self.paused = kind == "paused"
        elif kind == "relaunch":
            self.relaunching = True
        elif kind == "eval":
            self.evaluations.append(event)
            self.best_step = event["step"] if event["best"] else self.best_step
        elif kind == "gate":
            self.gates[event["stage"] or ""] = event
        elif kind == "restored":
            self._restored[event["revision"]] = event
        elif kind == "end":
            self.end, self.paused, self.relaunching = event, False, False
        elif kind == "progress":
            self.message = event["message"]
        elif kind in ("warning", "guard"):
            self.warning = event

    def _take_flip(self, event: dict) -> None:
        fields = Flip.__dataclass_fields__.keys() & {"step", *FIELDS[event["kind"]]}
        flip = Flip(**{name: event[name] for name in fields})
        flip.in_turns, before = event["kind"] == "measuring", self._by_revision.get(flip.revision)
        if flip.in_turns and before is not None:  # over, before there was anything to measure
            before.applied, before.reason = flip.applied, flip.reason
            return
        self._by_revision[flip.revision], self.relaunching = flip, False
        if flip.in_turns or flip.changes or flip.skipped or not flip.applied:
            self.flips.append(flip)

    def answer(self, revision: int, what: str) -> str:
        """What came of a request; one of several in quick succession is answered together with the last."""
        if revision in self._restored:
            event = self._restored[revision]
            if not event["applied"]:
                return f"{what}: refused. {event['reason']}"
            return f"{what}: the weights of step {event['from_step']}, at step {event['step']}"
        flip = next((flip for flip in self._by_revision.values() if flip.revision >= revision), None)
        if flip is None:
            if self.end is not None:
                return f"{what}: requested too late, the run has ended"
            return f"{what}: " + ("relaunching from a checkpoint" if self.relaunching else "requested")
        if not flip.applied:
            return f"{what}: refused. {flip.why}"
        if flip.in_turns:
            return f"{what}: {flip.measured or flip.measuring}"
        return f"{what}: applied at step {flip.step:,}" + ("" if flip.changes else ", and nothing had to change")

    # -- derived ----------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The last step that was taken."""
        return int(self.steps["step"][-1]) if self.steps.num_rows else int(self.start.get("step", 0))

    @property
    def time_s(self) -> float:
        """Training time so far."""
        return float(self.steps["time_s"][-1]) if self.steps.num_rows else 0.0

    @property
    def unit(self) -> str:
        """What throughput counts."""
        return naming(self.start)["unit"]

    @property
    def metric(self) -> str:
        """What validations measure."""
        return naming(self.start)["metric"]

    @property
    def cycle(self) -> int:
        """Steps in a turn of all datasets."""
        return max(len(self.start.get("datasets", ())), 1)

    def progress(self) -> tuple[float, float]:
        """(share done, seconds of training left)."""
        if self.end is not None:
            return 1.0, 0.0
        if not self.step:
            return 0.0, math.inf
        return progress(self.start, self.step, self.time_s)

    def rate(self) -> float:
        """Samples, or other units, per second over the latest steady steps; NaN before there are some."""
        since = self.flips[-1].step if self.flips else -1
        recent = slice(-40 * self.cycle, None)
        chosen = self.steps["step"][recent] > since
        if not chosen.any():
            return math.nan
        samples = np.nansum(self.steps["samples"][recent][chosen])
        seconds = np.nansum(self.steps["seconds"][recent][chosen])
        return float(samples / seconds) if seconds else math.nan

    @property
    def num_comparable(self) -> int:
        """Steady steps since the last change: what the next flip's effect is measured against."""
        since = next((flip.step for flip in reversed(self.flips) if flip.changes), -1)
        return int(np.isfinite(self.steps["seconds"][self.steps["step"] > since]).sum()) if self.steps.num_rows else 0

    def turns(self, axis: str) -> list[tuple[float, float]]:
        """Where on the axis a change that was measured in turns was on."""
        places = [(begin, self.step if end is None else end) for begin, end in turns_with(self._turn_ends)]
        return [(self.position(begin, axis), self.position(end, axis)) for begin, end in places]

    def position(self, step: float, axis: str) -> float:
        """Where a step stands on the axis `step` or `time`."""
        if axis == "step" or not self.steps.num_rows:
            return float(step)
        return float(np.interp(step, self.steps["step"], self.steps["time_s"]))


def letter(index: int) -> str:
    """A, B and so on to Z, then AA: flips have letters, because numbers are phases."""
    return (letter(index // 26 - 1) if index >= 26 else "") + chr(ord("A") + index % 26)


def plain(value) -> str:
    """A setting's value as one would write it in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "empty", True: "on", False: "off"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _mean(values) -> float:
    """Over the devices that told; NaN if none did."""
    told = [value for value in values if value is not None]
    return sum(told) / len(told) if told else math.nan
