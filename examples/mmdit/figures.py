"""What a run's samples look like, and where in time and in training it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from textwrap import fill

import numpy as np
import torch
from matplotlib.figure import Figure

from examples.mmdit import data, judge
from upsnb.report import style
from upsnb.report.figures import floats, latest
from upsnb.runs import runfolder
from upsnb.training import workload


def of(drawn) -> dict[str, Callable[[], Figure]]:
    """By file name, of a run's `RunFigures`."""
    found = {"accuracy": partial(accuracy, drawn)} if latest(drawn.events, "eval") else {}
    if drawn.results:
        found |= {"samples": partial(samples, drawn), "loss_by_time": partial(loss_by_time, drawn)}
    return found


def samples(drawn) -> Figure:
    """Pictures drawn for captions of the reported split, each with what the judge misses in it."""
    with np.load(drawn.folder / runfolder.EXAMPLES) as file:
        kept = {
            name: (file[f"{name}/pictures"], list(map(data.decode, file[f"{name}/tokens"]))) for name in drawn.results
        }
    told = ", ".join(f"{name} {result['whole caption']:.0%}" for name, result in drawn.results.items())
    return grid(kept, f"Drawn for captions of the {drawn.split} split; whole captions that the judge finds: {told}")


def true_samples(buckets: dict, count: int = 8) -> Figure:
    """The first training pictures of each bucket."""
    kept = {}
    for name, bucket in buckets.items():
        rows = bucket.splits["train"][:count]
        kept[name] = bucket.pictures[rows] / 255, list(map(data.decode, bucket.tokens[rows]))
    return grid(kept, f"Training pictures, {sum(map(len, (b.pictures for b in buckets.values()))):,} in all")


def ask(run, name: str, captions: list[str], count: int) -> Figure:
    """So many pictures of each caption that a run's model draws, of the size of a bucket."""
    tokens = torch.tensor([data.encode(caption) for caption in captions for _ in range(count)])
    pictures = workload.of(run.config).draw(run.load_model(), name, tokens, range(len(tokens))).numpy()
    rows = {f"{i}": (pictures[i * count :][:count], [caption] * count) for i, caption in enumerate(captions)}
    return grid(rows, f"Drawn by {run.folder.name}")


@style.styled
def grid(rows: dict[str, tuple[np.ndarray, list[str]]], title: str) -> Figure:
    """Pictures under their captions, and under each what of it the judge misses.

    Args:
        rows: by name, pictures (count, C, H, W) in [0, 1] and their captions.
    """
    columns = max(len(pictures) for pictures, _ in rows.values())
    figure = style.empty_figure(1.2 * columns, 1.6 * len(rows), title)
    for axes, (name, (pictures, captions)) in zip(figure.subplots(len(rows), columns, squeeze=False), rows.items()):
        for ax, picture, caption in zip(axes, pictures, captions):
            missed = [key for key, right in judge.verdict(caption, picture).items() if not right]
            ax.imshow(picture.transpose(1, 2, 0), interpolation="nearest")
            ax.set_title(caption.replace(" a ", "\na "), fontsize=6)
            ax.set_xlabel(fill(f"not: {', '.join(missed)}", 19) if missed else "all there", fontsize=6)
            ax.set(xticks=[], yticks=[])
        axes[0].set_ylabel(name)
        for ax in axes[len(pictures) :]:
            ax.set_axis_off()
    return figure


@style.styled
def loss_by_time(drawn) -> Figure:
    """Squared error of the velocity from the picture, time 0, to noise, time 1."""
    told = ", ".join(f"{name} {result['flow']:.3g}" for name, result in drawn.results.items())
    figure = style.empty_figure(4.8, 2.9, f"Loss on the {drawn.split} split, mean over the times of training: {told}")
    ax = figure.subplots()
    for name, look in style.looks(drawn.results).items():
        ax.plot(*drawn.results[name]["flow_by_time"].values(), marker="o", markersize=3.5, label=name, **look)
    ax.set(xlabel=style.label("time"), ylabel=style.label("squared velocity error"), xlim=(0, 1), yscale="log")
    style.legend(ax)
    return figure


@style.styled
def accuracy(drawn) -> Figure:
    """Share of the captions' attributes that the judge finds in validation samples, over training."""
    checks = latest(drawn.events, "eval")
    names = list(dict.fromkeys(name for event in checks.values() for name in event["val_nrmse"]))
    curves = {name: 1 - floats([event["val_nrmse"].get(name) for event in checks.values()]) for name in names}
    told = ", ".join(f"{name} {values[-1]:.0%}" for name, values in curves.items())
    figure = style.empty_figure(4.8, 2.9, f"Attributes of validation captions that samples show, at the end: {told}")
    ax = figure.subplots()
    for name, look in style.looks(curves).items():
        ax.plot(list(checks), curves[name], marker="o", markersize=style.point_size(len(checks)), label=name, **look)
    ax.set(xlabel=style.label("step"), ylabel=style.label("accuracy"), ylim=(0, 1.02))
    style.legend(ax)
    return figure
