"""What can be saved when a step fails: which failure it is, what to ask for, and how an act is written down.

Loads no torch, so that the supervisor can decide on a relaunch without it.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path

from upsnb import overlays
from upsnb.config import RunConfig, TrainingConfig
from upsnb.errors import ConfigError
from upsnb.runs import runfolder

OUT_OF_MEMORY = {"OutOfMemoryError", "OutOfMemory", "MemoryError"}  # torch's for CUDA, ours, Python's
OUT_OF_MEMORY_TEXTS = re.compile(  # in plain RuntimeErrors and others: the CPU's allocator, cuBLAS, cuDNN, CUDA, NCCL
    r"DefaultCPUAllocator: can't allocate memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED|CUDA (error: )?out of memory"
    r"|Cuda failure.*out of memory"
)
MESSAGE_LENGTH = 300
COMPILE_ERRORS = {  # from torch._dynamo.exc and torch._inductor.exc, in any torch since 2.11
    "TorchDynamoException",  # BackendCompilerFailed, InductorError, TorchRuntimeError, Unsupported and kin
    "OperatorIssue",
    "SubgraphLoweringException",
    "InvalidCxxCompiler",
    "CppCompileError",
    "CppWrapperCodegenError",
    "FailOnRecompileLimitHit",
}


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and all that caused it, the outermost first."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the device or of the host ran out, however deep in the chain of causes."""
    return any(
        OUT_OF_MEMORY & {kind.__name__ for kind in type(e).__mro__} or OUT_OF_MEMORY_TEXTS.search(str(e))
        for e in chain(error)
    )


def is_compile_failure(error: BaseException) -> bool:
    """Whether compiling failed: tracing, lowering, or a C++ or Triton compiler that is missing or gives up."""
    return any(COMPILE_ERRORS & {kind.__name__ for kind in type(e).__mro__} for e in chain(error))


def in_one_line(error: BaseException) -> str:
    """Type and first words of an error."""
    return shortened(f"{type(error).__name__}: {error}")


def shortened(text: str) -> str:
    """The beginning of a message, in one line."""
    text = " ".join(text.split())
    return text if len(text) <= MESSAGE_LENGTH else text[: MESSAGE_LENGTH - 3] + "..."


def sizes(batch_size: int, accum_steps: int) -> list[tuple[int, int]]:
    """Pairs (batch_size, accum_steps) of one effective batch, from the given one down to single pairs.

    Each is the largest proper divisor of the one before: 30 x 2, 15 x 4, 5 x 12, 1 x 60.
    """
    chain = [(batch_size, accum_steps)]
    while batch_size > 1:
        factor = next(n for n in range(2, batch_size + 1) if batch_size % n == 0)
        batch_size, accum_steps = batch_size // factor, accum_steps * factor
        chain.append((batch_size, accum_steps))
    return chain


def overlay_of(size: tuple[int, int]) -> dict[str, int]:
    """The change of settings that leads to a size."""
    return {"training.batch_size": size[0], "training.accum_steps": size[1]}


def size_of(training: TrainingConfig) -> tuple[int, int]:
    """Microbatch and accumulation of a config."""
    return training.batch_size, training.accum_steps


def smaller(config: RunConfig) -> dict[str, int] | None:
    """The change to the next smaller microbatch at the same effective batch; None where it is a single pair."""
    return next((overlay_of(size) for size in sizes(*size_of(config.training))[1:]), None)


def act(
    folder: Path,
    events: runfolder.EventWriter,
    guard: str,
    action: str,
    reason: str,
    step: int,
    changes: dict | None = None,
    **numbers,
) -> int | None:
    """Ask for a change of settings as a panel would, and say so in a `guard` event.

    Only rank 0, or the supervisor between two launches, may call this.

    Returns:
        The request's revision, which is also the event's: the `flip` event of the same revision belongs to it. None
        for an act that asks for nothing.
    """
    revision = None
    if changes:
        revision = runfolder.write_control(folder, lambda standing: {**standing, **changes}).revision
    said = {"guard": guard, "action": action, "reason": reason, "revision": revision, "changes": changes or {}}
    events.write("guard", step, **said, **numbers)
    return revision


def ask_for_less(folder: Path, base: RunConfig, config: RunConfig, reason: str, step: int) -> bool:
    """Ask the next launch of a run without ranks for a smaller microbatch.

    Args:
        base: config.yaml.
        config: what the ranks that ran out of memory did.
    Returns:
        False where the guard is off, nothing is smaller, or the last such request was refused.
    """
    shrunk = [e for e in runfolder.read_events(folder, ("guard",)) if e["action"] == "shrink"]
    since = (shrunk[-1]["revision"] or 0) if shrunk else math.inf
    answers = [e for e in runfolder.read_events(folder, ("flip",)) if e["revision"] >= since]
    if answers and not answers[0]["applied"]:
        return False
    with contextlib.suppress(ConfigError):  # a request that makes no config is about to be refused
        config = overlays.apply(base, runfolder.effective_overlay(folder, runfolder.read_control(folder)))
    changes = smaller(config)
    if changes is None or not config.guards.out_of_memory:
        return False
    with runfolder.further_events(folder) as events:
        size = list(size_of(config.training))
        act(folder, events, "out_of_memory", "shrink", reason, step, changes, size=size)
    return True
