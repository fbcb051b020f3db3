"""A microbatch: as it is scheduled, by the numbers of its pairs, and as it is read, in tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Microbatch:
    """This rank's share of one global microbatch: pairs of a single dataset."""

    dataset: str
    pairs: np.ndarray  # (B, 2) int64: sample, first frame
    draws: np.ndarray  # (B, 2) float64 in [0, 1), each pair's own: which symmetric image of it is shown
    seed: int  # of this microbatch's query points, the same on all ranks
    turn: int  # microbatches of this dataset before it: which losses are due


class TensorBatch:
    """A dataclass of tensors, beside what it has of their Microbatch."""

    dataset: str
    seed: int
    turn: int

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors().values())).device

    def map(self, change: Callable[[Tensor], Tensor]) -> TensorBatch:
        """The same with every tensor changed."""
        return replace(self, **{name: change(value) for name, value in self.tensors().items()})

    def pin_memory(self) -> TensorBatch:
        """In page-locked memory, from which copies to a device need not be waited for; the DataLoader calls it."""
        return self.map(Tensor.pin_memory)


@dataclass
class Batch(TensorBatch):
    """One of fields, in physical units."""

    dataset: str
    inputs: Tensor  # (B, T_in, C_in, *grid) float32
    targets: Tensor  # (B, calls * T_out, C_out, *grid) float32
    parameters: Tensor  # (B, P) float32
    seed: int
    turn: int = 0
    pairs: np.ndarray | None = None  # (B, 2) of its Microbatch, where they are shown as they are
