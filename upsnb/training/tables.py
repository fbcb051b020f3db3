"""Workloads whose data are tables, a training pair in each row: how they are read, and evaluated by all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upsnb.config import RunConfig
from upsnb.data.batch import Microbatch, TensorBatch
from upsnb.errors import ConfigError, Problem
from upsnb.models.network import evaluating
from upsnb.runs.files import replacing
from upsnb.training import parallel
from upsnb.training.evaluation import spread
from upsnb.training.losses import Objective
from upsnb.training.workload import Workload
from upsnb.values import Section

SPLITS = ("train", "validation", "test")


class Table(ABC):
    """A dataset whose samples are its training pairs. Subclasses are dataclasses with these fields and their own."""

    name: str
    spec: Any  # what the model must know of it, plain data
    splits: dict[str, np.ndarray]  # numbers of samples
    tables: tuple[Tensor, ...]  # all there is, on the CPU or memory-mapped

    @abstractmethod
    def batch(self, tables: tuple[Tensor, ...], samples: Tensor, microbatch: Microbatch) -> TensorBatch:
        """Some samples, of the tables as they lie on the CPU or on a device, where `samples` is as well."""

    @property
    def num_bytes(self) -> int:
        return sum(table.nbytes for table in self.tables)

    def pairs(self, split: str, calls: int = 1) -> np.ndarray:
        """(P, 2) int64: the number of a sample, and 0."""
        return np.stack((self.splits[split], 0 * self.splits[split]), axis=1)

    def resident(self, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(table.to(device) for table in self.tables)

    def read(self, microbatch: Microbatch, calls: int = 1, resident: tuple[Tensor, ...] | None = None) -> TensorBatch:
        tables = resident or self.tables
        samples = torch.from_numpy(microbatch.pairs[:, 0]).to(tables[0].device, non_blocking=True)
        return self.batch(tables, samples, microbatch)


class TableWorkload(Workload):
    """Reads its settings, and evaluates by what `measure` finds. Subclasses name these classes, and do the rest."""

    settings_class: type[Section]  # of data.workload_settings
    sizes_class: type[Section]  # of model.settings
    spec_class: type  # a dataclass, what the model must know of a dataset

    def __init__(self, config: RunConfig):
        super().__init__(config)
        self.settings = self.section(self.settings_class, "data.workload_settings")
        self.sizes = self.section(self.sizes_class, "model.settings")
        self.held_out = config.data.split.validation_fraction, config.data.split.test_fraction
        if problems := list(self.problems()):
            raise ConfigError(problems, "the workload")

    def problems(self) -> Iterable[Problem]:
        """What settings that are valid one by one ask for and cannot be. May be written."""
        return ()

    def spec_from(self, values: dict):
        return self.spec_class(**{key: tuple(x) if isinstance(x, list) else x for key, x in values.items()})

    @abstractmethod
    def measure(self, model, dataset, samples: np.ndarray, ranks, alive, final: bool) -> tuple[dict, dict]:
        """A dataset's part of what `evaluate` returns, found on some samples of a split; and arrays that are drawn.

        The model is in evaluation, without gradients; all ranks enter, and `shared_out` gives each its share.
        """

    @torch.no_grad()
    def evaluate(self, model, datasets, split, ranks, alive, fraction=1.0, examples=None, final=False):
        results, arrays = {}, {}
        with evaluating(model):
            for name, dataset in datasets.items():
                samples = spread(dataset.splits[split], fraction)
                if len(samples):
                    results[name], drawn = self.measure(model, dataset, samples, ranks, alive, final)
                    arrays |= drawn
        if arrays and examples is not None and ranks.rank == 0:
            with replacing(examples) as file:
                np.savez_compressed(file, **arrays)
        return results


def shared_out(ask: Callable[[np.ndarray], Iterable], samples: np.ndarray, at_once: int, ranks, alive) -> list:
    """What `ask` finds for samples, in their order, on all ranks; each asks for its share, `at_once` at a time."""
    own, found = np.array_split(samples, ranks.world_size)[ranks.rank], []
    for start in range(0, len(own), at_once):
        alive()
        found.extend(ask(own[start : start + at_once]))
    return [one for share in parallel.all_gather_objects(ranks, found) for one in share]


class PlainObjective(Objective):
    """All of its TERMS act in every microbatch, each with a weight of 1."""

    def weights(self, step: int, microbatch: int) -> dict[str, float]:
        return dict.fromkeys(self.TERMS, 1.0)

    def idle(self, batch) -> Tensor:
        return sum(self.terms(batch, dict.fromkeys(self.TERMS, 1.0)).values())
