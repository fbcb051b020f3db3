"""A profile of a live run, taken by its own ranks between two step boundaries when control.json asks for one.

Two passes over steps that train like any other. In the first, marks at the borders of a step's parts: nothing waits
for them, so their times are those of undisturbed steps and add up to them. In the second torch.profiler looks inside
the parts; it slows the host down, so that only its proportions count there, but not the kernels of a GPU. There the
device is also waited for at each border, or a kernel could not be told to belong to a part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function

from upsnb import hardware, spans
from upsnb.models.surrogate import Surrogate, count_parameters
from upsnb.profile import flops as counting
from upsnb.profile import trace
from upsnb.runs import runfolder
from upsnb.runs.events import EventWriter
from upsnb.training import parallel
from upsnb.training.losses import turn
from upsnb.training.offload import local
from upsnb.training.parallel import Ranks
from upsnb.training.precision import amp_dtype
from upsnb.training.setup import Setup
from upsnb.training.timing import elapsed_ms, mark, peak_memory_gib

FORMAT = 1
TIMED_STEPS, TRACED_STEPS = 20, 4  # at least; each pass is whole turns of datasets and loss frequencies
WARMUP_STEPS = 1  # traced and not measured: the profiler allocates
IDLE, TIMING, TRACING = "idle", "timing", "tracing"


class Marks:
    """When the device passed the borders between parts."""

    def __init__(self, device: torch.device):
        self.device, self.names, self.marks = device, [], []

    def switch(self, name: str) -> None:
        self.names.append(name)
        self.marks.append(mark(self.device))

    def totals_ms(self) -> dict[str, float]:
        """Milliseconds by part; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        totals = dict.fromkeys(spans.PARTS, 0.0)
        for name, begin, end in zip(self.names, self.marks, self.marks[1:]):
            totals[name] = totals.get(name, 0.0) + elapsed_ms(begin, end)
        totals.pop(spans.OUTSIDE, None)
        return totals


class Segments:
    """Ranges in a trace, one after the other."""

    def __init__(self, device: torch.device):
        self.device, self.measured, self.open = device, False, None

    def switch(self, name: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.close()
        if self.measured and name != spans.OUTSIDE:
            self.open = record_function(trace.PREFIX + name)
            self.open.__enter__()

    def close(self) -> None:
        if self.open is not None:
            self.open.__exit__(None, None, None)
            self.open = None


class Profiler:
    """Takes profiles of one launch of a run."""

    def __init__(self, folder: Path, setup: Setup, ranks: Ranks, events: EventWriter, forget_peak: Callable[[], None]):
        self.folder, self.setup, self.ranks, self.events = folder, setup, ranks, events
        self.forget_peak = forget_peak  # of memory, once it has been noted
        self.state, self.revision = IDLE, 0

    def at_boundary(self, step: int, revision: int) -> bool:
        """Begin, go on with or end a profile at a step boundary; all ranks enter.

        A changed setting, or a step that has to be taken again, makes it begin anew.

        Args:
            step: optimizer steps done.
            revision: of control.json that asks for a profile now; 0: none does.
        Returns:
            Whether the profile disturbs the steps around this boundary.
        """
        if self.state == IDLE and not revision:
            return False
        with spans.span(spans.OUTSIDE):
            disturbed = self.state == TRACING
            self.revision = revision or self.revision
            if self.state == IDLE or revision or self.setup.config is not self.config or step != self.last_step + 1:
                self.close()
                self._time(step)
                return disturbed
            self.last_step = step
            if self.state == TIMING and step == self.first_step + self.num_timed:
                self._trace(step)
                return True
            if self.state == TRACING:
                self.segments.measured = step >= self.first_step + WARMUP_STEPS
                if step == self.first_step + WARMUP_STEPS + self.num_traced:
                    self._finish(step)
        return disturbed

    def close(self) -> None:
        """Leave nothing recording, whatever the state."""
        if self.state == TRACING:
            self.segments.close()
            self.profile.stop()
        self.state = IDLE
        spans.record(None)

    def _time(self, step: int) -> None:
        self.config = config = self.setup.config
        num_datasets, accumulated = len(self.setup.datasets), config.training.accum_steps
        microbatches = turn(config.training) * num_datasets
        cycle = math.lcm(microbatches, accumulated) // accumulated
        self.num_timed, self.num_traced = (-(-least // cycle) * cycle for least in (TIMED_STEPS, TRACED_STEPS))
        self.first_step = self.last_step = step
        self.state, self.marks = TIMING, Marks(self.ranks.device)
        spans.record(self.marks)
        self.marks.switch(spans.OTHER)

    def _trace(self, step: int) -> None:
        self.marks.switch(spans.OUTSIDE)
        self.parts_ms = {name: total / self.num_timed for name, total in self.marks.totals_ms().items()}
        self.timed_from, self.first_step = self.first_step, step
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if self.ranks.device.type == "cuda" else []
        self.profile = torch.profiler.profile(activities=activities)
        self.profile.start()
        self.state, self.segments = TRACING, Segments(self.ranks.device)
        spans.record(self.segments)

    def _finish(self, step: int) -> None:
        started = time.perf_counter()
        self.close()
        path = self.folder / f"trace.rank{self.ranks.rank}.json.gz"
        record, problem = self._known(), ""
        try:  # a profile that fails is no reason to end a training
            self.profile.export_chrome_trace(str(path))
            record["trace"] = trace.read(path, self.num_traced)
            if self.ranks.rank == 0:  # the same for all
                objective = self.setup.objective
                where = self.config, self.setup.datasets, self.setup.stage, objective.progress
                where += (getattr(objective, "forecasts", ()),)
                for kind, nbytes in (("flops", False), ("product_bytes", True)):
                    counted = counting.per_microbatch(*where, nbytes=nbytes)
                    mean = sum(counted[name] * share for name, share in self.setup.loader.shares.items())
                    record[f"{kind}_per_step"] = mean * self.config.training.accum_steps
        except (RuntimeError, ValueError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
        self.profile = None
        parallel.barrier(self.ranks)  # all ranks multiply at once, as they do in a step
        self.forget_peak()  # what is measured with is none of the run's memory
        record["matrix_peak"] = counting.matrix_peak(self.ranks.device, amp_dtype(self.config) or torch.float32)
        record["bandwidth_gb_per_s"] = counting.bandwidth(self.ranks.device)
        if self.ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.ranks.device)
        problems = parallel.all_gather_objects(self.ranks, problem)
        if not any(problems):
            runfolder.write_json(self.folder / profile_name(self.ranks.rank), record)
        parallel.barrier(self.ranks)
        if self.ranks.rank == 0:
            failed = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
            self.events.write(
                "profile",
                step,
                revision=self.revision,
                files=[] if failed else [profile_name(rank) for rank in range(self.ranks.world_size)],
                reason="; ".join(failed) or None,
                num_steps=[self.num_timed, self.num_traced],
                analysis_s=round(time.perf_counter() - started, 3),
            )

    def _known(self) -> dict:
        """What needs no trace."""
        setup, training, device = self.setup, self.config.training, self.ranks.device
        machine = hardware.detect()
        state = [
            value for optimizer in setup.optimizers for state in optimizer.state.values() for value in state.values()
        ]
        tensors = [*setup.model.parameters(), *state, *(setup.ema.average if setup.ema else ())]
        return {
            "format": FORMAT,
            "revision": self.revision,
            "rank": self.ranks.rank,
            "num_ranks": self.ranks.world_size,
            "device": device.type,
            "num_threads": torch.get_num_threads(),
            "first_step": self.timed_from,
            "num_steps": {"timed": self.num_timed, "traced": self.num_traced},
            "samples_per_step": training.batch_size * training.accum_steps,  # of this rank
            "step_ms": sum(self.parts_ms.values()),
            "parts_ms": self.parts_ms,
            "parameters": parameters_by_part(setup.model),
            "state_gib": sum(local(value).nbytes for value in tensors if torch.is_tensor(value)) / 2**30,
            "gradients_gib": sum(local(p).nbytes for p in setup.model.parameters() if p.requires_grad) / 2**30,
            "peak_memory_gib": peak_memory_gib(device),
            "device_memory_gib": machine.device_memory_gib,
        }


def profile_name(rank: int) -> str:
    """The file in a run folder that holds a rank's latest profile."""
    return f"profile.rank{rank}.json"


def parameters_by_part(model: Surrogate) -> dict:
    """Trained parameters that all datasets share, those of its blocks, and those that each dataset has of its own."""
    parts = model.parts()
    codecs = {name: sum(map(count_parameters, parts.get(name, ()))) for name in model.specs}
    shared, blocks = count_parameters(model) - sum(codecs.values()), sum(map(count_parameters, model.blocks()))
    return {"operator": shared, "blocks": blocks, "codecs": codecs}
