"""The eight phases: named differences between two configs, and what is claimed of each. Pure data.

Claims are the published recipe's (one transformer of 21.4 M parameters on PDEBench, A100); nobody had measured them one
by one. docs/phases.md sets them beside measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from upsnb import hardware as machines
from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.errors import ConfigError
from upsnb.hardware import Hardware

LOADER = (  # what the order, the size or the way of batches depends on
    "training.batch_size",
    "training.accum_steps",
    "training.num_workers",
    "training.prefetch_factor",
    "training.pin_memory",
    "training.lambda_rollout",
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
    "checkpoint.",
    "guards.",
    "evaluation.",
)
COLD = (  # prefixes of settings that may change between two launches of the workers; nothing else may change in a run
    "training.num_gpus",
    "training.threads_per_rank",
    "training.device",
    "training.use_fsdp2",
    "training.nccl_tuning",
    "training.ema_decay",
    "training.stall_timeout_s",
    "training.max_restarts",
    "optimizer.name",
)
SOURCE = "published recipe, multiplied factors"


@dataclass(frozen=True)
class Expected:
    """A promise, to be shown beside a measurement and never instead of one."""

    factor: float  # alone
    cumulative: float  # with all phases before it
    of: str = "samples_per_s"
    source: str = SOURCE


@dataclass(frozen=True)
class Phase:
    """One switch."""

    number: int | None  # place in the published recipe; None for an extra
    name: str  # YAML value, switch label, report column
    sentence: str
    on: dict[str, object]  # dotted setting: value
    off: dict[str, object]
    expected: Expected | None  # None: nothing was promised
    hot: bool  # may change between two steps; False: relaunch and resume
    numerics: Literal["identical", "rounding", "different"]  # what tests may demand of losses and gradients
    ladder: dict[str, object] = field(default_factory=dict)  # what the published recipe changes along with it
    needs: str = ""  # what the machine must have, in words; `unmet` checks it


PHASES = (
    Phase(
        1,
        "compile",
        "Fuse the operations of each block into generated kernels.",
        on={"training.compile": True},
        off={"training.compile": False},
        expected=Expected(1.36, 1.36),
        hot=True,
        numerics="rounding",
    ),
    Phase(
        2,
        "activation_checkpointing",
        "Recompute block activations in backward instead of keeping them.",
        on={"operator.pdet.use_activation_checkpoint": True},
        off={"operator.pdet.use_activation_checkpoint": False},
        expected=Expected(1.45, 1.97),
        hot=True,
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
        hot=True,
        numerics="different",
    ),
    Phase(
        4,
        "data_loading",
        "Read ahead in several processes and copy to the device without waiting.",
        on={"training.num_workers": 6, "training.prefetch_factor": 2, "training.pin_memory": True},
        off={"training.num_workers": 0, "training.prefetch_factor": 2, "training.pin_memory": False},
        expected=Expected(1.07, 2.78),
        hot=True,
        numerics="identical",
    ),
    Phase(
        5,
        "optimizer_offload",
        "Keep AdamW's state in host memory and step there.",
        on={"training.cpu_offload_optimizer": True},
        off={"training.cpu_offload_optimizer": False},
        expected=Expected(1.23, 3.41),
        hot=True,
        numerics="rounding",
        ladder={"training.batch_size": 20},
        needs="CUDA",
    ),
    Phase(
        6,
        "bf16",
        "Compute in bfloat16 instead of float16, without a gradient scaler.",
        on={"training.amp": True, "training.amp_dtype": "bfloat16"},
        off={"training.amp": True, "training.amp_dtype": "float16"},
        expected=Expected(1.10, 3.75),
        hot=True,
        numerics="rounding",
    ),
    Phase(
        7,
        "fsdp2",
        "Shard parameters, gradients and optimizer state over the ranks.",
        on={"training.use_fsdp2": True},
        off={"training.use_fsdp2": False},
        expected=Expected(1.18, 4.41),
        hot=False,
        numerics="rounding",
        ladder={"training.batch_size": 24},
    ),
    Phase(
        8,
        "fused",
        "Step AdamW in one kernel and attend with FlexAttention.",
        on={"optimizer.fused": True, "operator.pdet.attention": "flex"},
        off={"optimizer.fused": False, "operator.pdet.attention": "sdpa"},
        expected=Expected(1.13, 5.0),
        hot=True,
        numerics="rounding",
        needs="CUDA for the backward pass of FlexAttention",
    ),
)
EXTRAS = (
    Phase(
        None,
        "nccl",
        "Give NCCL more sockets, threads and channels.",
        on={"training.nccl_tuning": True},
        off={"training.nccl_tuning": False},
        expected=None,
        hot=False,
        numerics="identical",
        needs="several CUDA devices",
    ),
    Phase(
        None,
        "tf32",
        "Multiply float32 matrices with TensorFloat-32.",
        on={"training.tf32": True},
        off={"training.tf32": False},
        expected=None,
        hot=True,
        numerics="rounding",
        needs="CUDA",
    ),
    Phase(
        None,
        "no_sync",
        "Average gradients over the ranks once a step, not after every microbatch.",
        on={"training.no_sync": True},
        off={"training.no_sync": False},
        expected=None,
        hot=True,
        numerics="rounding",
    ),
    Phase(
        None,
        "foreach",
        "Step AdamW over lists of tensors.",
        on={"optimizer.foreach": True},
        off={"optimizer.foreach": False},
        expected=None,
        hot=True,
        numerics="rounding",
    ),
    Phase(
        None,
        "async_checkpoints",
        "Write checkpoints to disk while training goes on.",
        on={"checkpoint.async_save": True},
        off={"checkpoint.async_save": False},
        expected=None,
        hot=True,
        numerics="identical",
    ),
    Phase(
        None,
        "sparse_validation",
        "Validate every fifth epoch on a quarter of the split.",
        on={"evaluation.every_epochs": 5, "evaluation.fraction": 0.25},
        off={"evaluation.every_epochs": 1, "evaluation.fraction": 1.0},
        expected=None,
        hot=True,
        numerics="identical",
    ),
)
BY_NAME = {phase.name: phase for phase in (*PHASES, *EXTRAS)}


def label(name: str) -> str:
    """A phase's name, or a setting's last key, as people write it: activation checkpointing, FSDP2."""
    return {"fsdp2": "FSDP2", "nccl": "NCCL", "tf32": "TF32", "no_sync": name}.get(name, name.replace("_", " "))


def is_on(phase: Phase, config: RunConfig) -> bool:
    """Whether a config has every setting of the phase."""
    return all(setting(config, path) == value for path, value in phase.on.items())


def setting(config: RunConfig, path: str):
    """The value of a dotted setting."""
    value = config
    for key in path.split("."):
        value = getattr(value, key)
    return value


# Settings that a phase stands or falls with, beside its own and its ladder's: how a technique is carried out.
COMPANIONS = (
    "training.compile_mode",
    "training.on_missing",
    "operator.pdet.checkpoint_every",
    "operator.pdet.checkpoint_parts",
)


def switchable(overlay: dict) -> dict[str, object]:
    """The part of an overlay, flattened, that phases and their ladders consist of: what a live run can be asked for.

    A params file holds more: its model, data and stages belong to the start of a run, its number of ranks to a machine.
    """
    settings = {path for phase in BY_NAME.values() for path in (*phase.on, *phase.off, *phase.ladder)} | {*COMPANIONS}
    return {
        path: value
        for path, value in overlays.flatten(overlay).items()
        if path in settings and path.startswith((*HOT, *COLD))
    }


def is_cold(path: str) -> bool:
    """Whether a setting changes between two launches of the workers, and not between two steps."""
    return path.startswith(COLD) and not path.startswith(HOT)


def unmet(phase: Phase, config: RunConfig, hardware: Hardware) -> list[str]:
    """Why the phase cannot be switched on in a run of this config on this machine, in words; empty when it can."""
    try:
        on = overlays.apply(config, phase.on)
    except ConfigError as error:
        return error.problems
    before = machines.problems(config, hardware)
    return [problem for problem in machines.problems(on, hardware) if problem not in before]


def skip_missing(config: RunConfig, hardware: Hardware) -> tuple[RunConfig, dict[str, str]]:
    """A config without the phases that cannot run here, and why for each, as `training.on_missing: skip` asks for."""
    skipped: dict[str, str] = {}
    for name, phase in BY_NAME.items():
        for path, value in phase.on.items():
            if setting(config, path) != value:
                continue
            try:
                without = overlays.apply(config, {path: phase.off[path]})
            except ConfigError:  # another phase needs the setting, such as offload its bfloat16
                continue
            left = machines.problems(without, hardware)
            solved = [problem for problem in machines.problems(config, hardware) if problem not in left]
            if solved:
                skipped[name] = "; ".join(filter(None, (skipped.get(name), *solved)))
                config = without
    return config, skipped
