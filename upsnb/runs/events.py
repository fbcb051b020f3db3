"""What a run tells while it runs: events as JSON lines, and one line of heartbeat from each rank."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # typing's own is not enough for pydantic before Python 3.12

from upsnb.errors import RunError

Number = Annotated[float, Field(allow_inf_nan=False)]
Least0 = Annotated[Number, Field(ge=0)]
Above0 = Annotated[Number, Field(gt=0)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


def _or(kind: Any, default) -> Any:
    """A field that older versions did not write, and what it says where it is missing."""
    return Annotated[kind, Field(default=default)]


def _pair(kind: Any) -> Any:
    return Annotated[list[kind], Field(min_length=2, max_length=2)]


NAMING = {"unit": "samples", "metric": "nRMSE"}  # of fields: what is meant where nothing is said

_EVENT = {"kind": str, "time": Number, "step": Count, "stage": _or(str | None, None)}
_ANSWER = {
    "revision": Count,
    "applied": bool,
    "reason": _or(str | None, None),
    "changes": _or(dict[str, Any], {}),
    "phases": _or(dict[str, bool], {}),
}
FIELDS = {  # of each kind, beside those of every event; what reads events relies on these and on no others
    "segment": {"number": Count},
    "progress": {"message": str},
    "start": {
        "num_ranks": Count,
        "device": str,
        "parameters": Count,
        "samples_per_step": Count,
        "unit": _or(str, NAMING["unit"]),  # what throughput counts, under whatever key
        "metric": _or(str, NAMING["metric"]),  # what validations measured
        "datasets": dict[str, TypedDict("StartDataset", {"pairs": Count})],
        "phases_on": NotRequired[list[str]],
        "total_steps": _or(Count | None, None),
        "stage_from_step": _or(Count, 0),
        "stage_from_s": _or(Least0, 0.0),
        "time_limit_s": _or(Least0 | None, None),
        "build_s": _or(dict[str, Number], {}),
    },
    "first_step": {"since_launch_s": Number},
    "step": {
        "epoch": Count,
        "time_s": Number,  # of training, all launches
        "step_time_ms": Above0,
        "samples_per_s": Least0,
        "data_wait_ms": Least0,
        "peak_memory_gib": Least0,
        "loss": Number | None,
        "losses": dict[str, Number | None],
        "datasets": list[str],
        "steady": bool,
        "learning_rate": _or(Number | None, None),
    },
    "compile": {"graphs": Count, "duration_s": Least0},
    "eval": {
        "epoch": Count,
        "time_s": Number,
        "val_nrmse": Annotated[dict[str, Least0 | None], Field(min_length=1)],  # the metric, whatever it is
        "best": bool,
        "split": _or(str, "validation"),
    },
    "gate": {
        "against": str,  # the stage that this one was measured against
        "verdict": str,
        "ratio": _or(Number | None, None),  # of CRPS per validation sample, or of mean absolute errors
        "ci95": _or(_pair(Number | None), [None, None]),
        "mean_ratio": _or(Number | None, None),  # of nRMSE of the members' means
        "perturbed_ratio": _or(Number | None, None),  # of CRPS over that of perturbed frames
        "perturbed_ci95": _or(_pair(Number | None), [None, None]),
        "samples": _or(Count, 0),
    },
    "checkpoint": {"revision": _or(Count | None, None)},
    "telemetry": dict.fromkeys(  # an entry per local rank
        ("utilisation_percent", "power_w", "clock_mhz"), _or(list[Number | None], [])
    ),
    "flip": {
        **_ANSWER,
        "phases_on": NotRequired[list[str]],
        "skipped": _or(dict[str, str], {}),
        "cold": _or(bool, False),
        "duration_ms": _or(Number | None, None),
    },
    "flip_effect": {
        "revision": Count,
        "changes": _or(dict[str, Any], {}),
        "ratio": Above0,
        "ci95": _pair(Above0),
        "memory_gib": _pair(Least0),
    },
    "measuring": _ANSWER,
    "turn": {
        "revision": Count,
        "arm": Count,
        "num_rounds": Count,
        "median": _or(Number | None, None),
        "ci95": _or(_pair(Number | None), [None, None]),
    },
    "relaunch": {
        "revision": Count,
        "since": Number,  # Unix time of the request
        "changes": dict[str, Any],
        "overlay": dict[str, Any],
        "phases_on": list[str],
        "skipped": _or(dict[str, str], {}),
    },
    "paused": {"revision": _or(Count | None, None)},
    "resumed": {"revision": _or(Count | None, None), "paused_s": Least0},
    "restored": {
        "revision": Count,
        "applied": bool,
        "reason": _or(str | None, None),
        "from_step": _or(Count | None, None),
    },
    "profile": {"revision": _or(Count | None, None), "files": list[str]},
    "guard": {
        "guard": str,
        "action": str,
        "reason": str,
        "revision": _or(Count | None, None),
        "changes": _or(dict[str, Any], {}),
        "size": _or(_pair(Count) | None, None),  # microbatch and accumulation, where memory ran out
    },
    "warning": {"message": str},
    "end": {
        "reason": str,
        "train_time_s": Number,
        "epochs": Count,
        "peak_memory_gib": Annotated[list[Least0], Field(min_length=1)],  # of each rank
        "memory_kind": str,
    },
}


@cache
def _shape(kind: str) -> TypeAdapter:
    shape = TypedDict("Event", {**_EVENT, **FIELDS.get(kind, {})})
    return TypeAdapter(with_config(ConfigDict(strict=True, extra="allow"))(shape))


def naming(said: Mapping) -> dict[str, str]:
    """`unit`, what throughput counts, and `metric`, what errors are called, as a start event or a report says it."""
    return {key: said.get(key, of_fields) for key, of_fields in NAMING.items()}


def latest_start(events: Sequence[dict]) -> dict:
    """The latest start event: of what a run is; empty before there is one."""
    return next((event for event in reversed(events) if event["kind"] == "start"), {})


def events_path(folder: Path, rank: int = 0) -> Path:
    """Rank 0 speaks for the run; the others keep files of their own."""
    return Path(folder) / ("events.jsonl" if rank == 0 else f"events.rank{rank}.jsonl")


def _plain(value):
    """Numbers that JSON does not know: a NumPy scalar or a tensor of one element."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be an event field -> use numbers, texts, lists and mappings")


def without_nonfinite(value, path: str = "", found: list[str] | None = None):
    """Plain data with infinite and NaN numbers as None; their dotted paths are appended to `found`."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, dict):
        return {k: without_nonfinite(v, f"{path}.{k}" if path else str(k), found) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nonfinite(v, f"{path}.{i}", found) for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        if found is not None:
            found.append(path)
        return None
    return value


class EventWriter:
    """Appends events, one JSON line each, visible to readers at once; `stage` is the one that they are of."""

    def __init__(self, folder: Path, rank: int = 0, stage: str | None = None):
        self.stage = stage
        path = events_path(folder, rank)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        if size := os.fstat(self._fd).st_size:
            with mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) as told:
                whole = told.rfind(b"\n") + 1
            if whole < size:  # a crash left half a line, which the next event would be glued to
                os.ftruncate(self._fd, whole)

    def write(self, kind: str, step: int, **fields) -> None:
        """One event. Infinite and NaN numbers become null, and `nonfinite` lists their names."""
        event = {"kind": kind, "time": round(time.time(), 6), "step": step, "stage": self.stage, **fields}
        try:
            text = json.dumps(event, allow_nan=False, default=_plain)
        except ValueError:
            found: list[str] = []
            text = json.dumps({**without_nonfinite(event, "", found), "nonfinite": found}, default=_plain)
        os.write(self._fd, text.encode() + b"\n")  # one write call: a line is there whole or not at all

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Tail:
    """Reads events as they come; each call returns only what is new."""

    def __init__(self, folder: Path, kinds=None):
        self.path = events_path(folder)
        self._kinds = kinds
        self.offset = 0  # in the file, of what comes next

    def read(self) -> list[dict]:
        """New events; a last line without its newline waits for the next call."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunError(f"{self.path}: cannot be read ({error.strerror})") from None
        data = data[: data.rfind(b"\n") + 1]
        start, self.offset = self.offset, self.offset + len(data)
        lines = data.splitlines()
        if self._kinds:  # kind comes first in a line, so unwanted lines need no parsing
            starts = tuple(f'{{"kind": "{kind}"'.encode() for kind in self._kinds)
            lines = [line for line in lines if line.startswith(starts)]
        try:
            events = json.loads(b"[" + b",".join(lines) + b"]")  # 100,000 lines: 0.3 s, against 0.5 one by one
            if len(events) != len(lines):
                raise ValueError("two in a line")
        except (ValueError, RecursionError):
            events = map(_parsed, lines)
        events = [_whole(event) for event in events]
        odd = [number for number, event in enumerate(events) if event is None]
        whole = [event for event in events if event is not None]
        if odd and (not self._kinds or "warning" in self._kinds):
            near = whole[min(odd[0], len(whole) - 1)] if whole else {"time": time.time(), "step": 0}
            message = (
                f"{self.path.name}: {len(odd)} of {len(events)} lines after byte {start} are damaged or lack what "
                f"this version reads, the first is {lines[odd[0]][:80]!r} -> they are left out"
            )
            warning = {"kind": "warning", "time": near["time"], "step": near["step"], "stage": None, "message": message}
            whole.insert(odd[0], warning)
        return whole


def _parsed(line: bytes):
    """What a line says; None where it is damaged."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(line)


def _whole(found) -> dict | None:
    """An event with all fields of its kind, those too that its version did not write; None for anything else."""
    try:
        kind = found["kind"]
        return _shape(kind if kind in FIELDS else "").validate_python(found)
    except (KeyError, TypeError, ValidationError):
        return None


def read_events(folder: Path, kinds=None) -> list[dict]:
    """All events so far, or those of some kinds."""
    return Tail(folder, kinds).read()


def last_events(folder: Path, kinds: Sequence[str]) -> dict[str, dict]:
    """The last whole event of each kind; found from the file's end, so that a long run costs no more than a short one.

    A kind that never came is searched for in the whole file, at memory speed and without parsing.
    """
    try:
        with (
            open(events_path(folder), "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            last = {kind: _last(data, f'{{"kind": "{kind}",'.encode()) for kind in kinds}
            return {kind: event for kind, event in last.items() if event is not None}
    except (FileNotFoundError, ValueError):  # mmap refuses an empty file
        return {}


def _last(data: mmap.mmap, start: bytes) -> dict | None:
    before = len(data)
    while (begin := data.rfind(start, 0, before)) >= 0:
        before = begin
        end = data.find(b"\n", begin)
        if end >= 0 and (begin == 0 or data[begin - 1 : begin] == b"\n"):  # a whole line, not a text within one
            event = _whole(_parsed(data[begin:end]))
            if event is not None:  # else the one before it is the last that says something
                return event
    return None


def newest_events(folder: Path, kinds: Sequence[str] | None, num_bytes: int) -> list[dict]:
    """The events of some kinds whose lines begin in the last `num_bytes` of the file."""
    tail = Tail(folder, kinds)
    with contextlib.suppress(FileNotFoundError), open(tail.path, "rb") as file:
        before = os.fstat(file.fileno()).st_size - num_bytes
        if before > 0:
            file.seek(before - 1)
            file.readline()
        tail.offset = file.tell()
    return tail.read()


class Heartbeat:
    """A rank's sign of life: one line of fixed length, overwritten in place.

    Its state is `waiting` before the first step of a stage, `beating` while steps are taken, `done` after the last; and
    from the first compilation in a step or a flip until the next beat `compiling`, since `time`.
    """

    def __init__(self, folder: Path, rank: int):
        self._fd = os.open(Path(folder) / f"heartbeat.rank{rank}", os.O_WRONLY | os.O_CREAT, 0o644)
        self._pid, self._beats, self._first, self._last = os.getpid(), 0, -1, -1
        self.waiting()

    def waiting(self) -> None:
        """Say that this rank prepares a stage, which may take long and says nothing meanwhile."""
        self._write("waiting")

    def _write(self, state: str) -> None:
        self._state = state
        numbers = f"pid={self._pid:<8d} step={self._last:<12d} beats={self._beats:<12d} first={self._first:<12d}"
        os.pwrite(self._fd, f"{numbers} time={time.time():<18.6f} state={state:<9}\n".encode(), 0)

    @property
    def step(self) -> int | None:
        """The step of the last beat; None before the first."""
        return self._last if self._beats else None

    def beat(self, step: int) -> None:
        """Say that this rank lives and works on `step`; several beats a step tell a hang's place more closely."""
        if self._beats == 0:
            self._first = step
        self._beats += 1
        self._last = step
        self._write("beating")

    def compiling(self) -> None:
        """Say that this rank compiles; often in a row is as good as once."""
        if self._state != "compiling":
            self._write("compiling")

    def done(self) -> None:
        """Say that this rank has nothing left to do, so that its silence is no hang."""
        self._write("done")


def read_heartbeats(folder: Path) -> dict[int, dict]:
    """Last sign of life by rank: `pid, step, beats, first` (step of the first beat), `time` and `state`."""
    beats = {}
    for path in sorted(Path(folder).glob("heartbeat.rank*")):
        with contextlib.suppress(OSError, ValueError, KeyError):  # a rank that is just creating its file
            entry = dict(part.split("=", 1) for part in path.read_text().split())
            kinds = {"pid": int, "step": int, "beats": int, "first": int, "time": float, "state": str}
            beat = {key: kind(entry[key]) for key, kind in kinds.items()}
            beats[int(path.name.removeprefix("heartbeat.rank"))] = beat
    return beats


def last_step(folder: Path) -> int | None:
    """The last step that a rank of the last launch has begun; None before the first."""
    return max((beat["step"] for beat in read_heartbeats(folder).values() if beat["beats"]), default=None)
