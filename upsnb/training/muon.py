"""Muon, with one chain of matrix products for all matrices of a shape instead of one for each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

BATCH_ELEMENTS = 2**22  # of one chain: larger products keep a machine busy by themselves, and batches cost memory


class Muon(torch.optim.Muon):
    """`torch.optim.Muon`: the same state and the same updates, batched over the repeated blocks of a transformer.

    Hundreds of products of small matrices, one after the other, keep no machine busy (docs/LOG.md has what batching
    saves). Sharded weights are stepped as torch does.
    """

    def __init__(self, weights: list[Tensor], **settings):
        # Scaled to AdamW's update size (Moonlight, arXiv 2502.16982, section 2.2), so that one rate suits both.
        super().__init__(weights, adjust_lr_fn="match_rms_adamw", **settings)

    @torch.no_grad()
    def step(self) -> None:
        """Update every weight that has a gradient."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if any(isinstance(weight, DTensor) for weight in weights):
                super().step()
                return
            self._step_group(group, weights)

    def _step_group(self, group: dict, weights: list[Tensor]) -> None:
        if not weights:
            return
        gradients = [weight.grad for weight in weights]
        for weight, gradient in zip(weights, gradients):
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(gradient)
        moments = [self.state[weight]["momentum_buffer"] for weight in weights]
        torch._foreach_lerp_(moments, gradients, 1 - group["momentum"])
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        alike: dict[tuple, list[int]] = {}
        for number, weight in enumerate(weights):
            alike.setdefault((*sorted(weight.shape), weight.device), []).append(number)
        for (shorter, longer, _), those in alike.items():
            rate, count = 0.2 * longer**0.5 * group["lr"], max(1, BATCH_ELEMENTS // (shorter * longer))
            for numbers in (those[start : start + count] for start in range(0, len(those), count)):
                updates = [moments[number] for number in numbers]
                if group["nesterov"]:
                    updates = torch._foreach_lerp([gradients[n] for n in numbers], updates, group["momentum"])
                wide = torch.stack([wide_view(update).bfloat16() for update in updates])
                directions = orthogonal(wide, group["ns_coefficients"], group["ns_steps"], group["eps"])
                for number, direction in zip(numbers, directions):
                    wide_view(weights[number]).add_(direction, alpha=-rate)


def wide_view(matrix: Tensor) -> Tensor:
    """A view of a matrix that is at least as wide as high."""
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


def orthogonal(x_NRC: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz iterations towards matrices with orthonormal rows (Muon, arXiv 2502.16982, section 2.1).

    (N, R, C) bfloat16 with R <= C -> the same; singular values end between 0.5 and 1.5, which suffices.
    """
    a, b, c = coefficients
    x_NRC = x_NRC / torch.linalg.matrix_norm(x_NRC, keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x_NRC @ x_NRC.mT
        x_NRC = torch.baddbmm(x_NRC, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x_NRC, beta=a)
    return x_NRC
