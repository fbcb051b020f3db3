"""The cheapest ensemble there is: what a model makes of given frames that white noise was added to."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from upsnb.models.surrogate import Surrogate


class Perturbed(Surrogate):
    """A model that draws nothing, as one that does; needs no training.

    Args:
        sizes: of the noise by dataset, standard deviations of the training data.
    """

    def __init__(self, model: Surrogate, sizes: Mapping[str, float]):
        super().__init__(model.specs)
        self.called, self.model, self.sizes = model.called, model, sizes
        self.draws = max(self.num_draws(name, spec.grid_shape) for name, spec in self.specs.items())

    def num_draws(self, name: str, grid: tuple[int, ...]) -> int:
        spec = self.specs[name]
        return spec.input_frames * spec.input_channels * math.prod(grid)

    def predict(self, name, x, parameters, relative_dt, points=None) -> Tensor:
        return self.model.predict(name, x, parameters, relative_dt, points)

    def rollout(self, name, given, parameters, dt, num_frames, noise=None) -> Tensor:
        """Only the first call's random numbers count: forecasts that are fed back differ by themselves."""
        given = given[:, -self.specs[name].input_frames :]
        if noise is not None:
            scale = self.sizes[name] * self.constant(name, "input_std", given.dim() - 3)
            given = given + scale * noise[0].reshape(given.shape)
        return self.model.rollout(name, given, parameters, dt, num_frames)
