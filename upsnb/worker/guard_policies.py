"""What guards decide from: the events of this run and of a reference run. Nothing here acts."""

from __future__ import annotations

import math

import numpy as np

from upsnb import config as configs
from upsnb.config import OPERATOR, GuardsConfig, RunConfig
from upsnb.errors import ConfigError
from upsnb.runs import recovery, runfolder

OFFLOAD = "training.cpu_offload_optimizer"


class MemoryHistory:
    """When the microbatch shrank and grew; the same from live acts and from the events of earlier launches."""

    def __init__(self):
        self.full: tuple[int, int] | None = None  # size before the first shrink
        self.since = 0  # step of the last change
        self.grown = False  # the last change
        self.relapses = 0  # times that a grown size ran out of memory again

    def take(self, action: str, size: tuple[int, int], step: int) -> None:
        """Note a change that was made at `size`."""
        if action == "shrink":
            if self.full is None or size not in recovery.sizes(*self.full):
                self.full, self.relapses = size, 0
            elif self.grown:
                self.relapses += 1
        self.grown, self.since = action == "grow", step

    def due(self, step: int, size: tuple[int, int], guards: GuardsConfig) -> tuple[int, int] | None:
        """The next larger size, once there were enough good steps; the wait doubles with every relapse."""
        if not guards.out_of_memory or self.full is None or size == self.full:
            return None
        chain = recovery.sizes(*self.full)
        if size not in chain:  # somebody chose another size
            self.full, self.relapses = None, 0
            return None
        if step - self.since < guards.regrow_steps * 2**self.relapses:
            return None
        return chain[chain.index(size) - 1]


class OffloadTrial:
    """Whether what optimizer offload costs has been measured, and the trial that does so where nobody flipped it.

    One definition: the `flip_effect` of a flip that changed offload and nothing else. A run that starts with offload
    on, or switched it on along with other settings, has no such flip; one is made, and undone if offload is worth it.
    """

    def __init__(self):
        self.judged = False
        self.revision: int | None = None  # of a trial whose effect is awaited
        self.own: set[int] = set()  # revisions that the guard asked for

    def is_due(self) -> bool:
        return not self.judged and self.revision is None

    def take_flip(self, event: dict) -> bool:
        """Note a flip; True where it makes a trial under way worthless and left offload off."""
        if event["applied"] and event["changes"].get(OFFLOAD) and event["revision"] not in self.own:
            self.judged = False
        interrupts = self.revision is not None and event["revision"] > self.revision and bool(event["changes"])
        if event["revision"] == self.revision and not event["applied"]:  # refused: do not ask again
            self.judged, self.revision = True, None
        if interrupts:
            self.revision = None
        return interrupts and OFFLOAD not in event["changes"]

    def take_effect(self, event: dict) -> bool:
        """Note a measured effect of offload alone; True where it is the trial's."""
        tried, self.judged = event["revision"] == self.revision, True
        if tried:
            self.revision = None
        return tried


def overhead(event: dict) -> tuple[float, float, float] | None:
    """What offload adds to a step, relative to the same run without it, with its 95 % interval.

    Args:
        event: a `flip_effect`; its ratio is the throughput after over before.
    Returns:
        None for any other event and for a flip that changed more than offload.
    """
    if event["kind"] != "flip_effect" or event["changes"].keys() != {OFFLOAD}:
        return None
    ratios = [event["ratio"], *event["ci95"]]
    without_over_with = [1 / ratio for ratio in ratios] if event["changes"][OFFLOAD] else ratios
    return without_over_with[0] - 1, min(without_over_with) - 1, max(without_over_with) - 1


class Reference:
    """Validation errors of another run in the same stage, by epoch: the same samples seen, whatever a step holds."""

    def __init__(self, named: str, config: RunConfig, stage: str = OPERATOR):
        """
        Raises:
            ConfigError: the folder is no run, has no validation, or its run was validated on other data.
        """
        self.named, setting = named, "guards.validation_reference"
        folder = runfolder.project_root() / named
        if not (folder / runfolder.CONFIG).is_file():
            raise ConfigError([f"{setting}: {folder} is no run folder -> name one, relative to the project"])
        evals = [e for e in runfolder.read_events(folder, ("eval",)) if e["split"] == "validation"]
        if not evals:
            raise ConfigError([f"{setting}: the run in {folder} has no validation yet -> wait for it, or name another"])
        theirs = configs.load(folder / runfolder.CONFIG)
        if self._measured(theirs) != self._measured(config):
            raise ConfigError([f"{setting}: the run in {folder} was validated on other data -> name one on the same"])
        self.curves: dict[str, dict[float, float]] = {}
        for event in evals:
            if (event["stage"] or OPERATOR) != stage:  # older ones name none
                continue
            for name, value in event["val_nrmse"].items():
                self.curves.setdefault(name, {})[event["epoch"]] = math.inf if value is None else value

    @staticmethod
    def _measured(config: RunConfig) -> tuple:
        evaluation = config.evaluation
        return (
            *(config.data.workload, config.data.workload_settings, config.data.datasets),
            *(config.data.split, config.training.time_stride),
            *(evaluation.fraction, evaluation.rollout, evaluation.symmetry_average),
        )

    def at(self, name: str, epoch: float) -> float | None:
        """A dataset's error after so many epochs, linear between two validations; None outside of them."""
        curve = sorted(self.curves.get(name, {}).items())
        if not curve or not curve[0][0] <= epoch <= curve[-1][0]:
            return None
        return float(np.interp(epoch, *zip(*curve)))
