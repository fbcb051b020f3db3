"""Pictures from captions: a multimodal diffusion transformer as a workload."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from examples.mmdit import data, figures, judge
from examples.mmdit.model import CHANNELS, BucketSpec, MMDiT, Shape
from examples.mmdit.sampler import noise, sample, shifted
from upsnb.config import TrainingConfig
from upsnb.data.batch import Microbatch, TensorBatch
from upsnb.data.datasets import Outline
from upsnb.data.source import thinned
from upsnb.errors import ConfigError, Problem
from upsnb.training import parallel
from upsnb.training.losses import Objective
from upsnb.training.workload import Workload
from upsnb.values import DatasetName, NonNegativeFloat, OpenFraction, PositiveInt, Section, Seed

NUM_TIMES = 8  # at which the loss is measured, each for as many of the times that training draws
SIZES = {"square": (32, 32), "wide": (24, 40), "tall": (40, 24)}


class Settings(Section):
    """`workload_settings` of a params file."""

    buckets: dict[DatasetName, tuple[PositiveInt, PositiveInt]] = SIZES  # height and width of each dataset's [pixels]
    pictures: PositiveInt = 3000  # of each bucket, all splits together
    seed: Seed = 0  # of the pictures, apart from training.seed
    caption_dropout: OpenFraction = 0.1  # share of training pairs whose caption is left out, for guidance
    method: Literal["euler", "heun"] = "euler"  # how samples are drawn
    steps: PositiveInt = 20  # from noise to picture
    guidance: NonNegativeFloat = 1.75  # 1: none; more draws what the caption says more often, and too many of it


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
class Bucket:
    """Pictures of one size with their captions."""

    name: str
    spec: BucketSpec
    splits: dict[str, np.ndarray]
    pictures: np.ndarray  # (N, C, H, W) uint8
    tokens: np.ndarray  # (N, L) int64
    seed: int  # of both

    @property
    def num_bytes(self) -> int:
        return self.pictures.nbytes + self.tokens.nbytes

    @property
    def about(self) -> dict:
        known = {"size": list(self.spec.size), "words": len(data.WORDS)}
        return known | {"pictures": len(self.pictures), "seed": self.seed}

    def pairs(self, split: str, calls: int = 1) -> np.ndarray:
        samples = self.splits[split]
        return np.stack((samples, np.zeros_like(samples)), axis=1)

    def resident(self, device: torch.device) -> tuple[Tensor, ...]:
        return torch.from_numpy(self.pictures).to(device), torch.from_numpy(self.tokens).to(device)

    def read(self, microbatch: Microbatch, calls: int = 1, resident: tuple[Tensor, ...] | None = None) -> Pictures:
        pictures, tokens = resident or (torch.from_numpy(self.pictures), torch.from_numpy(self.tokens))
        chosen = torch.from_numpy(microbatch.pairs[:, 0]).to(pictures.device, non_blocking=True)
        draws = torch.from_numpy(microbatch.draws).float().to(pictures.device, non_blocking=True)
        return Pictures(self.name, pictures[chosen], tokens[chosen], draws, microbatch.seed, microbatch.turn)


def logit_normal(draws_B: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) -> shifted times of standard normal logits (arXiv 2403.03206), in the same order."""
    return shifted(torch.sigmoid(torch.special.ndtri(draws_B)))


class FlowObjective(Objective):
    """Rectified flow: the squared error of the velocity on the straight line between a picture and noise."""

    TERMS = ("flow",)
    GRAPHS = ("flow",)

    def __init__(self, model: MMDiT, config: TrainingConfig, caption_dropout: float):
        super().__init__(model, config)
        self.caption_dropout = caption_dropout
        self.register_buffer("no_caption", torch.tensor(data.encode(data.NO_CAPTION)), persistent=False)

    def weights(self, step: int, microbatch: int) -> dict[str, float]:
        return {"flow": 1.0}

    def terms(self, batch: Pictures, weights: dict[str, float]) -> dict[str, Tensor]:
        # Times and dropped captions belong to the pairs: steps that share pairs out differently see the same ones.
        tokens = torch.where(batch.draws[:, 1:] < self.caption_dropout, self.no_caption, batch.tokens)
        drawn = torch.randn(batch.pictures.shape, generator=self.generator, device=batch.device)
        return {"flow": self.flow(batch.dataset, batch.pictures, tokens, logit_normal(batch.draws[:, 0]), drawn)}

    def flow(self, name: str, pictures: Tensor, tokens: Tensor, time_B: Tensor, drawn: Tensor) -> Tensor:
        """Mean over a microbatch; `drawn` is standard normal, like the pictures (B, C, H, W)."""
        return flow_errors(self.model, name, pictures, tokens, time_B, drawn).mean()

    def idle(self, batch: Pictures) -> Tensor:
        return self.terms(batch, {"flow": 1.0})["flow"]


def flow_errors(model: MMDiT, name: str, pictures: Tensor, tokens: Tensor, time_B: Tensor, drawn: Tensor) -> Tensor:
    """Squared error of the velocity, mean over each picture, (B,) float32."""
    x, time = model.normalise(name, pictures), time_B.view(-1, 1, 1, 1)
    velocity = model.velocity(name, (1 - time) * x + time * drawn, time_B, tokens)
    return (velocity.float() - (drawn - x)).square().mean(dim=(1, 2, 3))


class TextToPicture(Workload):
    """Drawn scenes and their captions, one dataset for each size of picture, judged by what samples show."""

    unit = "pictures"
    metric = "attribute error"

    def __init__(self, config):
        super().__init__(config)
        self.settings = self.section(Settings, "data.workload_settings")
        self.shape = self.section(Shape, "model.settings")
        if problems := list(self._problems()):
            raise ConfigError(problems, "the workload")

    def _problems(self) -> Iterator[Problem]:
        width, heads, patch, least = self.shape.width, self.shape.num_heads, self.shape.patch, len(data.NUMBERS)
        if width % (4 * heads):
            yield Problem(
                "model.settings.width", f"{width} is not shared by {heads} heads", "choose a multiple of both"
            )
        for name, size in self.settings.buckets.items():
            path, said = f"data.workload_settings.buckets.{name}", f"{name} of {size[0]} x {size[1]} pixels"
            if math.prod(side // data.CELL for side in size) < least:
                yield Problem(path, f"{said} has no room for {least} things", f"each takes {data.CELL} x {data.CELL}")
            if any(side % patch for side in size):
                yield Problem(path, f"{said} is not made of patches of {patch}", f"choose multiples of {patch}")

    def open(self, root: Path, log: Callable[[str], None]) -> dict[str, Bucket]:
        found, count, split = {}, self.settings.pictures, self.config.data.split
        validation, test = (max(1, round(count * share)) for share in (split.validation_fraction, split.test_fraction))
        parts = np.split(np.arange(count), [count - validation - test, count - test])
        splits = dict(zip(("train", "validation", "test"), parts))
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

    def spec_from(self, values: dict) -> BucketSpec:
        return BucketSpec(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})

    def objective(self, datasets: Mapping, stage: str, before) -> FlowObjective:
        specs = {name: dataset.spec for name, dataset in datasets.items()}
        return FlowObjective(MMDiT(specs, self.shape), self.config.training, self.settings.caption_dropout)

    def zeros(self, name: str, spec: BucketSpec, size: int, device=None, calls: int = 1) -> Pictures:
        pictures = torch.zeros(size, CHANNELS, *spec.size, dtype=torch.uint8, device=device)
        tokens = torch.zeros(size, data.LENGTH, dtype=torch.int64, device=device)
        return Pictures(name, pictures, tokens, torch.zeros(size, 2, device=device), seed=0)

    @torch.no_grad()
    def evaluate(self, model, datasets, split, ranks, alive, fraction=1.0, examples=None, final=False):
        was_training, results, arrays = model.training, {}, {}
        model.eval()
        for name, bucket in datasets.items():
            samples = bucket.splits[split]
            samples = thinned(samples, max(1, round(fraction * len(samples))))
            own, found = samples[ranks.rank :: ranks.world_size], []
            for start in range(0, len(own), self.config.evaluation.samples_per_call):
                alive()
                rows = own[start : start + self.config.evaluation.samples_per_call]
                pictures = self.draw(model, name, torch.from_numpy(bucket.tokens[rows]), rows, ranks.device)
                losses = self._losses(model, bucket, rows, ranks.device)
                found += zip(rows.tolist(), pictures.numpy(), losses.T.tolist())
            judged = [self._judged(bucket, *one) for one in found]
            merged = [one for rank in parallel.all_gather_objects(ranks, judged) for one in rank]
            results[name] = summary(sorted(merged, key=lambda one: one["sample"]))
            kept = found[: self.config.evaluation.num_examples]
            arrays[f"{name}/pictures"] = np.array([picture for _, picture, _ in kept], np.float32)
            arrays[f"{name}/tokens"] = bucket.tokens[[row for row, _, _ in kept]]
        model.train(was_training)
        if examples is not None and ranks.rank == 0:
            unfinished = examples.with_name(f".{examples.name}")
            with open(unfinished, "wb") as file:  # by name, savez would add an ending of its own
                np.savez_compressed(file, **arrays)
            os.replace(unfinished, examples)
        return results

    def draw(self, model: MMDiT, name: str, tokens: Tensor, samples, device="cpu", seed: int = 0) -> Tensor:
        """Pictures of captions, as the settings say, (B, C, H, W) in [0, 1] on the CPU; the same for a sample's number.

        Args:
            tokens: (B, L) int64.
        """
        settings = self.settings
        z = noise(model.specs[name].size, samples, seed).to(device)
        return sample(model, name, tokens.to(device), z, settings.steps, settings.guidance, settings.method).cpu()

    def _losses(self, model: MMDiT, bucket: Bucket, rows: np.ndarray, device) -> Tensor:
        """Squared errors of the velocity at the middle of each share of the times, (NUM_TIMES, B)."""
        pictures, tokens = (torch.from_numpy(part[rows]).to(device) for part in (bucket.pictures, bucket.tokens))
        drawn, found = noise(bucket.spec.size, rows, seed=1).to(device), []
        for time in middle_times().tolist():
            times = torch.full((len(rows),), time, device=device)
            found.append(flow_errors(model, bucket.name, pictures, tokens, times, drawn).cpu())
        return torch.stack(found)

    def _judged(self, bucket: Bucket, row: int, picture: np.ndarray, losses: list[float]) -> dict:
        """What one sample shows of its caption, and what the true picture of the next caption would."""
        caption, other = data.decode(bucket.tokens[row]), (row + 1) % len(bucket.pictures)
        blind = judge.verdict(caption, bucket.pictures[other] / 255)
        return {"sample": row, "losses": losses, "right": judge.verdict(caption, picture), "blind": blind}

    def figures(self, drawn) -> dict[str, Callable[[], Figure]]:
        return figures.of(drawn)


def middle_times() -> Tensor:
    """The middle of each of NUM_TIMES equal shares of the times that training draws."""
    return logit_normal((torch.arange(NUM_TIMES) + 0.5) / NUM_TIMES)


def summary(judged: list[dict]) -> dict:
    """Scores of a bucket: shares of the attributes, and of whole captions, that samples show."""
    errors, blind = ([1 - float(np.mean(list(one[kind].values()))) for one in judged] for kind in ("right", "blind"))
    by_attribute = {
        name: float(np.mean([one["right"][name] for one in judged if name in one["right"]] or [np.nan]))
        for name in judge.ATTRIBUTES
    }
    losses = np.mean([one["losses"] for one in judged], axis=0)
    return {
        "num_samples": len(judged),
        "error": float(np.mean(errors)),
        "baseline": "another caption's picture",
        "baseline_error": float(np.mean(blind)),
        **by_attribute,
        "whole caption": float(np.mean([error == 0 for error in errors])),
        "flow": float(losses.mean()),
        "flow_by_time": {"time": middle_times().tolist(), "flow": losses.tolist()},
        "per_sample": {"samples": [one["sample"] for one in judged], "error": errors},
    }
