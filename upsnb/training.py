"""The training loop: steps, events, validation, checkpoints, and the messages that keep all ranks in step."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from upsnb import checkpoint, evaluation, hardware, optimizers, parallel, runs
from upsnb import config as configs
from upsnb.config import RunConfig
from upsnb.events import without_nonfinite
from upsnb.models.ups import count_parameters
from upsnb.parallel import Ranks
from upsnb.runs import EventWriter, Heartbeat
from upsnb.setup import Setup
from upsnb.timing import StepClock, num_graphs, peak_memory_gib

EVALUATION, EXAMPLES = "evaluation.json", "examples.npz"


def train(config: RunConfig, folder: Path, ranks: Ranks, events: EventWriter, heartbeat: Heartbeat) -> None:
    """Train as the config says, evaluate, and leave a checkpoint, evaluation.json and an end event.

    All ranks enter; rank 0 writes. Returns when training has finished or was asked to stop.
    """
    hardware.check_runnable(config, hardware.detect())
    loop = Loop(config, folder, ranks, events, heartbeat)
    reason = loop.run()
    loop.finish(reason)


@dataclass
class Position:
    """How far training is; travels with every checkpoint."""

    step: int = 0  # optimizer steps done
    epoch: int = 0
    microbatch: int = 0  # microbatches done in this epoch
    elapsed_s: float = 0.0  # training time of earlier segments
    best: float = math.inf  # lowest validation nRMSE so far
    best_step: int = -1
    waited: int = 0  # validations since then


class Loop:
    """One segment of a run on one rank."""

    def __init__(self, config: RunConfig, folder: Path, ranks: Ranks, events: EventWriter, heartbeat: Heartbeat):
        self.config, self.folder, self.ranks, self.events, self.heartbeat = config, folder, ranks, events, heartbeat
        self.launched = time.perf_counter()
        self.setup = Setup.build(config, runs.project_root(), ranks, self._say)
        self.stage = config.stages.operator
        self.position = Position()
        self._resume()
        per_step = config.training.accum_steps
        self.steps_per_epoch = max(1, self.setup.loader.schedule.num_microbatches // per_step)
        self.total_steps = self.stage.epochs * self.steps_per_epoch
        self.samples_per_step = config.training.batch_size * per_step * ranks.world_size
        self.clock = StepClock(ranks.device)
        self.pending: deque = deque()  # step events whose numbers are still on the device
        self.control_revision = -1
        self.validated_step = -1
        self._announce()

    # -- start ------------------------------------------------------------------------------------------------------

    def _say(self, message: str) -> None:
        print(message, flush=True)
        if self.ranks.rank == 0:
            self.events.write("progress", 0, message=message)

    def _resume(self) -> None:
        state = checkpoint.load(self.folder, device=self.ranks.device) if self.config.checkpoint.resume else None
        if state is None:
            return
        self.setup.load_state_dict(state["setup"])
        self.position = Position(**state["position"])
        self._say(f"resumed at step {self.position.step}")

    def _announce(self) -> None:
        setup, datasets = self.setup, self.setup.datasets
        if self.ranks.rank != 0:
            return
        self.events.write(
            "start",
            self.position.step,
            num_ranks=self.ranks.world_size,
            device=self.ranks.device.type,
            parameters=count_parameters(setup.model),
            operator_parameters=count_parameters(setup.model.operator),
            total_steps=self.total_steps,
            time_limit_s=self.config.training.time_limit_s,
            samples_per_step=self.samples_per_step,
            residency=setup.loader.residency,
            num_threads=torch.get_num_threads(),
            build_s=setup.build_s,
            datasets={
                name: {
                    "files": [file.name for file in dataset.source.files],
                    "samples": {split: len(rows) for split, rows in dataset.splits.items()},
                    "pairs": len(setup.loader.schedule.pairs[name]),
                    "grid": list(dataset.source.grid_shape),
                    "tokens": math.prod(dataset.spec.token_grid),
                    "patch": dataset.spec.patch,
                }
                for name, dataset in datasets.items()
            },
        )
        queries = self.config.training.query_sampling
        for name, dataset in datasets.items():
            points = math.prod(dataset.source.grid_shape)
            if queries.num_queries and queries.num_queries >= points and queries.jitter == 0:
                self._warn(
                    f"training.query_sampling.num_queries is {queries.num_queries} and {name} has {points} grid points "
                    "-> every point is compared, nothing is sampled"
                )

    def _warn(self, message: str) -> None:
        print(f"warning: {message}", flush=True)
        self.events.write("warning", self.position.step, message=message)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> str:
        """Train to the end of the stage; returns why it ended: epochs, time, patience or stopped."""
        self.clock.start()
        self.run_started = time.perf_counter()
        reason = self._agree()
        while reason is None:
            reason = self._epoch()
        self._drain(everything=True)
        return reason

    def _epoch(self) -> str | None:
        training, position = self.config.training, self.position
        batches = self.setup.loader.epoch(position.epoch, position.microbatch)
        left = self.setup.loader.schedule.num_microbatches - position.microbatch
        for _ in range(left // training.accum_steps):
            self._beat()  # before and after reading: a rank whose disk hangs stands one beat behind the others
            waiting = time.perf_counter()
            microbatches = [next(batches) for _ in range(training.accum_steps)]
            wait_ms = 1e3 * (time.perf_counter() - waiting)
            self._step(microbatches, wait_ms)
            if position.step % self.config.checkpoint.interval == 0:
                self._save(best=False)
            reason = self._agree()
            if reason not in (None, "epochs"):
                return reason
        position.epoch, position.microbatch = position.epoch + 1, 0
        finished = position.step >= self.total_steps
        due = finished or position.epoch % self.config.evaluation.every_epochs == 0
        impatient = self._validate() if due else None
        return "epochs" if finished else impatient

    def _agree(self) -> str | None:
        """Rank 0 reads clock and control file; all ranks learn the same and decide the same."""
        limit = self.config.training.time_limit_s
        message = torch.zeros(2, dtype=torch.float64)
        if self.ranks.rank == 0:
            control = runs.read_control(self.folder)
            by_steps = self.position.step / self.total_steps
            by_clock = self._elapsed() / limit if limit else 0.0
            message[0] = max(by_steps, by_clock)
            message[1] = control.command == runs.STOP
        self.progress, stop = parallel.broadcast_control(self.ranks, message).tolist()
        if stop:
            return "stopped"
        if self.progress >= 1.0:
            return "epochs" if self.position.step >= self.total_steps else "time"
        return None

    def _beat(self) -> None:
        self.heartbeat.beat(self.position.step)

    def _elapsed(self) -> float:
        return self.position.elapsed_s + time.perf_counter() - self.run_started

    def _step(self, batches: list, wait_ms: float) -> None:
        setup, position = self.setup, self.position
        self._beat()
        factor = optimizers.learning_rate_factor(self.stage.scheduler, self.progress) * setup.plateau.factor
        rate = optimizers.set_learning_rate(setup.optimizers, factor)
        done = position.epoch * setup.loader.schedule.num_microbatches + position.microbatch
        graphs = num_graphs()
        loss, terms, norm = setup.step(batches, position.step, done)
        position.step += 1
        position.microbatch += len(batches)
        compiled = num_graphs() - graphs
        self.clock.step()
        if self.ranks.rank == 0:
            names = {batch.dataset for batch in batches}
            self.pending.append((position.step, position.epoch, names, wait_ms, compiled, rate, loss, terms, norm))
            self._drain()
        else:
            self.clock.ends.clear()  # nobody reads them here, and on CUDA each is an event of the driver

    def _drain(self, everything: bool = False) -> None:
        """Write the step events whose numbers the device has finished; never waits unless asked for everything."""
        while self.pending:
            measured = self.clock.read(wait=everything)
            if measured is None:
                return
            step, epoch, names, wait_ms, compiled, rate, loss, terms, norm = self.pending.popleft()
            time_s, step_ms = measured
            losses = {term: float(value) for term, value in terms.items()}
            self.events.write(
                "step",
                step,
                epoch=epoch,
                time_s=round(self.position.elapsed_s + time_s, 4),
                step_time_ms=round(step_ms, 3),
                samples_per_s=round(self.samples_per_step / step_ms * 1e3, 3),
                data_wait_ms=round(wait_ms, 3),
                datasets=sorted(names),
                loss=float(loss),
                losses=losses,
                gradient_norm=float(norm),
                learning_rate=rate,
                peak_memory_gib=round(peak_memory_gib(self.ranks.device), 4),
                steady=self.clock.is_steady(step, compiled),
            )
            if compiled:
                self.events.write("compile", step, graphs=compiled, duration_s=round(step_ms / 1e3, 3))
            if step == self.clock.first_step:
                self.events.write("first_step", step, since_launch_s=round(self.clock.first_done - self.launched, 3))

    # -- validation and checkpoints ----------------------------------------------------------------------------------

    def _validate(self) -> str | None:
        """Measure the validation split with the averaged weights; returns "patience" when it is time to stop."""
        if not any(len(dataset.splits["validation"]) for dataset in self.setup.datasets.values()):
            return None
        position = self.position
        self.validated_step = position.step
        results = self._evaluate("validation")
        score = float(np.mean([_headline(result) for result in results.values()]))
        improved = score < position.best
        position.waited = 0 if improved else position.waited + 1
        if improved:
            position.best, position.best_step = score, position.step
        self.setup.plateau.update(score)
        if self.ranks.rank == 0:
            self._drain(everything=True)
            self.events.write(
                "eval",
                position.step,
                epoch=position.epoch,
                time_s=round(self._elapsed(), 3),
                split="validation",
                val_nrmse={name: _headline(result) for name, result in results.items()},
                best=improved,
            )
        if improved:
            self._save(best=True)
        self.clock.interrupt()
        patience = self.config.training.patience
        return "patience" if patience is not None and position.waited >= patience else None

    def _evaluate(self, split: str) -> dict:
        setup = self.setup
        if setup.ema is not None:
            setup.ema.swap()
        with torch.compiler.set_stance("force_eager"):  # other batch sizes would compile anew, for one call each
            results = evaluation.evaluate(
                setup.model, setup.datasets, split, self.config.evaluation, self.ranks, self._beat
            )
        if setup.ema is not None:
            setup.ema.swap()
        return results

    def _save(self, best: bool) -> None:
        """Write a checkpoint; all ranks enter because each hands in its random state."""
        setup_state = self.setup.state_dict()
        if self.ranks.rank == 0:
            self._drain(everything=True)
            started = time.perf_counter()
            position = {**vars(self.position), "elapsed_s": self._elapsed()}
            state = {
                "format": checkpoint.FORMAT,
                "step": self.position.step,
                "position": position,
                "setup": setup_state,
                "config": configs.dump(self.config),
                "specs": {name: vars(dataset.spec) for name, dataset in self.setup.datasets.items()},
            }
            path = checkpoint.save(self.folder, state, best)
            self.events.write(
                "checkpoint",
                self.position.step,
                path=f"{runs.CHECKPOINTS}/{path.name}",
                best=best,
                save_s=round(time.perf_counter() - started, 3),
                size_mib=round(path.stat().st_size / 2**20, 3),
            )
        parallel.barrier(self.ranks)
        self.clock.interrupt()

    def finish(self, reason: str) -> None:
        """Save the last state, evaluate the reported split and write the end event."""
        train_time_s = self._elapsed()
        if self.config.evaluation.checkpoint == "best" and self.validated_step != self.position.step:
            self._validate()  # where the clock or a request ended training, its last weights may be the best
        self._save(best=False)
        config, setup, reported = self.config, self.setup, "last"
        if config.evaluation.checkpoint == "best" and self.position.best_step not in (-1, self.position.step):
            state = checkpoint.load(self.folder, "best", self.ranks.device)
            setup.load_state_dict(state["setup"])
            reported = f"best, step {state['step']}"
        results = self._evaluate(config.evaluation.split)
        if self.ranks.rank == 0:
            if setup.ema is not None:
                setup.ema.swap()
            path, device = self.folder / EXAMPLES, self.ranks.device
            with torch.compiler.set_stance("force_eager"):
                evaluation.save_examples(path, setup.model, setup.datasets, results, config.evaluation, device)
            split = config.evaluation.split
            summary = {
                "format": evaluation.FORMAT,
                "split": split,
                "weights": reported + (", averaged" if setup.ema else ""),
                "datasets": {name: {split: result} for name, result in results.items()},
            }
            runs.write_json(self.folder / EVALUATION, without_nonfinite(summary))
        memory = parallel.all_gather_objects(self.ranks, peak_memory_gib(self.ranks.device))
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


def _headline(result: dict) -> float:
    """The one number a dataset is judged by: rollout nRMSE where there is a rollout."""
    return result.get("rollout_nrmse_mean", result["nrmse_mean"])
