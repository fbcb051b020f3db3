"""What is in a dataset, before anything is trained: its fields, their spectra and values, and what an audit found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from upsnb.data import audit
from upsnb.data.audit import Audit
from upsnb.data.datasets import Dataset
from upsnb.report import style
from upsnb.report.file import finish, number
from upsnb.report.style import BLACK, PALETTE, label, styled

FORMAT, KIND = 1, "data"
MOST_READ = 32  # training samples that spectra and values are taken of
SHOWN = 4  # samples or times
COLUMNS = {  # of the table: column -> field of an Audit
    "samples looked at": "num_samples",
    "different ones": "num_distinct",
    "test seen in training": "test_seen",
    "nearly seen": "test_near",
    "linear dimensions": "linear_dimensions",
    "dimensions": "dimensions",
    "look-up nRMSE": "lookup_nrmse",
    "median": "lookup_nrmse_median",
    "persistence nRMSE": "persistence_nrmse",
}


def report(datasets: Mapping[str, Dataset], folder: Path | str) -> tuple[dict, dict[str, Audit]]:
    """Audit datasets by their splits; the report, also written to `report.json`, and the audits."""
    audits = {name: audit.audit(dataset.source, dataset.splits) for name, dataset in datasets.items()}
    told = {
        name: {"family": datasets[name].family.name, "files": [path.name for path in datasets[name].source.files]}
        | asdict(found)
        for name, found in audits.items()
    }
    return finish({"format": FORMAT, "kind": KIND, "datasets": told}, folder), audits


def summary(report: Mapping) -> str:
    """The report in a few lines."""
    lines = []
    for name, told in report["datasets"].items():
        found = [f"{one['name']}: {one['found']}" for one in told["findings"]] or ["nothing stands against it"]
        lines += [
            f"{name}: a look-up scores an nRMSE of {number(told['lookup_nrmse'])}",
            *(f"  {line}" for line in found),
        ]
    return "\n".join(lines)


def table(audits: Mapping[str, Audit]) -> pd.DataFrame:
    """What was measured, a row a dataset; what means nothing for a dataset is a dash."""
    rows = {
        name: {column: _told(getattr(audit, key)) for column, key in COLUMNS.items()} for name, audit in audits.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("dataset")


def _told(value) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else number(value, 3)


def findings(audits: Mapping[str, Audit]) -> pd.DataFrame:
    """What stands against believing a score, with its remedy; empty where nothing does."""
    rows = [(name, one.name, one.found, one.remedy) for name, audit in audits.items() for one in audit.findings]
    return pd.DataFrame(rows, columns=["dataset", "what", "found", "remedy"])


@styled
def samples(dataset: Dataset) -> Figure:
    """Training samples, a row a channel: over space and time in 1-D, else one at some times, or several still ones.

    Of 3-D fields the middle slice.
    """
    family, spec, source = dataset.family, dataset.spec, dataset.source
    chosen, frames = dataset.splits["train"][:SHOWN], dataset.frames if spec.time_dependent else np.zeros(1, dtype=int)
    if in_turn := spec.time_dependent and spec.num_dims > 1:
        chosen, frames = chosen[:1], frames[np.unique(np.linspace(0, len(frames) - 1, SHOWN).astype(int))]
    parts = [(family.output_channels, style.FIELD_COLOURS)]
    parts = parts if spec.time_dependent else [(family.input_channels, style.INPUT_COLOURS), *parts]
    extent = style.edges(source.coordinates[0])
    extent += style.edges(source.times[frames] if spec.num_dims == 1 else source.coordinates[1])
    rows = []
    for (channels, colours), fields in zip(parts, source.read(chosen, frames)[-len(parts) :]):
        for channel, field in zip(channels, fields.swapaxes(0, 2).swapaxes(1, 2)):  # (samples, times, *grid)
            if spec.num_dims > 1:
                field = field.reshape(-1, *field.shape[2:]).swapaxes(1, 2)  # one sample, or one time; rows of y
            rows.append((channel, field if spec.num_dims < 3 else field[..., field.shape[-1] // 2], colours))
    low, high = min(field.min() for _, field, _ in rows), max(field.max() for _, field, _ in rows)
    told = f"training sample {chosen[0]}" if in_turn else f"{len(chosen)} training samples"
    title = f"{dataset.name}, {told}: {', '.join(channel for channel, _, _ in rows)} from {low:.2g} to {high:.2g}"
    if spec.num_dims == 3:
        title += f", slices at z = {source.coordinates[2][len(source.coordinates[2]) // 2]:.2g}"
    heads = [f"t = {time:.3g}" for time in source.times[frames]] if in_turn else [f"sample {n}" for n in chosen]
    figure = style.empty_figure(1.9 * max(len(heads), 2) + 0.8, 1.75 * len(rows) + 0.4, title)
    grid = figure.subplots(len(rows), len(heads), squeeze=False, sharex=True, sharey=True)
    for axes, (channel, field, colours) in zip(grid, rows):
        norm = style.value_range(field)
        for ax, image, head in zip(axes, field, heads):
            style.draw_image(ax, image, extent, colours, norm, family.quantity(channel) if ax is axes[-1] else "")
            ax.set(xlabel=label("x"), ylabel=label("time t" if spec.num_dims == 1 else "y"))
            ax.set(aspect="auto" if spec.num_dims == 1 else "equal", title=head if ax in grid[0] else "")
            ax.locator_params(nbins=3)
            ax.label_outer()
    return figure


def _some_fields(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Targets (n, t, C, *grid) of some training samples at the first, middle and last time, and these times."""
    train = dataset.splits["train"]
    samples = train[np.unique(np.linspace(0, len(train) - 1, MOST_READ).astype(int))]
    frames = dataset.frames[np.unique([0, len(dataset.frames) // 2, len(dataset.frames) - 1])]
    frames = frames if dataset.spec.time_dependent else np.zeros(1, dtype=int)
    return dataset.source.read(samples, frames)[1], dataset.source.times[frames]


@styled
def spectra(datasets: Mapping[str, Dataset]) -> Figure:
    """Energy per wavenumber of each dataset's first channel at three times, mean over samples."""
    import torch

    from upsnb.training.metrics import energy_spectrum  # loads torch, as nothing else about data needs it

    curves, depths = {}, {}
    for name, dataset in datasets.items():
        fields, times = _some_fields(dataset)
        wavenumber, energy = (x.double().numpy() for x in energy_spectrum(torch.from_numpy(fields[:, :, :1])))
        means = energy[:, :, 0].mean(axis=0)[:, 1:]  # wavenumber 0 has no place on a logarithmic axis
        curves[name], depths[name] = (wavenumber[1:], means, times), float(means[-1, -1] / means[-1].max())
    told = ", ".join(f"{name} {depth:.1g}" for name, depth in depths.items())
    title = f"What is left at the smallest waves of the largest energy, at the end: {told}"
    figure = style.empty_figure(3.4 * max(len(datasets), 2), 3.1, title)
    for ax, (name, dataset) in zip(figure.subplots(1, len(datasets), squeeze=False)[0], datasets.items()):
        wavenumber, means, times = curves[name]
        for mean, time, colour in zip(means, times, (PALETTE if len(times) > 1 else (BLACK,))):
            ax.plot(wavenumber, style.positive(mean), color=colour, label=f"t = {time:.3g}")
        top = means.max()
        ax.set(xscale="log", yscale="log", ylim=(max(means[means > 0].min() / 2, 1e-12 * top), 2 * top))
        ax.set(xlabel=label("wavenumber k", "cycles per domain"), title=name)
        ax.set_ylabel(f"energy of {dataset.family.quantity(dataset.family.output_channels[0])}")
        if dataset.spec.time_dependent:
            ax.legend(loc="lower left")
    return figure


@styled
def values(datasets: Mapping[str, Dataset]) -> Figure:
    """How often each value occurs, a panel for each predicted channel; all of three times together."""
    panels = [(name, dataset, c) for name, dataset in datasets.items() for c in range(dataset.spec.output_channels)]
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    fields = {name: _some_fields(dataset)[0] for name, dataset in datasets.items()}
    shown = [
        (fields[name][:, :, c].ravel(), dataset.spec.output_mean[c], dataset.spec.output_std[c])
        for name, dataset, c in panels
    ]
    widest = max(float(np.abs(found - mean).max() / std) for found, mean, std in shown)
    title = f"Values lie up to {widest:.1f} standard deviations from their mean (dotted: one)"
    figure = style.empty_figure(3.0 * max(columns, 2), 2.2 * rows + 0.4, title)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax, (name, dataset, channel), (found, mean, std) in zip(axes, panels, shown):
        ax.hist(found, bins=60, color=PALETTE[0], log=True)
        for edge in (mean - std, mean + std):
            ax.axvline(edge, color=BLACK, linestyle=":", linewidth=1.0)
        quantity = dataset.family.quantity(dataset.family.output_channels[channel])
        ax.set(xlabel=quantity, ylabel=label("points"), title=f"{name}, {mean:.2g} \u00b1 {std:.2g}")
    for ax in axes[len(panels) :]:
        ax.remove()
    return figure
