"""The Universal Physics Stack: encoders and decoders per dataset around one shared latent operator.

After Universal Physics Transformers (arXiv 2402.12365), with tokens that keep their place in space.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from upsnb.config import LatentConfig, OperatorConfig, RunConfig
from upsnb.data.spec import DatasetSpec
from upsnb.models.codec import build_decoder, build_encoder
from upsnb.models.fourier import Propagator
from upsnb.models.geometry import grid_points, sample_at
from upsnb.models.surrogate import Surrogate
from upsnb.models.transformer import Operator, rotary_table
from upsnb.rules import INVERSE_TERMS

CONDITION_DIM = 128


def needs_inverse_heads(config: RunConfig) -> bool:
    """Whether anything reads fields back out of a latent."""
    weights = (getattr(config.training, f"lambda_{term}") for term in INVERSE_TERMS)
    return config.operator.rollout == "latent" or any(weight > 0 for weight in weights)


def build(config: RunConfig, specs: dict[str, DatasetSpec]) -> UPS:
    """The model that `latent` and `operator` describe."""
    return UPS(config.latent, config.operator, specs, needs_inverse_heads(config))


class Condition(nn.Module):
    """Task, PDE parameters and time step as one vector."""

    def __init__(self, num_parameters: int):
        super().__init__()
        self.values = nn.Linear(num_parameters + 1, CONDITION_DIM)  # its bias is the task's own vector
        self.mix = nn.Sequential(nn.SiLU(), nn.Linear(CONDITION_DIM, CONDITION_DIM), nn.SiLU())
        self.noise: nn.Linear | None = None  # of what a model that draws is given after the parameters

    def forward(self, parameters_BP: Tensor, relative_dt_B: Tensor) -> Tensor:
        count = self.values.in_features - 1
        known = self.values(torch.cat((parameters_BP[:, :count], relative_dt_B[:, None]), dim=-1))
        return self.mix(known + self.noise(parameters_BP[:, count:]) if parameters_BP.shape[1] > count else known)


class UPS(Surrogate):
    """Encoders, conditions and decoders of each dataset around the operator that all of them share."""

    any_points = True

    def __init__(self, latent: LatentConfig, operator: OperatorConfig, specs: dict[str, DatasetSpec], inverse: bool):
        super().__init__(specs)
        dim = latent.dim
        self.latent_rollout = operator.rollout == "latent"
        self.hard_walls = operator.walls == "hard"
        self.keeping = {n for n, s in specs.items() if operator.means == "kept" and "conservation" in s.priors}
        self.encoders = nn.ModuleDict({n: build_encoder(operator, s, dim) for n, s in specs.items()})
        self.conditions = nn.ModuleDict({n: Condition(s.num_parameters) for n, s in specs.items()})
        self.operator = Operator(operator.pdet, dim, CONDITION_DIM)
        self.decoders = nn.ModuleDict(
            {n: build_decoder(operator, s, dim, s.output_frames * s.output_channels) for n, s in specs.items()}
        )
        modes = operator.fourier_modes
        self.propagators = nn.ModuleDict(
            {n: Propagator(s, modes) for n, s in specs.items() if modes and s.time_dependent}
        )
        # Inverse losses and latent rollout read fields, not changes of fields, out of a latent: a head of its own.
        self.inverse_decoders = nn.ModuleDict(
            {n: build_decoder(operator, s, dim, s.input_frames * s.input_channels) for n, s in specs.items()}
            if inverse
            else {}
        )
        head_dim = operator.pdet.hidden_dim // operator.pdet.num_heads
        for name, spec in specs.items():
            if operator.encoder == "patch":  # pooled latents have no place to rotate by
                table = rotary_table(grid_points(spec.token_grid), spec.periodic, head_dim)
                self._constant(f"{name}_cos", table[0])
                self._constant(f"{name}_sin", table[1])
        self.ordered = operator.encoder == "patch"

    def blocks(self) -> list[nn.Module]:
        return list(self.operator.blocks)

    def parts(self) -> dict[str, list[nn.Module]]:
        codecs = (self.encoders, self.conditions, self.decoders, self.propagators, self.inverse_decoders)
        return {name: [parts[name] for parts in codecs if name in parts] for name in self.specs}

    def compiled(self) -> list[nn.Module]:
        """The blocks, and encoders and decoders of every dataset.

        A condition is too small to gain, and the compiler makes no Fourier transforms of its own.
        """
        codecs = (self.encoders, self.decoders, self.inverse_decoders)
        return [*self.operator.blocks, *(part for parts in codecs for part in parts.values())]

    def take_noise(self, count: int) -> bool:
        self.draws = count
        for condition in self.conditions.values():
            condition.noise = nn.Linear(count, CONDITION_DIM, bias=False)
            nn.init.zeros_(condition.noise.weight)
        return True

    # -- pieces, all in normalised units ----------------------------------------------------------------------------

    def encode(self, name: str, fields: Tensor) -> Tensor:
        """Normalised (B, T, C, *grid) -> latent tokens (B, L, D)."""
        return self.encoders[name](fields)

    def advance(self, name: str, z_BLD: Tensor, parameters: Tensor, relative_dt: Tensor) -> Tensor:
        """One call of the operator on latent tokens (B, L, D); parameters (B, P) normalised, relative_dt (B,)."""
        table = (self.constant(name, "cos"), self.constant(name, "sin")) if self.ordered else None
        return self.operator(z_BLD, self.conditions[name](parameters, relative_dt), table)

    def decode(self, name: str, z_BLD: Tensor, fields: Tensor, points: Tensor | None = None) -> Tensor:
        """Latent tokens to normalised output frames; where there is a time, added to the last frame, propagated.

        Args:
            z_BLD: (B, L, D) advanced latent.
            fields: normalised input frames (B, T, C, *grid); their grid is the output grid.
            points: (Q, S) unit coordinates, or None for the grid.
        Returns:
            (B, T_out, C, *grid) or (B, T_out, C, Q).
        """
        spec = self.specs[name]
        frames = (spec.output_frames, spec.output_channels)
        if points is None:
            change = self.decoders[name](z_BLD, tuple(fields.shape[3:])).unflatten(1, frames)
        else:
            change = self.decoders[name].at(z_BLD, points).unflatten(1, frames)
        if spec.zero_walls and self.hard_walls:
            change = self._hold_walls(name, change, tuple(fields.shape[3:]), points)
        if not spec.time_dependent:
            return change
        last = fields[:, -1:, : spec.output_channels]
        known = last + self.propagators[name](fields) if name in self.propagators else last
        if name in self.keeping:
            grid, space = tuple(fields.shape[3:]), tuple(range(3, fields.dim()))
            on_grid = change if points is None else self.decoders[name](z_BLD, grid).unflatten(1, frames)
            gained = on_grid.float().mean(space) + (known - last).mean(space)
            change = change - gained.reshape(*gained.shape, *(1,) * (change.dim() - 3))
        return change + (known if points is None else sample_at(known, points, spec.periodic))

    def _hold_walls(self, name: str, values: Tensor, shape: tuple[int, ...], points: Tensor | None) -> Tensor:
        """Normalised values whose physical counterpart falls to exactly zero in the ghost cells around the grid.

        The decoder then learns a field that is smooth up to the wall, and the known boundary layer is put on top.
        Between ghost cells the problem on n cells is (n + 1) / n wide, and pressure grows with the square of the width:
        another resolution than the training grid's is another amplitude, and the ratio is known.
        """
        spec = self.specs[name]
        asked, trained = [
            math.prod([1 + (before + after - 1) / size for (before, after), size in zip(spec.ghosts(grid), grid)])
            for grid in (shape, spec.grid_shape)
        ]
        amplitude = (asked / trained) ** (2 / len(shape))
        factor = wall_factor(grid_points(shape, values.device) if points is None else points, shape, spec)
        factor = amplitude * (factor.unflatten(0, shape) if points is None else factor)
        zero = self.constant(name, "output_zero", values.dim() - 3)
        return factor * (values - zero) + zero

    def reconstruct(self, name: str, z_BLD: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Latent tokens to the normalised fields they encode, (B, T_in, C_in, *shape)."""
        spec = self.specs[name]
        return self.inverse_decoders[name](z_BLD, shape).unflatten(1, (spec.input_frames, spec.input_channels))

    def reconstruct_or_decode(self, name: str, z: Tensor, x: Tensor, points: Tensor | None = None) -> Tensor:
        """Fields out of an advanced latent, by the head that this kind of rollout trains."""
        if self.latent_rollout and self.specs[name].time_dependent:
            y = self.reconstruct(name, z, tuple(x.shape[3:]))[:, :, : self.specs[name].output_channels]
            return y if points is None else sample_at(y, points, self.specs[name].periodic)
        return self.decode(name, z, x, points)

    # -- one call -------------------------------------------------------------------------------------------------

    def predict(self, name, x, parameters, relative_dt, points=None) -> Tensor:
        return self.reconstruct_or_decode(
            name, self.advance(name, self.encode(name, x), parameters, relative_dt), x, points
        )

    def predict_next(self, name, x, parameters, relative_dt, state):
        z = self.encode(name, x) if state is None or not self.latent_rollout else state
        z = self.advance(name, z, parameters, relative_dt)
        return self.reconstruct_or_decode(name, z, x), z


def wall_factor(points_QS: Tensor, shape: tuple[int, ...], spec: DatasetSpec) -> Tensor:
    """One inside, zero in the ghost cells around the points of a grid, with a layer one token wide, (Q,)."""
    factor = torch.ones_like(points_QS[:, 0])
    for x, size, tokens, (before, after) in zip(points_QS.unbind(-1), shape, spec.token_grid, spec.ghosts(shape)):
        for distance in (x + (before - 0.5) / size, 1 - x + (after - 0.5) / size):
            factor = factor * -torch.expm1(-distance * tokens)
    return factor
