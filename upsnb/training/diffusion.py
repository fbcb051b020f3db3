"""What a diffusion model of errors is trained by: noised errors of the frozen model, which are to be found again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from upsnb.data.batches import Batch
from upsnb.data.datasets import Dataset
from upsnb.data.source import thinned
from upsnb.models.diffusion import HIGHEST, LOWEST, Distilled, ResidualDiffusion, denoise, noise_levels
from upsnb.rules import LOSS_TERMS
from upsnb.training.losses import Objective

MEASURED = 64  # samples of a split that the spread of errors is measured on, one call of each
MEAN_LOG, STD_LOG = -0.5, 1.2  # of the noise levels that are trained on
TAUGHT = 18  # noise levels between two of which a student learns


class DiffusionObjective(Objective):
    """Mean square of what the network says less what it should have said (EDM, equation 8).

    1 is what a normal distribution as wide as the errors reaches. Errors on samples that the frozen model has been
    trained on are smaller than on others: they are learned from in units of their own spread, and drawn in units of the
    spread on the validation split.
    """

    model: ResidualDiffusion
    TERMS = LOSS_TERMS  # of the operator; here they do nothing
    GRAPHS = ("score",)

    @torch.no_grad()
    def begin(self, datasets: Mapping[str, Dataset], log: Callable[[str], None]) -> None:
        for name, dataset in datasets.items():
            seen = self._spread(dataset, "train")
            unseen = self._spread(dataset, "validation") if len(dataset.splits["validation"]) else seen
            self.model.set_spread(name, seen, unseen)
            larger = (unseen / seen).max().item()
            log(f"{name}: errors on validation samples are {larger:.2f} times those on training samples")

    def _spread(self, dataset: Dataset, split: str) -> Tensor:
        """Root mean square of the frozen model's errors in one call, by channel, normalised units, (C_out,)."""
        model, spec, squares = self.model.eval(), dataset.spec, []
        device, frames = next(model.parameters()).device, spec.input_frames + spec.output_frames
        samples = thinned(dataset.splits[split], MEASURED)
        starts = np.linspace(0, max(len(dataset.frames) - frames, 0), len(samples)).astype(int)
        for sample, start in zip(samples, starts):
            inputs, targets = map(
                torch.from_numpy, dataset.source.read(np.array([sample]), dataset.frames[start : start + frames])
            )
            if spec.time_dependent:
                inputs, targets = inputs[:, : spec.input_frames], inputs[:, spec.input_frames :, : spec.output_channels]
            parameters = torch.from_numpy(dataset.source.parameters[[sample]])
            error = self._errors(spec.name, *(some.to(device) for some in (inputs, targets, parameters)))[0]
            squares.append(error.square().transpose(1, 2).flatten(2).mean((0, 2)))
        model.train()
        return torch.stack(squares).mean(0).sqrt().clamp_min(1e-8)

    def weights(self, step: int, microbatch: int) -> dict[str, float]:
        return {"diffusion": 1.0}

    def terms(self, batch: Batch, weights: dict[str, float]) -> dict[str, Tensor]:
        spec, device = self.model.specs[batch.dataset], batch.inputs.device
        frames = len(batch.inputs), spec.output_frames, spec.output_channels, *batch.inputs.shape[3:]
        draws = {"generator": self.generator, "device": device}
        level = (MEAN_LOG + STD_LOG * torch.randn(frames[0], **draws)).exp().clamp(LOWEST, HIGHEST)
        fields = batch.inputs, batch.targets[:, : spec.output_frames], batch.parameters
        return {"diffusion": self.score(batch.dataset, fields, level, torch.randn(frames, **draws))}

    def score(self, name: str, fields: tuple[Tensor, Tensor, Tensor], level: Tensor, noise: Tensor) -> Tensor:
        """
        Args:
            fields: physical inputs, targets of one call and parameters of a microbatch of B pairs.
            level: (B,) standard deviation of the noise.
            noise: (B, T_out, C_out, *grid) standard normal.
        """
        with torch.no_grad():
            error, *given = self._errors(name, *fields)
            error = error / self.model.spread(name, "seen", error.dim() - 3)
        sigma = level.reshape(-1, *(1,) * (error.dim() - 1))
        _, said = denoise(self.model.denoiser, name, error + sigma * noise, level, tuple(given))
        wanted = (sigma * error - noise) * (1 + sigma.square()).rsqrt()  # (error - keep^2 noised) / (sigma keep)
        return (said - wanted).square().mean()

    def _errors(self, name: str, inputs: Tensor, targets: Tensor, parameters: Tensor) -> tuple[Tensor, ...]:
        """Of the frozen model, normalised, and what it was given: x, its forecast, parameters and relative_dt."""
        model, spec = self.model, self.model.specs[name]
        x, known = model.normalise(name, inputs), model.normalise_parameters(name, parameters)
        relative_dt = model.relative_dt(name, x, spec.dt)
        forecast = model.before.predict(name, x, known, relative_dt).float()
        return model.normalise(name, targets, "output") - forecast, x, forecast, known, relative_dt

    def idle(self, batch: Batch) -> Tensor:
        return self.terms(batch, {})["diffusion"]


class ConsistencyObjective(DiffusionObjective):
    """How far a student's answers at two noise levels are from each other, on one path of its teacher's.

    Consistency distillation (arXiv 2303.01469, algorithm 2) with the pseudo-Huber distance and the weights of improved
    training (arXiv 2310.14189), and no average of the student as its own target. At the lowest level the student's
    answer is what it is given, and from there the teacher's answers reach all others.
    """

    model: Distilled

    def begin(self, datasets: Mapping[str, Dataset], log: Callable[[str], None]) -> None:
        """The spread of errors is the teacher's."""

    def weights(self, step: int, microbatch: int) -> dict[str, float]:
        return {"consistency": 1.0}

    def terms(self, batch: Batch, weights: dict[str, float]) -> dict[str, Tensor]:
        spec, device = self.model.specs[batch.dataset], batch.inputs.device
        frames = len(batch.inputs), spec.output_frames, spec.output_channels, *batch.inputs.shape[3:]
        draws = {"generator": self.generator, "device": device}
        levels = torch.tensor(noise_levels(TAUGHT)[:-1], device=device)
        chosen = torch.randint(len(levels) - 1, frames[:1], **draws)
        fields = batch.inputs, batch.targets[:, : spec.output_frames], batch.parameters
        level = torch.stack((levels[chosen], levels[chosen + 1]))
        return {"consistency": self.score(batch.dataset, fields, level, torch.randn(frames, **draws))}

    def score(self, name: str, fields: tuple[Tensor, Tensor, Tensor], level: Tensor, noise: Tensor) -> Tensor:
        """
        Args:
            fields, noise: as of a diffusion model.
            level: (2, B) standard deviation of the noise, and the next lower one.
        """
        model, (high, low) = self.model, level
        with torch.no_grad():
            error, *given = self._errors(name, *fields)
            error, given = error / model.spread(name, "seen", error.dim() - 3), tuple(given)
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
