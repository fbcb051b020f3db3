"""What a run is about, as one object: its data, its loss, how good it is, and what its numbers are called.

PDE fields are the one that is built in (`upsnb/training/fields.py`); docs/extending.md adds another. Nothing else in
training, memory prediction or reports asks which one it is.
"""

from __future__ import annotations

import importlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn

from upsnb.config import RunConfig
from upsnb.data.batch import TensorBatch
from upsnb.errors import ConfigError, Problem
from upsnb.models.network import Network
from upsnb.overlays import project_root
from upsnb.runs import runfolder
from upsnb.runs.events import without_nonfinite
from upsnb.values import Section

FORMAT = 1  # of evaluation.json


class Workload(ABC):
    """Made for one config. Subclasses write what is abstract, and what else says so.

    A dataset is any picklable object with `name`, `spec` (plain data that travels with checkpoints), `splits`,
    `num_bytes`, `about`, `pairs`, `resident` and `read`, as `data.datasets.Dataset` has them; an outline has `spec` and
    `num_bytes`.
    """

    unit = "samples"  # what throughput counts
    metric = "nRMSE"  # the error that judges; lower is better, so a correlation is "1 - Spearman"

    def __init__(self, config: RunConfig):
        self.config = config

    def section(self, kind: type[Section], where: str) -> Any:
        """Settings that this workload alone knows, checked: `where` is data.workload_settings or model.settings.

        Raises:
            ConfigError: every one that is unknown or out of bounds.
        """
        room, name = where.split(".")
        try:
            return kind.model_validate_json(json.dumps(getattr(getattr(self.config, room), name)))
        except ValidationError as error:
            found = [(".".join(map(str, (where, *one["loc"]))), one["msg"]) for one in error.errors()]
            known = f"the settings are {', '.join(kind.model_fields)}"
            raise ConfigError([Problem(path, said, known) for path, said in found], "the workload") from None

    def units_per_pair(self) -> int:
        """How many units one training pair holds. May be written."""
        return 1

    def prepare(self, root: Path, log: Callable[[str], None]) -> None:
        """Make what `open` opens, unless it is there; one rank calls this while the others wait. May be written."""
        return None

    @abstractmethod
    def open(self, root: Path, log: Callable[[str], None]) -> dict[str, Any]:
        """All datasets by name; `root` is the project's."""

    @abstractmethod
    def outlines(self, root: Path) -> dict[str, Any]:
        """The same as far as memory depends on it, without the data where their shapes are known without."""

    @abstractmethod
    def spec_from(self, values: dict) -> Any:
        """A dataset's spec from its fields as JSON gives them back: lists for tuples."""

    @abstractmethod
    def objective(self, datasets: Mapping[str, Any], stage: str, before: Network | None) -> nn.Module:
        """The untrained Objective of a stage; `datasets` may be outlines."""

    @abstractmethod
    def zeros(self, name: str, spec: Any, size: int, device=None, calls: int = 1) -> TensorBatch:
        """A microbatch of zeros, to predict memory and count operations with."""

    @abstractmethod
    def evaluate(self, model, datasets, split, ranks, alive, fraction=1.0, examples=None, final=False) -> dict:
        """What the model reaches on a split, the same on every rank; all ranks enter, each takes a share.

        Args:
            model: in evaluation mode.
            ranks: parallel.Ranks.
            alive: to be called now and then, so that a long evaluation is not taken for a hang.
            fraction: of the split's samples, the same ones each time.
            examples: path of a file for arrays that figures are drawn of; rank 0 may write it.
            final: this is the split that is reported on.
        Returns:
            {dataset: {"num_samples", "error": the metric, "baseline" and "baseline_error": what is reached without a
            model, further numbers, each a column of the report's table, "per_sample": {...}}}
        """

    def write(self, folder: Path, results: dict[str, dict], datasets: Mapping[str, Any], split: str, weights: str):
        """Write evaluation.json: the results of a split, and what runs of one leaderboard agree in. May be written."""
        known = self.config.data
        given = {"workload": known.workload, "settings": json.dumps(known.workload_settings, sort_keys=True)}
        given |= {"split": split, "shares": known.split.model_dump_json()}
        about = {name: json.dumps(dataset.about, sort_keys=True) for name, dataset in datasets.items()}
        found = {name: {**result, "protocol": {**given, "data": about[name]}} for name, result in results.items()}
        write_results(folder, found, split, weights)

    def figures(self, drawn) -> dict[str, Callable]:
        """What a run's results look like, by file name; `drawn` is its `RunFigures`. May be written."""
        return {}


def write_results(folder: Path, results: dict[str, dict], split: str, weights: str) -> None:
    """Write evaluation.json."""
    datasets = {name: {split: result} for name, result in results.items()}
    summary = {"format": FORMAT, "split": split, "weights": weights, "datasets": datasets}
    runfolder.write_json(folder / runfolder.EVALUATION, without_nonfinite(summary))


def of(config: RunConfig) -> Workload:
    """The workload of a config: `data.workload` names its class, in a module or in a file below the project's folder.

    A file is imported by its dotted name, so that it may import others beside it and processes that read ahead find it.

    Raises:
        ConfigError: there is none.
    """
    place, _, name = config.data.workload.rpartition(":")
    if place.endswith(".py"):
        root = str(project_root())
        if root not in sys.path:
            sys.path.insert(0, root)
        place = ".".join(Path(place).with_suffix("").parts)
    try:
        found = getattr(importlib.import_module(place), name)
    except Exception as error:  # whatever the code of a user's module raises
        raise _refused(config, f"cannot be imported ({type(error).__name__}: {error})") from error
    if not (isinstance(found, type) and issubclass(found, Workload)):
        raise _refused(config, "is no Workload class")
    return found(config)


def _refused(config: RunConfig, found: str) -> ConfigError:
    remedy = "write folder/file.py:Name, from the project's folder, or package.module:Name"
    return ConfigError([Problem("data.workload", f"{config.data.workload}: {found}", remedy)], "the workload")
