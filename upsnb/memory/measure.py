"""What torch's own allocators saw: the peak of a step on the CPU or on CUDA, and CUDA's history until it ran out.

Counted below all tensors, so that what kernels allocate for themselves is in it: the measurement that the ledger's
predictions are held against.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

from upsnb import hardware
from upsnb.config import RunConfig
from upsnb.errors import RunError
from upsnb.memory.predict import Footprint, Rehearsal
from upsnb.models.surrogate import set_attention
from upsnb.runs import runfolder

TOP_ALLOCATIONS = 12  # of an out-of-memory history, largest first
MAX_EVENTS = 100_000  # of a history
STEP = "upsnb.step"


class Meter:
    """Peak of allocated bytes between `begin` and the end, of all that was allocated since it was entered.

    On the CPU torch's profiler counts allocations and frees; memory that NumPy or other libraries take is not in it.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.peak_bytes = 0  # once left
        self.history: dict | None = None  # CUDA only, once left

    def __enter__(self) -> Meter:
        gc.collect()  # a model of an earlier measurement, freed during this one, would count as negative
        if self.device.type == "cuda":
            warm_up(self.device)
            torch.cuda.synchronize(self.device)
            self._base = torch.cuda.memory_allocated(self.device)
            torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS, stacks="python")
        else:
            activities = [torch.profiler.ProfilerActivity.CPU]
            self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
            self._profile.__enter__()
        return self

    def begin(self) -> None:
        """Now the part begins whose peak counts."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._step = torch.profiler.record_function(STEP)
            self._step.__enter__()

    def __exit__(self, *failure) -> None:
        if self.device.type == "cuda":
            if failure[0] is None:
                torch.cuda.synchronize(self.device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._base
            traces = torch.cuda.memory._snapshot(self.device)["device_traces"]
            torch.cuda.memory._record_memory_history(enabled=None)
            self.history = history(traces[self.device.index or 0])
        else:
            self._step.__exit__(*failure)
            self._profile.__exit__(*failure)
            self.peak_bytes = _peak_of_profile(self._profile.profiler.kineto_results.events())


def warm_up(device: torch.device) -> None:
    """Multiply matrices forward and backward, so that workspaces are there: cuBLAS takes 8 to 32 MiB a handle.

    Each dtype has kernels of its own, and the thread of the backward pass a handle of its own.
    """
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.ones(2, 64, 64, device=device, dtype=dtype, requires_grad=True)
        torch.baddbmm(x, x, x).add(torch.nn.functional.linear(x, x[0], x[0, 0])).sum().backward()


def _peak_of_profile(events) -> int:
    """Largest sum of allocations less frees after the step began; both come as memory events, frees negative."""
    begin = next(event.start_ns() for event in events if event.name() == STEP)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = peak = 0
    for time_ns, nbytes in changes:
        now += nbytes
        peak = max(peak, now if time_ns >= begin else 0)
    return peak


def history(trace: list[dict]) -> dict:
    """Plain data of a CUDA allocator's trace (`torch.cuda.memory._snapshot()["device_traces"][0]`).

    Returns:
        "time_ms" and "allocated_bytes", (M,) lists, after every allocation and free since recording began;
        "out_of_memory": None, or {"requested_bytes", "free_bytes", "index"} of the first failure;
        "largest": what was alive then, or at the peak, [{"nbytes", "where"}].
    """
    times, levels, alive = [], [], {}
    failure, now, fullest, largest = None, 0, -1, []
    for event in trace:
        action, size = event["action"], event["size"]
        if action == "alloc":
            alive[event["addr"]] = event
            now += size
        elif action == "free_completed" and event["addr"] in alive:  # else older than the recording
            now -= alive.pop(event["addr"])["size"]
        elif action == "oom" and failure is None:
            failure = {"requested_bytes": size, "free_bytes": event.get("device_free"), "index": len(levels)}
            fullest, largest = float("inf"), list(alive.values())
        else:
            continue
        if now > fullest:
            fullest, largest = now, list(alive.values())
        times.append((event.get("time_us", len(times)) - trace[0].get("time_us", 0)) / 1e3)
        levels.append(now)
    largest = sorted(largest, key=lambda event: -event["size"])[:TOP_ALLOCATIONS]
    return {
        "time_ms": times,
        "allocated_bytes": levels,
        "out_of_memory": failure,
        "largest": [{"nbytes": event["size"], "where": _where(event.get("frames", []))} for event in largest],
    }


def _where(frames: list[dict]) -> str:
    """The innermost line of this package in a stack, else the innermost of all."""
    own = [frame for frame in frames if "upsnb" in Path(frame["filename"]).parts]
    for frame in own or frames:
        return f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"
    return "unknown"


# -- one step, for real ------------------------------------------------------------------------------------------------


def measure(config: RunConfig, root: Path | None = None) -> Footprint:
    """The same step for real, by one rank, in this process: what torch's allocator saw at the fullest moment.

    Kinds and modules come from a second step, so that nothing watches the first. Eager, also where the config compiles.
    """
    hardware.check_runnable(config, hardware.detect())
    device = torch.device(hardware.resolve_device(config, hardware.detect()))
    root, started = root or runfolder.project_root(), time.perf_counter()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        with Meter(device) as meter:
            rehearsal = Rehearsal(config, root, device)
            meter.begin()
            rehearsal.steps(config.training.batch_size)
        if config.operator.pdet.attention == "flex":  # compiled by itself, which nothing can watch from inside
            set_attention(rehearsal.setup.model.blocks(), "sdpa")  # keeps no scores either
        account = rehearsal.account(config.training.batch_size)
    how = "measured by CUDA's allocator" if device.type == "cuda" else "measured by the CPU's allocator"
    return Footprint(meter.peak_bytes, account, how, time.perf_counter() - started, history=meter.history)


class MeasuringProcess:
    """A process that measures: it may run out of memory, and the one that asks keeps its hands off the GPU."""

    def __enter__(self) -> MeasuringProcess:
        spawned = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, mp_context=spawned, initializer=_be_quiet)
        return self

    def __exit__(self, *failure) -> None:
        self._pool.shutdown()

    def measure(self, config: RunConfig) -> Footprint:
        """`measure`, over there.

        Raises:
            RunError: the process was killed; the next measurement starts another.
        """
        try:
            return self._pool.submit(measure, config).result()
        except BrokenProcessPool:
            self.__enter__()
            raise RunError(
                "the measuring process was killed, most often for want of memory -> lower batch_size"
            ) from None


def _be_quiet() -> None:
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler announces its beginning and end on stderr
