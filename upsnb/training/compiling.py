"""Compiled blocks: switched on and off in place, kept on disk between runs, and counted."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from upsnb.models.surrogate import Surrogate

BACKEND = "inductor"
# Per block kind: datasets times what was flipped so far. torch stops at 8 and goes on eagerly, which is no choice here.
MOST_GRAPHS = 64
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def set_compile(model: Surrogate, mode: str | None) -> None:
    """Compile what the model names in place, so that no parameter changes its name (`block.compile()`); None: undo.

    Shapes are static per dataset: one graph per dataset and kind of part, shared by all blocks. What was compiled
    before is found again, not compiled again, because torch keeps graphs with the code and not with the module.
    `torch.compiler.set_stance("force_eager")` would switch off too, but for the whole process: the attention kernel of
    FlexAttention, which is compiled on its own, would go with it.
    """
    for module in model.compiled():
        if mode is None:
            module._compiled_call_impl = None  # where Module.compile puts it; there is no public way back
        else:
            module.compile(backend=BACKEND, mode=None if mode == "default" else mode, dynamic=False)


def step(function: Callable) -> Callable:
    """Decorate the method that takes an optimizer step of a Setup: its graphs are kept, never given up in silence.

    CUDA graphs reuse the memory of their outputs in the next step. Gradients are such outputs and live over all
    microbatches, so a step begins here and not with each microbatch.
    """

    @functools.wraps(function)
    def wrapped(setup, *arguments, **options):
        training = setup.config.training
        if not (training.compile or setup.config.operator.pdet.attention == "flex"):
            return function(setup, *arguments, **options)
        if training.compile and training.compile_mode in CUDA_GRAPH_MODES and setup.ranks.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        with keep_graphs():
            return function(setup, *arguments, **options)

    return wrapped


def keep_graphs() -> contextlib.AbstractContextManager:
    """Inside, many graphs of one function are kept, and too many are an error instead of a silent return to eager."""
    return torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS, fail_on_recompile_limit_hit=True)


@dataclass(frozen=True)
class Compilation:
    """What the compiler did in some time."""

    graphs: int = 0  # traced
    graph_breaks: int = 0  # and functions that were left to eager as a whole
    recompiles: int = 0  # of these graphs, those of code that had one already: other shapes, types or settings
    cache_hits: int = 0  # kernels of a forward or backward graph that were found on disk
    duration_s: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.graphs or self.graph_breaks or self.cache_hits)

    def as_dict(self) -> dict:
        return {**vars(self), "duration_s": round(self.duration_s, 3)}


class CompileCounter:
    """Tells what was compiled in this process since it was asked last."""

    def __init__(self):
        self.before, self.frames = self._totals(), set()
        self.read()

    def read(self) -> Compilation:
        totals = self._totals()
        graphs, breaks, hits, seconds = (now - then for now, then in zip(totals, self.before, strict=True))
        if totals == self.before:  # every step but the first few: a few dictionary look-ups
            return Compilation()
        self.before = totals
        return Compilation(graphs, breaks, min(self._recompiles(), graphs), hits, seconds)

    @staticmethod
    def _totals() -> tuple[int, int, int, float]:
        dynamo = torch._dynamo.utils  # loaded by torch on first use, which importing this module is not
        counters, spent = dynamo.counters, dynamo.calculate_time_spent()["total_wall_time"]
        hits = counters["inductor"]["fxgraph_cache_hit"]
        breaks = sum(counters["graph_break"].values()) + counters["frames"]["total"] - counters["frames"]["ok"]
        return counters["stats"]["unique_graphs"], breaks, hits, spent

    def _recompiles(self) -> int:
        """Frames compiled since last time that had been compiled before: ids read frame/number, from 0 up."""
        found = {str(metrics.compile_id) for metrics in torch._dynamo.utils.get_compilation_metrics()}
        new, self.frames = found - self.frames, found
        return sum(not compile_id.endswith("/0") for compile_id in new if "/" in compile_id)
