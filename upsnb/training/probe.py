"""Trying out a step outside of training, and forgetting one that failed: nothing of either is left behind."""

from __future__ import annotations

import gc

import torch

from upsnb import overlays
from upsnb.training import compiling, parallel
from upsnb.training.losses import active_terms
from upsnb.training.precision import amp_dtype, build_scaler
from upsnb.training.setup import Setup

COMPILED = (  # prefixes of settings that compiled code depends on
    "training.compile",
    "training.amp",
    "training.tf32",
    "training.batch_size",
    "training.query_sampling",
    "training.lambda_",
    "operator.pdet.",
)


def compile_now(setup: Setup) -> None:
    """Compile what a step of the setup's config needs: one microbatch of each dataset, forward and backward.

    Compilation is lazy: without this its failure shows in the middle of a step, where ranks cannot agree on what to
    do. Weights, gradients and random states are left as found, and no gradient is averaged over ranks. Does nothing
    where nothing is compiled, or all is since the last call.
    """
    last, config = setup.probed, setup.config
    setup.probed = None  # until it has gone well
    if not config.training.compile:
        return
    changed = overlays.difference(last, config) if last else COMPILED
    if any(path.startswith(COMPILED) for path in changed):
        _forward_backward(setup)
    setup.probed = config


def _forward_backward(setup: Setup) -> None:
    device, parameters = setup.ranks.device, list(setup.model.parameters())
    gradients, noise = [parameter.grad for parameter in parameters], setup.generator.get_state()
    # DDP keeps the gradients to this rank; FSDP2 would keep them gathered, where resetting `grad` does not reach them
    alone = parallel.synchronising(setup.loss, on=setup.config.training.use_fsdp2)
    try:
        if device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.random.fork_rng([device] if device.type == "cuda" else []), alone, compiling.keep_graphs():
            for batch in setup.loader.peek():
                for parameter in parameters:
                    parameter.grad = None
                weights = active_terms(setup.config.training, 2**31, 0)  # all terms, past their warm-up
                total, _ = setup.loss(batch, weights, amp_dtype(setup.config))
                if total.requires_grad:
                    total.backward()
    finally:
        setup.generator.set_state(noise)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def abandon_step(setup: Setup) -> None:
    """Forget a step that failed before its update: its gradients, and what the scaler noted of them."""
    for parameter in setup.model.parameters():
        parameter.grad = None
    noted, setup.scaler = setup.scaler.state_dict(), build_scaler(setup.config, setup.ranks.device)
    setup.scaler.load_state_dict(noted)
    gc.collect()  # what the failure's frames held
    if setup.ranks.device.type == "cuda":
        torch.cuda.empty_cache()
