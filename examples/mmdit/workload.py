"""Pictures from captions: a multimodal diffusion transformer as a workload."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from examples.mmdit import data, figures, judge
from examples.mmdit.model import CHANNELS, BucketSpec, MMDiT, Shape, noise, sample, shifted
from upsnb.config import TrainingConfig
from upsnb.data.batch import Microbatch, TensorBatch
from upsnb.data.datasets import Outline
from upsnb.data.source import thinned
from upsnb.errors import Problem
from upsnb.report.figures import latest
from upsnb.training.tables import SPLITS, PlainObjective, Table, TableWorkload, shared_out
from upsnb.values import DatasetName, NonNegativeFloat, OpenFraction, PositiveInt, Section, Seed

NUM_TIMES = 8  # at which the loss is measured, each for as many of the times that training draws
SIZES = {"square": (32, 32), "wide": (24, 40), "tall": (40, 24)}


class Settings(Section):
    """`workload_settings` of a params file."""

    buckets: dict[DatasetName, tuple[PositiveInt, PositiveInt]] = SIZES  # height and width of each dataset's [pixels]
    pictures: PositiveInt = 3000  # of each bucket, all splits together
    seed: Seed = 0  # of the pictures, apart from training.seed
    caption_dropout: OpenFraction = 0.1  # share of training pairs whose caption is left out, for guidance
    method: Literal["ancestral", "euler"] = "ancestral"  # how samples are drawn: with new noise in every step, or none
    steps: PositiveInt = 20  # from noise to picture
    guidance: NonNegativeFloat = 1.5  # 1: none; more draws what the caption says more often, and too many of it


@dataclass
class Pictures(TensorBatch):
    """A microbatch of one bucket."""

    dataset: str
    pictures: Tensor  # (B, C, H, W) uint8
    tokens: Tensor  # (B, L) int64
    draws: Tensor  # (B, 2) float32 in [0, 1): which time, and whether the caption is left out
    seed: int
    turn: int = 0


@dataclass
class Bucket(Table):
    """Pictures of one size with their captions."""

    name: str
    spec: BucketSpec
    splits: dict[str, np.ndarray]
    pictures: np.ndarray  # (N, C, H, W) uint8
    tokens: np.ndarray  # (N, L) int64
    seed: int  # of both

    @property
    def about(self) -> dict:
        known = {"size": list(self.spec.size), "words": len(data.WORDS)}
        return known | {"pictures": len(self.pictures), "seed": self.seed}

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return torch.from_numpy(self.pictures), torch.from_numpy(self.tokens)

    def batch(self, tables: tuple[Tensor, ...], samples: Tensor, microbatch: Microbatch) -> Pictures:
        chosen = (table[samples] for table in tables)
        draws = torch.from_numpy(microbatch.draws).float().to(samples.device, non_blocking=True)
        return Pictures(self.name, *chosen, draws, microbatch.seed, microbatch.turn)


def logit_normal(draws_B: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) -> shifted times of standard normal logits (arXiv 2403.03206), in the same order."""
    return shifted(torch.sigmoid(torch.special.ndtri(draws_B)))


class FlowObjective(PlainObjective):
    """Rectified flow: the squared error of the velocity on the straight line between a picture and noise."""

    TERMS = ("flow",)
    GRAPHS = ("flow",)

    def __init__(self, model: MMDiT, config: TrainingConfig, caption_dropout: float):
        super().__init__(model, config)
        self.caption_dropout = caption_dropout
        self.register_buffer("no_caption", torch.tensor(data.encode(data.NO_CAPTION)), persistent=False)

    def terms(self, batch: Pictures, weights: dict[str, float]) -> dict[str, Tensor]:
        # Times and dropped captions belong to the pairs: steps that share pairs out differently see the same ones.
        tokens = torch.where(batch.draws[:, 1:] < self.caption_dropout, self.no_caption, batch.tokens)
        drawn = torch.randn(batch.pictures.shape, generator=self.generator, device=batch.device)
        return {"flow": self.flow(batch.dataset, batch.pictures, tokens, logit_normal(batch.draws[:, 0]), drawn)}

    def flow(self, name: str, pictures: Tensor, tokens: Tensor, time_B: Tensor, drawn: Tensor) -> Tensor:
        """Mean over a microbatch; `drawn` is standard normal, like the pictures (B, C, H, W)."""
        return flow_errors(self.model, name, pictures, tokens, time_B, drawn).mean()


def flow_errors(model: MMDiT, name: str, pictures: Tensor, tokens: Tensor, time_B: Tensor, drawn: Tensor) -> Tensor:
    """Squared error of the velocity, mean over each picture, (B,) float32."""
    x, time = model.normalise(name, pictures), time_B.view(-1, 1, 1, 1)
    velocity = model.velocity(name, (1 - time) * x + time * drawn, time_B, tokens)
    return (velocity.float() - (drawn - x)).square().mean(dim=(1, 2, 3))


class TextToPicture(TableWorkload):
    """Drawn scenes and their captions, one dataset for each size of picture, judged by what samples show."""

    unit, metric = "pictures", "attribute error"
    settings_class, sizes_class, spec_class = Settings, Shape, BucketSpec

    def problems(self) -> Iterator[Problem]:
        width, heads, patch, least = self.sizes.width, self.sizes.num_heads, self.sizes.patch, len(data.NUMBERS)
        if width % (4 * heads):
            why = f"{width} is not shared by {heads} heads"
            yield Problem("model.settings.width", why, "choose a multiple of both")
        for name, size in self.settings.buckets.items():
            path, said = f"data.workload_settings.buckets.{name}", f"{name} of {size[0]} x {size[1]} pixels"
            if math.prod(side // data.CELL for side in size) < least:
                yield Problem(path, f"{said} has no room for {least} things", f"each takes {data.CELL} x {data.CELL}")
            if any(side % patch for side in size):
                yield Problem(path, f"{said} is not made of patches of {patch}", f"choose multiples of {patch}")

    def open(self, root: Path, log: Callable[[str], None]) -> dict[str, Bucket]:
        found, count = {}, self.settings.pictures
        validation, test = (max(1, round(count * share)) if share else 0 for share in self.held_out)
        splits = dict(zip(SPLITS, np.split(np.arange(count), [count - validation - test, count - test])))
        for name, size in self.settings.buckets.items():
            pictures, tokens = data.generate(self.settings.pictures, size, self.settings.seed)
            some = pictures[thinned(splits["train"], 1000)] / 255
            mean, std = (tuple(each((0, 2, 3)).tolist()) for each in (some.mean, some.std))
            spec = BucketSpec(name, size, mean, std)
            found[name] = Bucket(name, spec, splits, pictures, tokens, self.settings.seed)
        return found

    def outlines(self, root: Path) -> dict[str, Outline]:
        found = {}
        for name, size in self.settings.buckets.items():
            spec = BucketSpec(name, size, (0.0,) * CHANNELS, (1.0,) * CHANNELS)
            found[name] = Outline(spec, self.settings.pictures * (CHANNELS * size[0] * size[1] + 8 * data.LENGTH))
        return found

    def objective(self, datasets: Mapping, stage: str, before) -> FlowObjective:
        specs = {name: dataset.spec for name, dataset in datasets.items()}
        return FlowObjective(MMDiT(specs, self.sizes), self.config.training, self.settings.caption_dropout)

    def zeros(self, name: str, spec: BucketSpec, size: int, device=None, calls: int = 1) -> Pictures:
        pictures = torch.zeros(size, CHANNELS, *spec.size, dtype=torch.uint8, device=device)
        tokens = torch.zeros(size, data.LENGTH, dtype=torch.int64, device=device)
        return Pictures(name, pictures, tokens, torch.zeros(size, 2, device=device), seed=0)

    def measure(self, model: MMDiT, bucket: Bucket, samples: np.ndarray, ranks, alive, final: bool):
        """Of each sample what its picture shows of the caption, and what the true one of the next caption would."""
        shown = []

        def ask(rows: np.ndarray) -> Iterator[tuple]:
            drawn = self.draw(model, bucket.name, torch.from_numpy(bucket.tokens[rows]), rows, ranks.device).numpy()
            shown.extend(drawn)
            for row, picture, losses in zip(rows, drawn, self._losses(model, bucket, rows, ranks.device).T.tolist()):
                caption, other = data.decode(bucket.tokens[row]), bucket.pictures[(row + 1) % len(bucket.pictures)]
                yield judge.verdict(caption, picture), judge.verdict(caption, other / 255), losses

        found = shared_out(ask, samples, self.config.evaluation.samples_per_call, ranks, alive)
        kept = np.array(shown[: self.config.evaluation.num_examples], np.float32)
        arrays = {f"{bucket.name}/pictures": kept, f"{bucket.name}/tokens": bucket.tokens[samples[: len(kept)]]}
        return summary(samples, *zip(*found)), arrays

    def draw(self, model: MMDiT, name: str, tokens: Tensor, samples, device="cpu", seed: int = 0) -> Tensor:
        """Pictures of captions, as the settings say, (B, C, H, W) in [0, 1] on the CPU; the same for a sample's number.

        Args:
            tokens: (B, L) int64.
        """
        settings = self.settings
        draws = settings.steps if settings.method == "ancestral" else 1
        drawn = noise(model.specs[name].size, samples, seed, draws).to(device)
        return sample(model, name, tokens.to(device), drawn, settings.steps, settings.guidance).cpu()

    def _losses(self, model: MMDiT, bucket: Bucket, rows: np.ndarray, device) -> Tensor:
        """Squared errors of the velocity at the middle of each share of the times, (NUM_TIMES, B)."""
        pictures, tokens = (torch.from_numpy(part[rows]).to(device) for part in (bucket.pictures, bucket.tokens))
        drawn, found = noise(bucket.spec.size, rows, seed=1)[0].to(device), []
        for time in middle_times().tolist():
            times = torch.full((len(rows),), time, device=device)
            found.append(flow_errors(model, bucket.name, pictures, tokens, times, drawn).cpu())
        return torch.stack(found)

    def figures(self, drawn) -> dict[str, Callable[[], Figure]]:
        found = {"accuracy": figures.accuracy} if latest(drawn.events, "eval") else {}
        if drawn.results:
            found |= {"samples": figures.samples, "loss_by_time": figures.loss_by_time}
        return {name: partial(draw, drawn) for name, draw in found.items()}


def middle_times() -> Tensor:
    """The middle of each of NUM_TIMES equal shares of the times that training draws."""
    return logit_normal((torch.arange(NUM_TIMES) + 0.5) / NUM_TIMES)


def summary(samples: np.ndarray, right: tuple[dict, ...], blind: tuple[dict, ...], losses: tuple[list, ...]) -> dict:
    """Scores of a bucket: shares of the attributes, and of whole captions, that samples show.

    Args:
        right, blind: verdicts on what was drawn, and on pictures of other captions.
        losses: at each of the `middle_times`.
    """
    errors, others = ([1 - float(np.mean(list(one.values()))) for one in verdicts] for verdicts in (right, blind))
    by_attribute = {
        name: float(np.mean([verdict[name] for verdict in right if name in verdict] or [np.nan]))
        for name in judge.ATTRIBUTES
    }
    by_time = np.mean(losses, axis=0)
    return {
        "num_samples": len(samples),
        "error": float(np.mean(errors)),
        "baseline": "another caption's picture",
        "baseline_error": float(np.mean(others)),
        **by_attribute,
        "whole caption": float(np.mean([error == 0 for error in errors])),
        "flow": float(by_time.mean()),
        "flow_by_time": {"time": middle_times().tolist(), "flow": by_time.tolist()},
        "per_sample": {"samples": samples.tolist(), "error": errors},
    }
