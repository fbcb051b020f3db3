"""The Universal Physics Stack: encoders and decoders per dataset around one shared latent operator.

After Universal Physics Transformers (arXiv 2402.12365), with tokens that keep their place in space.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from upsnb.config import LatentConfig, OperatorConfig
from upsnb.data.spec import DatasetSpec
from upsnb.models.codec import build_decoder, build_encoder
from upsnb.models.geometry import grid_points, sample_at
from upsnb.models.transformer import Operator, rotary_table

CONDITION_DIM = 128


class Condition(nn.Module):
    """Task, PDE parameters and time step as one vector."""

    def __init__(self, num_parameters: int):
        super().__init__()
        self.values = nn.Linear(num_parameters + 1, CONDITION_DIM)  # its bias is the task's own vector
        self.mix = nn.Sequential(nn.SiLU(), nn.Linear(CONDITION_DIM, CONDITION_DIM), nn.SiLU())

    def forward(self, parameters_BP: Tensor, relative_dt_B: Tensor) -> Tensor:
        return self.mix(self.values(torch.cat((parameters_BP, relative_dt_B[:, None]), dim=-1)))


class UPS(nn.Module):
    """Fields in physical units in, fields in physical units out, for each dataset it was built for.

    `state_dict` holds no prefix of any wrapper; statistics come with the specs, not with the weights.
    """

    def __init__(self, latent: LatentConfig, operator: OperatorConfig, specs: dict[str, DatasetSpec], inverse: bool):
        super().__init__()
        dim = latent.dim
        self.specs = specs
        self.latent_rollout = operator.rollout == "latent"
        self.hard_walls = operator.walls == "hard"
        self.encoders = nn.ModuleDict({n: build_encoder(operator, s, dim) for n, s in specs.items()})
        self.conditions = nn.ModuleDict({n: Condition(s.num_parameters) for n, s in specs.items()})
        self.operator = Operator(operator.pdet, dim, CONDITION_DIM)
        self.decoders = nn.ModuleDict(
            {n: build_decoder(operator, s, dim, s.output_frames * s.output_channels) for n, s in specs.items()}
        )
        # Inverse losses and latent rollout read fields, not changes of fields, out of a latent: a head of its own.
        self.inverse_decoders = nn.ModuleDict(
            {n: build_decoder(operator, s, dim, s.input_frames * s.input_channels) for n, s in specs.items()}
            if inverse
            else {}
        )
        head_dim = operator.pdet.hidden_dim // operator.pdet.num_heads
        for name, spec in specs.items():
            for key in ("input_mean", "input_std", "output_mean", "output_std"):
                shape = (1, 1, -1) + (1,) * spec.num_dims
                self._constant(f"{name}_{key}", torch.tensor(getattr(spec, key)).reshape(shape))
            self._constant(f"{name}_parameter_mean", torch.tensor(spec.parameter_mean))
            self._constant(f"{name}_parameter_std", torch.tensor(spec.parameter_std))
            if operator.encoder == "patch":  # pooled latents have no place to rotate by
                table = rotary_table(grid_points(spec.token_grid), spec.periodic, head_dim)
                self._constant(f"{name}_cos", table[0])
                self._constant(f"{name}_sin", table[1])
        self.ordered = operator.encoder == "patch"

    def _constant(self, name: str, value: Tensor) -> None:
        self.register_buffer(f"constant_{name}", value.float(), persistent=False)

    def constant(self, name: str, key: str) -> Tensor:
        return getattr(self, f"constant_{name}_{key}")

    def parts(self) -> list[nn.Module]:
        """Submodules that together own every parameter and are called as a whole, inner before outer."""
        codecs = (self.encoders, self.conditions, self.decoders, self.inverse_decoders)
        return [*self.operator.blocks, self.operator, *(part for parts in codecs for part in parts.values())]

    # -- pieces, all in normalised units ----------------------------------------------------------------------------

    def normalise(self, name: str, fields: Tensor, side: str = "input") -> Tensor:
        """Physical (B, T, C, *grid) -> zero mean and unit variance per channel over the training split."""
        return (fields - self.constant(name, f"{side}_mean")) / self.constant(name, f"{side}_std")

    def denormalise(self, name: str, fields: Tensor, side: str = "output") -> Tensor:
        return fields * self.constant(name, f"{side}_std") + self.constant(name, f"{side}_mean")

    def encode(self, name: str, fields: Tensor) -> Tensor:
        """Normalised (B, T, C, *grid) -> latent tokens (B, L, D)."""
        return self.encoders[name](fields)

    def advance(self, name: str, z_BLD: Tensor, parameters: Tensor, relative_dt: Tensor) -> Tensor:
        """One call of the operator on latent tokens."""
        normalised = (parameters - self.constant(name, "parameter_mean")) / self.constant(name, "parameter_std")
        table = (self.constant(name, "cos"), self.constant(name, "sin")) if self.ordered else None
        return self.operator(z_BLD, self.conditions[name](normalised, relative_dt), table)

    def decode(self, name: str, z_BLD: Tensor, fields: Tensor, points: Tensor | None = None) -> Tensor:
        """Latent tokens to normalised output frames, added to the last input frame where channels agree.

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
        last = fields[:, -1:]
        return change + (last if points is None else sample_at(last, points, spec.periodic))

    def _hold_walls(self, name: str, values: Tensor, shape: tuple[int, ...], points: Tensor | None) -> Tensor:
        """Normalised values whose physical counterpart falls to exactly zero in the ghost cells around the grid.

        The decoder then learns a field that is smooth up to the wall, and the known boundary layer is put on top.
        Between ghost cells the problem on n cells is (n + 1) / n wide, and pressure grows with the square of the width:
        another resolution than the training grid's is another amplitude, and the ratio is known.
        """
        spec = self.specs[name]
        widths = [(1 + 1 / size) / (1 + 1 / trained) for size, trained in zip(shape, spec.grid_shape)]
        amplitude = math.prod(widths) ** (2 / len(widths))
        factor = wall_factor(grid_points(shape, values.device) if points is None else points, shape, spec)
        factor = amplitude * (factor.unflatten(0, shape) if points is None else factor)
        zero = self.constant(name, "output_mean") / self.constant(name, "output_std")
        zero = zero.reshape(1, 1, -1, *(1,) * (values.dim() - 3))
        return factor * (values + zero) - zero

    def reconstruct(self, name: str, z_BLD: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Latent tokens to the normalised fields they encode, (B, T_in, C_in, *shape)."""
        spec = self.specs[name]
        return self.inverse_decoders[name](z_BLD, shape).unflatten(1, (spec.input_frames, spec.input_channels))

    # -- what users call, in physical units -----------------------------------------------------------------------

    def forward(self, name: str, fields: Tensor, parameters: Tensor, dt: float, points: Tensor | None = None) -> Tensor:
        """One call: input frames to output frames.

        Args:
            name: dataset, one of `specs`.
            fields: (B, input_frames, C, *grid) float32, physical units, any resolution.
            parameters: (B, P) float32 PDE parameters.
            dt: physical time between frames.
            points: (Q, S) unit coordinates to predict at; None: the grid of `fields`.
        Returns:
            (B, output_frames, C_out, *grid) or (B, output_frames, C_out, Q) float32, physical units.
        """
        x = self.normalise(name, fields)
        z = self.advance(name, self.encode(name, x), parameters, self.relative_dt(name, fields, dt))
        y = self.reconstruct_or_decode(name, z, x, points)
        return self.denormalise(name, y.float()) if points is None else self._denormalise_points(name, y.float())

    def reconstruct_or_decode(self, name: str, z: Tensor, x: Tensor, points: Tensor | None = None) -> Tensor:
        if self.latent_rollout and self.specs[name].time_dependent:
            y = self.reconstruct(name, z, tuple(x.shape[3:]))
            return y if points is None else sample_at(y, points, self.specs[name].periodic)
        return self.decode(name, z, x, points)

    def _denormalise_points(self, name: str, values: Tensor) -> Tensor:
        std, mean = (self.constant(name, f"output_{key}").reshape(1, 1, -1, 1) for key in ("std", "mean"))
        return values * std + mean

    def relative_dt(self, name: str, fields: Tensor, dt: float) -> Tensor:
        reference = self.specs[name].dt
        return torch.full((len(fields),), dt / reference if reference else 1.0, device=fields.device)

    def rollout(self, name: str, given: Tensor, parameters: Tensor, dt: float, num_frames: int) -> Tensor:
        """Feed forecasts back until `num_frames` are predicted.

        Args:
            given: (B, T >= input_frames, C, *grid) physical; the last input_frames are used.
        Returns:
            (B, num_frames, C_out, *grid) physical.
        """
        spec = self.specs[name]
        x = self.normalise(name, given[:, -spec.input_frames :])
        relative_dt, frames = self.relative_dt(name, given, dt), []
        z = None
        while sum(f.shape[1] for f in frames) < num_frames:
            if z is None or not self.latent_rollout:
                z = self.encode(name, x)
            z = self.advance(name, z, parameters, relative_dt)
            frames.append(self.reconstruct_or_decode(name, z, x).float())
            if not spec.time_dependent:
                break
            x = torch.cat((x, frames[-1]), dim=1)[:, -spec.input_frames :]
        return self.denormalise(name, torch.cat(frames, dim=1)[:, :num_frames])


def wall_factor(points_QS: Tensor, shape: tuple[int, ...], spec: DatasetSpec) -> Tensor:
    """One inside, zero in the ghost cells half a cell outside the domain, with a layer one token wide, (Q,)."""
    factor = torch.ones_like(points_QS[:, 0])
    for x, size, tokens in zip(points_QS.unbind(-1), shape, spec.token_grid):
        for distance in (x + 0.5 / size, 1 - x + 0.5 / size):
            factor = factor * -torch.expm1(-distance * tokens)
    return factor


def count_parameters(module: nn.Module) -> int:
    """Trained parameters."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
