"""What the model must know of a dataset."""

from __future__ import annotations

import math
from dataclasses import dataclass

from upsnb.errors import DataError


@dataclass(frozen=True)
class DatasetSpec:
    """What the model must know of a dataset; plain data that travels with every checkpoint."""

    name: str
    family: str
    grid_shape: tuple[int, ...]  # training resolution
    periodic: tuple[bool, ...]
    input_channels: int
    output_channels: int
    input_frames: int
    output_frames: int
    num_parameters: int
    time_dependent: bool
    dt: float  # physical time between two frames, 0 where static
    tokens: int  # budget of latent tokens
    input_mean: tuple[float, ...]  # per channel, over the training split
    input_std: tuple[float, ...]
    output_mean: tuple[float, ...]
    output_std: tuple[float, ...]
    parameter_mean: tuple[float, ...]
    parameter_std: tuple[float, ...]
    parameter_low: tuple[float, ...] = ()  # lowest over the training split; empty in older checkpoints
    parameter_high: tuple[float, ...] = ()
    zero_walls: bool = False  # outputs are zero in the ghost cells around the grid,
    ghosts_before: tuple[float, ...] = ()  # which lie so many distances of points before the first one of each axis
    ghosts_after: tuple[float, ...] = ()  # and after the last one; empty: one
    parameter_names: tuple[str, ...] = ()  # empty in older checkpoints, as are:
    priors: tuple[str, ...] = ()  # the physics terms of the loss that hold

    @classmethod
    def from_plain(cls, values: dict) -> DatasetSpec:
        """A spec from its fields as JSON gives them back: lists for tuples."""
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})

    def ghosts(self, shape: tuple[int, ...]) -> list[tuple[float, float]]:
        """Where ghost cells lie around a grid, by axis; around another one than that of training they are its own."""
        if not self.ghosts_before or shape != self.grid_shape:
            return [(1.0, 1.0)] * len(shape)
        return list(zip(self.ghosts_before, self.ghosts_after, strict=True))

    @property
    def num_dims(self) -> int:
        return len(self.grid_shape)

    @property
    def patch(self) -> int:
        """Cells per token and axis: the smallest even divisor of the grid whose token count is within budget."""
        for patch in range(2, min(self.grid_shape) + 1, 2):
            if all(size % patch == 0 for size in self.grid_shape):
                # a list: given a generator, torch.compile skips the encoder and decoder that ask, and says nothing
                if math.prod([size // patch for size in self.grid_shape]) <= self.tokens:
                    return patch
        raise DataError(
            f"dataset {self.name}: no even patch divides the grid {self.grid_shape} into at most {self.tokens} tokens "
            "-> raise latent.tokens, or choose a reduced_resolution whose grid has more even divisors"
        )

    @property
    def token_grid(self) -> tuple[int, ...]:
        return tuple(size // self.patch for size in self.grid_shape)
