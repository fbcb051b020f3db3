"""The eight phases: named differences between two configs, and what is claimed of each. Pure data.

Claims are the published recipe's (one transformer of 21.4 M parameters on PDEBench, A100); nobody had measured them one
by one. docs/phases.md sets them beside measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from upsnb import hardware as machines
from upsnb import overlays
from upsnb.config import RunConfig, setting
from upsnb.errors import ConfigError, Problem
from upsnb.hardware import Hardware

LOADER = (  # what the order, the size or the way of batches depends on
    "training.batch_size",
    "training.accum_steps",
    "training.num_workers",
    "training.prefetch_factor",
    "training.pin_memory",
    "training.lambda_rollout",
    "stages.finetune.unroll",
    "stages.crps.unroll",
    "data.mixing",
    "data.residency",
    "data.max_resident_gib",
)
HOT = (  # prefixes of settings that may change between two steps
    *LOADER,
    "operator.pdet.use_activation_checkpoint",
    "operator.pdet.checkpoint_",
    "operator.pdet.attention",
    "training.amp",
    "training.compile",
    "training.tf32",
    "training.no_sync",
    "training.cpu_offload_optimizer",
    "training.on_missing",
    "training.inverse_loss_frequency",
    "training.query_sampling",
    "training.lambda_",
    "training.loss_",
    "training.noise",
    "training.grad_clip",
    "training.patience",
    "training.time_limit_s",
    "optimizer.lr",
    "optimizer.muon_lr",
    "optimizer.weight_decay",
    "optimizer.betas",
    "optimizer.momentum",
    "optimizer.fused",
    "optimizer.foreach",
    "stages.",
    "checkpoint.interval",
    "checkpoint.budget_gb",
    "checkpoint.async_save",
    "guards.",
    "evaluation.",
    "cost.",
)
COLD = (  # prefixes of settings that may change between two launches of the workers; nothing else may change in a run
    "training.num_gpus",
    "training.threads_per_rank",
    "training.device",
    "training.use_fsdp2",
    "training.nccl_tuning",
    "training.bf16_gradients",
    "training.expandable_segments",
    "training.ema_decay",
    "training.stall_timeout_s",
    "training.max_restarts",
    "optimizer.name",
)
NO_STEP = (
    "data.mixing",
    "evaluation.",
    "checkpoint.",
    "guards.",
    "stages.",
    "cost.",
)  # no steady step depends on these
SOURCE = "published recipe, multiplied factors"


WORKS, ON_PARTS, DOES_NOT_APPLY, REFUSED = "works", "works on named parts", "does not apply", "refused"


class Verdict(NamedTuple):
    """What a phase is to a model, on a machine."""

    kind: str  # WORKS, ON_PARTS, DOES_NOT_APPLY or REFUSED
    why: str = ""  # which parts, or why not

    @property
    def stands_against(self) -> bool:
        """Whether there is nothing to switch on, or to measure."""
        return self.kind in (DOES_NOT_APPLY, REFUSED)

    def __str__(self) -> str:
        return f"{self.kind}{': ' * bool(self.why)}{self.why}"


@dataclass(frozen=True)
class Expected:
    """A promise, to be shown beside a measurement and never instead of one."""

    factor: float  # alone
    cumulative: float  # with all phases before it
    source: str = SOURCE


@dataclass(frozen=True)
class Phase:
    """One switch."""

    number: int | None  # place in the published recipe; None for an extra
    name: str  # YAML value, switch label, report column
    sentence: str
    on: dict[str, object]  # dotted setting: value
    off: dict[str, object]  # the same settings without it, in the published recipe or by default
    expected: Expected | None = None  # None: nothing was promised
    numerics: Literal["identical", "rounding", "different"] = "rounding"  # what tests may demand of losses, gradients
    ladder: dict[str, object] = field(default_factory=dict)  # what the published recipe changes along with it
    needs: str = ""  # what the machine must have, in words; `unmet` checks it
    when: Callable[[RunConfig], bool] | None = None  # it is on; None: with every setting of `on`
    off_on_cpu: dict[str, object] = field(default_factory=dict)  # in place of `off`, where a CPU would not do that

    @property
    def hot(self) -> bool:
        """Whether it may change between two steps; otherwise by a relaunch that resumes."""
        return not any(is_cold(path) for path in self.on)


PHASES = (
    Phase(
        1,
        "compile",
        "Fuse the operations of the model into generated kernels.",
        on={"training.compile": True},
        off={"training.compile": False},
        expected=Expected(1.36, 1.36),
    ),
    Phase(
        2,
        "activation_checkpointing",
        "Recompute block activations in backward instead of keeping them.",
        on={"operator.pdet.use_activation_checkpoint": True},
        off={"operator.pdet.use_activation_checkpoint": False},
        expected=Expected(1.45, 1.97),
        numerics="identical",
        ladder={"training.batch_size": 16, "training.accum_steps": 2},
    ),
    Phase(
        3,
        "loss_frequency",
        "Compute inverse losses every fourth time and compare half as many points.",
        on={"training.inverse_loss_frequency": 4, "training.query_sampling.num_queries": 1024},
        off={"training.inverse_loss_frequency": 1, "training.query_sampling.num_queries": 2048},
        expected=Expected(1.31, 2.59),
        numerics="different",
    ),
    Phase(
        4,
        "data_loading",
        "Read ahead in several processes and copy to the device without waiting.",
        on={"training.num_workers": 6, "training.prefetch_factor": 2, "training.pin_memory": True},
        off={"training.num_workers": 0, "training.prefetch_factor": 2, "training.pin_memory": False},
        expected=Expected(1.07, 2.78),
        numerics="identical",
        when=lambda config: config.training.num_workers > 0 and config.training.pin_memory,  # 4 GPUs take 12
    ),
    Phase(
        5,
        "optimizer_offload",
        "Keep AdamW's state in host memory and step there.",
        on={"training.cpu_offload_optimizer": True},
        off={"training.cpu_offload_optimizer": False},
        expected=Expected(1.23, 3.41),
        ladder={"training.batch_size": 20},
        needs="CUDA",
    ),
    Phase(
        6,
        "bf16",
        "Compute in bfloat16 instead of float16, without a gradient scaler.",
        on={"training.amp": True, "training.amp_dtype": "bfloat16"},
        off={"training.amp": True, "training.amp_dtype": "float16"},
        off_on_cpu={"training.amp": False, "training.amp_dtype": "float16"},  # few CPUs have instructions for float16
        expected=Expected(1.10, 3.75),
    ),
    Phase(
        7,
        "fsdp2",
        "Shard parameters, gradients and optimizer state over the ranks.",
        on={"training.use_fsdp2": True},
        off={"training.use_fsdp2": False},
        expected=Expected(1.18, 4.41),
        ladder={"training.batch_size": 24},
    ),
    Phase(
        8,
        "fused",
        "Step AdamW in one kernel.",
        on={"optimizer.fused": True},
        off={"optimizer.fused": False},
        expected=Expected(1.13, 5.0),
    ),
)
EXTRAS = (
    Phase(
        None,
        "flex_attention",
        "Attend through the kernel that FlexAttention generates.",
        on={"operator.pdet.attention": "flex"},
        off={"operator.pdet.attention": "sdpa"},
        needs="CUDA for the backward pass",
    ),
    Phase(
        None,
        "nccl",
        "Give NCCL more sockets, threads and channels.",
        on={"training.nccl_tuning": True},
        off={"training.nccl_tuning": False},
        numerics="identical",
        needs="several CUDA devices",
    ),
    Phase(
        None,
        "bf16_gradients",
        "Average gradients over the ranks in bfloat16, which halves what DDP sends.",
        on={"training.bf16_gradients": True},
        off={"training.bf16_gradients": False},
        needs="several ranks",
    ),
    Phase(
        None,
        "expandable_segments",
        "Let CUDA's allocator grow its segments, which leaves fewer gaps that fit nothing.",
        on={"training.expandable_segments": True},
        off={"training.expandable_segments": False},
        numerics="identical",
        needs="CUDA",
    ),
    Phase(
        None,
        "tf32",
        "Multiply float32 matrices with TensorFloat-32.",
        on={"training.tf32": True},
        off={"training.tf32": False},
        needs="CUDA",
    ),
    Phase(
        None,
        "no_sync",
        "Average gradients over the ranks once a step, not after every microbatch.",
        on={"training.no_sync": True},
        off={"training.no_sync": False},
    ),
    Phase(
        None,
        "foreach",
        "Step AdamW over lists of tensors.",
        on={"optimizer.foreach": True},
        off={"optimizer.foreach": False},
    ),
    Phase(
        None,
        "async_checkpoints",
        "Write checkpoints to disk while training goes on.",
        on={"checkpoint.async_save": True},
        off={"checkpoint.async_save": False},
        numerics="identical",
    ),
    Phase(
        None,
        "sparse_validation",
        "Validate every fifth epoch on a quarter of the split.",
        on={"evaluation.every_epochs": 5, "evaluation.fraction": 0.25},
        off={"evaluation.every_epochs": 1, "evaluation.fraction": 1.0},
        numerics="identical",
    ),
)
BY_NAME = {phase.name: phase for phase in (*PHASES, *EXTRAS)}


def label(name: str) -> str:
    """A phase's name, or a setting's last key, as people write it: activation checkpointing, FSDP2."""
    own = {"fsdp2": "FSDP2", "flex_attention": "FlexAttention", "nccl": "NCCL", "tf32": "TF32", "no_sync": name}
    return own.get(name, name.replace("_", " "))


def is_on(phase: Phase, config: RunConfig) -> bool:
    """Whether a config has the phase."""
    if phase.when is not None:
        return phase.when(config)
    return all(setting(config, path) == value for path, value in phase.on.items())


def names_on(config: RunConfig) -> list[str]:
    """Names of the phases of the recipe that a config has."""
    return [phase.name for phase in PHASES if is_on(phase, config)]


def off_overlay(phase: Phase, base: RunConfig) -> dict[str, object]:
    """What switching a phase off asks of a run that was started as `base`: its own settings, as they were without.

    Where it was started with the phase there are none, and off is what the phase says.
    """
    if not is_on(phase, base):
        return {path: setting(base, path) for path in phase.on}
    on_cpu = phase.off_on_cpu and machines.resolve_device(base, machines.detect()) == "cpu"
    return phase.off_on_cpu if on_cpu else phase.off


def baseline_overlay(base: RunConfig) -> dict[str, object]:
    """What takes every phase out of a run that was started as `base`, whatever was flipped since, half of one too.

    What is neither on nor off in the base is its own: float32 stays float32.
    """
    own = {path: setting(base, path) for phase in PHASES for path in phase.on}
    off = {
        path: (off_overlay(phase, base) if is_on(phase, base) else phase.off)[path]
        for phase in PHASES
        for path, value in phase.on.items()
        if is_on(phase, base) or own[path] == value
    }
    return own | off


# Beside a phase's own settings and its ladder's: how a technique is carried out, and what guards it.
COMPANIONS = (
    "training.compile_mode",
    "training.on_missing",
    "operator.pdet.checkpoint_every",
    "operator.pdet.checkpoint_parts",
    "optimizer.lr_scaling",
    "optimizer.lr_reference_batch",
    "guards.nonfinite",
    "guards.out_of_memory",
)


def switchable(overlay: dict) -> dict[str, object]:
    """The part of an overlay, flattened, that phases and their ladders consist of: what a live run can be asked for.

    A params file holds more: its model, data and stages belong to the start of a run, its number of ranks to a machine.
    """
    settings = {path for phase in BY_NAME.values() for path in (*phase.on, *phase.ladder)} | {*COMPANIONS}
    return {path: value for path, value in overlays.flatten(overlay).items() if path in settings}


def is_cold(path: str) -> bool:
    """Whether a setting changes between two launches of the workers, and not between two steps."""
    return path.startswith(COLD) and not path.startswith(HOT)


def is_idle(path: str) -> bool:
    """Whether no steady step depends on a setting."""
    return path.startswith(NO_STEP)


def no_turns(old: RunConfig, new: RunConfig) -> list[str]:
    """Why the difference of two configs cannot be switched every few steps and measured so; empty where it can."""
    changes, elsewhere = overlays.difference(old, new), "compare two runs (notebooks/02_compare.ipynb)"
    cold = [f"{path}: takes a relaunch -> flip it, or {elsewhere}" for path in changes if is_cold(path)]
    idle = all(map(is_idle, changes))
    return cold or [f"{path}: no step depends on it -> {elsewhere}" for path in changes if idle]


def unmet(phase: Phase, config: RunConfig, hardware: Hardware) -> list[Problem]:
    """Why the phase cannot be switched on in a run of this config on this machine; empty when it can."""
    try:
        on = overlays.apply(config, phase.on)
    except ConfigError as error:
        return error.problems
    before = machines.problems(config, hardware)
    return [problem for problem in machines.problems(on, hardware) if problem not in before]


def skip_missing(
    config: RunConfig, hardware: Hardware, base: RunConfig | None = None
) -> tuple[RunConfig, dict[str, str]]:
    """A config without the phases that cannot run here, and why for each, as `training.on_missing: skip` asks for.

    Args:
        base: what its run was started as, and goes back to without a phase; empty: the same.
    """
    skipped: dict[str, str] = {}
    for phase in BY_NAME.values():
        if not is_on(phase, config):
            continue
        # what the phase is instead of, and where that cannot run either, as on a CPU without halves, none of both
        for off in (off_overlay(phase, base or config), {path: setting(RunConfig(), path) for path in phase.on}):
            try:
                without = overlays.apply(config, off)
            except ConfigError:  # another setting needs the phase
                continue
            left = machines.problems(without, hardware)
            solved = [str(problem) for problem in machines.problems(config, hardware) if problem not in left]
            if solved:
                skipped[phase.name], config = "; ".join(solved), without
                break
    return config, skipped
