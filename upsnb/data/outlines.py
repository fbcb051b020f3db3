"""Datasets in outline: all that a step's memory depends on, before any data is generated or downloaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from upsnb.config import DatasetConfig, RunConfig
from upsnb.data.datasets import find_files
from upsnb.data.families import FAMILIES, open_source
from upsnb.data.spec import DatasetSpec


@dataclass(frozen=True)
class Outline:
    """What memory depends on of a dataset; stands where a Dataset does."""

    spec: DatasetSpec
    num_bytes: int  # of all samples in float32


def outlines(config: RunConfig, root: Path) -> dict[str, Outline]:
    """Shapes of all datasets, from the settings where they are generated, else from the headers of their files."""
    return {name: _outline(name, chosen, config, root) for name, chosen in config.data.datasets.items()}


def _outline(name: str, chosen: DatasetConfig, config: RunConfig, root: Path) -> Outline:
    family = FAMILIES[chosen.family]
    reduction, reduction_t = chosen.reduced_resolution, chosen.reduced_resolution_t
    if chosen.files:
        files = find_files(name, chosen, root / config.data.root)
        source = open_source(chosen.family, files, reduction, reduction_t, chosen.num_samples)
        grid, num_samples, num_times = source.grid_shape, source.num_samples, source.num_times
    else:
        made = chosen.generate
        grid = (-(-made.resolution // reduction),) * family.num_dims
        num_samples = min(made.num_samples, chosen.num_samples or made.num_samples)
        num_times = -(-made.num_times // reduction_t) if family.time_dependent else 1
    inputs, outputs = len(family.input_channels), len(family.output_channels)
    zeros, ones = (0.0,), (1.0,)  # no shape and no lifetime depends on statistics
    spec = DatasetSpec(
        name=name,
        family=family.name,
        grid_shape=grid,
        periodic=family.periodic,
        input_channels=inputs,
        output_channels=outputs,
        input_frames=chosen.input_frames,
        output_frames=chosen.output_frames,
        num_parameters=len(family.parameter_names),
        time_dependent=family.time_dependent,
        dt=1.0 if family.time_dependent else 0.0,
        tokens=chosen.tokens or config.latent.tokens,
        input_mean=zeros * inputs,
        input_std=ones * inputs,
        output_mean=zeros * outputs,
        output_std=ones * outputs,
        parameter_mean=zeros * len(family.parameter_names),
        parameter_std=ones * len(family.parameter_names),
        zero_walls=family.zero_walls,
    )
    frames = -(-num_times // config.training.time_stride)
    channels = outputs + (0 if family.time_dependent else inputs)
    return Outline(spec, 4 * num_samples * frames * channels * math.prod(grid))
