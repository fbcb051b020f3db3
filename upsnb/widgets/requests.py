"""What a run is asked to do next: which requests are pending, which would be refused, and what presets come to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from upsnb import hardware as machines
from upsnb import overlays, phases
from upsnb.config import RunConfig, setting
from upsnb.errors import ConfigError, Problem
from upsnb.phases import Phase, Verdict
from upsnb.runs import runfolder
from upsnb.runs.handle import Run
from upsnb.widgets.history import History

AS_STARTED, BASELINE = "as started", "baseline"
FILES = ("conservative", "aggressive", "2gpu_baseline", "2gpu_optimized", "4gpu_baseline", "4gpu_optimized")


@dataclass(frozen=True)
class Obstacle:
    """Why a phase cannot be switched on."""

    kind: str
    problems: list[Problem]
    final: bool  # it is the machine's; otherwise changing other settings clears the way

    @property
    def sentence(self) -> str:
        """The first problem without its setting and remedy: `cannot run here: no backward pass on the CPU`."""
        more = len(self.problems) - 1
        return f"{self.kind}: {self.problems[0].found}" + (f" (and {more} more)" if more else "")


class PanelRequests:
    """Requests to one run, checked against its own machine before they are written."""

    def __init__(self, run: Run, history: History):
        self.run, self.history = run, history
        self.config: RunConfig = run.config  # as started; everything asked is a difference from it
        self.hardware = machines.Hardware(**run.manifest["hardware"])  # the run's, not this kernel's
        self._verdicts: dict[str, list[str]] = {}
        self._known: dict[str, RunConfig] = {}  # validating a config takes half a millisecond

    def configs(self) -> tuple[RunConfig, RunConfig]:
        """What the run does now, and what it was last asked to do."""
        folder = self.run.folder
        control = runfolder.read_control(folder)
        applied = runfolder.read_manifest(folder).get("applied", {}).get("overlay", {})
        wanted = runfolder.effective_overlay(folder, control) if self.history.end is None else applied
        return self._config(applied), self._config(wanted)

    def _config(self, overlay: dict) -> RunConfig:
        key = repr(overlay)
        if key not in self._known:
            try:
                known = overlays.apply(self.config, overlay)
            except ConfigError:  # a request written by hand; the run will refuse it and say why
                known = self.config
            self._known = {**dict(list(self._known.items())[-3:]), key: known}
        return self._known[key]

    def flip(self, phase: Phase, on: bool) -> dict:
        """What switching a phase asks of the run.

        Raises:
            ConfigError: it cannot run on this machine, or contradicts other settings.
        """
        obstacle = self.obstacle(phase, self.configs()[1]) if on else None
        if obstacle:
            raise ConfigError(obstacle.problems, phase.name)
        return phase.on if on else phases.off_overlay(phase, self.config)

    def is_cold(self, overlay: dict | None) -> bool:
        """Whether a request takes a relaunch; None is the one for what the run was started with."""
        desired = self.configs()[1]
        wanted = self.config if overlay is None else overlays.apply(desired, overlay)
        return any(map(phases.is_cold, overlays.difference(desired, wanted)))

    def value(self, path: str, text: str):
        """What somebody typed as a setting's value; nothing, or 0, empties one that may be empty.

        Raises:
            ConfigError: it is no number, none that the setting takes, or it contradicts others.
        """
        whole, text = not isinstance(setting(RunConfig(), path), float), text.strip()
        if overlays.may_be_empty(path) and text in ("", "0"):
            return None
        try:
            value = int(text) if whole else float(text)
            is_number = math.isfinite(value)
        except (ValueError, OverflowError):
            is_number = False
        if not is_number:
            remedy = "write a whole number" if whole else "write a number such as 0.001 or 1e-3"
            raise ConfigError([Problem(path, f"got {text!r}", remedy)], path)
        overlays.apply(self.configs()[1], {path: value}, path)
        return value

    def obstacle(self, phase: Phase, desired: RunConfig) -> Obstacle | None:
        """What stands against switching a phase on; None where nothing does."""
        problems = phases.unmet(phase, desired, self.hardware)
        if not problems:
            verdict = self.verdict(phase)
            if not verdict.stands_against or phases.unmet(phase, self.config, self.hardware):  # of then, not of now
                return None
            return Obstacle(verdict.kind, [Problem(phase.name, verdict.why, "leave it off")], final=True)
        try:
            overlays.apply(desired, phase.on)
        except ConfigError:
            return Obstacle("conflicts with another setting", problems, final=False)
        return Obstacle("cannot run here", problems, final=True)

    def verdict(self, phase: Phase) -> Verdict:
        """What the worker found the phase to be to this model; that it works, until the worker has begun."""
        self._verdicts = self._verdicts or self.run.manifest.get("verdicts", {})
        return Verdict(*self._verdicts.get(phase.name, (phases.WORKS,)))

    def presets(self) -> list[str]:
        """Those that this machine can run, without what they leave out themselves where it is missing."""
        return [AS_STARTED, BASELINE, *filter(self._can_run, FILES)]

    def _can_run(self, name: str) -> bool:
        try:
            config = overlays.load(_file(name))
        except ConfigError:  # a kernel that stands elsewhere
            return False
        if config.training.on_missing == "skip":
            config, _ = phases.skip_missing(config, self.hardware)
        return not machines.problems(config, self.hardware)

    def preset(self, name: str) -> tuple[dict, dict[str, str]]:
        """What a preset asks of this run: the settings that may change in it.

        Returns:
            Dotted settings, and the phases that cannot run on its machine with the reason of each.
        """
        if name == BASELINE:
            asked = phases.baseline_overlay(self.config)
        else:
            asked = phases.switchable(overlays.read(_file(name)))
        wanted = overlays.apply(self.config, asked, name)
        reached, left_out = phases.skip_missing(wanted, self.hardware, self.config)
        back = overlays.difference(wanted, reached)  # settings of phases that stay out
        return {**asked, **back}, left_out


def _file(name: str) -> Path:
    return runfolder.project_root() / "params" / f"{name}.yaml"
