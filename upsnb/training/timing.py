"""Times and memory of steps, measured without making any step wait."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections import deque

import torch

from upsnb.training.compiling import Compilation

WARMUP_STEPS = 5  # never counted as steady: caches, allocator and clocks settle


def mark(device: torch.device):
    """This moment on a device: an event in its queue on CUDA, the host's clock elsewhere; nothing waits for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(start, end) -> float:
    """Milliseconds between two marks of one device; on CUDA both must be done, or it waits."""
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


class StepClock:
    """Times of step ends: device events on CUDA, read when they are done, so that no step waits for its own timing."""

    def __init__(self, device: torch.device):
        self.device, self.ends, self.interrupted = device, deque(), True
        self.first_step: int | None = None
        self.first_done = math.nan
        self.unsteady_until = 0

    def start(self) -> None:
        self.origin = self.previous = mark(self.device)

    def step(self) -> None:
        """Call at the end of each step."""
        self.ends.append(mark(self.device))

    def interrupt(self) -> None:
        """Something that is no step happened: the next step starts now and is not steady."""
        self.ends.append(("restart", mark(self.device)))
        self.interrupted = True

    def settle(self, step: int, warmup_steps: int = WARMUP_STEPS) -> None:
        """The computation changed: the next few steps warm it up."""
        self.unsteady_until = max(self.unsteady_until, step + warmup_steps)
        self.interrupt()

    def read(self, wait: bool) -> tuple[float, float] | None:
        """(seconds since start, milliseconds) of the oldest finished step; None if the device is not there yet."""
        while self.ends and isinstance(self.ends[0], tuple):
            self.previous = self.ends.popleft()[1]
        end = self.ends[0]
        if self.device.type == "cuda":
            if wait:
                end.synchronize()
            elif not end.query():
                return None
        result = elapsed_ms(self.origin, end) / 1e3, elapsed_ms(self.previous, end)
        self.previous = self.ends.popleft()
        return result

    def is_steady(self, step: int, compiled: Compilation) -> bool:
        """Whether this step measures throughput: not among the first, nothing compiled or recorded, no interruption."""
        if self.first_step is None:
            self.first_step, self.first_done = step, time.perf_counter()
        if compiled.graphs or compiled.cuda_graphs_again:
            self.unsteady_until = step + 1
        steady = step >= self.first_step + WARMUP_STEPS and step > self.unsteady_until and not self.interrupted
        self.interrupted = False
        return steady


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory of this rank so far: allocated by CUDA, or resident in host memory."""
    if device.type == "cuda":
        # as max_memory_allocated has it, which flattens and sorts some 150 other statistics each time
        return torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"] / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10  # bytes; Linux counts KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
