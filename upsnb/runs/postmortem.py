"""How a launch of the workers ended, and why, in one sentence."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from upsnb.errors import OutOfMemory, RunError
from upsnb.runs import checkpoint_index, recovery, runfolder
from upsnb.runs.files import Shape, is_full, read_json
from upsnb.runs.ranks import log_name

# Of these a rank dies by itself. SIGABRT and SIGTERM also come from elsewhere: NCCL aborts ranks whose peer is gone,
# and torchrun terminates those that are left.
OWN_DEATHS = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
RELAUNCH = "relaunch"  # event with which workers end that are to be launched again
SUMMARY_ENTRY = re.compile(
    r"time +: (?P<time>\S+)\n.*?\n? *rank +: (?P<rank>\d+) \(local_rank: \d+\)\n +exitcode +: (?P<code>-?\d+) "
)


@dataclass(frozen=True)
class Ending:
    """What became of a launch."""

    status: str  # finished, failed, or relaunching: the workers ended so that they are launched with other settings
    cause: str | None = None  # of a failure, one sentence
    reason: str | None = None  # of a finished run, from its end event
    exit_code: int | None = None  # torchrun's, or the single rank's
    crashed: bool = False  # a relaunch from the last checkpoint may help
    hung: bool = False  # the supervisor ended it, because a rank stood still
    relaunch: dict | None = None  # the workers' own `relaunch` event: settings and revision
    out_of_memory: bool = False  # in a step: a relaunch with smaller microbatches may help


def examine(
    folder: Path, exit_code: int, log_start: int, num_ranks: int, last_word: Callable[[], str | None] = lambda: None
) -> Ending:
    """The verdict on workers that have all ended.

    Args:
        exit_code: of the single rank, or of several ranks' torchrun; negative for a signal.
        log_start: where this launch's output begins in worker.log.
        num_ranks: of this launch, on this machine.
        last_word: what other machines say of an end that no rank could write down.
    """
    if (whole := ended(folder, exit_code)) is not None:
        return whole
    if exit_code == 0:
        missing = "wrote no end event" if _end_event(folder) is None else "left no checkpoint"
        return Ending("failed", f"all ranks ended with exit code 0 but {missing}", None, 0)
    failures = read_failures(folder)
    full = [failure for failure in failures if failure["disk_full"]]
    if full or is_full(folder):
        who = f" ({_describe(full[0])})" if full else ""
        return Ending("failed", f"no space left on the disk of {folder}{who}", None, exit_code)  # nor for a relaunch
    starved = any(failure["type"] == OutOfMemory.__name__ for failure in failures)
    first = first_failures(folder, exit_code, log_start, num_ranks)
    cause = _cause(folder, first, exit_code, failures, last_word)
    return Ending("failed", cause, None, exit_code, crashed=True, out_of_memory=starved)


def ended(folder: Path, exit_code: int) -> Ending | None:
    """The end of ranks that came to theirs, by event and checkpoint, however their processes fell apart afterwards."""
    end = _end_event(folder)
    if end is None or not checkpoint_index.is_there(folder, end["step"]):
        return None
    if end["kind"] == RELAUNCH:
        return Ending("relaunching", None, None, exit_code, relaunch=end)
    return Ending("finished", None, end["reason"], exit_code)


def _cause(folder: Path, first: list[dict], exit_code: int, failures: list[dict], last_word) -> str:
    """The first thing that went wrong; other ranks fail as well once their peer is gone."""
    if said := own_death(folder, first) or last_word():
        return said
    if exit_code < 0 and not first:  # it found no rank that had failed: they do so once it is gone
        return f"torchrun was killed by {_signal_name(-exit_code)}"
    if failures:
        return _describe(failures[0])
    if first and first[0]["code"] < 0:
        return _killed(folder, first[0])
    if first:
        return f"rank {first[0]['rank']} ended with exit code {first[0]['code']}{_at_step(folder, first[0]['rank'])}"
    return f"torchrun ended with exit code {exit_code}, see {runfolder.LOG}"


def own_death(folder: Path, first: list[dict]) -> str | None:
    """Which of the first ranks that failed died by itself, and how, in one sentence; None: none did."""
    return next((_killed(folder, entry) for entry in first if -entry["code"] in OWN_DEATHS), None)


def first_failures(folder: Path, exit_code: int, log_start: int, num_ranks: int, node: int = 0) -> list[dict]:
    """Ranks of one machine that failed first: rank, code, time.

    Args:
        exit_code, log_start, num_ranks: as of `examine`.
        node: number of the machine among the run's.
    """
    if num_ranks == 1:
        entries = [{"rank": 0, "code": exit_code, "time": 0.0}]
    else:
        entries = summary(runfolder.log_tail(folder, 1 << 16, log_start, log_name(node)))
    # A rank that torchrun has to kill 30 s after another failed is no cause.
    first = [entry for entry in entries if entry["time"] - entries[0]["time"] <= 2]
    return [{**entry, "rank": node * num_ranks + entry["rank"]} for entry in first]


def summary(log: str) -> list[dict]:
    """Failed ranks from torchrun's closing summary, the first failure first: rank, code, time."""
    report = log.rpartition("ChildFailedError")[2]
    entries = [
        {
            "rank": int(match["rank"]),
            "code": int(match["code"]),
            "time": datetime.strptime(match["time"], "%Y-%m-%d_%H:%M:%S").timestamp(),
        }
        for match in SUMMARY_ENTRY.finditer(report)
    ]
    # torchrun prints its root cause last, and its times are whole seconds.
    return sorted(entries[-1:] + entries[:-1], key=lambda entry: entry["time"])


class _Failure(Shape):
    rank: int
    time: float
    step: int | None
    type: str
    message: str
    disk_full: bool


def read_failures(folder: Path) -> list[dict]:
    """What failing ranks wrote down, the earliest first."""
    failures = []
    for path in folder.glob("failure.rank*.json"):
        with contextlib.suppress(RunError):
            failures.append(read_json(path, None, _Failure))
    return sorted(failures, key=lambda failure: failure["time"])


def _end_event(folder: Path) -> dict | None:
    """The end or relaunch event of the last segment; those of earlier segments say nothing about it."""
    last = runfolder.read_events(folder, ("segment", "end", RELAUNCH))[-1:]
    return last[0] if last and last[0]["kind"] != "segment" else None


def raised(folder: Path) -> str | None:
    """What the first rank that failed wrote down, in one sentence."""
    return next((_describe(failure) for failure in read_failures(folder)), None)


def _describe(failure: dict) -> str:
    where = "before its first step" if failure["step"] is None else f"at step {failure['step']}"
    message = recovery.shortened(failure["message"])
    return f"rank {failure['rank']} raised {failure['type']} {where}: {message}".removesuffix(": ")


def _killed(folder: Path, entry: dict) -> str:
    name = _signal_name(-entry["code"])
    guess = " (out of memory?)" if name == "SIGKILL" else ""
    return f"rank {entry['rank']} was killed by {name}{guess}{_at_step(folder, entry['rank'])}"


def _at_step(folder: Path, rank: int) -> str:
    beat = runfolder.read_heartbeats(folder).get(rank)
    return f" at step {beat['step']}" if beat and beat["beats"] else " before its first step"


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
