"""What every surrogate shares: statistics, physical units, rollout. A model writes `predict`, and may name blocks."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from upsnb.config import PdetConfig
from upsnb.data.spec import DatasetSpec
from upsnb.models.network import Network

STATISTICS = ("input_mean", "input_std", "output_mean", "output_std", "parameter_mean", "parameter_std")


class Surrogate(Network):
    """Fields in physical units in, fields in physical units out, for each dataset it was built for.

    Statistics come with the specs and not with the weights, so `state_dict` holds trained tensors only. Subclasses
    write `predict`; what else they may write says so. The rest is final.
    """

    draws = 0  # how many random numbers a call on the training grid may be given after its parameters

    def __init__(self, specs: dict[str, DatasetSpec]):
        super().__init__(specs)
        for name, spec in specs.items():
            for key in STATISTICS:
                self._constant(f"{name}_{key}", torch.tensor(getattr(spec, key)))
            for side in ("input", "output"):  # where a physical zero lies in normalised units
                mean, std = (self.constant(name, f"{side}_{key}") for key in ("mean", "std"))
                self._constant(f"{name}_{side}_zero", -mean / std)

    def _constant(self, name: str, value: Tensor) -> None:
        self.register_buffer(f"constant_{name}", value.float(), persistent=False)

    def constant(self, name: str, key: str, num_dims: int = 0) -> Tensor:
        """A statistic of a dataset by channel, (C,) float32; (C, 1, ...) to go before so many axes of space.

        `key` is one of STATISTICS, or `input_zero` or `output_zero`.
        """
        value = getattr(self, f"constant_{name}_{key}")
        return value.reshape(-1, *(1,) * num_dims) if num_dims else value

    # -- what a model writes ------------------------------------------------------------------------------------------

    @abstractmethod
    def predict(
        self, name: str, x: Tensor, parameters: Tensor, relative_dt: Tensor, points: Tensor | None = None
    ) -> Tensor:
        """One call in normalised units.

        Args:
            name: dataset, one of `specs`.
            x: (B, input_frames, C, *grid) float32, zero mean and unit variance over the training split; any resolution.
            parameters: (B, P) float32 PDE parameters, normalised likewise.
            relative_dt: (B,) time between two frames over that of the training data.
            points: (Q, S) unit coordinates to predict at, where `any_points` says so; None: the grid of `x`.
        Returns:
            (B, output_frames, C_out, *grid) or (B, output_frames, C_out, Q), normalised.
        """

    def predict_next(self, name: str, x: Tensor, parameters: Tensor, relative_dt: Tensor, state):
        """One call of a rollout, and what it hands on to the next; `state` is None in the first. May be written."""
        return self.predict(name, x, parameters, relative_dt), None

    def smallest_grid(self, name: str) -> tuple[int, ...]:
        """Fewest points of each axis of a grid that `predict` takes. May be written; by default any."""
        return (1,) * self.specs[name].num_dims

    def refuses(self, name: str, grid: tuple[int, ...]) -> str:
        """Why nothing can be predicted on a grid, empty where it can. May be written, and called for what it says."""
        smallest = self.smallest_grid(name)
        if all(size >= least for size, least in zip(grid, smallest, strict=True)):
            return ""
        return f"this model needs at least {' x '.join(map(str, smallest))} points"

    def num_draws(self, name: str, grid: tuple[int, ...]) -> int:
        """How many random numbers a call on a grid may be given. May be written, where that depends on it."""
        return self.draws

    def take_noise(self, count: int) -> bool:
        """Make room for so many random numbers after the parameters, without effect until trained. May be written.

        Returns:
            whether there is; by default there is not.
        """
        return False

    # -- physical units -----------------------------------------------------------------------------------------------

    def normalise(self, name: str, fields: Tensor, side: str = "input") -> Tensor:
        """Physical (B, T, C, *grid) -> zero mean and unit variance per channel over the training split."""
        mean, std = (self.constant(name, f"{side}_{key}", fields.dim() - 3) for key in ("mean", "std"))
        return (fields - mean) / std

    def denormalise(self, name: str, fields: Tensor) -> Tensor:
        """Forecasts back to physical units, on a grid or at points."""
        mean, std = (self.constant(name, f"output_{key}", fields.dim() - 3) for key in ("mean", "std"))
        return fields * std + mean

    def normalise_parameters(self, name: str, parameters: Tensor, noise: Tensor | None = None) -> Tensor:
        """Physical (B, P) -> zero mean and unit variance over the training split; then `draws` random numbers.

        Args:
            noise: (B, draws) standard normal; None: none, the middle of what the model might draw.
        """
        values = (parameters - self.constant(name, "parameter_mean")) / self.constant(name, "parameter_std")
        return values if noise is None else torch.cat((values, noise), dim=-1)

    def relative_dt(self, name: str, fields: Tensor, dt: float) -> Tensor:
        """Time between frames over that of the training data, (B,); 1 where nothing changes in time."""
        reference = self.specs[name].dt
        return torch.full((fields.shape[0],), dt / reference if reference else 1.0, device=fields.device)

    def normalised(self, name: str, fields: Tensor, parameters: Tensor, dt: float) -> tuple[Tensor, Tensor, Tensor]:
        """What `predict` is given for physical input frames and parameters: x, parameters, relative_dt."""
        x, condition = self.normalise(name, fields), self.normalise_parameters(name, parameters)
        return x, condition, self.relative_dt(name, fields, dt)

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
        y = self.predict(name, *self.normalised(name, fields, parameters, dt), points)
        return self.denormalise(name, y.float())

    def rollout(
        self, name: str, given: Tensor, parameters: Tensor, dt: float, num_frames: int, noise: Tensor | None = None
    ) -> Tensor:
        """Feed forecasts back until `num_frames` are predicted.

        Args:
            given: (B, T >= input_frames, C, *grid) physical; the last input_frames are used.
            noise: (calls, B, draws) for each call, from `noise`; None: none.
        Returns:
            (B, num_frames, C_out, *grid) physical.
        """
        spec = self.specs[name]
        x, relative_dt = self.normalise(name, given[:, -spec.input_frames :]), self.relative_dt(name, given, dt)
        frames, state = [], None
        while sum(f.shape[1] for f in frames) < num_frames:
            condition = self.normalise_parameters(name, parameters, None if noise is None else noise[len(frames)])
            y, state = self.predict_next(name, x, condition, relative_dt, state)
            frames.append(y.float())
            if not spec.time_dependent:
                break
            x = self.next_inputs(name, x, frames[-1])
        return self.denormalise(name, torch.cat(frames, dim=1)[:, :num_frames])

    def noise(self, draws: int, samples: Iterable[int], member: int, calls: int, seed: int = 0) -> Tensor:
        """What a member of an ensemble is made of: (calls, B, draws), the same for a sample whatever stands beside it.

        Args:
            draws: random numbers of a call, from `num_draws`.
            samples: a number of each sample.
        """
        rows = []
        for sample in samples:
            generator = torch.Generator().manual_seed(seed + 1_000_003 * (int(sample) + 1) + 7_919 * (member + 1))
            rows.append(torch.randn(calls, draws, generator=generator))
        return torch.stack(rows, dim=1)

    def ensemble(
        self,
        name: str,
        given: Tensor,
        parameters: Tensor,
        dt: float,
        num_frames: int,
        members: int,
        samples: Iterable[int] | None = None,
        seed: int = 0,
    ) -> Tensor:
        """Several rollouts at once, each with random numbers of its own; all alike where the model draws none.

        Args:
            samples: numbers by which random numbers are found again; None: 0, 1, ...
        Returns:
            (members, B, num_frames, C_out, *grid) physical.
        """
        samples = list(range(len(given)) if samples is None else samples)
        calls = -(-num_frames // self.specs[name].output_frames)
        draws = self.num_draws(name, tuple(given.shape[3:]))
        noise = torch.cat([self.noise(draws, samples, member, calls, seed) for member in range(members)], dim=1)
        given, parameters = (some.repeat(members, *(1,) * (some.dim() - 1)) for some in (given, parameters))
        rolled = self.rollout(name, given, parameters, dt, num_frames, noise.to(given.device))
        return rolled.unflatten(0, (members, -1))

    def next_inputs(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """The latest input_frames of x (B, T, C, *grid) and, after it, y (B, t, C_out, *grid); given fields stay."""
        given = x[:, -1:, y.shape[2] :]
        if given.shape[2]:
            y = torch.cat((y, given.expand(-1, y.shape[1], *given.shape[2:])), dim=2)
        return torch.cat((x, y), dim=1)[:, -self.specs[name].input_frames :]


def set_checkpointing(blocks: Iterable[nn.Module], config: PdetConfig) -> None:
    """Choose which blocks are computed again in backward; may be called between any two steps."""
    for number, block in enumerate(blocks):
        on = config.use_activation_checkpoint and number % config.checkpoint_every == 0
        _recompute(block, config.checkpoint_parts if on else None)


def set_attention(blocks: Iterable[nn.Module], backend: str) -> None:
    """Choose the attention kernel of training steps; parameters and results stay, rounding may not."""
    for block in blocks:
        if hasattr(block, "attention"):
            block.attention.backend = backend


def _recompute(block: nn.Module, parts: str | None) -> None:
    """Compute a block's activations again in backward (arXiv 1604.06174), its own way or as a whole; None: keep."""
    if hasattr(block, "recompute"):
        block.recompute(parts)
    elif parts is None:
        vars(block).pop("forward", None)
    elif "forward" not in vars(block):
        block.forward = functools.partial(_recomputed, type(block).forward, block)


def _recomputed(forward: Callable, block: nn.Module, *inputs, **named):
    if not torch.is_grad_enabled():
        return forward(block, *inputs, **named)
    return checkpoint(forward, block, *inputs, use_reentrant=False, **named)


def count_parameters(module: nn.Module) -> int:
    """Trained parameters."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
