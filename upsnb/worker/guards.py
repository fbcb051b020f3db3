"""What a run does by itself when training goes wrong: each act is a request like a panel's, and a `guard` event.

Rank 0 writes the request to control.json; all ranks obey it at the next step boundary, a `flip` event of the same
revision acknowledges it, and whoever watches the run can undo it. Every rank enters every method and decides alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from upsnb.config import RunConfig, setting
from upsnb.data.batch import Batch
from upsnb.errors import ConfigError, OutOfMemory, RunError
from upsnb.phases import BY_NAME, is_on, off_overlay
from upsnb.runs import recovery, runfolder
from upsnb.runs.events import EventWriter
from upsnb.training import workload
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup
from upsnb.worker.flips import WINDOW_STEPS, Flips
from upsnb.worker.guard_policies import OFFLOAD, MemoryHistory, OffloadTrial, Reference, overhead


class Guards:
    """The guards of one launch; what earlier launches did is read back from their events."""

    def __init__(self, folder: Path, setup: Setup, flips: Flips, ranks: Ranks, events: EventWriter):
        self.folder, self.setup, self.flips, self.ranks, self.events = folder, setup, flips, ranks, events
        self.expected: dict = {}  # settings that a failed step needs before it can be taken again
        self.last_error: str = ""
        self.skips = 0  # steps in a row that had no finite loss or gradient
        self.asked_bfloat16 = False
        self.memory = MemoryHistory()
        self.offload = OffloadTrial()
        self.reference: Reference | None = None
        self.judged_reference = False  # phase 3 is switched off, or warned of, once a run
        self.tail = runfolder.Tail(folder, ("flip", "flip_effect"))
        if ranks.rank == 0:
            self._remember()
            self._reference()  # a missing one is an error at the start, not after the first epoch

    @property
    def config(self) -> RunConfig:
        return self.setup.config

    def _remember(self) -> None:
        """Take up what earlier launches of this run did and measured."""
        for event in runfolder.read_events(self.folder, ("guard",)):
            if event["guard"] == "out_of_memory" and event["size"]:
                self.memory.take(event["action"], tuple(event["size"]), event["step"])
            self.judged_reference |= event["guard"] == "validation_reference"
        self.offload.judged = any(overhead(event) for event in self.tail.read())

    def _act(self, guard: str, action: str, reason: str, step: int, changes: dict | None = None, **numbers):
        if self.ranks.rank == 0:
            print(f"guard {guard}, step {step}: {action}: {reason}", flush=True)
            return recovery.act(self.folder, self.events, guard, action, reason, step, changes, **numbers)

    # -- after each step ----------------------------------------------------------------------------------------------

    def after_step(self, step: int, loss: Tensor, terms: dict[str, Tensor], norm: Tensor) -> None:
        """Look at a step that is done.

        Raises:
            RunError: loss or gradients stayed infinite or NaN and the config says to stop, or nothing else is left.
        """
        if self.setup.skipped in ("loss", "gradient"):
            self._count_skip(step, loss, terms, norm)
        elif not self.setup.skipped:  # an overflow that the scaler deals with neither counts nor ends a row
            self.skips = 0
        if self.ranks.rank == 0:
            self._grow(step)
            if self.config.guards.offload_overhead is not None:
                self._watch_offload(step)

    def _count_skip(self, step: int, loss: Tensor, terms: dict[str, Tensor], norm: Tensor) -> None:
        guards, training = self.config.guards, self.config.training
        bad = [term for term, value in terms.items() if not math.isfinite(value.item())]
        what = f"the loss term {', '.join(bad)}" if bad else f"the {self.setup.skipped}"
        reason = f"{what} is infinite or NaN, so the step changed no weight"
        self.skips += 1
        self._act("nonfinite", "skip", reason, step, in_a_row=self.skips, loss=loss.item(), gradient_norm=norm.item())
        if self.skips < guards.nonfinite_patience:
            return
        since = f"{what} is infinite or NaN since step {step - self.skips + 1}"
        is_float16 = training.amp and training.amp_dtype == "float16"
        if guards.nonfinite == "bfloat16" and is_float16 and not self.asked_bfloat16:
            self.skips, self.asked_bfloat16 = 0, True
            self._act("nonfinite", "bfloat16", since, step, {"training.amp_dtype": "bfloat16"})
            return
        advice = "lower optimizer.lr, or set training.amp: false"
        if guards.nonfinite == "bfloat16" and not is_float16:
            since += " and the step computes in " + (training.amp_dtype if training.amp else "float32") + " already"
        self._act("nonfinite", "stop", since, step)
        raise RunError(f"step {step}: {since} -> {advice}; the last good checkpoint is kept")

    def _grow(self, step: int) -> None:
        size = recovery.size_of(self.config.training)
        larger = self.memory.due(step, size, self.config.guards)
        if larger is None:
            return
        reason = f"{step - self.memory.since} good steps with microbatches of {size[0]}"
        self.memory.take("grow", size, step)
        self._act("out_of_memory", "grow", reason, step, recovery.overlay_of(larger), size=list(size))

    def _watch_offload(self, step: int) -> None:
        trial, limit = self.offload, self.config.guards.offload_overhead
        is_offloaded = self.config.training.cpu_offload_optimizer
        for event in self.tail.read():
            if event["kind"] == "flip":
                if trial.take_flip(event):
                    self._ask_offload("on", "another change came before the trial was measured", step)
                continue
            cost = overhead(event)
            if cost is None:
                continue
            tried, too_dear = trial.take_effect(event), cost[1] > limit
            said = (
                f"a step with optimizer offload takes {cost[0]:+.1%} (95 % interval {cost[1]:+.1%} to {cost[2]:+.1%}) "
                f"of one without, the limit is {limit:.1%}"
            )
            numbers = {"overhead": cost[0], "ci95": [cost[1], cost[2]], "effect_of": event["revision"]}
            if too_dear and is_offloaded:
                self._ask_offload("off", said, step, **numbers)
            elif tried and not is_offloaded:
                if too_dear:
                    self._act("offload_overhead", "keep off", said, step, **numbers)
                else:
                    self._ask_offload("on", said, step, **numbers)
        full = self.flips.after is None and len(self.flips.before) == WINDOW_STEPS
        if is_offloaded and full and trial.is_due():
            self._ask_offload("trial", "offload is on and has not been measured against a step without it", step)
            trial.revision = max(trial.own)

    def _ask_offload(self, action: str, reason: str, step: int, **numbers) -> None:
        self.offload.own.add(self._act("offload_overhead", action, reason, step, {OFFLOAD: action == "on"}, **numbers))

    # -- failures -----------------------------------------------------------------------------------------------------

    def attempt(self, batches: list[Batch], step: int, blame: Callable[[Exception], bool]) -> tuple | None:
        """What `Setup.step` returns; None where the step failed and other settings to take it again with will come.

        Args:
            blame: whether somebody else knows the cause of an error and takes it away.
        """
        try:
            return self.setup.step(batches, step)
        except Exception as error:
            if not (blame(error) or self._rescue(error, step)):
                raise
        self.setup.discard_step()  # out here, because inside the block the error still holds the step's tensors
        return None

    def _rescue(self, error: Exception, step: int) -> bool:
        """Ask for settings with which a failed step can be taken again; False where no guard is for this error.

        Raises:
            OutOfMemory: this process cannot go on, a relaunch with smaller microbatches may.
            RunError: compiling failed, and the config says to stop or other ranks may have gone on.
        """
        guards = self.config.guards
        if recovery.is_out_of_memory(error) and guards.out_of_memory:
            self._shrink(error, step)
            return True
        if recovery.is_compile_failure(error) and self.config.training.compile:
            if self.ranks.world_size > 1:  # they may have gone on
                raise self._not_compiled(recovery.in_one_line(error), step) from error
            self._compile_failed(recovery.in_one_line(error), step)
            return True
        return False

    def _shrink(self, error: Exception, step: int) -> None:
        changes, size = recovery.smaller(self.config), recovery.size_of(self.config.training)
        said = f"step {step + 1} with microbatches of {size[0]}: {recovery.in_one_line(error)}"
        if changes is None:
            raise OutOfMemory(f"{said} -> no microbatch is smaller; use a smaller model or recompute activations")
        if self.setup.updating:
            raise OutOfMemory(f"{said}, while weights were changing -> the step cannot be taken again") from error
        if self.ranks.world_size > 1:  # the others wait in a collective for this rank
            raise OutOfMemory(said) from error
        self.memory.take("shrink", size, step)
        self._act("out_of_memory", "shrink", said, step, changes, size=list(size))
        self.expected, self.last_error = changes, said

    def _compile_failed(self, reason: str, step: int) -> None:
        if self.config.guards.compile_failure == "stop":
            raise self._not_compiled(reason, step)
        changes = off_overlay(BY_NAME["compile"], self.flips.base)
        self._act("compile_failure", "off", reason, step, changes)
        self.expected, self.last_error = changes, reason

    @staticmethod
    def _not_compiled(reason: str, step: int) -> RunError:
        remedy = "set training.compile: false, or guards.compile_failure: off to go on without it"
        return RunError(f"compiling failed in step {step + 1}: {reason} -> {remedy}")

    def compile_ahead(self, step: int) -> bool:
        """Compile before the first step; True where compile is to be switched off.

        On a CPU kernels are compiled side by side then, and with the guard, ranks can still agree.

        Raises:
            RunError: compiling failed, and the config says to stop.
        """
        guarded, on_cpu = self.config.guards.compile_failure == "off", self.ranks.device.type == "cpu"
        if not self.config.training.compile or not (guarded or on_cpu):
            return False
        problem = ""
        try:
            self.setup.try_compile()
        except Exception as error:
            if recovery.is_out_of_memory(error) and self.config.guards.out_of_memory:
                return False  # the step finds out itself, and what to do then
            if not recovery.is_compile_failure(error):
                raise
            problem = recovery.in_one_line(error)
        failed = self.flips.failures(problem)
        if failed:
            self._compile_failed("; ".join(failed), step)
        return bool(failed)

    def confirm(self) -> None:
        """Check at the step boundary that what a failed step needs has come about.

        Raises:
            RunError: it was refused, so the step would fail again.
        """
        if not self.expected:
            return
        missing = [path for path, value in self.expected.items() if setting(self.config, path) != value]
        if missing:
            raise RunError(f"{self.last_error} -> {', '.join(missing)} could not be changed, see the last flip event")
        self.expected = {}

    # -- validation ---------------------------------------------------------------------------------------------------

    def validated(self, epoch: int, step: int, val_nrmse: dict[str, float]) -> None:
        """Compare a validation with the reference run's at the same epoch; switches phase 3 off, once."""
        if self.ranks.rank != 0 or self.judged_reference:
            return
        try:
            reference = self._reference()
        except (ConfigError, RunError) as error:  # named by a flip: the run goes on as it did without
            self.judged_reference = True
            self._act("validation_reference", "warning", str(error), step)
            return
        if reference is None:
            return
        tolerance = self.config.guards.validation_tolerance
        worse = {}
        for name, value in val_nrmse.items():
            expected = reference.at(name, epoch)
            if expected is not None and not value <= expected * (1 + tolerance):  # NaN is worse
                worse[name] = [value, expected]
        if not worse:
            return
        self.judged_reference = True
        phase = BY_NAME["loss_frequency"]
        said = ", ".join(f"{name} {value:.4g} against {expected:.4g}" for name, (value, expected) in worse.items())
        metric = workload.of(self.config).metric
        reason = f"validation {metric} after epoch {epoch} is more than {tolerance:.0%} above the reference's: {said}"
        numbers = {"epoch": epoch, "val_nrmse": {name: pair[0] for name, pair in worse.items()}}
        numbers["reference"] = {name: pair[1] for name, pair in worse.items()}
        if is_on(phase, self.config):
            changes = off_overlay(phase, self.flips.base)
            self._act("validation_reference", "off", reason, step, changes, phase=phase.name, **numbers)
        else:
            reason += "; phase loss_frequency is not on, so there is nothing to switch off"
            self._act("validation_reference", "warning", reason, step, **numbers)

    def _reference(self) -> Reference | None:
        named = self.config.guards.validation_reference
        if named is None:
            return None
        if self.reference is None or self.reference.named != named:
            self.reference = Reference(named, self.config, self.setup.stage)
        return self.reference
