"""Muon: one chain of matrix products for all matrices of a shape, and two messages a step where weights are sharded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from upsnb import hardware
from upsnb.training.offload import local

# Of one chain: larger products keep a machine busy by themselves, and batches cost memory.
BATCH_ELEMENTS = {"cpu": 2**22, "cuda": 2**25}


class Muon(torch.optim.Muon):
    """`torch.optim.Muon`: the same state and the same updates, batched over the repeated blocks of a transformer.

    Hundreds of products of small matrices, one after the other, keep no machine busy (docs/LOG.md has what batching
    saves). Of sharded weights torch gathers every matrix on every rank, product by product; here each matrix has an
    owner, which is sent the shards, orthogonalises and sends the shards of the result back.
    """

    def __init__(self, weights: list[Tensor], **settings):
        # Scaled to AdamW's update size (Moonlight, arXiv 2502.16982, section 2.2), so that one rate suits both.
        super().__init__(weights, adjust_lr_fn="match_rms_adamw", **settings)

    @torch.no_grad()
    def step(self) -> None:
        """Update every weight that has a gradient; all ranks that share weights enter."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._step_group(group, weights)

    def _step_group(self, group: dict, weights: list[Tensor]) -> None:
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight.grad)
        gradients = [local(weight.grad) for weight in weights]
        moments = [local(self.state[weight]["momentum_buffer"]) for weight in weights]
        torch._foreach_lerp_(moments, gradients, 1 - group["momentum"])
        own = [local(weight) for weight in weights]
        torch._foreach_mul_(own, 1 - group["lr"] * group["weight_decay"])

        def updates(numbers: list[int]) -> list[Tensor]:
            """Of some weights, with Nesterov's momentum."""
            mine, smooth = ([values[number] for number in numbers] for values in (gradients, moments))
            return torch._foreach_lerp(mine, smooth, group["momentum"])

        found = self._ways_of_shards if _is_sharded(weights[0]) else self._ways
        for numbers, ways in found(group, weights, updates):
            torch._foreach_mul_(ways, [-0.2 * max(weights[n].shape) ** 0.5 * group["lr"] for n in numbers])
            torch._foreach_add_([own[number] for number in numbers], ways)

    def _ways(self, group: dict, weights: list[Tensor], updates) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Orthogonalised updates in float32, some of one shape at a time, and the numbers of their weights."""
        alike: dict[tuple, list[int]] = {}
        for number, weight in enumerate(weights):
            alike.setdefault((*sorted(weight.shape), weight.device), []).append(number)
        for (shorter, longer, device), those in alike.items():
            count = max(1, BATCH_ELEMENTS[device.type] // (shorter * longer))
            for numbers in (those[start : start + count] for start in range(0, len(those), count)):
                wide = torch.stack([wide_view(update) for update in updates(numbers)]).to(product_dtype(device))
                directions = orthogonal(wide, group["ns_coefficients"], group["ns_steps"], group["eps"]).float()
                yield numbers, [d if weights[n].shape[0] == shorter else d.mT for n, d in zip(numbers, directions)]

    def _ways_of_shards(self, group: dict, weights: list[DTensor], updates) -> Iterator:
        """The same of this rank's rows.

        Two messages to each other rank, whatever the number of weights: rows of what it owns, and back.
        """
        mesh = weights[0].device_mesh
        rank, ranks, process_group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
        owned = owners([tuple(weight.shape) for weight in weights], ranks)
        order = [number for numbers in owned for number in numbers]
        rows = [rows_of_ranks(weight.shape[0], ranks) for weight in weights]
        widths = [weight.shape[1] for weight in weights]

        def shares(flat: Tensor, numbers: list[int], of: int) -> list[Tensor]:
            """Rows that rank `of` has of some matrices, out of one row of numbers."""
            parts = flat.split([rows[n][of] * widths[n] for n in numbers])
            return [part.view(-1, widths[n]) for n, part in zip(numbers, parts)]

        to_owner = [sum(rows[n][rank] * widths[n] for n in numbers) for numbers in owned]
        from_rank = [sum(rows[n][other] * widths[n] for n in owned[rank]) for other in range(ranks)]
        sent = torch.cat([update.flatten() for update in updates(order)]).bfloat16()
        received = sent.new_empty(sum(from_rank))
        dist.all_to_all_single(received, sent, from_rank, to_owner, group=process_group)
        if owned[rank]:
            parts = [shares(part, owned[rank], other) for other, part in enumerate(received.split(from_rank))]
            whole = [torch.cat(those) for those in zip(*parts)]
            for numbers, ways in self._ways(group, whole, lambda numbers: [whole[n] for n in numbers]):
                for number, way in zip(numbers, ways):
                    whole[number].copy_(way)
            cut = [matrix.split(rows[n]) for n, matrix in zip(owned[rank], whole)]
            received = torch.cat([those[other].flatten() for other in range(ranks) for those in cut])
        dist.all_to_all_single(sent, received, to_owner, from_rank, group=process_group)
        yield order, shares(sent.float(), order, rank)


def product_dtype(device: torch.device) -> torch.dtype:
    """What the products are computed in: bfloat16 where there are instructions for it, else float32 (docs/LOG.md)."""
    if device.type == "cuda" and torch.cuda.is_available():
        has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        has_bf16 = device.type != "cpu" or hardware.cpu_has_bf16()
    return torch.bfloat16 if has_bf16 else torch.float32


def _is_sharded(weight: Tensor) -> bool:
    if not isinstance(weight, DTensor) or weight.device_mesh.size() == 1:
        return False
    assert weight.placements == (Shard(0),), f"Muon takes weights that FSDP2 shards by rows, not {weight.placements}"
    return True


def owners(shapes: list[tuple[int, int]], ranks: int) -> list[list[int]]:
    """Which matrices each rank orthogonalises, by number: the costliest first, each to who has least to do."""
    costs = [min(shape) ** 2 * max(shape) for shape in shapes]
    owned, loads = [[] for _ in range(ranks)], [0] * ranks
    for number in sorted(range(len(shapes)), key=lambda number: -costs[number]):
        least = loads.index(min(loads))
        owned[least].append(number)
        loads[least] += costs[number]
    return owned


def rows_of_ranks(rows: int, ranks: int) -> list[int]:
    """How many rows of a matrix each rank has: chunks of one size as far as they go, as FSDP2 cuts them."""
    chunk = -(-rows // ranks)
    return [min(chunk, max(0, rows - rank * chunk)) for rank in range(ranks)]


def wide_view(matrix: Tensor) -> Tensor:
    """A view of a matrix that is at least as wide as high."""
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


def orthogonal(x_NRC: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz iterations towards matrices with orthonormal rows (Muon, arXiv 2502.16982, section 2.1).

    (N, R, C) bfloat16 or float32 with R <= C -> the same; singular values end between 0.5 and 1.5, which suffices.
    """
    a, b, c = coefficients
    x_NRC = x_NRC / torch.linalg.matrix_norm(x_NRC, keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x_NRC @ x_NRC.mT
        x_NRC = torch.baddbmm(x_NRC, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x_NRC, beta=a)
    return x_NRC
