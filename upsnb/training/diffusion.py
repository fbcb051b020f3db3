"""What denoisers are trained by: noised errors of the frozen model, or noised changes, which are to be found again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from upsnb.data.batch import Batch
from upsnb.data.datasets import Dataset
from upsnb.data.source import thinned
from upsnb.models.diffusion import (
    HIGHEST,
    LOWEST,
    REFINEMENTS,
    Denoising,
    Distilled,
    Refined,
    ResidualDiffusion,
    denoise,
    noise_level,
)
from upsnb.models.network import evaluating
from upsnb.rules import LOSS_TERMS
from upsnb.training.frozen import PairRows
from upsnb.training.losses import Objective

MEASURED = 64  # samples of a split that the spread of errors is measured on, one call of each
MEAN_LOG, STD_LOG = -0.5, 1.2  # of the noise levels that are trained on
TAUGHT = 18  # noise levels between two of which a student learns


class DenoisingObjective(Objective):
    """Mean square of what a denoiser says less what it should have said (EDM, equation 8). Subclasses say of what.

    1 is what a normal distribution as wide as the clean fields reaches.
    """

    model: Denoising
    TERMS = LOSS_TERMS  # of the operator; here they do nothing
    GRAPHS = ("score",)
    TERM = ""
    forecasts: Mapping[str, PairRows] = {}  # of the frozen model, by dataset, where they are kept and not computed

    def pairs_changed(self, pairs: Mapping[str, np.ndarray]) -> None:
        self.forecasts = {name: kept for name, kept in self.forecasts.items() if kept.has(pairs[name])}

    @abstractmethod
    def level(self, name: str, pairs: int, device: torch.device) -> Tensor:
        """Standard deviation of the noise on each pair, drawn, (B,)."""

    @abstractmethod
    def clean(self, name: str, inputs: Tensor, targets: Tensor, parameters: Tensor, *kept: Tensor) -> tuple:
        """What noise is added to, of about unit variance, (B, T_out, C_out, *grid), and what `denoise` is given.

        Args:
            kept: the frozen model's forecasts, normalised, where they need not be computed.
        """

    def weights(self, step: int, microbatch: int) -> dict[str, float]:
        return {self.TERM: 1.0}

    def unreached(self, computed: set[tuple[str, str]]) -> list[nn.Module]:
        """A denoiser that is built as the operator is may have inverses; no term asks them."""
        return [*super().unreached(computed), *getattr(self.model.denoiser, "inverse_decoders", {}).values()]

    def terms(self, batch: Batch, weights: dict[str, float]) -> dict[str, Tensor]:
        spec, device = self.model.specs[batch.dataset], batch.inputs.device
        frames = len(batch.inputs), spec.output_frames, spec.output_channels, *batch.inputs.shape[3:]
        fields = batch.inputs, batch.targets[:, : spec.output_frames], batch.parameters
        if batch.pairs is not None and batch.dataset in self.forecasts and self.stage.cache != "off":
            fields += (self.forecasts[batch.dataset].read(batch.pairs, device),)
        level = self.level(batch.dataset, frames[0], device)
        noise = torch.randn(frames, generator=self.generator, device=device)
        return {self.TERM: self.score(batch.dataset, fields, level, noise)}

    def score(self, name: str, fields: tuple[Tensor, ...], level: Tensor, noise: Tensor) -> Tensor:
        """
        Args:
            fields: physical inputs, targets of one call and parameters of a microbatch of B pairs, and `kept`.
            level: (B,) standard deviation of the noise.
            noise: (B, T_out, C_out, *grid) standard normal.
        """
        with torch.no_grad():
            clean, given = self.clean(name, *fields)
        sigma = level.reshape(-1, *(1,) * (clean.dim() - 1))
        _, said = denoise(self.model.denoiser, name, clean + sigma * noise, level, given)
        wanted = (sigma * clean - noise) * (1 + sigma.square()).rsqrt()  # (clean - keep^2 noised) / (sigma keep)
        return (said - wanted).square().mean()

    def idle(self, batch: Batch) -> Tensor:
        return self.terms(batch, {})[self.TERM]

    def errors(self, name: str, inputs: Tensor, targets: Tensor, parameters: Tensor, *kept: Tensor) -> tuple:
        """Of the frozen model, normalised, and what it was given: x, its forecast, parameters and relative_dt."""
        x, known, relative_dt = self.model.normalised(name, inputs, parameters, self.model.specs[name].dt)
        if kept:
            forecast = kept[0]
        else:  # in float32, as it is kept, measured and corrected: 16 bits err by as much as what is to be learned
            with torch.autocast(x.device.type, enabled=False):
                forecast = self.model.before.predict(name, x, known, relative_dt).float()
        return self.model.normalise(name, targets, "output") - forecast, x, forecast, known, relative_dt

    def _error(self, *fields) -> Tensor:
        return self.errors(*fields)[0]

    @torch.no_grad()
    def measured(self, dataset: Dataset, split: str, of: Callable[..., Tensor]) -> Tensor:
        """Root mean square of what `of` makes of some pairs of a split, by frame and channel, (T_out, C_out).

        Args:
            split: the training split stands for one that is empty.
            of: (name, inputs, targets, parameters) -> (B, T_out, C_out, *grid).
        """
        spec, squares = dataset.spec, []
        device, frames = next(self.model.parameters()).device, spec.input_frames + spec.output_frames
        samples = thinned(dataset.splits[split if len(dataset.splits[split]) else "train"], MEASURED)
        starts = np.linspace(0, max(len(dataset.frames) - frames, 0), len(samples)).astype(int)
        for sample, start in zip(samples, starts):
            inputs, targets = map(
                torch.from_numpy, dataset.source.read(np.array([sample]), dataset.frames[start : start + frames])
            )
            if spec.time_dependent:
                inputs, targets = inputs[:, : spec.input_frames], inputs[:, spec.input_frames :, : spec.output_channels]
            parameters = torch.from_numpy(dataset.source.parameters[[sample]])
            with evaluating(self.model):
                found = of(spec.name, *(some.to(device) for some in (inputs, targets, parameters)))[0]
            squares.append(found.square().flatten(2).mean(2))
        return torch.stack(squares).mean(0).sqrt().clamp_min(1e-8)


class DiffusionObjective(DenoisingObjective):
    """Noised errors of the frozen model, which are to be found again.

    Errors on samples that it has been trained on are smaller than on others: they are learned from in units of their
    own spread, and drawn in units of the spread on the validation split.
    """

    model: ResidualDiffusion
    TERM = "diffusion"

    def begin(self, datasets: Mapping[str, Dataset], log: Callable[[str], None]) -> None:
        for name, dataset in datasets.items():
            seen, unseen = (self.measured(dataset, split, self._error) for split in ("train", "validation"))
            self.model.set_spread(name, seen, unseen)
            larger = (unseen / seen).max().item()
            log(f"{name}: errors on validation samples are {larger:.2f} times those on training samples")

    def level(self, name: str, pairs: int, device: torch.device) -> Tensor:
        drawn = torch.randn(pairs, generator=self.generator, device=device)
        return (MEAN_LOG + STD_LOG * drawn).exp().clamp(LOWEST, HIGHEST)

    def clean(self, name: str, inputs: Tensor, targets: Tensor, parameters: Tensor, *kept: Tensor) -> tuple:
        error, *given = self.errors(name, inputs, targets, parameters, *kept)
        return error / self.model.spread(name, "seen", error.dim() - 3), tuple(given)


class RefineObjective(DenoisingObjective):
    """Noised changes from the last given frame, which are to be found again (PDE-Refiner, arXiv 2308.05732, section 3).

    All noise levels alike. The frozen model takes no part: it makes the forecast that refinement begins with.
    """

    model: Refined
    TERM = "refine"

    def begin(self, datasets: Mapping[str, Dataset], log: Callable[[str], None]) -> None:
        for name, dataset in datasets.items():
            change = self.measured(dataset, "train", self._change)
            self.model.set_spread(name, change, self.measured(dataset, "validation", self._error))
            levels = ", ".join(f"{level:.2g}" for level in self.model.levels(name).tolist())
            log(f"{name}: noise on forecasts, as shares of what a call changes: {levels}")

    def _change(self, name: str, inputs: Tensor, targets: Tensor, parameters: Tensor) -> Tensor:
        target = self.model.normalise(name, targets, "output")
        return target - self.model.still(name, self.model.normalise(name, inputs))

    def level(self, name: str, pairs: int, device: torch.device) -> Tensor:
        chosen = torch.randint(REFINEMENTS, (pairs,), generator=self.generator, device=device)
        return self.model.levels(name)[chosen]

    def clean(self, name: str, inputs: Tensor, targets: Tensor, parameters: Tensor, *kept: Tensor) -> tuple:
        model, change = self.model, self._change(name, inputs, targets, parameters)
        given = model.normalised(name, inputs, parameters, model.specs[name].dt)
        return change / model.spread(name, "change", change.dim() - 3), given


class ConsistencyObjective(DiffusionObjective):
    """How far a student's answers at two noise levels are from each other, on one path of its teacher's.

    Consistency distillation (arXiv 2303.01469, algorithm 2) with the pseudo-Huber distance and the weights of improved
    training (arXiv 2310.14189), and no average of the student as its own target. At the lowest level the student's
    answer is what it is given, and from there the teacher's answers reach all others.
    """

    model: Distilled
    TERM = "consistency"

    def begin(self, datasets: Mapping[str, Dataset], log: Callable[[str], None]) -> None:
        """The spread of errors is the teacher's."""

    def level(self, name: str, pairs: int, device: torch.device) -> Tensor:
        """A level, and the next lower one, (2, B)."""
        levels = noise_level(torch.arange(TAUGHT, device=device), TAUGHT)  # a copy from here would wait for it
        chosen = torch.randint(len(levels) - 1, (pairs,), generator=self.generator, device=device)
        return torch.stack((levels[chosen], levels[chosen + 1]))

    def score(self, name: str, fields: tuple[Tensor, ...], level: Tensor, noise: Tensor) -> Tensor:
        """
        Args:
            fields, noise: as of a diffusion model.
            level: (2, B) standard deviation of the noise, and the next lower one.
        """
        model, (high, low) = self.model, level
        with torch.no_grad():
            error, given = self.clean(name, *fields)
            above, below = (one.reshape(-1, *(1,) * (error.dim() - 1)) for one in level)
            start = error + above * noise
            slope = (start - denoise(model.teacher, name, start, high, given)[0]) / above
            end = start + (below - above) * slope
            slope = (slope + (end - denoise(model.teacher, name, end, low, given)[0]) / below) / 2  # Heun's method
            end = start + (below - above) * slope
            wanted = denoise(model.denoiser, name, end, low, given, LOWEST)[0]
        found = denoise(model.denoiser, name, start, high, given, LOWEST)[0]
        apart = (found - wanted).flatten(1)
        small = 0.00054 * apart.shape[1] ** 0.5
        distance = (apart.square().sum(1) + small**2).sqrt() - small
        return (distance / (high - low)).mean() / apart.shape[1] ** 0.5
