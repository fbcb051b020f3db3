"""Runs as notebooks see them: what a run is doing, what it said, and what is asked of it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from upsnb import config as configs
from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.errors import ConfigError, RunFailed
from upsnb.rules import did_you_mean
from upsnb.runs import runfolder
from upsnb.runs.table import table as table  # of all runs, beside the one run below


class Run:
    """A run by its folder: what it is doing, what it said, and requests to it."""

    def __init__(self, folder: Path | str, process: subprocess.Popen | None = None):
        self.folder = Path(folder).absolute()
        self._process = process  # the supervisor, if this process started it; holds an attached run's pipe

    @classmethod
    def attach(cls, folder: Path | str) -> Run:
        """The run of a folder, from any process and at any time.

        Raises:
            RunError: the folder holds no run.
        """
        run = cls(folder)
        runfolder.read_manifest(run.folder)
        return run

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {self.status()})"

    @property
    def config(self) -> RunConfig:
        """The resolved config the run was started with."""
        return configs.load(self.folder / runfolder.CONFIG)

    @property
    def current_config(self) -> RunConfig:
        """The config it runs with now: the one it was started with, and all changes that were applied since."""
        return overlays.apply(self.config, self.manifest["applied"]["overlay"])

    @property
    def manifest(self) -> dict:
        """What was run, where, and how it went; read anew each time."""
        return runfolder.read_manifest(self.folder)

    def status(self) -> str:
        """One of starting, running, stopping, finished, failed, died."""
        return runfolder.state(self.folder, self._process)[0]

    def cause(self) -> str | None:
        """Why the run failed or died, in one sentence; None otherwise."""
        return runfolder.state(self.folder, self._process)[1]

    def events(self, kinds=None, rank: int = 0) -> list[dict]:
        """All events so far, or those of some kinds."""
        return runfolder.read_events(self.folder, kinds, rank)

    # -- requests ------------------------------------------------------------------------------------------------

    def update(self, overlay: dict) -> int:
        """Ask for settings to change at the next step boundary, on top of those that were changed before.

        Settings that cannot change between two steps (`phases.COLD`) make all ranks save and end; the run is launched
        again with them, and goes on where it was.

        Args:
            overlay: in any written form; `{}` changes nothing. `back_to_start` drops all changes.
        Returns:
            A revision. The `flip` event that says whether it was applied names it, or a later one asked for meanwhile.
        Raises:
            ConfigError: a setting that does not exist, or a contradiction; nothing was asked.
        """
        flat, base = overlays.flatten(overlay), self.config

        def merged(standing: dict) -> dict:
            overlays.apply(base, whole := overlays.stack(standing, flat), "the update")
            return whole

        return runfolder.write_control(self.folder, merged).revision

    def flip(self, phase: str, on: bool) -> int:
        """Ask for a phase or an extra to be switched on or off; returns the revision, as `update` does."""
        from upsnb import phases  # loads torch, which readers of a run do not need

        if phase not in phases.BY_NAME:
            raise ConfigError([f"{phase}: unknown phase -> {did_you_mean(phase, phases.BY_NAME)}"], "the flip")
        chosen = phases.BY_NAME[phase]
        return self.update(chosen.on if on else chosen.off)

    def back_to_start(self) -> int:
        """Ask for the config that the run was started with."""
        return runfolder.write_control(self.folder, {}).revision

    def checkpoint(self) -> int:
        """Ask for a checkpoint at the next step boundary; its `checkpoint` event names the revision returned here."""
        return runfolder.write_control(self.folder, None, runfolder.CHECKPOINT).revision

    def profile(self) -> int:
        """Ask all ranks to profile their next steps; the `profile` event names the revision returned here.

        It leaves `profile.rank<k>.json` and a trace of each rank; `profiling.report` makes sentences of them.
        """
        return runfolder.write_control(self.folder, None, runfolder.PROFILE).revision

    def pause(self) -> int:
        """Ask all ranks to wait at the next step boundary; the `paused` event names the revision returned here.

        Time limits stand still, flips and `stop` are obeyed. A run that is launched again waits as well: after a cold
        flip, and after a crash.
        """
        return runfolder.write_control(self.folder, None, runfolder.PAUSE).revision

    def resume(self) -> int:
        """Ask a paused run to go on; the `resumed` event names the revision returned here."""
        return runfolder.write_control(self.folder, None, runfolder.RESUME).revision

    def is_paused(self) -> bool:
        """Whether all ranks wait now; a pause that was asked for begins with the next step boundary."""
        last = self.events(("paused", "resumed", "segment", "end"))[-1:]
        return bool(last) and last[0]["kind"] == "paused" and self.status() in runfolder.ALIVE

    def stop(self) -> None:
        """Ask the run to finish its step, save and end; returns at once."""
        runfolder.write_control(self.folder, None, runfolder.STOP)

    # -- waiting and results -------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None, on_event: Callable[[dict], None] | None = None) -> str:
        """Return when the run has finished.

        Args:
            timeout: give up waiting after so many seconds; the run goes on.
            on_event: called with every event of rank 0, those before the call included.
        Raises:
            RunFailed: the run ended in any other way; carries the cause and the end of the log.
            TimeoutError: it still runs.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        tail = runfolder.Tail(self.folder)
        while True:
            # before the events, so that none of a run's last ones is missed
            status, cause = runfolder.state(self.folder, self._process)
            for event in tail.read() if on_event else ():
                on_event(event)
            if status == "finished":
                return status
            if status not in runfolder.ALIVE:
                raise RunFailed(self.folder, status, cause or "unknown", self.log_tail())
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.folder}: still {status} after {timeout:g} s")
            time.sleep(0.2)

    def load_model(self, which: str = "latest", device: str = "cpu"):
        """The trained model, in evaluation mode, with averaged weights where the run kept them.

        Args:
            which: "latest" or "best" checkpoint.
        Raises:
            RunError: there is no whole checkpoint yet.
        """
        from upsnb.training import setup  # loads torch, which readers of a run do not need

        return setup.load_model(self.folder, which, device)

    def log_tail(self, num_lines: int = 30) -> str:
        """Last lines of the workers' output."""
        return runfolder.log_tail(self.folder, num_lines)
