"""A frozen surrogate and a diffusion model of what it gets wrong: its forecast, plus a correction that is drawn.

After EDM (arXiv 2206.00364), on residuals as in CorrDiff (arXiv 2309.15214). The denoiser is a second model of the same
kind and size. It is given the frames, the forecast and a noised correction as channels of one frame, and how strong the
noise is as one more parameter.
"""

from __future__ import annotations

import itertools
import math
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
RHO = 7.0  # how much closer to each other the low ones are


def noise_levels(steps: int = STEPS) -> list[float]:
    """From the highest to the lowest, and then none at all (EDM, equation 5)."""
    high, low = HIGHEST ** (1 / RHO), LOWEST ** (1 / RHO)
    return [(high + number / max(steps - 1, 1) * (low - high)) ** RHO for number in range(steps)] + [0.0]


def denoiser_spec(spec: DatasetSpec) -> DatasetSpec:
    """What a denoiser must know of a dataset: all frames as channels of one, already normalised, and no time."""
    given, out = spec.input_frames * spec.input_channels, spec.output_frames * spec.output_channels
    channels, parameters = given + 2 * out, spec.num_parameters + 2
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
        given: x, the forecast, parameters and relative_dt, as of `Surrogate.predict`.
    """
    x, forecast, parameters, relative_dt = given
    sigma = level.reshape(-1, *(1,) * (z.dim() - 1))
    above, scale = sigma - lowest, (1 + sigma.square()).rsqrt()
    channels = torch.cat([fields.flatten(1, 2) for fields in (x, forecast, scale * z)], dim=1)
    condition = torch.cat((parameters, relative_dt[:, None], level.log()[:, None] / 4), dim=1)
    said = network.predict(name, channels[:, None], condition, torch.ones_like(level)).float().reshape(z.shape)
    return z / (1 + above.square()) + above * scale * said, said


class ResidualDiffusion(Surrogate):
    """Calls the frozen model, and draws what is to be added to its forecast.

    Args:
        before: trained; its weights stay as they are.
        config: of the run, which chooses the denoiser's kind and size.
    """

    def __init__(self, before: Surrogate, config: RunConfig):
        super().__init__(before.specs)
        self.called, self.any_points, self.before = before.called, before.any_points, before.requires_grad_(False)
        # a network that names no parameters would not know how strong the noise is
        told = overlays.apply(config, {"model.append_parameters": True})
        self.denoiser = chosen.build(told, {name: denoiser_spec(spec) for name, spec in self.specs.items()})
        for name, spec in self.specs.items():
            # of the errors that corrections are learned from, and of those that they are for
            self.register_buffer(f"spread_{name}", torch.ones(2, spec.output_channels))
        self.draws = max(self.num_draws(name, spec.grid_shape) for name, spec in self.specs.items())

    def train(self, mode: bool = True) -> ResidualDiffusion:
        super().train(mode)
        self.before.eval()
        return self

    def num_draws(self, name: str, grid: tuple[int, ...]) -> int:
        spec = self.specs[name]
        return spec.output_frames * spec.output_channels * math.prod(grid)

    def spread(self, name: str, of: str, num_dims: int) -> Tensor:
        """Root mean square of the frozen model's errors by channel, normalised units, (C_out, 1, ...).

        Args:
            of: "seen" samples, which it was trained on, or others, "unseen".
        """
        return getattr(self, f"spread_{name}")[int(of == "unseen")].reshape(-1, *(1,) * num_dims)

    def set_spread(self, name: str, seen: Tensor, unseen: Tensor) -> None:
        """Both by channel, (C_out,)."""
        getattr(self, f"spread_{name}").copy_(torch.stack((seen, unseen)))

    def predict(self, name, x, parameters, relative_dt, points=None) -> Tensor:
        """The forecast and a correction, drawn from the random numbers that stand after the parameters."""
        count = self.specs[name].num_parameters
        known, drawn = parameters[:, :count], parameters[:, count:]
        forecast = self.before.predict(name, x, known, relative_dt).float()
        z = HIGHEST * drawn.reshape(forecast.shape) if drawn.shape[1] else torch.zeros_like(forecast)
        correction = self.correction(name, z, (x, forecast, known, relative_dt))
        y = forecast + self.spread(name, "unseen", x.dim() - 3) * correction
        return y if points is None else sample_at(y, points, self.specs[name].periodic)

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
