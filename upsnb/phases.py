"""The eight phases: named differences between two configs, and what is claimed of each. Pure data.

Claims are the published recipe's (one transformer of 21.4 M parameters on PDEBench, A100); nobody had measured them one
by one. docs/phases.md sets them beside measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from upsnb.config import RunConfig
from upsnb.hardware import Hardware, resolve_device

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
    "stages.operator",
    "checkpoint.interval",
    "evaluation.",
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

    number: int
    name: str  # YAML value, switch label, report column
    sentence: str
    on: dict[str, object]  # dotted setting: value
    off: dict[str, object]
    expected: Expected
    hot: bool  # may change between two steps; False: relaunch and resume
    numerics: Literal["identical", "rounding", "different"]  # what tests may demand of losses and gradients
    ladder: dict[str, object] = field(default_factory=dict)  # what the published recipe changes along with it
    needs: Callable[[Hardware, RunConfig], list[str]] = lambda hardware, config: []  # unmet requirements, in words


def _cuda(what: str) -> Callable[[Hardware, RunConfig], list[str]]:
    def needs(hardware: Hardware, config: RunConfig) -> list[str]:
        return [] if resolve_device(config, hardware) == "cuda" else [f"{what} needs a CUDA device"]

    return needs


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
        needs=_cuda("offloading from an accelerator"),
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
        needs=_cuda("the backward pass of FlexAttention"),
    ),
)
BY_NAME = {phase.name: phase for phase in PHASES}


def is_on(phase: Phase, config: RunConfig) -> bool:
    """Whether a config has every setting of the phase."""
    return all(_setting(config, path) == value for path, value in phase.on.items())


def _setting(config: RunConfig, path: str):
    value = config
    for key in path.split("."):
        value = getattr(value, key)
    return value
