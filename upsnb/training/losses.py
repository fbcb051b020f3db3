"""Objectives: a network and the loss terms it is trained by; what is replicated, sharded and differentiated.

Every term reaches the parameters it is for (tests/test_losses.py measures each alone). Terms are dimensionless: errors
relative to the target, or in units of the training split's standard deviation.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from upsnb.config import StageConfig, TrainingConfig
from upsnb.data.batch import Batch, TensorBatch
from upsnb.data.datasets import Dataset
from upsnb.models.geometry import grid_points, sample_at
from upsnb.models.network import Network
from upsnb.models.surrogate import Surrogate
from upsnb.models.ups import UPS
from upsnb.rules import INVERSE_TERMS, LOSS_TERMS, acts
from upsnb.spans import INVERSE, span
from upsnb.training import ensembles

ESTABLISHED = 10**9  # optimizer steps done: every loss has its full weight
WITHOUT_OPERATOR = frozenset({"inv_enc", "latent_diversity"})  # need the encoded latent only
WITHOUT_DECODER = WITHOUT_OPERATOR | {"forward", "latent_norm"}  # need no field out of the advanced latent


def turn(training: TrainingConfig) -> int:
    """After how many microbatches of a dataset the same terms are computed again."""
    return math.lcm(training.inverse_loss_frequency, *training.loss_frequency.values())


def relative_error(prediction: Tensor, target: Tensor, zero: Tensor | None = None) -> Tensor:
    """Mean over batch, frames and channels of |error| / |target|, norms over space: PDEBench's nRMSE.

    (B, T, C, ...) -> scalar. Targets that are zero everywhere count with a norm of 1e-6.

    Args:
        zero: (C, 1, ...) where a physical zero lies, from which norms of targets are measured.
    """
    error = (prediction - target).flatten(3).norm(dim=-1)
    size = (target if zero is None else target - zero).flatten(3).norm(dim=-1)
    return (error / size.clamp_min(1e-6)).mean()


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


def wall_points(grid_shape: tuple[int, ...], ghosts: Sequence[tuple[float, float]], device) -> Tensor:
    """Unit coordinates of the ghost cells around a grid, where PDEBench's Darcy pressure is zero, (Q, S).

    Args:
        ghosts: how far they lie outside of the outermost points, from `DatasetSpec.ghosts`.
    """
    sides = []
    for axis, (size, (before, after)) in enumerate(zip(grid_shape, ghosts, strict=True)):
        face = grid_points(grid_shape[:axis] + grid_shape[axis + 1 :], device)
        for value in ((0.5 - before) / size, 1 + (after - 0.5) / size):
            wall = torch.full((len(face), 1), value, device=device)
            sides.append(torch.cat((face[:, :axis], wall, face[:, axis:]), dim=1))
    return torch.cat(sides)


class Objective(nn.Module, ABC):
    """A network with its loss: the weighted sum of the active terms of one microbatch.

    Subclasses write `terms`, and name in TERMS those that they know: of fields, from `rules.LOSS_TERMS`. Autocast,
    weighting and sum are final.
    """

    TERMS: tuple[str, ...] = ()
    # Methods that are compiled, model and losses as one graph. They draw no noise and read no settings: what they are
    # given besides tensors chooses the graph. Without any, the model's own parts are compiled.
    GRAPHS: tuple[str, ...] = ()
    stage = StageConfig()  # settings of the stage that is trained; kept up to date, like `config`

    def __init__(self, model: Network, config: TrainingConfig):
        super().__init__()
        self.model, self.config = model, config
        self.generator: torch.Generator | None = None  # of input noise, each rank's own
        # DDP averages once every parameter has a gradient, and a microbatch of one dataset uses one codec.
        self.touch_all = False
        self.progress = 0.0  # of the stage, 0 to 1
        # FSDP2 averages what earlier microbatches left in the backward of a later one, so there has to be one.
        self.touch_any = False

    def weights(self, step: int, microbatch: int) -> dict[str, float]:
        """Those of the terms that a microbatch computes. May be written.

        A term computed every k-th microbatch is weighted k-fold when it is, so that its mean gradient does not depend
        on k.

        Args:
            step: optimizer steps done, for the warm-up.
            microbatch: microbatches of this dataset done, for the frequency.
        """
        config, weights = self.config, {}
        for term in LOSS_TERMS:
            weight = getattr(config, f"lambda_{term}")
            every = config.inverse_loss_frequency if term in INVERSE_TERMS else config.loss_frequency.get(term, 1)
            rise = config.loss_warmup_steps.get(term, 0)
            if rise:
                weight *= min(1.0, (step + 1) / rise)
            if weight > 0 and microbatch % every == 0:
                weights[term] = weight * every
        return weights

    @abstractmethod
    def terms(self, batch: TensorBatch, weights: dict[str, float]) -> dict[str, Tensor]:
        """The terms of `weights` that act on this microbatch, each a scalar of unit weight.

        Networks run in the autocast dtype that stands around the call; losses and FFTs are to be float32.
        """

    def begin(self, datasets: Mapping[str, Dataset], log: Callable[[str], None]) -> None:
        """Measure what the stage must know before its first step, by the weights it starts from. May be written.

        Not called where a run goes on: what is measured belongs into buffers, which are saved.
        """

    def pairs_changed(self, pairs: Mapping) -> None:
        """Let go of what is kept of other training pairs than these, by dataset. May be written."""

    @abstractmethod
    def idle(self, batch: TensorBatch) -> Tensor:
        """Any scalar that the model computes, for microbatches that no term acts on."""

    def unreached(self, computed: set[tuple[str, str]]) -> list[nn.Module]:
        """Modules that no loss of some microbatches reaches.

        Args:
            computed: (dataset, loss term) of all of them.
        """
        names = {name for name, _ in computed}
        if not names:
            return [self.model]
        return [part for name, parts in self.model.parts().items() if name not in names for part in parts]

    def forward(self, batch: TensorBatch, weights: dict[str, float], amp_dtype: torch.dtype | None):
        """
        Args:
            batch: on the device, fields in physical units.
            weights: from `weights`.
            amp_dtype: autocast dtype of the networks, None for float32.
        Returns:
            total loss (scalar), {term: value} detached and unweighted.
        """
        device = batch.device
        with torch.autocast(device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
            terms = self.terms(batch, weights)
        weighted = [value if weights[term] == 1 else weights[term] * value for term, value in terms.items()]
        # a tensor even where no term acts on this dataset in this microbatch
        total = functools.reduce(torch.add, weighted) if weighted else torch.zeros((), device=device)
        if self.touch_all:
            unreached = self.unreached({(batch.dataset, term) for term in terms})
            parameters = (p for module in unreached for p in module.parameters())
            total = total + 0.0 * sum((torch.view_as_real(p) if p.is_complex() else p).sum() for p in parameters)
        if self.touch_any and not total.requires_grad:
            total = total + 0.0 * self.idle(batch)
        return total, {term: value.detach() for term, value in terms.items()}


class Forecast:
    """One call of a surrogate in normalised units, evaluated wherever it is asked for."""

    latents: tuple[Tensor, ...] = ()  # encoded, and advanced by the call, of a model that has any

    def __init__(self, model: Surrogate, name: str, x: Tensor, parameters: Tensor, relative_dt: Tensor):
        self.model, self.name, self.x, self.condition = model, name, x, (parameters, relative_dt)

    def at(self, points: Tensor | None = None) -> Tensor:
        """(B, T, C, *grid), or (B, T, C, Q) at points."""
        return self.model.predict(self.name, self.x, *self.condition, points)


class FieldObjective(Objective):
    """Errors of predicted fields, their physics, and of a second, self-fed call: for any surrogate."""

    TERMS = ("relative", "field", "spectral", "rollout", "boundary", "conservation", "positivity")
    ON_GRID = frozenset({"spectral", "rollout", "conservation"})  # not at sampled points alone
    GRAPHS = ("direct_terms", "inverse_terms")
    forecast = Forecast

    @property
    def unroll(self) -> int:
        """Calls in a row that a stage ends with which is for nothing but them, 0 in any other."""
        return getattr(self.stage, "unroll", 0)

    @property
    def calls(self) -> int:
        """In a row where `rollout` acts: two, and in a stage of unrolled calls more from part to part of it."""
        return max(2, min(self.unroll, 2 + int(self.progress * (self.unroll - 1))))

    def weights(self, step: int, microbatch: int) -> dict[str, float]:
        """In a stage of unrolled calls, each call's error counts like the first one's."""
        weights = super().weights(step, microbatch)
        return weights | {"rollout": (self.calls - 1) * weights.get("relative", 1.0)} if self.unroll else weights

    def terms(self, batch: Batch, weights: dict[str, float]) -> dict[str, Tensor]:
        name, spec, x = batch.dataset, self.model.specs[batch.dataset], batch.inputs
        active = [term for term in LOSS_TERMS if term in weights and acts(term, spec)]  # in one order: a graph per set
        noise, points = None, self._query_points(batch, spec)
        if self.config.noise > 0 and self.training:
            noise = self.config.noise * torch.randn(x.shape, generator=self.generator, device=x.device)
        inverse = any(getattr(self.config, f"lambda_{term}") > 0 for term in INVERSE_TERMS)
        terms, known = self.direct_terms(
            name,
            tuple(term for term in active if term not in INVERSE_TERMS),
            self.calls if "rollout" in active else 1,  # or a static dataset's graph is made again for each number
            inverse,  # of the config, not of this microbatch: one graph for both
            (x, batch.targets, batch.parameters, noise),
            points,
        )
        if wanted := tuple(term for term in active if term in INVERSE_TERMS):
            with span(INVERSE):
                terms |= self.inverse_terms(name, wanted, *known)
        return terms

    def direct_terms(
        self, name: str, active: tuple[str, ...], calls: int, inverse: bool, fields: tuple, points: Tensor | None
    ) -> tuple[dict[str, Tensor], tuple]:
        """One forecast, and all its terms but the inverse ones.

        Args:
            calls: in a row, for `rollout`.
            inverse: whether to return what `inverse_terms` is given.
            fields: physical inputs, targets and parameters of a microbatch, and noise to add to the normalised inputs.
            points: (Q, S) unit coordinates that fields are compared at, None for the grid.
        """
        model, spec = self.model, self.model.specs[name]
        inputs, targets, parameters, noise = fields
        x, *condition = model.normalised(name, inputs, parameters, spec.dt)
        if noise is not None:
            x = x + noise
        target = model.normalise(name, targets[:, : spec.output_frames], "output")
        forecast = self.forecast(model, name, x, *condition)
        grid_y = forecast.at() if points is None or self.ON_GRID.intersection(active) else None
        terms = self._latent_terms(forecast, active, target)
        if "rollout" in active:
            terms["rollout"] = self._later_calls(targets, forecast, grid_y, calls)
        y, y_target = grid_y, target
        if points is not None:
            y, y_target = forecast.at(points), sample_at(target, points, spec.periodic)
        terms |= self._field_terms(name, active, y.float(), y_target)
        if grid_y is not None:
            terms |= self._grid_terms(name, active, x, grid_y.float(), target)
        if "boundary" in active:
            # zero outside, in units of the field's own spread
            grid = tuple(x.shape[3:])
            at_walls = forecast.at(wall_points(grid, spec.ghosts(grid), x.device)).float()
            terms["boundary"] = (at_walls - model.constant(name, "output_zero", 1)).square().mean()
        return terms, ((x, *forecast.latents, grid_y) if inverse else ())

    def inverse_terms(self, name: str, active: tuple[str, ...], *known: Tensor) -> dict[str, Tensor]:
        """Terms of fields read back out of latents; a model without latents has none."""
        return {}

    def idle(self, batch: Batch) -> Tensor:
        spec = self.model.specs[batch.dataset]
        return self.model(batch.dataset, batch.inputs, batch.parameters, spec.dt).sum()

    def _latent_terms(self, forecast: Forecast, active: tuple[str, ...], target: Tensor) -> dict[str, Tensor]:
        """Terms of what the model computes on its way; a model without any has none."""
        return {}

    def _query_points(self, batch: Batch, spec) -> Tensor | None:
        """This microbatch's random query points (Q, S), the same on all ranks; None for the whole grid."""
        sampling, shape = self.config.query_sampling, batch.inputs.shape[3:]
        num_points = math.prod(shape)
        count = min(sampling.num_queries or num_points, num_points)
        if count == num_points and sampling.jitter == 0:
            return None
        # By numpy, which draws a few of many without shuffling all: of 128^3 in 0.5 ms, which took 100 ms (two cores).
        chosen = np.random.default_rng(batch.seed).choice(num_points, count, replace=False, shuffle=False)
        cells, sizes = torch.tensor(np.stack(np.unravel_index(chosen, shape), axis=-1)), torch.tensor(shape)
        points = (cells + 0.5) / sizes
        if sampling.jitter > 0:
            draws = torch.Generator().manual_seed(batch.seed)
            points = points + (torch.rand(points.shape, generator=draws) - 0.5) * sampling.jitter / sizes
        return points.to(batch.inputs.device, non_blocking=True)

    def _field_terms(self, name: str, active: tuple[str, ...], y: Tensor, target: Tensor) -> dict[str, Tensor]:
        terms = {}
        if "relative" in active:  # in physical units: the mean belongs to the norm
            zero = self.model.constant(name, "output_zero", y.dim() - 3)
            terms["relative"] = relative_error(y, target, zero)
        if "field" in active:
            terms["field"] = (y - target).square().mean()
        if "positivity" in active:
            terms["positivity"] = torch.relu(self.model.constant(name, "output_zero", y.dim() - 3) - y).square().mean()
        return terms

    def _grid_terms(
        self, name: str, active: tuple[str, ...], x: Tensor, y: Tensor, target: Tensor
    ) -> dict[str, Tensor]:
        terms, space = {}, tuple(range(3, y.dim()))
        if "spectral" in active:
            terms["spectral"] = spectral_error(y, target, len(space))
        if "conservation" in active:
            terms["conservation"] = (y.mean(space) - x[:, -1:, : y.shape[2]].mean(space)).square().mean()
        return terms

    def _later_calls(self, targets: Tensor, forecast: Forecast, y: Tensor, calls: int) -> Tensor:
        """Mean relative error of the forecasts after the first one, each fed by what came out before it."""
        name, model, x, errors = forecast.name, self.model, forecast.x, []
        state = forecast.latents[-1] if forecast.latents else None
        zero = model.constant(name, "output_zero", y.dim() - 3)
        for target in targets.split(model.specs[name].output_frames, dim=1)[1:calls]:
            x = model.next_inputs(name, x, y.float())
            y, state = model.predict_next(name, x, *forecast.condition, state)
            # As for the first call: a difference of normalised fields keeps digits, and units that are small.
            errors.append(relative_error(y.float(), model.normalise(name, target, "output"), zero))
        return torch.stack(errors).mean()


class LatentForecast(Forecast):
    """The same of UPS, whose tokens are computed once."""

    def __init__(self, model: UPS, name: str, x: Tensor, *condition: Tensor):
        super().__init__(model, name, x, *condition)
        z = model.encode(name, x)
        self.latents = z, model.advance(name, z, *condition)

    def at(self, points: Tensor | None = None) -> Tensor:
        return self.model.reconstruct_or_decode(self.name, self.latents[-1], self.x, points)


class UPSObjective(FieldObjective):
    """The errors of fields, and the latent terms that only UPS has."""

    TERMS = LOSS_TERMS
    forecast = LatentForecast

    def unreached(self, computed: set[tuple[str, str]]) -> list[nn.Module]:
        model = self.model
        encoded = {name for name, _ in computed}
        advanced = {name for name, term in computed if term not in WITHOUT_OPERATOR}
        decoded = {name for name, term in computed if term not in WITHOUT_DECODER}
        inverted = {name for name, term in computed if term == "inv_enc"}
        latent = {name for name, spec in model.specs.items() if model.latent_rollout and spec.time_dependent}
        unreached: list[nn.Module] = [] if advanced else [model.operator]
        for parts, reached in (
            (model.encoders, encoded),
            (model.conditions, advanced),
            (model.decoders, decoded - latent),
            (model.propagators, decoded),  # none where rollouts are latent
            (model.inverse_decoders, inverted | (decoded & latent)),
        ):
            unreached += [part for name, part in parts.items() if name not in reached]
        return unreached

    def inverse_terms(
        self, name: str, active: tuple[str, ...], x: Tensor, z: Tensor, advanced: Tensor, grid_y: Tensor | None
    ) -> dict[str, Tensor]:
        model, terms = self.model, {}
        if "inv_enc" in active:
            again = model.reconstruct(name, z, tuple(x.shape[3:]))
            zero = model.constant(name, "input_zero", x.dim() - 3)
            terms["inv_enc"] = relative_error(again.float(), x, zero)
        if "inv_dec" in active:
            grid_y = model.reconstruct_or_decode(name, advanced, x) if grid_y is None else grid_y
            terms["inv_dec"] = latent_error(model.encode(name, model.next_inputs(name, x, grid_y)), advanced)
        return terms

    def _latent_terms(self, forecast: LatentForecast, active: tuple[str, ...], target: Tensor) -> dict[str, Tensor]:
        model, terms, (z, advanced) = self.model, {}, forecast.latents
        if "forward" in active:
            with torch.no_grad():
                future = model.encode(forecast.name, model.next_inputs(forecast.name, forecast.x, target))
            terms["forward"] = latent_error(advanced, future)
        if "latent_norm" in active:
            terms["latent_norm"] = sum(
                (tokens.float().square().mean((1, 2)) - 1).square().mean() for tokens in (z, advanced)
            )
        if "latent_diversity" in active:
            unit = nn.functional.normalize(z.float() - z.float().mean(1, keepdim=True), dim=-1)
            with torch.autocast(unit.device.type, enabled=False):
                similarity = unit @ unit.transpose(1, 2)
            count = similarity.shape[-1]
            pairs = max(1, count * (count - 1))  # of one token there is none, and nothing to differ from
            terms["latent_diversity"] = (similarity.square().sum((1, 2)) - count).relu().mean() / pairs
        return terms


class CrpsObjective(UPSObjective):
    """The fair CRPS of a few forecasts of each pair that differ by what they draw, and of nothing else.

    After Lang et al., AIFS-CRPS (arXiv 2412.15832): one call, trained by a score that is lowest where forecasts are
    drawn from what may happen. Inputs are given as they are: noise on them would be spread that the model did not draw.
    """

    GRAPHS = ("score",)

    @property
    def calls(self) -> int:
        return self.stage.unroll

    def weights(self, step: int, microbatch: int) -> dict[str, float]:
        return {"crps": 1.0}

    def unreached(self, computed: set[tuple[str, str]]) -> list[nn.Module]:
        return (super() if isinstance(self.model, UPS) else super(UPSObjective, self)).unreached(computed)

    def terms(self, batch: Batch, weights: dict[str, float]) -> dict[str, Tensor]:
        spec, pairs = self.model.specs[batch.dataset], len(batch.inputs)
        calls = self.calls if spec.time_dependent else 1
        shape = (calls, self.stage.members * pairs, self.model.draws)
        noise = torch.randn(shape, generator=self.generator, device=batch.inputs.device)
        return {"crps": self.score(batch.dataset, (batch.inputs, batch.targets, batch.parameters), noise)}

    def score(self, name: str, fields: tuple[Tensor, Tensor, Tensor], noise: Tensor) -> Tensor:
        """Mean over calls in a row, each member fed by itself.

        Args:
            fields: physical inputs, targets and parameters of a microbatch of B pairs.
            noise: (calls, members * B, draws).
        """
        model, (inputs, targets, parameters) = self.model, fields
        spec, members = model.specs[name], noise.shape[1] // len(inputs)
        x = model.normalise(name, inputs).repeat(members, *(1,) * (inputs.dim() - 1))
        parameters, relative_dt = parameters.repeat(members, 1), model.relative_dt(name, x, spec.dt)
        scores, state = [], None
        for drawn, target in zip(noise, targets.split(spec.output_frames, dim=1)):
            condition = model.normalise_parameters(name, parameters, drawn)
            y, state = model.predict_next(name, x, condition, relative_dt, state)
            y = y.float()
            truth = model.normalise(name, target, "output")
            scores.append(ensembles.fair_crps(y.unflatten(0, (members, -1)), truth).mean())
            x = model.next_inputs(name, x, y)
        return torch.stack(scores).mean()
