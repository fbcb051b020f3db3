"""The workload that is built in: fields of PDEs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from upsnb.data import datasets as fields
from upsnb.data.batch import Batch
from upsnb.data.spec import DatasetSpec
from upsnb.training import evaluation, stages
from upsnb.training.workload import Workload


class Fields(Workload):
    """Samples of PDE families and of a user's own, all stages, PDEBench's metrics."""

    def prepare(self, root: Path, log: Callable[[str], None]) -> None:
        fields.generate_missing(self.config, root, log)

    def open(self, root: Path, log: Callable[[str], None]) -> dict[str, fields.Dataset]:
        return fields.open_all(self.config, root, log)

    def outlines(self, root: Path) -> dict[str, fields.Outline]:
        return fields.outlines(self.config, root)

    def spec_from(self, values: dict) -> DatasetSpec:
        return DatasetSpec.from_plain(values)

    def objective(self, datasets: stages.Datasets, stage: str, before):
        return stages.STAGES[stage](self.config, datasets, before)

    def zeros(self, name: str, spec: DatasetSpec, size: int, device=None, calls: int = 1) -> Batch:
        inputs = (size, spec.input_frames, spec.input_channels, *spec.grid_shape)
        targets = (size, calls * spec.output_frames, spec.output_channels, *spec.grid_shape)
        shapes = (inputs, targets, (size, spec.num_parameters))
        return Batch(name, *(torch.zeros(shape, device=device) for shape in shapes), seed=0)

    def evaluate(self, model, datasets, split, ranks, alive, fraction=1.0, examples=None, final=False):
        settings = self.config.evaluation
        judged = datasets, split, settings, ranks, alive
        results = evaluation.evaluate(model, *judged, fraction, lookup=final)
        for name, found in evaluation.evaluate_ensembles(model, *judged).items() if final and model.draws else ():
            results[name]["ensemble"] = found
        if examples is not None and ranks.rank == 0:
            evaluation.save_examples(examples, model, datasets, results, settings, ranks.device, final)
        return results

    def write(self, folder: Path, results: dict[str, dict], datasets: Mapping, split: str, weights: str) -> None:
        evaluation.write(folder, results, datasets, split, weights)

    def figures(self, drawn) -> dict[str, Callable]:
        drawings: dict[str, Callable] = {}
        for name in drawn.results:
            drawings[f"prediction_{name}"] = partial(drawn.prediction, name)
            if "spectrum" in drawn.results[name]:  # a run of before there was one has none
                drawings[f"spectrum_{name}"] = partial(drawn.spectrum, name)
            if name in drawn.rolled_out:
                drawings[f"rollout_{name}"] = partial(drawn.rollout, name)
        if drawn.results:
            drawings["error_distribution"] = drawn.distribution
        return drawings
