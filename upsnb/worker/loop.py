"""The training loop: steps, events, validation, checkpoints, and the messages that keep all ranks in step."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from upsnb import config as configs
from upsnb import hardware, overlays
from upsnb.config import RunConfig, StageConfig
from upsnb.data import audit
from upsnb.models.surrogate import count_parameters
from upsnb.phases import names_on
from upsnb.profile.recorder import Profiler, parameters_by_part
from upsnb.runs import runfolder
from upsnb.runs.runfolder import EventWriter, Heartbeat, Launch
from upsnb.spans import DATA, outside_step, span
from upsnb.training import checkpoint, evaluation, parallel, preflight, stages
from upsnb.training.compiling import CompileClock, CompileCounter
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup, idle_settings
from upsnb.training.timing import StepClock
from upsnb.training.workload import of as workload_of
from upsnb.worker import staging
from upsnb.worker.flips import CHANGED, RELAUNCH, Flips
from upsnb.worker.guards import Guards
from upsnb.worker.measuring import Measuring
from upsnb.worker.position import HandOver, Position
from upsnb.worker.requests import Requests
from upsnb.worker.step_log import StepLog


def train(
    config: RunConfig,
    folder: Path,
    ranks: Ranks,
    events: EventWriter,
    heartbeat: Heartbeat,
    launch: Launch | None = None,
) -> None:
    """Train as the config says, evaluate, and leave a checkpoint, evaluation.json and an end event.

    All ranks enter; rank 0 writes. Stages follow each other. Returns when training has finished or was asked to stop;
    or, with a checkpoint and a relaunch event alone, when the ranks are to be launched again with other settings.

    Args:
        launch: what was changed since the run was started, as the supervisor says; empty: nothing.
    """
    launch = launch or Launch()
    stage, handed = staging.first_stage(overlays.apply(config, launch.overlay), folder, ranks), None
    while stage is not None:
        loop = Loop(config, folder, ranks, events, heartbeat, launch, stage, handed)
        try:
            stage, handed = loop.train()
            overlay = overlays.difference(config, loop.config)  # a cold flip, if there was one, is done
            launch = replace(launch, overlay=overlay, revision=loop.flips.revision, cold_flip=None)
            loop.saver.close()
        finally:
            loop.profiler.close()  # these are all that is the process's
            loop.compiling.close()
            loop.setup.tf32.set(False)
        del loop  # with its data, weights and moments, before the next stage builds its own
        parallel.release(ranks.device)


class Loop:
    """One stage of one segment of a run, on one rank."""

    def __init__(
        self,
        base: RunConfig,
        folder: Path,
        ranks: Ranks,
        events: EventWriter,
        heartbeat: Heartbeat,
        launch: Launch,
        stage: str,
        handed: HandOver | None,
    ):
        self.folder, self.ranks, self.events, self.heartbeat, self.launch = folder, ranks, events, heartbeat, launch
        self.launched, events.stage = time.perf_counter(), stage
        config = overlays.apply(base, launch.overlay)
        hardware.check_runnable(config, hardware.detect())
        weights = handed.weights if handed else None
        if handed:
            heartbeat.waiting()
        self.setup = Setup.build(config, runfolder.project_root(), ranks, self._report_progress, stage, weights)
        self.flips = Flips(base, self.setup, ranks, events, folder, launch)
        self.requests = Requests(folder, ranks, events, self.flips)
        self.profiler = Profiler(folder, self.setup, ranks, events, self.flips.forget_peak)
        self.position = handed.position if handed else Position(stage=stage)
        self.clock, self.compiled = StepClock(ranks.device), CompileCounter()
        self.measuring = Measuring(self.flips)
        self.log = StepLog(events, self.clock, self.measuring.observe)
        self.announced_first = False
        self.guards = Guards(folder, self.setup, self.flips, ranks, events)
        self.saver = checkpoint.Saver(folder, ranks, events, self._beat, config.training.stall_timeout_s)
        if handed is None:
            self._resume()
        self._plan()
        self.cached = staging.keep_forecasts(self.setup, folder, self._report_progress)
        self.log.time_before_s = self.position.elapsed_s
        self.epoch_saved_step = self.position.step
        self.validated_step = -1
        self._announce()
        self.compiling = CompileClock(heartbeat.compiling)  # last: nothing below can fail and leave it listening

    @property
    def config(self) -> RunConfig:
        """What the run does now; a flip changes it."""
        return self.setup.config

    @property
    def stage(self) -> StageConfig:
        """Length, optimizer and schedule of what is trained now."""
        return stages.settings(self.config, self.setup.stage)

    def _plan(self) -> None:
        """Lengths that follow from batch, accumulation and epochs, as if nothing were changed on the way."""
        training = self.config.training
        steps_per_epoch = self.setup.loader.schedule.num_microbatches // training.accum_steps
        self.total_steps = self.position.stage_from_step + self.stage.epochs * steps_per_epoch
        samples = training.batch_size * training.accum_steps * self.ranks.world_size
        self.samples_per_step = samples * workload_of(self.config).units_per_pair()

    # -- start ------------------------------------------------------------------------------------------------------

    def _report_progress(self, message: str) -> None:
        print(message, flush=True)
        if self.ranks.rank == 0:
            self.events.write("progress", 0, message=message)

    def _resume(self) -> None:
        room = checkpoint.room_for(self.setup.model)
        state = checkpoint.load(self.folder, ranks=self.ranks, allocate=room) if self.config.checkpoint.resume else None
        if state is None:
            for doubt in self.setup.begin(self._report_progress):
                self._warn(doubt)
            return
        with checkpoint.as_saved(f"{self.folder}/{state['name']}"):
            self.setup.load_state_dict(state["setup"])
            self.position = Position.of(state["position"])
            saved = configs.parse(state["config"], "the checkpoint's config").training
            self.position.find(saved.batch_size * saved.num_gpus, self.setup.loader.schedule)
        self.saver.last = state["name"]
        for doubt in checkpoint.doubts(state, self.setup.datasets) if self.ranks.rank == 0 else ():
            self._warn(doubt)
        self._report_progress(f"resumed at step {self.position.step}")

    def _announce(self) -> None:
        setup, datasets, about = self.setup, self.setup.datasets, workload_of(self.config)
        if self.ranks.rank != 0:
            return
        environment = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
        runfolder.update_segment(self.folder, self.launch.number, environment_seen=environment)
        verdicts = preflight.verdicts(setup.objective, self.config, hardware.detect())
        runfolder.update_manifest(self.folder, stage=setup.stage, verdicts=verdicts)
        self.events.write(
            "start",
            self.position.step,
            num_ranks=self.ranks.world_size,
            device=self.ranks.device.type,
            phases_on=names_on(self.config),
            parameters=count_parameters(setup.model),
            operator_parameters=parameters_by_part(setup.model)["operator"],
            total_steps=self.total_steps,
            stage_from_step=self.position.stage_from_step,
            stage_from_s=self.position.stage_from_s,
            time_limit_s=self.config.limit_s(setup.stage),
            samples_per_step=self.samples_per_step,
            unit=about.unit,
            metric=about.metric,
            residency=setup.loader.residency,
            num_threads=torch.get_num_threads(),
            build_s=setup.build_s,
            cache=self.cached,
            nccl_environment=environment,
            datasets={
                name: {
                    **dataset.about,
                    "samples": {split: len(rows) for split, rows in dataset.splits.items()},
                    "pairs": len(setup.loader.schedule.pairs[name]),
                }
                for name, dataset in datasets.items()
            },
        )
        for message in idle_settings(setup):
            self._warn(message)

    def _warn(self, message: str) -> None:
        print(f"warning: {message}", flush=True)
        self.events.write("warning", self.position.step, message=message)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def train(self) -> tuple[str | None, HandOver | None]:
        """Train, and end the stage or the run; the next stage and what it starts from, or nothing."""
        self.run_started = time.perf_counter()
        reason = self.position.ended or self.run()
        if reason == RELAUNCH:
            self.leave()
            return None, None
        following = stages.following(self.config, self.setup.stage)
        if reason in runfolder.CUT_SHORT or following is None:
            self.finish(reason)
            return None, None
        return following, self.hand_over(reason, following)

    def run(self) -> str:
        """Train to the end of the stage; why it ended: epochs, time, patience, stopped, budget or a relaunch."""
        self.clock.start()
        reason = self._agree()
        if reason is None and self.guards.compile_ahead(self.position.step):
            reason = self._agree()
        while reason is None:
            reason = self._epoch()
        self._change(partial(self.measuring.end, "training ended"))
        return reason

    def _epoch(self) -> str | None:
        training, position = self.config.training, self.position
        batches = self.setup.loader.epoch(position.epoch, position.microbatch, position.losses)
        left = self.setup.loader.schedule.num_microbatches - position.microbatch
        for _ in range(left // training.accum_steps):
            self._beat()  # before and after reading: a rank whose disk hangs stands one beat behind the others
            waiting = time.perf_counter()
            with span(DATA):
                microbatches = [next(batches) for _ in range(training.accum_steps)]
            wait_ms = 1e3 * (time.perf_counter() - waiting)
            is_done = self._step(microbatches, wait_ms)
            self.saver.poll()
            if is_done and position.step % self.config.checkpoint.interval == 0:
                self._save()
            schedule = self.setup.loader.schedule
            reason = self._agree()
            if reason is not None:
                return reason
            self.guards.confirm()
            if not is_done or self.setup.loader.schedule is not schedule:
                return None  # go on at the same place of the epoch
        position.epoch, position.microbatch = position.epoch + 1, 0
        finished = position.epoch >= self.stage.epochs
        due = finished or position.epoch % self.config.evaluation.every_epochs == 0
        impatient = self._validate() if due else None
        # At most one of these per interval: where an epoch takes seconds, not each end of one is worth a save.
        if not (finished or impatient) and position.step - self.epoch_saved_step >= self.config.checkpoint.interval:
            self._save()
        return "epochs" if finished else impatient

    def _agree(self) -> str | None:
        """Obey what is asked for at this step boundary, and wait while the run is to pause; why training ends, if so.

        Rank 0 reads clock and control file; all ranks learn the same and decide the same.
        """
        to_profile, step = 0, self.position.step
        while True:
            requested = self.requests.ask(step, *self._progress(), self.measuring.due(step))
            self.progress, to_profile = requested.progress, requested.profile or to_profile
            if requested.stop or requested.spent:
                return self._go_on("stopped" if requested.stop else "budget")
            if requested.checkpoint:
                self._save(revision=requested.checkpoint)
            if requested.restore:
                self.saver.wait()  # the best may be on its way to the disk
                self.requests.restore(step, requested.restore)
                self.clock.interrupt()
            if requested.settings or requested.measure:
                self._change(partial(self.measuring.end, "another request came"))
            asked = self.requests.last  # None on other ranks
            flip = partial(self.flips.apply, requested.settings, asked and asked.overlay)
            if requested.settings and self._change(flip) == RELAUNCH:
                return self._go_on(RELAUNCH)
            if requested.measure:
                self._change(partial(self.measuring.begin, requested.measure, asked and asked.measure))
            elif requested.turn != self.measuring.arm and not requested.settings:  # which have ended all turns
                self._change(partial(self.measuring.take_turn, requested.turn))
            if not requested.pause:
                break
            self.log.drain(everything=True)  # times of these steps are those before the pause
            self._beat()
            self.requests.hold(step, requested.pause)
        self._go_on(None)
        if self.profiler.at_boundary(step, to_profile):
            self.clock.settle(step)
        if requested.time_is_up:
            return "time"
        return "epochs" if self.position.epoch >= self.stage.epochs else None  # of a run resumed at its end

    def _progress(self) -> tuple[float, bool]:
        """How far the stage is, 0 to 1, by epochs or by the clock; and whether the clock says that it is over."""
        limit = self.config.limit_s(self.setup.stage)
        turns = self.position.microbatch / self.setup.loader.schedule.num_microbatches
        by_epochs = (self.position.epoch + turns) / self.stage.epochs
        by_clock = (self._elapsed() - self.position.stage_from_s) / limit if limit else 0.0
        return max(by_epochs, by_clock), by_clock >= 1

    def _go_on(self, reason: str | None) -> str | None:
        """Leave the boundary; after a pause no clock has run meanwhile."""
        paused_s = self.requests.leave(self.position.step, resumed=reason is None)
        if paused_s:
            self._stand_still(paused_s)
            self.launched += paused_s
            self.clock.settle(self.position.step)
        return reason

    def _stand_still(self, seconds: float) -> None:
        """Take time that has just passed out of the time of training."""
        self.run_started += seconds
        self.log.time_before_s -= seconds

    def _change(self, change: Callable[[int], str]) -> str:
        """Let settings change at this step, here and on all other ranks; what `change` found to do."""
        self.log.drain(everything=True)  # what was measured before belongs to the config before
        old_size, started = self.setup.loader.schedule.global_size, time.perf_counter()
        found = change(self.position.step)
        if self.requests.paused_since is None:  # in a pause time stands still anyway
            self._stand_still(time.perf_counter() - started)  # it may compile for longer than training was to take
        self.compiling.take_s()
        if found == CHANGED:
            self._plan()
            self.position.find(old_size, self.setup.loader.schedule)
            self.clock.settle(self.position.step, self.measuring.warmup_steps)
        return found

    def _beat(self) -> None:
        self.heartbeat.beat(self.position.step)

    def _elapsed(self) -> float:
        return self.position.elapsed_s + self.requests.now() - self.run_started

    def _step(self, batches: list, wait_ms: float) -> bool:
        """One optimizer step; False where it failed and a guard has asked for settings to take it again with."""
        setup, position = self.setup, self.position
        self._beat()
        rate = setup.set_learning_rate(self.progress)
        result = self.guards.attempt(batches, position.step, self.measuring.blame)
        if result is None:
            return False
        position.step += 1
        position.microbatch += len(batches)
        compiled_s = self.compiling.take_s()
        if compiled_s and self.flips.made:  # because of a flip; what the start compiles is part of what training costs
            self.log.drain()
            self._stand_still(compiled_s)
        if self.ranks.rank == 0:
            self._note_step(batches, wait_ms, rate, *result)
        self.guards.after_step(position.step, *result)
        return True

    def _note_step(self, batches: list, wait_ms: float, rate: float, loss, terms, norm) -> None:
        position = self.position
        self.log.guarded = self.config.guards.nonfinite != "off"
        known = {
            "step": position.step,
            "epoch": position.epoch,
            "data_wait_ms": round(wait_ms, 3),
            "datasets": sorted({batch.dataset for batch in batches}),
            "learning_rate": rate,
            "compiled": self.compiled.read(),
            "optimizer": self.setup.optimizer_marks,
        }
        self.log.add(known, loss, terms, norm, self.samples_per_step)
        if self.clock.first_step is not None and not self.announced_first:
            self.announced_first = True
            since_launch_s = round(self.clock.first_done - self.launched, 3)
            self.events.write("first_step", self.clock.first_step, since_launch_s=since_launch_s)

    # -- validation and checkpoints ----------------------------------------------------------------------------------

    @outside_step
    def _validate(self) -> str | None:
        """Measure the validation split with the averaged weights; returns "patience" when it is time to stop."""
        if not any(len(dataset.splits["validation"]) for dataset in self.setup.datasets.values()):
            return None
        position, fraction = self.position, self.config.evaluation.fraction
        self.validated_step = position.step
        if fraction != position.validated_fraction:  # other samples, other errors: none of them can be beaten
            position.validated_fraction, position.best, position.waited = fraction, math.inf, 0
            self.setup.plateau.forget()
        results = self._evaluate("validation", runfolder.GLANCE, fraction)
        scores = {name: audit.headline(result) for name, result in results.items()}
        position.losses, score = scores, float(np.mean(list(scores.values())))
        improved = score < position.best
        position.waited = 0 if improved else position.waited + 1
        if improved:
            position.best, position.best_step = score, position.step
        self.setup.plateau.update(score)
        self.log.drain(everything=True)
        if self.ranks.rank == 0:
            self.events.write(
                "eval",
                position.step,
                epoch=position.epoch,
                time_s=round(self._elapsed(), 3),
                split="validation",
                fraction=fraction,
                val_nrmse=scores,
                best=improved,
            )
        self.guards.validated(position.epoch, position.step, scores)
        if improved:
            self._save("best")
        self.clock.interrupt()
        patience = self.config.training.patience
        return "patience" if patience is not None and position.waited >= patience else None

    def _evaluate(self, split: str, examples: str, fraction: float = 1.0, stage: str | None = None) -> dict:
        """Metrics of a share of the split from all ranks; rank 0 writes forecasts to the file `examples`.

        Args:
            stage: whose model, if not the one in training; of those that have ended.
        """
        setup, ranked = self.setup, examples == runfolder.EXAMPLES
        # Eager: other batch sizes would compile anew, for one call each.
        with evaluation.evaluation_model(setup) as model, torch.compiler.set_stance("force_eager"):
            if stage not in (None, setup.stage):
                model = staging.ended(setup, self.folder, stage)
            judged = setup.datasets, split, self.ranks, self._beat
            return workload_of(self.config).evaluate(model, *judged, fraction, self.folder / examples, ranked)

    @outside_step
    def _save(self, *roles: str, last: bool = False, revision: int | None = None) -> None:
        """Write a checkpoint; all ranks enter because each writes its share.

        Args:
            roles: "best", if it is.
            revision: of control.json that asked for it.
            last: nothing is trained meanwhile, so there is nothing to gain from writing in the background.
        """
        position, settings = self.position, self.config.checkpoint
        if position.microbatch == 0 and position.epoch > 0:
            roles = (*roles, "epoch")
            self.epoch_saved_step = position.step
        self.log.drain(everything=True)
        state = {
            "format": checkpoint.FORMAT,
            "step": position.step,
            "position": {**vars(position), "elapsed_s": self._elapsed()},
            "setup": self.setup.state_dict(),
            "config": configs.dump(self.config),
            "specs": {name: vars(dataset.spec) for name, dataset in self.setup.datasets.items()},
        }
        self.saver.save(state, roles, settings.async_save and not last, settings.budget_gb, revision)
        self.clock.interrupt()

    def hand_over(self, reason: str, following: str) -> HandOver:
        """End the stage with a validation and a checkpoint; what the next one starts from. All ranks enter."""
        if self.validated_step != self.position.step:
            self._validate()  # the clock asks for none, and the report tells how each stage ended
        self.position.ended, elapsed_s = reason, self._elapsed()
        self._save(last=True)
        staging.conclude(self.setup, self.folder, self.events, self.position.step, self._beat)
        weights = staging.where_to_begin(self.setup, self.folder, following)
        where = {"step": self.position.step, "stage_from_step": self.position.step, "stage": following}
        return HandOver(weights, Position(**where, elapsed_s=elapsed_s, stage_from_s=elapsed_s))

    def leave(self) -> None:
        """Save, and end without an end: the supervisor launches the ranks again, with other settings."""
        self._save(last=True)
        if self.ranks.rank == 0:
            self.flips.leave(self.position.step)

    def finish(self, reason: str) -> None:
        """Save the last state, evaluate the reported split and write the end event."""
        train_time_s = self._elapsed()
        if self.config.evaluation.checkpoint == "best" and self.validated_step != self.position.step:
            self._validate()  # where the clock or a request ended training, its last weights may be the best
        self._save(last=True)
        config, setup, reported = self.config, self.setup, "last"
        if config.evaluation.checkpoint == "best" and self.position.best_step not in (-1, self.position.step):
            reported = self.requests.take_best(self.position.step)
        answers = staging.conclude(setup, self.folder, self.events, self.position.step, self._beat)
        if answers not in (None, setup.stage):
            reported = f"last of stage {answers}, which no later one has beaten"
        split, weights = config.evaluation.split, reported + (", averaged" if setup.ema else "")
        if self.ranks.rank == 0:  # before, so that no look at the test split goes uncounted
            self.events.write("opened", self.position.step, split=split, weights=weights)
        results = self._evaluate(split, runfolder.EXAMPLES, stage=answers)
        if self.ranks.rank == 0:
            workload_of(self.config).write(self.folder, results, setup.datasets, split, weights)
        memory = parallel.all_gather_objects(self.ranks, self.flips.peak_memory_gib())
        if self.ranks.rank == 0:
            self.events.write(
                "end",
                self.position.step,
                reason=reason,
                train_time_s=round(train_time_s, 3),
                epochs=self.position.epoch,
                peak_memory_gib=[round(value, 4) for value in memory],
                memory_kind="CUDA allocator, peak" if self.ranks.device.type == "cuda" else "resident set, peak",
            )
