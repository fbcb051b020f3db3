"""AdamW with its state in host memory: torchao's CPUOffloadOptimizer, driven once an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class OffloadedAdamW:
    """Steps parameters on the host; speaks like an optimizer of torch about the model's own parameters.

    torchao's optimizer copies gradients to the host in hooks on the parameters, one by one during backward. Under DDP
    those are the gradients of this rank before they are averaged, with several microbatches every copy but the last is
    for nothing, and what FSDP2 shards its hooks do not see as plain tensors. So it is given views of the local
    parameters that no backward pass reaches, and its hooks are run here: during a backward pass that is said to be
    the only one of a step, on one rank, else when the gradients are final.

    Tensors below 4096 elements stay on the device (torchao's `minimal_size`). Host steps are always fused.

    Args:
        groups: as for torch.optim.AdamW, with the model's parameters.
    """

    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, float]):
        from torchao.optim import CPUOffloadOptimizer  # here, because it takes seconds and most runs need none

        self.views = {p: local(p).detach().requires_grad_() for group in groups for p in group["params"]}
        given = [{**group, "params": [self.views[p] for p in group["params"]]} for group in groups]
        self.inner = CPUOffloadOptimizer(given, torch.optim.AdamW, lr=lr, betas=betas, fused=True)
        self.param_groups = [{"lr": lr, "betas": betas, "fused": True, **group} for group in groups]
        # torchao has a group for each tensor on the host, and one of ours for what stays: all follow our learning rates
        owners = {self.views[p]: group for group in self.param_groups for p in group["params"]}
        self.inner_groups = [(inner.param_groups[0], owners[view]) for view, inner in self.inner.optim_dict.items()]
        self.inner_groups += [(kept, owners[kept["params"][0]]) for kept in self.inner.d_param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        """Moments by parameter, where they lie: on the host, or sharded as the parameter is; of stepped ones only."""
        states = ((p, self._state_of(p)) for p in self.views)
        return {p: {key: _like(p, value) for key, value in state.items()} for p, state in states if state}

    def give_state(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Continue with `state` (step, exp_avg, exp_avg_sq) for a parameter; it is copied to where it is needed."""
        own = self.inner.param_d2h_map.get(self.views[parameter])
        place = self.views[parameter].device if own is None else own.device
        mine = self._state_of(parameter)
        mine.clear()
        for key, value in state.items():
            mine[key] = local(torch.as_tensor(value)).detach().to(place, torch.float32, copy=True)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        view = self.views[parameter]
        if view in self.inner.optim_dict:
            return self.inner.optim_dict[view].state[self.inner.param_d2h_map[view]]
        return self.inner.d_opt.state[view]

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the parameters' values to the host again, after something other than `step` has changed them."""
        for view, host in self.inner.param_d2h_map.items():
            host.copy_(view)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Around a backward pass to whose gradients nothing is added: each goes to the host while the next is computed.

        What changes all of them alike before the step is said by `multiplied`.
        """
        large = (p for p, view in self.views.items() if view in self.inner.optim_dict)
        hooks = [p.register_post_accumulate_grad_hook(self._copy) for p in large]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def is_ahead(self) -> bool:
        """Whether gradients of this step are on their way to the host."""
        return bool(self.inner.queue)

    def _copy(self, parameter: Tensor) -> None:
        """Begin to copy a gradient, as torchao does when autograd has accumulated it."""
        view = self.views[parameter]
        view.grad = local(parameter.grad)
        for hook in view._post_accumulate_grad_hooks.values():
            hook(view)

    def wait(self) -> None:
        """Let the device change no gradient before its copy has been read; the host goes on."""
        torch.cuda.current_stream().wait_stream(self.inner.stream)

    def multiplied(self, factor: Tensor) -> None:
        """Note by what all gradients on the device were multiplied after they were copied."""
        scale = (1 / factor).to("cpu", torch.float32)
        for inner in self.inner.optim_dict.values():
            inner.grad_scale = scale  # a fused step divides by it

    def step(self) -> None:
        """Step on the host, with gradients that are copied there unless they have been; copy the parameters back.

        Waits until they are.
        """
        for p, view in self.views.items():
            if p.grad is None:
                view.grad = None
                self.inner.queue.pop(view, None)
            elif view not in self.inner.optim_dict:
                view.grad = local(p.grad)
            elif view not in self.inner.queue:
                self._copy(p)
        for inner, group in self.inner_groups:
            inner["lr"] = group["lr"]
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, on the device and in the views, and what was copied of a step that was not taken."""
        for p, view in self.views.items():
            p.grad = view.grad = None
        for inner in self.inner.optim_dict.values():
            inner.grad_scale = None
        self.inner.queue.clear()


def local(x: Tensor) -> Tensor:
    """This rank's part of a tensor that FSDP2 may have sharded; shares its memory."""
    return x.to_local() if isinstance(x, DTensor) else x


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """A local moment as the parameter is: sharded over the same ranks and on the device, or as it lies."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.to_local().shape:
        return value
    mesh, placements, size = parameter.device_mesh, parameter.placements, parameter.size()
    part = value.to(parameter.device)
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=size, stride=parameter.stride())
