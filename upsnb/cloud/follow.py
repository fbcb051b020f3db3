"""A run elsewhere followed to its end: pulled again and again, and on another machine where one is taken away.

A machine that was bid for stops whenever somebody bids more. What is lost with it is what the run did since its last
checkpoint that was pulled, never what it may cost: each machine's budget is what those before it have left.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from upsnb.cloud import launches, vast
from upsnb.errors import RunError
from upsnb.runs import checkpoint_index
from upsnb.runs.runfolder import MANIFEST, read_manifest

TAKEN = ("exited", "stopped", "offline")  # states of an instance; its own switch lets a run end first
MOST_FAILURES = 5  # machines in a row on which nothing began to train
GONE = "its machine was taken away"


class Failed(RunError):
    """A machine was paid for, and nothing came of it."""


def follow(name: str, every_s: float, say: vast.Say) -> bool:
    """Pull a run every so often until it has ended, then end the instance that it was on.

    Whatever cannot be asked now is asked again: a switch on the machine itself bounds what this may cost.

    Returns:
        Whether the notebook there finished.
    Raises:
        RunError: it cannot go on: its budget is spent, machine after machine failed, or it was on no rented one.
    """
    last, failures, trained = "", 0, False
    while True:
        folder, record = launches.find(name)
        try:
            if record["provider"] == "vast" and record["instance"] is None:
                state = _go_on(folder, record, say)
            else:
                state = _turn(folder, record, trained)
            trained = state.startswith("running")  # not known for a while is no other state
            if not state.startswith("starting"):
                failures = 0
        except launches.Spent as error:
            raise RunError(f"{name}: {error}; what was pulled is here") from None
        except RunError as error:
            state = f"not now: {error}"
            failures += isinstance(error, Failed)
            if failures == MOST_FAILURES:
                raise RunError(f"{name}: {failures} times in a row: {error} -> follow it again later") from None
        if state != last:
            say(f"{name}: {state}")
            last = state
        if state.startswith(("finished", "failed", "stopped")):
            if record["provider"] == "vast":
                say(launches.destroy(name, sure=True))
            return state.startswith("finished")
        if state != GONE:
            time.sleep(every_s)


def _turn(folder: Path, record: dict, trained: bool) -> str:
    """Pull what there is; what the run does there.

    Args:
        trained: when it was last known. One that is found stopped at first may have finished, and is started for a
            pull.
    """
    name, rented = folder.name, record["instance"]
    if rented is not None:
        found = vast.instance(rented)
        if found is None or found.get("actual_status") in TAKEN:
            if found is None or trained or record["host"] is None or not _came(name):
                launches.let_go(folder, record)
                return GONE
            record = launches.find(name)[1]  # it may have another port now
    state = launches.host(record).state(name)
    if not state.startswith("starting"):
        launches.host(record).pull(name, folder)
    if state.startswith("stopped") and rented is not None:  # it was away for a while
        launches.let_go(folder, record)
        return GONE
    return state.replace("\n", ": ", 1)


def _came(name: str) -> bool:
    """Start a stopped instance for what lies there, and pull it; False where nothing has ever begun on it.

    Raises:
        Failed: it cannot be had. Each start costs, so that this is no trouble of a moment.
    """
    try:
        launches.pull(name)
    except RunError as error:
        with contextlib.suppress(RunError):
            if launches.host(launches.find(name)[1]).state(name).startswith("starting"):
                return False
        raise Failed(str(error)) from None
    return True


def _go_on(folder: Path, record: dict, say: vast.Say) -> str:
    """Rent another machine for a run that has none, unless it needs none any more."""
    if (folder / MANIFEST).exists() and read_manifest(folder)["status"] == "finished":
        return "finished before its machine was gone; what its notebook drew afterwards may be missing"
    left = record["budget"] - record["spent"]
    (planned,) = launches.plan(record["needs"], round(left, 4), interruptible=record["interruptible"])
    where = "begins anew"
    if checkpoint_index.is_there(folder):
        where = f"goes on from step {checkpoint_index.step_of(checkpoint_index.read_index(folder), 'latest')}"
    say(f"{folder.name}: {where}, with ${left:.2f} of ${record['budget']:g}")
    try:
        launches.rent(folder, planned, record, say)
    except RunError as error:
        raise Failed(str(error)) from None
    return "goes on"
