"""A frozen surrogate and a denoiser: a diffusion model of what it gets wrong, a student of that one, or a refiner.

After EDM (arXiv 2206.00364), on residuals as in CorrDiff (arXiv 2309.15214). The denoiser is a second model of the same
kind and size. It is given the frames and what is noised as channels of one frame, and how strong the noise is as one
more parameter.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor, nn

from upsnb import overlays
from upsnb.config import RunConfig
from upsnb.data.spec import DatasetSpec
from upsnb.models import chosen
from upsnb.models.geometry import sample_at
from upsnb.models.surrogate import Surrogate

HIGHEST, LOWEST = 20.0, 0.01  # noise levels, standard deviations of a correction
# Noise levels that a correction is drawn through, one call each. Of a normal distribution they draw one that is up to
# 6 % too wide; Heun's method through 8, which takes 15 calls, one that is 14 to 32 % too wide.
STEPS = 12
REFINEMENTS = 3  # calls that refine a forecast
RHO = 7.0  # how much closer to each other the low ones are


def noise_level(number: int | Tensor, steps: int) -> float | Tensor:
    """Of so many from the highest to the lowest, that of a number, which counts from 0 (EDM, equation 5)."""
    high, low = HIGHEST ** (1 / RHO), LOWEST ** (1 / RHO)
    return (high + number / max(steps - 1, 1) * (low - high)) ** RHO


def noise_levels(steps: int = STEPS) -> list[float]:
    """From the highest to the lowest, and then none at all."""
    return [noise_level(number, steps) for number in range(steps)] + [0.0]


def denoiser_spec(spec: DatasetSpec, shown: int) -> DatasetSpec:
    """What a denoiser must know of a dataset: all frames as channels of one, already normalised, and no time.

    Args:
        shown: how many forecasts' worth of channels stand after the given frames.
    """
    given, out = spec.input_frames * spec.input_channels, spec.output_frames * spec.output_channels
    channels, parameters = given + shown * out, spec.num_parameters + 2
    frames = {"input_frames": 1, "output_frames": 1, "input_channels": channels, "output_channels": out}
    statistics = {
        "input_mean": (0.0,) * channels,
        "input_std": (1.0,) * channels,
        "output_mean": (0.0,) * out,
        "output_std": (1.0,) * out,
        "parameter_mean": (0.0,) * parameters,
        "parameter_std": (1.0,) * parameters,
    }
    unknown = {"parameter_low": (), "parameter_high": (), "parameter_names": (), "priors": ()}
    still = {"num_parameters": parameters, "time_dependent": False, "dt": 0.0, "zero_walls": False}
    return replace(spec, **frames, **statistics, **unknown, **still)


def denoise(
    network: Surrogate, name: str, z: Tensor, level: Tensor, given: tuple[Tensor, ...], lowest: float = 0.0
) -> tuple[Tensor, Tensor]:
    """What a noised correction of unit variance may have been, and what the network itself said of it.

    EDM, equation 7; with `lowest`, at which the answer is `z` itself, a consistency model's (arXiv 2303.01469, appendix
    C).

    Args:
        z: (B, T_out, C_out, *grid) correction plus noise.
        level: (B,) standard deviation of that noise.
        given: x, the forecast where it is shown, parameters and relative_dt, as of `Surrogate.predict`.
    """
    *known, parameters, relative_dt = given
    sigma = level.reshape(-1, *(1,) * (z.dim() - 1))
    above, scale = sigma - lowest, (1 + sigma.square()).rsqrt()
    channels = torch.cat([fields.flatten(1, 2) for fields in (*known, scale * z)], dim=1)
    condition = torch.cat((parameters, relative_dt[:, None], level.log()[:, None] / 4), dim=1)
    said = network.predict(name, channels[:, None], condition, torch.ones_like(level)).float().reshape(z.shape)
    return z / (1 + above.square()) + above * scale * said, said


class Denoising(Surrogate):
    """A frozen surrogate and a denoiser beside it; subclasses say what forecasts are made of both.

    Args:
        before: trained; its weights stay as they are.
        config: of the run, which chooses the denoiser's kind and size.
    """

    SHOWN = 2  # forecasts' worth of channels that the denoiser is given: the forecast itself, and what is noised
    SPREADS: tuple[str, ...] = ()  # what is measured before training, root mean squares by frame and channel

    def __init__(self, before: Surrogate, config: RunConfig):
        super().__init__(before.specs)
        self.called, self.any_points, self.before = before.called, before.any_points, before.requires_grad_(False)
        # a network that names no parameters would not know how strong the noise is
        told = overlays.apply(config, {"model.append_parameters": True})
        specs = {name: denoiser_spec(spec, self.SHOWN) for name, spec in self.specs.items()}
        self.denoiser = chosen.build(told, specs)
        for name, spec in self.specs.items():
            shape = len(self.SPREADS), spec.output_frames, spec.output_channels
            self.register_buffer(f"spread_{name}", torch.ones(shape))
        self.draws = max(self.num_draws(name, spec.grid_shape) for name, spec in self.specs.items())

    def train(self, mode: bool = True) -> Denoising:
        super().train(mode)
        self.before.eval()
        return self

    def num_draws(self, name: str, grid: tuple[int, ...]) -> int:
        spec = self.specs[name]
        return spec.output_frames * spec.output_channels * math.prod(grid)

    def spread(self, name: str, of: str, num_dims: int) -> Tensor:
        """One of SPREADS, normalised units, (T_out, C_out, 1, ...) before so many axes of space."""
        value = getattr(self, f"spread_{name}")[self.SPREADS.index(of)]
        return value.reshape(*value.shape, *(1,) * num_dims)

    def set_spread(self, name: str, *values: Tensor) -> None:
        """All of SPREADS, each (T_out, C_out) or what can be spread over that."""
        for row, value in zip(getattr(self, f"spread_{name}"), values, strict=True):
            row.copy_(value)

    def predict(self, name, x, parameters, relative_dt, points=None) -> Tensor:
        """What is made of the frozen model's forecast; random numbers may stand after the parameters."""
        count = self.specs[name].num_parameters
        known, drawn = parameters[:, :count], parameters[:, count:]
        forecast = self.before.predict(name, x, known, relative_dt).float()
        y = self.improved(name, forecast, drawn, (x, known, relative_dt))
        return y if points is None else sample_at(y, points, self.specs[name].periodic)

    @abstractmethod
    def improved(self, name: str, forecast: Tensor, drawn: Tensor, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """A better forecast, by (B, num_draws) or (B, 0) random numbers; `given`: x, parameters and relative_dt."""

    # -- what phases act on: the denoiser, and where weights are sharded the frozen model too ------------------------

    def smallest_grid(self, name: str) -> tuple[int, ...]:
        return tuple(map(max, self.before.smallest_grid(name), self.denoiser.smallest_grid(name)))

    def refuses(self, name: str, grid: tuple[int, ...]) -> str:
        return self.before.refuses(name, grid) or self.denoiser.refuses(name, grid)

    def blocks(self) -> list[nn.Module]:
        return self.denoiser.blocks()

    def matrices(self) -> list[Tensor]:
        return self.denoiser.matrices()

    def parts(self) -> dict[str, list[nn.Module]]:
        return self.denoiser.parts()

    def compiled(self) -> list[nn.Module]:
        return self.denoiser.compiled()

    def units(self) -> list[nn.Module]:
        return [*self.before.units(), *self.denoiser.units()]


class ResidualDiffusion(Denoising):
    """Calls the frozen model, and draws what is to be added to its forecast, with a denoiser that may be less deep."""

    # of the frozen model's errors on samples that it was trained on, from which corrections are learned, and on others,
    # which they are for
    SPREADS = "seen", "unseen"

    def __init__(self, before: Surrogate, config: RunConfig):
        depth = config.diffusion.depth or config.operator.pdet.depth
        super().__init__(before, overlays.apply(config, {"operator.pdet.depth": depth}))

    def improved(self, name, forecast, drawn, given) -> Tensor:
        """The forecast and a correction, drawn from the random numbers, the middle of what might be without any."""
        x, *condition = given
        z = HIGHEST * drawn.reshape(forecast.shape) if drawn.shape[1] else torch.zeros_like(forecast)
        correction = self.correction(name, z, (x, forecast, *condition))
        return forecast + self.spread(name, "unseen", x.dim() - 3) * correction

    def correction(self, name: str, z: Tensor, given: tuple[Tensor, ...]) -> Tensor:
        """What noise of the highest level becomes as it is taken away, by DPM-Solver++(2M) (arXiv 2211.01095)."""
        clean, step = None, 0.0
        for high, low in itertools.pairwise(noise_levels()):
            earlier, clean = clean, denoise(self.denoiser, name, z, z.new_full((len(z),), high), given)[0]
            if low == 0:
                break
            last, step = step, math.log(high / low)
            ahead = clean if earlier is None else clean + step / (2 * last) * (clean - earlier)
            z = low / high * z + (1 - low / high) * ahead
        return clean


class Distilled(ResidualDiffusion):
    """The same corrections in one call, by a denoiser that goes from the highest noise to none (arXiv 2303.01469).

    Args:
        taught: the diffusion model that it learns from, and begins as.
    """

    def __init__(self, taught: ResidualDiffusion, config: RunConfig):
        super().__init__(taught.before, config)
        self.denoiser.load_state_dict(taught.denoiser.state_dict())
        for name in self.specs:
            self.set_spread(name, *getattr(taught, f"spread_{name}"))
        self.teacher = taught.denoiser.requires_grad_(False)

    def train(self, mode: bool = True) -> Distilled:
        super().train(mode)
        self.teacher.eval()
        return self

    def correction(self, name: str, z: Tensor, given: tuple[Tensor, ...]) -> Tensor:
        return denoise(self.denoiser, name, z, z.new_full((len(z),), HIGHEST), given, LOWEST)[0]

    def units(self) -> list[nn.Module]:
        return [*super().units(), *self.teacher.units()]


class Refined(Denoising):
    """Calls the frozen model, and has its forecast refined in a few calls, after PDE-Refiner (arXiv 2308.05732).

    Noise is put on the forecast, less of it from call to call, and what the denoiser finds beneath is taken for it:
    parts of a field that are smaller than the noise are made anew, so that each call sees to smaller ones. What is
    noised is the change from the last given frame, in units of its own spread.
    """

    SHOWN = 1  # the denoiser sees no forecast but what is noised
    # of changes, and of the frozen model's errors on samples that it was not trained on
    SPREADS = "change", "error"

    def num_draws(self, name: str, grid: tuple[int, ...]) -> int:
        return REFINEMENTS * super().num_draws(name, grid)

    def levels(self, name: str) -> Tensor:
        """Standard deviations of the noise, falling in equal ratios, in units of the change, (REFINEMENTS,).

        From twice the frozen model's error to a thousandth of it, but no lower than float32 tells from no noise.
        """
        change, error = getattr(self, f"spread_{name}")
        of_error = (error / change).square().mean().sqrt()
        last = (1e-3 * of_error).clamp_min(1e-5)
        share = torch.linspace(0, 1, REFINEMENTS, device=change.device)
        return (2 * of_error) ** (1 - share) * last**share

    def still(self, name: str, x: Tensor) -> Tensor:
        """The last given frame of what is forecast, (B, 1, C_out, *grid) normalised; zeros where there is no time."""
        spec = self.specs[name]
        if not spec.time_dependent:
            return x.new_zeros(len(x), 1, spec.output_channels, *x.shape[3:])
        return x[:, -1:, : spec.output_channels]

    def improved(self, name, forecast, drawn, given) -> Tensor:
        """The forecast refined; without random numbers with the same noise each time."""
        x, still = given[0], self.still(name, given[0])
        change = self.spread(name, "change", x.dim() - 3)
        if drawn.shape[1]:
            noise = drawn.reshape(len(x), REFINEMENTS, *forecast.shape[1:]).transpose(0, 1)
        else:
            same = torch.randn(REFINEMENTS, *forecast.shape[1:], generator=torch.Generator().manual_seed(0))
            noise = same.unsqueeze(1).to(x.device)
        z = (forecast - still) / change
        for level, added in zip(self.levels(name), noise):
            z, _ = denoise(self.denoiser, name, z + level * added, level.expand(len(x)), given)
        return still + change * z
