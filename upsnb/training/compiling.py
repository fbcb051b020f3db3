"""Compiled blocks: switched on and off in place, kept on disk between runs, and counted."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from upsnb.config import TrainingConfig
from upsnb.training import kernels

BACKEND = "inductor"
# Per block kind: datasets times what was flipped so far. torch stops at 8 and goes on eagerly, which is no choice here.
MOST_GRAPHS = 64
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def set_compile(objective: nn.Module, training: TrainingConfig) -> None:
    """Compile a step in place as the settings say, so that no parameter changes its name; or undo it.

    Either model and losses are one graph for each dataset and set of terms, forward and backward, and one more for its
    inverse terms (`Objective.GRAPHS`), or the model's parts are compiled one by one (`Surrogate.compiled`) and losses
    are not. Shapes are static. What was compiled before is found again, not compiled again, because torch keeps graphs
    with the code and not with the module.
    `torch.compiler.set_stance("force_eager")` would switch off too, but for the whole process: the attention kernel of
    FlexAttention, which is compiled on its own, would go with it.
    """
    mode = None if training.compile_mode == "default" else training.compile_mode
    options = {"backend": BACKEND, "mode": mode, "dynamic": False}
    device = next(objective.parameters()).device.type
    whole = as_a_whole(objective, training, device)
    if training.compile and BACKEND == "inductor" and device == "cpu":
        kernels.prepare()
    for module in objective.model.compiled():
        module._compiled_call_impl = None  # where Module.compile puts it; there is no public way back
        if training.compile and not whole:
            module.compile(**options)
    for name in objective.GRAPHS:
        vars(objective).pop(name, None)
        if training.compile and whole:
            vars(objective)[name] = torch.compile(getattr(objective, name), **options)


def as_a_whole(objective: nn.Module, training: TrainingConfig, device: str) -> bool:
    """Whether model and losses are compiled together, as they are anyway where the model names no parts.

    Not on a CPU, which launches cheaply: darcy_5min gains 7 % and compiles 1.8 times as long (docs/LOG.md). Not under
    FSDP2, which gathers and frees the weights of parts between their calls. Not under DDP, which averages the gradients
    of one part while those of the next are computed: a single graph hands them all over at its end. Nor where the
    number of calls in a row grows: each would be a graph of its own, with the model in it as often.
    """
    if training.use_fsdp2 or not objective.GRAPHS:
        return False
    grows = getattr(objective, "unroll", 0) > 2
    return (device == "cuda" and training.num_gpus == 1 and not grows) or not objective.model.compiled()


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
    # DDPOptimizer would cut graphs at its buckets. Parts are small: their gradients are sent while others are computed.
    kept = {"recompile_limit": MOST_GRAPHS, "fail_on_recompile_limit_hit": True, "optimize_ddp": False}
    return torch._dynamo.config.patch(**kept)


@dataclass(frozen=True)
class Compilation:
    """What the compiler did in some time."""

    graphs: int = 0  # traced
    graph_breaks: int = 0  # and functions that were left to eager as a whole
    recompiles: int = 0  # of these graphs, those of code that had one already: other shapes, types or settings
    cache_hits: int = 0  # kernels of a forward or backward graph that were found on disk
    cuda_graphs_skipped: int = 0  # code that could not be recorded as a CUDA graph, and so is launched kernel by kernel
    cuda_graphs_again: int = 0  # recorded once more, because addresses had changed
    duration_s: float = 0.0

    def __bool__(self) -> bool:
        return any(count for name, count in vars(self).items() if name != "duration_s")

    def as_dict(self) -> dict:
        return {**vars(self), "duration_s": round(self.duration_s, 3)}


class CompileClock:
    """Tells how long this process has compiled, in whatever step it had to.

    Args:
        begun: called whenever compiling begins.
    """

    def __init__(self, begun: Callable[[], None]):
        self.begun, self.since, self.spent_s = begun, 0.0, -kernels.waited_s
        self.handler = importlib.import_module("torch._dynamo.callback").callback_handler
        self.handler.register_start_callback(self._begin)
        self.handler.register_end_callback(self._end)

    def _begin(self, _) -> None:
        self.since = time.perf_counter()
        self.begun()

    def _end(self, _) -> None:
        self.spent_s += time.perf_counter() - self.since

    def take_s(self) -> float:
        """Seconds spent compiling since the last call."""
        spent_s, self.spent_s = self.spent_s + kernels.waited_s, -kernels.waited_s
        return spent_s

    def close(self) -> None:
        """Listen no longer."""
        with contextlib.suppress(ValueError):  # torch._dynamo.reset has forgotten all who listened
            self.handler.remove_start_callback(self._begin)
            self.handler.remove_end_callback(self._end)


class CompileCounter:
    """Tells what was compiled in this process since it was asked last."""

    def __init__(self):
        self.before, self.frames = self._totals(), set()
        self._recompiles()  # before this

    def read(self) -> Compilation:
        totals = self._totals()
        if totals == self.before:  # every step but the first few: a few dictionary look-ups
            return Compilation()
        new = {name: value - self.before[name] for name, value in totals.items()}
        self.before = totals
        return Compilation(**new, recompiles=min(self._recompiles(), new["graphs"]))

    @staticmethod
    def _totals() -> dict[str, float]:
        dynamo = torch._dynamo.utils  # loaded by torch on first use, which importing this module is not
        counters = dynamo.counters
        return {
            "graphs": counters["stats"]["unique_graphs"],
            "graph_breaks": sum(counters["graph_break"].values())
            + counters["frames"]["total"]
            - counters["frames"]["ok"],
            "cache_hits": counters["inductor"]["fxgraph_cache_hit"],
            "cuda_graphs_skipped": counters["inductor"]["cudagraph_skips"],
            "cuda_graphs_again": _recorded_again(),
            "duration_s": dynamo.calculate_time_spent()["total_wall_time"] + kernels.waited_s,
        }

    def _recompiles(self) -> int:
        """Frames compiled since last time that had been compiled before: ids read frame/number, from 0 up."""
        compiled = torch._dynamo.utils.get_compilation_metrics()
        found = {(str(one.compile_id), one.start_time_us) for one in compiled}  # ids begin again when torch is reset
        new, self.frames = found - self.frames, found
        return sum(not compile_id.endswith("/0") for compile_id, _ in new if "/" in compile_id)


def _recorded_again() -> int:
    """How often CUDA graphs of this device were recorded once more, so far."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")  # loaded with the first recording
    if trees is None or not torch.cuda.is_available():
        return 0
    manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return sum(sum(counts.values()) for counts in manager.num_rerecord.values()) if manager else 0
