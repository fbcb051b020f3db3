"""The loss terms and the module whose forward computes them: the unit that is compiled, wrapped and differentiated.

Every term reaches the parameters it is for (tests/test_losses.py measures each alone). Terms are dimensionless: errors
relative to the target, or in units of the training split's standard deviation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from upsnb.config import TrainingConfig
from upsnb.data.batches import Batch
from upsnb.models.geometry import grid_points, sample_at
from upsnb.models.ups import UPS
from upsnb.rules import INVERSE_TERMS, LOSS_TERMS, PHYSICS_TERMS
from upsnb.spans import FORWARD, INVERSE, span

WITHOUT_OPERATOR = frozenset({"inv_enc", "latent_diversity"})  # need the encoded latent only
WITHOUT_DECODER = WITHOUT_OPERATOR | {"forward", "latent_norm"}  # need no field out of the advanced latent


def active_terms(config: TrainingConfig, step: int, microbatch: int) -> dict[str, float]:
    """Weights of the terms that this microbatch computes.

    A term computed every k-th microbatch is weighted k-fold when it is, so that its mean gradient does not depend on k.

    Args:
        step: optimizer steps done, for the warm-up.
        microbatch: microbatches of this dataset done, for the frequency.
    """
    weights = {}
    for term in LOSS_TERMS:
        weight = getattr(config, f"lambda_{term}")
        every = config.inverse_loss_frequency if term in INVERSE_TERMS else config.loss_frequency.get(term, 1)
        rise = config.loss_warmup_steps.get(term, 0)
        if rise:
            weight *= min(1.0, (step + 1) / rise)
        if weight > 0 and microbatch % every == 0:
            weights[term] = weight * every
    return weights


def untouched_parts(model: UPS, computed: set[tuple[str, str]]) -> list[nn.Module]:
    """Parts of the model that no loss of a step reaches.

    Args:
        computed: (dataset, loss term) of all microbatches of the step.
    """
    encoded = {name for name, _ in computed}
    advanced = {name for name, term in computed if term not in WITHOUT_OPERATOR}
    decoded = {name for name, term in computed if term not in WITHOUT_DECODER}
    inverted = {name for name, term in computed if term == "inv_enc"}
    latent = {name for name, spec in model.specs.items() if model.latent_rollout and spec.time_dependent}
    untouched: list[nn.Module] = [] if advanced else [model.operator]
    for parts, touched in (
        (model.encoders, encoded),
        (model.conditions, advanced),
        (model.decoders, decoded - latent),
        (model.inverse_decoders, inverted | (decoded & latent)),
    ):
        untouched += [part for name, part in parts.items() if name not in touched]
    return untouched


def relative_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean over batch, frames and channels of |error| / |target|, norms over space: PDEBench's nRMSE.

    (B, T, C, ...) -> scalar. Targets that are zero everywhere count with a norm of 1e-6.
    """
    error = (prediction - target).flatten(3).norm(dim=-1)
    return (error / target.flatten(3).norm(dim=-1).clamp_min(1e-6)).mean()


def spectral_error(prediction: Tensor, target: Tensor, num_dims: int) -> Tensor:
    """Relative error of Fourier amplitudes over space, their energy weighted by 1 + wavenumber.

    Amplitudes only: by Parseval the full difference is the relative error again. float32 throughout.
    """
    axes = tuple(range(-num_dims, 0))
    spectra = [torch.fft.rfftn(x.float(), dim=axes).abs() for x in (prediction, target)]
    sizes = prediction.shape[-num_dims:]
    squared = 0
    for axis, size in enumerate(sizes):
        last = axis == num_dims - 1
        waves = (torch.fft.rfftfreq if last else torch.fft.fftfreq)(size, d=1 / size, device=prediction.device)
        squared = squared + waves.square().view(-1, *(1,) * (num_dims - 1 - axis))
    # rfft keeps one of each pair of conjugates along the last axis, fft both along the others: count all modes alike
    twins = torch.where((waves == 0) | (2 * waves == sizes[-1]), 1.0, 2.0)
    weight = (twins * (1 + squared.sqrt())).sqrt()
    return relative_error(spectra[0] * weight, spectra[1] * weight)


def latent_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean squared difference of (B, L, D) in units of each target's variance; the target is held fixed.

    Per sample, so that the mean over a batch does not depend on how ranks share it.
    """
    target = target.detach().float()
    error = (prediction.float() - target).square().mean((1, 2))
    return (error / target.var((1, 2)).clamp_min(1e-6)).mean()


def wall_points(grid_shape: tuple[int, ...], device) -> Tensor:
    """Unit coordinates of the ghost cells around a grid, where PDEBench's Darcy pressure is zero, (Q, S).

    Half a cell outside the domain, a whole cell from the outermost centres.
    """
    sides = []
    for axis, size in enumerate(grid_shape):
        face = grid_points(grid_shape[:axis] + grid_shape[axis + 1 :], device)
        for value in (-0.5 / size, 1 + 0.5 / size):
            wall = torch.full((len(face), 1), value, device=device)
            sides.append(torch.cat((face[:, :axis], wall, face[:, axis:]), dim=1))
    return torch.cat(sides)


class LossModule(nn.Module):
    """Weighted sum of the active loss terms of one microbatch.

    Args of `forward`:
        batch: physical fields on the device.
        weights: from `active_terms`.
        amp_dtype: autocast dtype of the networks, None for float32. Losses and FFTs are float32 always.
    Returns:
        total loss (scalar), {term: value} detached and unweighted.
    """

    def __init__(
        self,
        model: UPS,
        config: TrainingConfig,
        generator: torch.Generator,
        touch_all: bool = False,
        touch_any: bool = False,
    ):
        super().__init__()
        self.model, self.config, self.generator = model, config, generator
        # DDP waits for the gradient of every parameter, and a microbatch of one dataset uses one codec.
        self.touch_all = touch_all
        # FSDP2 averages what earlier microbatches left in the backward of a later one, so there has to be one.
        self.touch_any = touch_any

    def forward(self, batch: Batch, weights: dict[str, float], amp_dtype: torch.dtype | None):
        name, model = batch.dataset, self.model
        spec = model.specs[name]
        x = model.normalise(name, batch.inputs)
        if self.config.noise > 0 and self.training:
            x = x + self.config.noise * torch.randn(x.shape, generator=self.generator, device=x.device)
        frames = spec.output_frames
        target = model.normalise(name, batch.targets[:, :frames], "output")
        dt = model.relative_dt(name, x, spec.dt)
        points = self._query_points(batch, spec)
        on_grid = weights.keys() & {"spectral", "rollout", "inv_dec", "conservation"}
        whole_grid = points is None or bool(on_grid)

        with torch.autocast(x.device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
            z = model.encode(name, x)
            advanced = model.advance(name, z, batch.parameters, dt)
            with span(INVERSE if points is not None and on_grid == {"inv_dec"} else FORWARD):  # who asks for it
                grid_y = model.reconstruct_or_decode(name, advanced, x) if whole_grid else None
            point_y = None if points is None else model.reconstruct_or_decode(name, advanced, x, points)
            extra = self._latent_terms(name, weights, x, z, advanced, target, grid_y)
            if "rollout" in weights and spec.time_dependent:
                extra["rollout"] = self._second_call(batch, x, grid_y, advanced, dt)

        y, y_target = (grid_y, target) if points is None else (point_y, sample_at(target, points, spec.periodic))
        terms = {**extra, **self._field_terms(name, weights, y.float(), y_target)}
        if grid_y is not None:
            terms |= self._grid_terms(name, weights, x, grid_y.float(), target)
        if "boundary" in weights and spec.family in PHYSICS_TERMS["boundary"]:
            with torch.autocast(x.device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
                walls = wall_points(tuple(x.shape[3:]), x.device)
                at_walls = model.reconstruct_or_decode(name, advanced, x, walls)
            # zero pressure on the walls, in units of the pressure's spread
            mean, std = (model.constant(name, f"output_{key}").reshape(-1, 1) for key in ("mean", "std"))
            terms["boundary"] = (at_walls.float() + mean / std).square().mean()
        # a tensor even where no term acts on this dataset in this microbatch
        total = sum((weights[term] * value for term, value in terms.items()), x.new_zeros(()))
        if self.touch_all:
            modules = [model.encoders, model.decoders, model.inverse_decoders, model.conditions]
            modules += [] if terms.keys() - WITHOUT_OPERATOR else [model.operator]
            total = total + 0.0 * sum(p.sum() for module in modules for p in module.parameters())
        if self.touch_any and not total.requires_grad:
            total = total + 0.0 * z.float().sum()
        return total, {term: value.detach() for term, value in terms.items()}

    def _query_points(self, batch: Batch, spec) -> Tensor | None:
        """This microbatch's random query points (Q, S), the same on all ranks; None for the whole grid."""
        sampling = self.config.query_sampling
        num_points = batch.inputs[0, 0, 0].numel()
        count = min(sampling.num_queries or num_points, num_points)
        if count == num_points and sampling.jitter == 0:
            return None
        draws = torch.Generator().manual_seed(batch.seed)
        chosen = torch.randperm(num_points, generator=draws)[:count]
        points = grid_points(batch.inputs.shape[3:])[chosen]
        if sampling.jitter > 0:
            sizes = torch.tensor(batch.inputs.shape[3:])
            points = points + (torch.rand(points.shape, generator=draws) - 0.5) * sampling.jitter / sizes
        return points.to(batch.inputs.device, non_blocking=True)

    def _field_terms(self, name: str, weights, y: Tensor, target: Tensor) -> dict[str, Tensor]:
        terms = {}
        if "relative" in weights:  # in physical units: the mean belongs to the norm
            shift = self.model.constant(name, "output_mean") / self.model.constant(name, "output_std")
            shift = shift.reshape(1, 1, -1, *(1,) * (y.dim() - 3))
            terms["relative"] = relative_error(y + shift, target + shift)
        if "field" in weights:
            terms["field"] = (y - target).square().mean()
        return terms

    def _grid_terms(self, name: str, weights, x: Tensor, y: Tensor, target: Tensor) -> dict[str, Tensor]:
        spec, terms = self.model.specs[name], {}
        space = tuple(range(3, y.dim()))
        if "spectral" in weights:
            terms["spectral"] = spectral_error(y, target, spec.num_dims)
        if "conservation" in weights and spec.family in PHYSICS_TERMS["conservation"]:
            terms["conservation"] = (y.mean(space) - x[:, -1:].mean(space)).square().mean()
        if "positivity" in weights and spec.family in PHYSICS_TERMS["positivity"]:
            shift = self.model.constant(name, "output_mean") / self.model.constant(name, "output_std")
            terms["positivity"] = torch.relu(-(y + shift)).square().mean()
        return terms

    def _latent_terms(self, name, weights, x, z, advanced, target, grid_y) -> dict[str, Tensor]:
        model, terms = self.model, {}
        spec = model.specs[name]
        if "forward" in weights and spec.time_dependent:
            with torch.no_grad():
                future = model.encode(name, target)
            terms["forward"] = latent_error(advanced, future)
        if "inv_enc" in weights:
            with span(INVERSE):
                again = model.reconstruct(name, z, tuple(x.shape[3:]))
                shift = model.constant(name, "input_mean") / model.constant(name, "input_std")
                terms["inv_enc"] = relative_error(again.float() + shift, x + shift)
        if "inv_dec" in weights and spec.time_dependent:
            with span(INVERSE):
                terms["inv_dec"] = latent_error(model.encode(name, grid_y), advanced)
        if "latent_norm" in weights:
            terms["latent_norm"] = sum(
                (part.float().square().mean((1, 2)) - 1).square().mean() for part in (z, advanced)
            )
        if "latent_diversity" in weights:
            unit = nn.functional.normalize(z.float() - z.float().mean(1, keepdim=True), dim=-1)
            with torch.autocast(unit.device.type, enabled=False):
                similarity = unit @ unit.transpose(1, 2)
            count = similarity.shape[-1]
            terms["latent_diversity"] = (similarity.square().sum((1, 2)) - count).mean() / (count * (count - 1))
        return terms

    def _second_call(self, batch: Batch, x: Tensor, y: Tensor, advanced: Tensor, dt: Tensor) -> Tensor:
        """Relative error of the next forecast, fed by the first one's output."""
        name, model = batch.dataset, self.model
        spec = model.specs[name]
        fed = torch.cat((x, y.float()), dim=1)[:, -spec.input_frames :]
        z = advanced if model.latent_rollout else model.encode(name, fed)
        again = model.reconstruct_or_decode(name, model.advance(name, z, batch.parameters, dt), fed)
        return relative_error(
            model.denormalise(name, again.float()), batch.targets[:, spec.output_frames : 2 * spec.output_frames]
        )
