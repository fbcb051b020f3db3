"""What a run's samples look like, and where in time and in training it is wrong."""

from __future__ import annotations

from textwrap import fill

import numpy as np
import torch
from matplotlib.figure import Figure

from examples.mmdit import data, judge
from upsnb.report import style
from upsnb.report.figures import floats, latest
from upsnb.runs import runfolder
from upsnb.training import workload


def samples(drawn) -> Figure:
    """Pictures drawn for captions of the reported split, each with what the judge misses in it."""
    with np.load(drawn.folder / runfolder.EXAMPLES) as file:
        kept = {name: (file[f"{name}/pictures"], file[f"{name}/tokens"]) for name in drawn.results}
    told = ", ".join(f"{name} {result['whole caption']:.0%}" for name, result in drawn.results.items())
    return grid(kept, f"Drawn for captions of the {drawn.split} split; whole captions that the judge finds: {told}")


def true_samples(buckets: dict, count: int = 8) -> Figure:
    """The first training pictures of each bucket."""
    first = {name: bucket.splits["train"][:count] for name, bucket in buckets.items()}
    kept = {name: (buckets[name].pictures[rows] / 255, buckets[name].tokens[rows]) for name, rows in first.items()}
    return grid(kept, f"Training pictures, {sum(len(bucket.pictures) for bucket in buckets.values()):,} in all")


def ask(run, name: str, captions: list[str], count: int) -> Figure:
    """So many pictures of each caption that a run's model draws, of the size of a bucket."""
    tokens = torch.tensor([data.encode(caption) for caption in captions for _ in range(count)])
    pictures = workload.of(run.config).draw(run.load_model(), name, tokens, range(len(tokens))).numpy()
    rows = zip(np.split(pictures, len(captions)), tokens.chunk(len(captions)))
    return grid({str(number): row for number, row in enumerate(rows)}, f"Drawn by {run.folder.name}")


@style.styled
def grid(rows: dict[str, tuple], title: str) -> Figure:
    """Pictures under their captions, and under each what of it the judge misses.

    Args:
        rows: by name, pictures (count, C, H, W) in [0, 1] and the token ids of their captions (count, L).
    """
    columns = max(len(pictures) for pictures, _ in rows.values())
    figure = style.empty_figure(1.2 * columns, 1.6 * len(rows), title)
    for axes, (name, (pictures, tokens)) in zip(figure.subplots(len(rows), columns, squeeze=False), rows.items()):
        for ax, picture, caption in zip(axes, pictures, map(data.decode, tokens)):
            missed = [key for key, right in judge.verdict(caption, picture).items() if not right]
            ax.imshow(picture.transpose(1, 2, 0), interpolation="nearest")
            ax.set_title(caption.replace(" a ", "\na "), fontsize=6)
            ax.set_xlabel(fill(f"not: {', '.join(missed)}", 19) if missed else "all there", fontsize=6)
            ax.set(xticks=[], yticks=[])
        axes[0].set_ylabel(name)
        for ax in axes[len(pictures) :]:
            ax.set_axis_off()
    return figure


def loss_by_time(drawn) -> Figure:
    """Squared error of the velocity from the picture, time 0, to noise, time 1."""
    told = ", ".join(f"{name} {result['flow']:.3g}" for name, result in drawn.results.items())
    found = {name: tuple(result["flow_by_time"].values()) for name, result in drawn.results.items()}
    title = f"Loss on the {drawn.split} split, mean over the times of training: {told}"
    return _curves(title, found, "time", "squared velocity error", xlim=(0, 1), yscale="log")


def accuracy(drawn) -> Figure:
    """Share of the captions' attributes that the judge finds in validation samples, over training."""
    checks = latest(drawn.events, "eval")
    names = list(dict.fromkeys(name for event in checks.values() for name in event["val_nrmse"]))
    found = {name: 1 - floats([event["val_nrmse"].get(name) for event in checks.values()]) for name in names}
    told = ", ".join(f"{name} {values[-1]:.0%}" for name, values in found.items())
    title = f"Attributes of validation captions that samples show, at step {list(checks)[-1]:,}: {told}"
    found = {name: (list(checks), values) for name, values in found.items()}
    return _curves(title, found, "step", "accuracy", xlim=(0, 1.05 * max(checks)), ylim=(0, 1.02))


@style.styled
def _curves(title: str, curves: dict[str, tuple], across: str, up: str, **axes) -> Figure:
    """`curves`: (x, y) by name."""
    figure = style.empty_figure(4.8, 2.9, title)
    ax = figure.subplots()
    for name, look in style.looks(curves).items():
        x, y = curves[name]
        ax.plot(x, y, marker="o", markersize=style.point_size(len(x)), label=name, **look)
    ax.set(xlabel=style.label(across), ylabel=style.label(up), **axes)
    style.legend(ax)
    return figure
