"""Muon on the operator's hidden matrices, AdamW on everything else, and the learning rate over a stage."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from upsnb.config import OptimizerConfig, SchedulerConfig
from upsnb.models.surrogate import Surrogate
from upsnb.training.muon import Muon
from upsnb.training.offload import OffloadedAdamW, local


def split_parameters(model: Surrogate) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Hidden matrices of the model's blocks; other weights; norms, biases and offsets (never decayed)."""
    hidden, weights, plain = [], [], []
    matrices = set(model.matrices())
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter in matrices:
            hidden.append(parameter)
        elif parameter.ndim >= 2 and name.endswith(".weight"):
            weights.append(parameter)
        else:
            plain.append(parameter)
    return hidden, weights, plain


def build(model: Surrogate, config: OptimizerConfig, offload: bool = False) -> list[torch.optim.Optimizer]:
    """Optimizers that together own every trained parameter exactly once.

    Args:
        offload: keep AdamW's state on the host and step there; Muon stays on the device, where its matrix products are.
    """
    hidden, weights, plain = split_parameters(model)
    optimizers: list[torch.optim.Optimizer] = []
    if config.name == "muon_hybrid" and hidden:
        optimizers.append(
            Muon(
                hidden,
                lr=config.muon_lr or config.lr,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
            )
        )
    else:
        weights = hidden + weights
    groups = [
        {"params": weights, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    if offload:
        optimizers.append(OffloadedAdamW(groups, config.lr, config.betas))
    else:
        how = {"fused": config.fused or None, "foreach": config.foreach}
        optimizers.append(torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, **how))
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["peak_lr"] = group["lr"]
    return optimizers


def optimizer_state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, dict[str, Tensor]]:
    """The state of the optimizers by parameter name, whatever their number, order and kind; shares its tensors."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: dict(state) for optimizer in optimizers for p, state in optimizer.state.items()}


def load_optimizer_state(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], given: dict[str, dict[str, Tensor]]
) -> None:
    """Let optimizers continue with the `optimizer_state` of others; a parameter that changed its optimizer starts anew.

    Moments move to where the new optimizer wants them: on the parameter's device, sharded as it is, or on the host.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        # In one order on all ranks, which gather shards one after the other; a set's order differs between processes.
        needed = ("momentum_buffer",) if isinstance(optimizer, torch.optim.Muon) else ("step", "exp_avg", "exp_avg_sq")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = given.get(names[parameter], {})
                if not state.keys() >= set(needed):
                    continue
                taken = {key: shard_like(torch.as_tensor(state[key]), parameter) for key in needed}
                if isinstance(optimizer, OffloadedAdamW):
                    optimizer.give_state(parameter, taken)
                    continue
                optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in taken.items()}
                if "step" in needed and not group["fused"]:  # a fused step reads it on the device, others on the host
                    optimizer.state[parameter]["step"] = taken["step"].to("cpu")


def copying(optimizers: list[torch.optim.Optimizer]) -> AbstractContextManager:
    """Around a backward pass whose gradients are stepped on as it leaves them: offloaded ones are copied meanwhile."""
    return next((each.copying() for each in optimizers if isinstance(each, OffloadedAdamW)), nullcontext())


def weights_changed(optimizers: list[torch.optim.Optimizer]) -> None:
    """Tell optimizers that keep copies of the weights that these were loaded; averages swapped in and out need not."""
    for optimizer in optimizers:
        if isinstance(optimizer, OffloadedAdamW):
            optimizer.refresh()


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """`value` sharded as `like` is, which every rank cuts out of its own copy; unchanged where nothing is to be cut."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def clip(parameters: Iterable[Tensor], limit: float | None) -> Tensor:
    """Scale all gradients so that their norm over all parameters, and over all shards, is at most the limit.

    Returns:
        The norm before, the same on every rank.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit or float("inf"), foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class JointOptimizer:
    """Several optimizers as one for a GradScaler: an overflow in the gradients of any skips the step of all.

    Stepped apart, clipping by a norm of NaN spreads one's bad gradients into the weights of the others.
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer]):
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def unscale_and_clip(
        self, scaler: torch.amp.GradScaler, parameters: Iterable[Tensor], limit: float | None
    ) -> Tensor:
        """Undo the loss's scale in all gradients and `clip` them; also for those that are on their way to the host."""
        ahead = [each for each in self.optimizers if isinstance(each, OffloadedAdamW) and each.is_ahead]
        for optimizer in ahead:
            optimizer.wait()
        scaler.unscale_(self)
        norm = clip(parameters, limit)
        for optimizer in ahead:
            shrunk = (limit / (norm + 1e-6)).clamp(max=1.0) if limit else torch.ones_like(norm)  # as torch clips
            optimizer.multiplied(shrunk / scaler.scale(torch.ones_like(norm)))
        return norm


def learning_rate_factor(config: SchedulerConfig, progress: float) -> float:
    """Learning rate over its peak at a stage's progress in [0, 1].

    `onecycle` rises along a half cosine and falls along another (arXiv 1708.07120, there over 30 % of the stage);
    `plateau` is constant here and multiplied by `Plateau` on top.
    """
    progress = min(max(progress, 0.0), 1.0)
    rise = config.warmup_fraction
    if progress < rise:
        fraction = progress / rise
        return max((1 - math.cos(math.pi * fraction)) / 2 if config.name == "onecycle" else fraction, 1e-3)
    if config.name in ("constant", "plateau"):
        return 1.0
    falling = (progress - rise) / (1 - rise)
    return config.min_lr_fraction + (1 - config.min_lr_fraction) * (1 + math.cos(math.pi * falling)) / 2


def batch_factor(config: OptimizerConfig, batch: int) -> float:
    """Learning rate over what `config` says, for a step of so many pairs, all ranks and microbatches."""
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[config.lr_scaling]
    return (batch / (config.lr_reference_batch or batch)) ** power


class Plateau:
    """Multiplies the learning rate whenever validation has not improved for `plateau_patience` evaluations."""

    def __init__(self, config: SchedulerConfig):
        self.config, self.factor, self.best, self.waited = config, 1.0, math.inf, 0

    def update(self, value: float) -> None:
        if self.config.name != "plateau":
            return
        if value < self.best:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.config.plateau_patience:
            self.factor, self.waited = self.factor * self.config.plateau_factor, 0

    def forget(self) -> None:
        """Start waiting anew: values to come are not comparable with those so far."""
        self.best, self.waited = math.inf, 0

    def state_dict(self) -> dict:
        return {"factor": self.factor, "best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict) -> None:
        self.factor, self.best, self.waited = state["factor"], state["best"], state["waited"]


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> float:
    """Set every group to its peak times `factor`; returns AdamW's rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
    return optimizer.param_groups[0]["lr"]


class Ema:
    """Exponential moving average of the weights, swapped in for evaluation.

    The decay rises as (1 + n) / (10 + n) towards its target, so that early averages do not remember the start.
    Averages of sharded weights are sharded alike, and each rank works on its own part.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay, self.updates = decay, 0
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters = [parameter for _, parameter in model.named_parameters()]
        self.average = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_([local(a) for a in self.average], [local(p) for p in self.parameters], 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and averages; twice is the identity."""
        for parameter, average in zip(self.parameters, self.average, strict=True):
            kept = local(parameter).clone()
            local(parameter).copy_(local(average))
            local(average).copy_(kept)

    def state_dict(self) -> dict:
        return {"updates": self.updates, "average": dict(zip(self.names, self.average, strict=True))}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        self.updates = state["updates"]
        for name, average in zip(self.names, self.average, strict=True):
            average.copy_(shard_like(state["average"][name], average))
